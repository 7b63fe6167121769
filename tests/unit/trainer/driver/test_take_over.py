"""A whole `run` with scripted actors: what a start does to what earlier processes left in the run directory."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.prompts.prompt_source import PromptSource
from tests.fakes.scripted_run import config, prompt_set
from trainer.driver import run as run_module
from trainer.driver.checkpointing import find_resume_point
from trainer.driver.datasets import DataSets
from trainer.driver.preflight import PreflightResult
from trainer.driver.state import RunState
from trainer.errors import CheckpointError, ConfigurationError
from trainer.learner import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


async def nothing(*_: object, **_keys: object) -> Any:
    return None


def save(directory: Path, step: int) -> Path:
    run = RunState(started_at=0.0, wall_clock=lambda: 0.0, step=step).state_dict()
    source = PromptSource(prompt_set(), seed=0, shuffle=True).state_dict()
    buffer = {"prompts": [], "num_finished": 0}
    return checkpoint.commit(checkpoint.begin(directory, step), {"run": run, "source": source, "buffer": buffer})


class Start:
    """One `python -m trainer` in `path`, up to its training, which is empty. Whatever is named in `fails` raises it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._monkeypatch = path, monkeypatch
        self.checkpoints = path / "checkpoints"
        self.fails: dict[str, Exception] = {}
        self.after_preflight: Callable[[], object] = lambda: None
        self.left_out: tuple[str, ...] = ()
        self.trained_from: list[int | None] = []
        self.seen_by_training: dict[str, list[Any]] = {}
        coordinator = SimpleNamespace(open=nothing, close=nothing, self_test=self._step("self_test"))
        devices = SimpleNamespace(acquire_for_training=nothing, publish=nothing, sync=nothing)
        actors = SimpleNamespace(close=nothing)
        cluster = SimpleNamespace(placement=None, stop=lambda **_keys: None)

        async def create_actors(*_: object, **_keys: object) -> Any:
            return actors, None

        async def start_cluster(*_: object) -> Any:
            return cluster

        async def train(driver: Any, *_: object) -> None:
            self.trained_from.append(driver._state.resumed_from_step)
            self.seen_by_training = self.seen()
            driver._state.stop("completed")

        for module, name, fake in (
            (run_module, "preflight", self._preflight),
            (run_module, "_start_cluster", start_cluster),
            (run_module, "start_actors", self._step("start_actors")),
            (run_module, "ensure_model", nothing),
            (run_module.compose, "create_actors", create_actors),
            (run_module.compose, "make_coordinator", lambda *_: coordinator),
            (run_module.compose, "make_devices", lambda *_: devices),
            (run_module.compose, "with_workers", lambda *_: actors),
            (run_module.Driver, "_train", train),
        ):
            monkeypatch.setattr(module, name, fake)

    def __call__(self, **sections: Any) -> int:
        self.cfg = replace(config(weight_sync={"self_test": True}, **sections), run_dir=str(self.path))
        return run_module.run(self.cfg, started_at=0.0)

    def _preflight(self, cfg: Any) -> PreflightResult:
        inputs = DataSets(train=prompt_set(), evaluation=(), left_out=self.left_out)
        backend: Any = SimpleNamespace(name="cpu")
        placement: Any = None
        resumed = find_resume_point(cfg, self.checkpoints)
        self.after_preflight()
        return PreflightResult(backend=backend, placement=placement, inputs=inputs, resumed=resumed)

    def _step(self, name: str) -> Any:
        async def step(*_: object) -> None:
            if name in self.fails:
                raise self.fails[name]

        return step

    def wrote(self, last_step: int) -> None:
        """As an earlier process that made so many steps and evaluated twice."""
        self.path.mkdir(exist_ok=True)
        (self.path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, last_step + 1)))
        (self.path / "evaluations.jsonl").write_text(f'{{"version": 0}}\n{{"version": {last_step}}}\n')

    def seen(self) -> dict[str, list[Any]]:
        """Steps and versions by file, and names of checkpoints."""
        files = {path.name: path for path in (*self.path.glob("metrics*"), *self.path.glob("evaluations*.jsonl"))}
        lines = {name: [*map(json.loads, path.read_text().splitlines())] for name, path in files.items()}
        numbers = {name: [number for line in lines[name] for number in line.values()] for name in lines}
        folders = {folder: self.checkpoints / folder for folder in (".", "abandoned")}
        named = {name: sorted(p.name for p in folder.glob("step_*")) for name, folder in folders.items()}
        return {name: found for name, found in (numbers | named).items() if found}

    @property
    def log(self) -> str:
        return (self.path / "log.txt").read_text()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("when", ["start_actors", "self_test"])
def test_a_start_that_fails_costs_no_checkpoint_and_no_record(start: Start, when: str) -> None:
    """It is told to go on from an older checkpoint, and its learner finds that this one does not fit."""
    start.wrote(30)
    for step in (10, 20, 30):
        save(start.checkpoints, step)
    before = start.seen()
    start.fails[when] = CheckpointError("the checkpoint is of another model")
    older = {"checkpoint": {"resume": str(start.checkpoints / "step_10")}}
    with pytest.raises(CheckpointError):
        start(**older)
    assert start.seen() == before
    assert "going on from" in start.log and "the checkpoint is of another model" in start.log
    assert json.loads((start.path / "summary.json").read_text())["resumed_from_step"] == 10
    start.fails.clear()
    assert start() == 0
    assert start.trained_from == [30], "the newest is still the one to go on from"
    assert start(**older) == 0
    assert start.trained_from == [30, 10]


