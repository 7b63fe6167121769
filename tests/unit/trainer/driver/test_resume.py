"""Where a run resumes, what must stay as it was, and what a start does to what earlier processes left."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.prompts.prompt_source import PromptSource
from tests.fakes.scripted_run import config, prompt_set
from trainer.config.algorithm import KlConfig
from trainer.config.schema import LoraConfig
from trainer.driver import checkpointing
from trainer.driver import run as run_module
from trainer.driver.checkpointing import find_resume_point, origin
from trainer.driver.datasets import DataSets
from trainer.driver.preflight import PreflightResult
from trainer.driver.state import EvalMetrics, RunState
from trainer.errors import CheckpointError, ConfigurationError
from trainer.learner import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.config.schema import RunConfig


def save(directory: Path, step: int) -> Path:
    run = RunState(started_at=0.0, wall_clock=lambda: 0.0, step=step, version=step).state_dict()
    source = PromptSource(prompt_set(), seed=0, shuffle=True).state_dict()
    tmp = checkpoint.begin(directory, step)
    (tmp / "weights").write_bytes(b"w" * 100)
    return checkpoint.commit(tmp, {"run": run, "source": source, "buffer": {"prompts": [], "num_finished": 0}})


def resume(value: str, directory: Path) -> Any:
    return find_resume_point(config(checkpoint={"resume": value}), directory)


def test_auto_takes_the_newest_complete_checkpoint_or_starts_from_the_beginning(tmp_path: Path) -> None:
    assert resume("auto", tmp_path / "none") is None
    assert resume("auto", tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    for step in (5, 20, 10):
        save(tmp_path, step)
    (tmp_path / "step_30.tmp").mkdir()
    found = resume("auto", tmp_path)
    assert (found.path, found.step, found.version) == (tmp_path / "step_20", 20, 20)
    assert resume(str(save(tmp_path / "other", 3)), tmp_path).step == 3, "a path wins over the run directory"


@pytest.mark.parametrize("wanted", ["auto", "step_20", "."])
def test_the_hint_names_an_older_checkpoint_and_removes_nothing(tmp_path: Path, wanted: str) -> None:
    directory = tmp_path / "checkpoints"
    for step in (10, 20):
        save(directory, step)
    (directory / "step_20" / "complete.json").unlink()
    with pytest.raises(ConfigurationError, match=r"no complete\.json") as caught:
        resume(wanted if wanted == "auto" else str(directory / wanted), directory)
    text = str(caught.value)
    assert f"checkpoint.resume={directory / 'step_10'}" in text and "delete" not in text
    assert resume(str(directory / "step_10"), directory).step == 10


@pytest.mark.parametrize(
    ("wanted", "damage", "words"),
    [
        ("auto", "truncated", "weights"),
        ("auto", "missing", "weights"),
        ("step_11", "", "step_11"),
        (".", "all", "holds no checkpoint"),
        ("never", "", "already has step_10.*choose another run_dir"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_and_never_passed_over(
    tmp_path: Path, wanted: str, damage: str, words: str
) -> None:
    assert resume("never", tmp_path) is None
    save(tmp_path, 5)
    path = save(tmp_path, 10)
    if damage == "truncated":
        (path / "weights").write_bytes(b"w" * 50)
    elif damage == "missing":
        (path / "weights").unlink()
    elif damage == "all":
        shutil.rmtree(path)
        shutil.rmtree(tmp_path / "step_5")
    value = wanted if wanted in ("auto", "never") else str(tmp_path / wanted)
    with pytest.raises(ConfigurationError, match=rf"(?s)checkpoint\.resume.*{words}") as caught:
        resume(value, tmp_path)
    assert "delete" not in str(caught.value)


# What must stay as it was


LORA = {"model": {"path": "org/first", "lora": LoraConfig(rank=8)}}
TWO_TARGETS = {"model": {"path": "org/first", "lora": LoraConfig(rank=8, target_modules="q_proj+v_proj")}}
WITH_KL = {"model": {"path": "org/first"}, "algorithm": {"kl": KlConfig(coef=0.1)}}
TAUGHT = {"model": {"path": "org/first"}, "algorithm": {"kl": KlConfig(coef=0.1, reference_model="org/teacher")}}
PPO = {"model": {"path": "org/first"}, "algorithm": {"advantage_estimator": "gae"}, "critic": {"path": "org/critic"}}


def merged(keys: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    both = {**keys, **change}
    return {name: {**keys.get(name, {}), **value} if isinstance(value, dict) else value for name, value in both.items()}


def with_seed(seed: int = 0, **sections: Any) -> RunConfig:
    return replace(config(**sections), seed=seed)


def go_on(directory: Path, keys: dict[str, Any], change: dict[str, Any]) -> Any:
    """A checkpoint of a run with `keys`, resumed with `change` in them."""
    tmp = checkpoint.begin(directory, 5)
    checkpoint.commit(tmp, {"run": {"step": 5}, "origin": origin(with_seed(**keys))})
    return find_resume_point(with_seed(**merged(keys, change), checkpoint={"resume": "auto"}), directory)


@pytest.mark.parametrize(
    ("keys", "change", "key"),
    [
        (WITH_KL, {"model": {"path": "org/second"}}, "model.path"),
        (LORA, {"model": {"path": "org/second"}}, "model.path"),
        (LORA, {"model": {"lora": LoraConfig(rank=8, alpha=64.0)}}, "model.lora.alpha"),
        (LORA, {"model": {"lora": LoraConfig(rank=16)}}, "model.lora.rank"),
        (LORA, {"model": {"lora": LoraConfig()}}, "model.lora.rank"),
        (WITH_KL, {"model": {"lora": LoraConfig(rank=8)}}, "model.lora.rank"),
        (LORA, {"model": {"lora": LoraConfig(rank=8, target_modules="q_proj+v_proj")}}, "model.lora.target_modules"),
        (
            TAUGHT,
            {"algorithm": {"kl": KlConfig(coef=0.1, reference_model="org/second")}},
            "algorithm.kl.reference_model",
        ),
        (
            WITH_KL,
            {"algorithm": {"kl": KlConfig(coef=0.1, reference_model="org/teacher")}},
            "algorithm.kl.reference_model",
        ),
        (TAUGHT, {"algorithm": {"kl": KlConfig(coef=0.1)}}, "algorithm.kl.reference_model"),
        (PPO, {"critic": {"path": "org/second"}}, "critic.path"),
        (PPO, {"critic": {"path": None}}, "critic.path"),
    ],
)
def test_what_no_checkpoint_holds_must_stay_as_it_was(
    tmp_path: Path, keys: dict[str, Any], change: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        go_on(tmp_path, keys, change)
    (problem,) = caught.value.problems
    value = origin(with_seed(**keys))[key]
    assert problem.key == key and f"must stay {value}, as in" in problem.message
    assert go_on(tmp_path, keys, {}).step == 5


def test_the_teacher_of_an_earlier_checkpoint_is_found_under_the_earlier_name_of_its_key(tmp_path: Path) -> None:
    known = origin(with_seed(**TAUGHT))
    earlier = {("algorithm.kl.path" if key == "algorithm.kl.reference_model" else key): known[key] for key in known}
    checkpoint.commit(checkpoint.begin(tmp_path, 5), {"run": {"step": 5}, "origin": earlier})
    other = {"algorithm": {"kl": KlConfig(coef=0.1, reference_model="org/second")}}
    with pytest.raises(ConfigurationError, match="org/second"):
        find_resume_point(with_seed(**merged(TAUGHT, other), checkpoint={"resume": "auto"}), tmp_path)
    assert find_resume_point(with_seed(**TAUGHT, checkpoint={"resume": "auto"}), tmp_path) is not None


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        ({"model": {"path": "org/first"}}, {"model": {"path": "org/second"}}),
        (PPO, {"model": {"path": "org/second"}}),
        (TAUGHT, {"model": {"path": "org/second"}}),
        (TAUGHT, {"algorithm": {"kl": KlConfig(coef=0.0)}}),
        (WITH_KL, {"seed": 7}),
        (WITH_KL, {"model": {"lora": LoraConfig(alpha=64.0, target_modules="q_proj")}}),
        (TWO_TARGETS, {"model": {"lora": LoraConfig(rank=8, target_modules="v_proj+q_proj")}}),
        ({**PPO, "algorithm": {}}, {"critic": {"path": "org/second"}}),
    ],
)
def test_what_is_not_read_again_may_change(tmp_path: Path, keys: dict[str, Any], change: dict[str, Any]) -> None:
    assert go_on(tmp_path, keys, change).step == 5


def test_a_reference_made_from_the_seed_keeps_it_and_the_kind_of_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**WITH_KL, "model": {"path": str(tmp_path), "random_weights": True}}
    with pytest.raises(ConfigurationError, match="seed"):
        go_on(tmp_path / "run", keys, {"seed": 7})
    with monkeypatch.context() as patch:  # as on another host
        backends = iter(["cpu", "cuda"])
        patch.setattr(checkpointing, "get_backend", lambda _: SimpleNamespace(name=next(backends)))
        with pytest.raises(ConfigurationError, match=r"device\.name = cuda\n *must stay cpu"):
            go_on(tmp_path / "run", keys, {})
    of_itself = {**keys, "algorithm": {"kl": KlConfig(coef=0.1, reference_model=str(tmp_path))}}
    with pytest.raises(ConfigurationError, match="seed"):
        go_on(tmp_path / "itself", of_itself, {"seed": 7})
    keys["model"]["random_weights"] = False
    assert go_on(tmp_path / "other", keys, {"seed": 7}).step == 5


def test_the_kind_of_device_that_is_named_need_not_be_on_the_drivers_host(tmp_path: Path) -> None:
    cfg = config(model={"random_weights": True}, device={"name": "npu"}, ray={"address": "auto"})
    assert origin(cfg)["device.name"] == "npu"


def test_a_directory_is_the_same_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    keys = {**WITH_KL, "model": {"path": "model"}}
    assert go_on(tmp_path / "run", keys, {"model": {"path": str(tmp_path / "model")}}).step == 5


@pytest.mark.parametrize("keys", [WITH_KL, LORA])
def test_a_checkpoint_without_an_origin_is_taken_as_it_is(tmp_path: Path, keys: dict[str, Any]) -> None:
    save(tmp_path, 5)
    assert find_resume_point(config(**keys, checkpoint={"resume": "auto"}), tmp_path).step == 5  # type: ignore[union-attr]


# The state of a run


def new_state(now: float = 100.0) -> RunState:
    return RunState(started_at=now, wall_clock=lambda: now)


def evaluation(version: int, accuracy: float) -> EvalMetrics:
    return EvalMetrics(version=version, accuracy=accuracy, num_prompts=4, truncated_frac=0.1, time_s=1.0)


def test_the_state_survives_json() -> None:
    state = new_state()
    state.step, state.version = 12, 9
    again = new_state()
    again.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert (again.first_accuracy, again.last_evaluation) == (None, None)
    state.add_evaluation({"": evaluation(0, 0.25)})
    state.add_evaluation({"": evaluation(9, 0.5)})
    kept = json.loads(json.dumps(state.state_dict()))
    again.load_state_dict(kept)
    assert again.state_dict() == state.state_dict()
    assert (again.step, again.version, again.live_version, again.resumed_from_step) == (12, 9, 9, 12)
    again.add_evaluation({"": evaluation(12, 0.9)})
    assert again.first_accuracy == 0.25, "the first accuracy is that of the whole run"
    del kept["version"]  # as every step made a version once
    again.load_state_dict(kept)
    assert (again.step, again.version, again.live_version) == (12, 12, 12)


def test_the_first_reason_to_stop_counts_and_only_an_interrupt_ends_a_wait() -> None:
    state = new_state()
    state.stop("accuracy_reached")
    assert not state.interrupted.is_set()
    state.stop("interrupted")
    assert state.interrupted.is_set()
    assert state.stop_reason == "accuracy_reached"


def test_start_up_ends_with_the_first_prompt() -> None:
    now = [10.0]
    state = RunState(started_at=4.0, wall_clock=lambda: now[0])
    state.mark_dispatched()
    now[0] = 50.0
    state.mark_dispatched()
    assert (state.startup_s, state.time_s) == (6.0, 46.0)


# A whole `run` with scripted actors


async def nothing(*_: object, **_keys: object) -> Any:
    return None


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
        inputs = DataSets(train=prompt_set(), evaluation=(), notes=self.left_out)
        backend: Any = SimpleNamespace(name="cpu")
        placement: Any = None
        resumed = find_resume_point(cfg, self.checkpoints)
        self.after_preflight()
        return PreflightResult(backend=backend, placement=placement, inputs=inputs, models={}, resumed=resumed)

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
    assert "resuming from" in start.log and "the checkpoint is of another model" in start.log
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
    assert "step_10; 0 groups that were under way begin again, 0 of them had been finished" in start.log


@pytest.mark.parametrize("named", ["checkpoint", "run", "own"])
def test_the_same_command_resumes_from_what_came_of_the_checkpoint_that_it_names(
    start: Start, tmp_path: Path, named: str
) -> None:
    """As of a job that is requeued. A run directory stands for its newest checkpoint."""
    is_own = named == "own"
    path = save(start.checkpoints if is_own else tmp_path / "other" / "checkpoints", 10)
    if named == "run":
        path = tmp_path / "other"
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
    assert start.seen_by_training == {"metrics.jsonl": list(range(1, 21)), "evaluations.jsonl": [0], ".": ["step_20"]}
    assert f"resumed from {path} before" in start.log
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


def test_a_run_that_starts_from_the_beginning_sets_aside_what_an_earlier_attempt_wrote(start: Start) -> None:
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
def test_a_checkpoint_that_comes_before_the_directory_is_ours_is_the_one_to_resume_from(
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
    start(algorithm={"advantage_estimator": "rloo"})
    written = (start.path / "config.yaml").read_text()
    start.after_preflight = lambda: save(start.checkpoints, 20)
    with pytest.raises(ConfigurationError, match="already has step_20"):
        start(checkpoint={"resume": "never"})
    assert start.trained_from == [None]
    assert (start.path / "config.yaml").read_text() == written
    assert not (start.path / "config.1.yaml").exists()


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