def test_what_does_not_lead_to_the_checkpoint_is_gone_when_training_begins(start: Start) -> None:
    start.wrote(30)
    for step in (10, 20, 30):
        save(start.checkpoints, step)
    start(checkpoint={"resume": str(start.checkpoints / "step_10")})
    assert start.seen_by_training == {
        "metrics.jsonl": list(range(1, 11)),
        "evaluations.jsonl": [0],
        ".": ["step_10"],
        "abandoned": ["step_20", "step_30"],
    }
    assert "step_20, step_30" in start.log and "20 later lines cut" in start.log


@pytest.mark.parametrize("is_own", [False, True])
def test_the_same_command_goes_on_from_what_came_of_the_checkpoint_that_it_names(
    start: Start, tmp_path: Path, is_own: bool
) -> None:
    """As of a job that is requeued."""
    path = save(start.checkpoints if is_own else tmp_path / "other", 10)
    branch = {"checkpoint": {"resume": str(path)}}
    start(**branch)
    start(**branch)
    assert start.trained_from == [10, 10], "nothing was saved in between"
    save(start.checkpoints, 20)
    assert "once more" not in start.log
    start.fails["self_test"] = RuntimeError("no memory")
    with pytest.raises(RuntimeError):
        start(**branch)
    start.fails.clear()
    if is_own:
        shutil.rmtree(path)  # as checkpoint.keep_last has it
    start.wrote(25)
    start(**branch)
    assert start.trained_from == [10, 10, 20]
    assert start.seen_by_training == {
        "metrics.jsonl": list(range(1, 21)),
        "evaluations.jsonl": [0],
        ".": ["step_20"],
    }
    assert f"went on from {path} before" in start.log
    start()
    start(**branch)
    assert start.trained_from[3:] == [20, 20]


def test_a_step_back_on_the_way_leaves_the_first_command_where_it_was(start: Start, tmp_path: Path) -> None:
    branch = {"checkpoint": {"resume": str(save(tmp_path / "other", 10))}}
    start(**branch)
    for step in (20, 30):
        save(start.checkpoints, step)
    start(checkpoint={"resume": str(start.checkpoints / "step_20")})
    start(**branch)
    assert start.trained_from == [10, 20, 20]
    assert start.seen_by_training["abandoned"] == ["step_30"]


def test_another_branch_or_one_whose_checkpoints_are_gone_begins_where_it_is_told(start: Start, tmp_path: Path) -> None:
    one, two = (save(tmp_path / name, 10) for name in ("one", "two"))
    start(checkpoint={"resume": str(one)})
    save(start.checkpoints, 20)
    start(checkpoint={"resume": str(two)})
    assert start.trained_from == [10, 10]
    assert start.seen_by_training["abandoned"] == ["step_20"]
    start(checkpoint={"resume": str(two)})
    start()  # there is none, so it is a run of its own
    save(start.checkpoints, 30)
    start(checkpoint={"resume": str(two)})
    assert start.trained_from == [10, 10, 10, None, 10]
    assert start.seen_by_training["abandoned"] == ["step_20", "step_30"]


def test_the_log_says_which_keys_are_not_as_before(start: Start) -> None:
    start(algorithm={"advantage_estimator": "rloo"}, trainer={"total_steps": 9})
    start(trainer={"total_steps": 9})
    (line,) = [line for line in start.log.splitlines() if "the configuration has changed" in line]
    assert line.endswith("(config.1.yaml): algorithm.advantage_estimator: rloo -> grpo")


def test_a_run_that_begins_anew_sets_aside_what_an_earlier_attempt_wrote(start: Start) -> None:
    start.wrote(3)
    start.fails["start_actors"] = RuntimeError("no memory")
    with pytest.raises(RuntimeError):
        start()
    assert start.seen() == {"metrics.jsonl": [1, 2, 3], "evaluations.jsonl": [0, 3]}
    start.fails.clear()
    for number in (1, 2):
        assert start() == 0
        assert start.seen()[f"metrics.{number}.jsonl"] == [1, 2, 3]
        assert start.seen()[f"evaluations.{number}.jsonl"] == [0, 3]
        assert not start.seen_by_training.keys() & {"metrics.jsonl", "evaluations.jsonl"}
        assert f"metrics.{number}.jsonl and evaluations.{number}.jsonl" in start.log
        start.wrote(3)


@pytest.mark.parametrize("found", [None, 10])
def test_a_checkpoint_that_comes_before_the_directory_is_ours_is_the_one_to_go_on_from(
    start: Start, found: int | None
) -> None:
    """The process that had the directory ends while the next one reads its data: it saves once more, and prunes."""
    start.wrote(20)
    if found is not None:
        save(start.checkpoints, found)

    def end_of_the_other() -> None:
        save(start.checkpoints, 20)
        if found is not None:
            shutil.rmtree(start.checkpoints / f"step_{found}")

    start.after_preflight = end_of_the_other
    assert start() == 0
    assert start.trained_from == [20]
    assert start.seen_by_training == {
        "metrics.jsonl": list(range(1, 21)),
        "evaluations.jsonl": [0, 20],
        ".": ["step_20"],
    }
    assert "step_20" in start.log


def test_what_a_checkpoint_must_be_is_asked_of_one_that_came_late_too(start: Start) -> None:
    start.after_preflight = lambda: save(start.checkpoints, 20)
    with pytest.raises(ConfigurationError, match="already has step_20"):
        start(checkpoint={"resume": "never"})
    assert start.trained_from == []


def test_the_log_says_what_was_loaded_and_the_screen_says_dropped_rows_once(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were on the screen while the data was loaded."""
    start.left_out = ("rows of task.train_path that were left out: 3",)
    start()
    assert "INFO    trainer.driver.preflight: 40 training prompts, 0 held out" in start.log
    assert "WARNING trainer.driver.preflight: rows of task.train_path that were left out: 3" in start.log
    assert "40 training prompts" in (shown := capsys.readouterr().out)
    assert "left out" not in shown
