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
from trainer.config.compose import load_config
from trainer.config.seats import Seats
from trainer.driver import checkpointing
from trainer.driver import run as run_module
from trainer.driver.checkpointing import find_resume_point, origin
from trainer.driver.datasets import DataSets
from trainer.driver.placement import Placement
from trainer.driver.preflight import EnginePlan, PreflightResult
from trainer.driver.scratch import Scratch
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


@pytest.mark.parametrize(
    ("wanted", "gone", "words"),
    [
        ("auto", "step_20/complete.json", "no complete\\.json"),
        ("step_20", "step_20/complete.json", "no complete\\.json"),
        (".", "step_20/complete.json", "no complete\\.json"),
        ("auto", "step_20/weights", "weights is missing"),
        ("step_11", "", "step_11"),
        ("empty", "", "holds no checkpoint"),
        ("never", "", "already has step_20.*choose another run_dir"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_and_never_passed_over(
    tmp_path: Path, wanted: str, gone: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert resume("never", tmp_path) is None
    for step in (10, 20):
        save(tmp_path, step)
    if gone:
        (tmp_path / gone).unlink()
    with pytest.raises(ConfigurationError, match=rf"(?s)checkpoint\.resume.*{words}") as caught:
        resume(wanted if wanted in ("auto", "never") else str(tmp_path / wanted), tmp_path)
    text = str(caught.value)
    assert "delete" not in text, "the rest of the run may be in it"
    assert (f"checkpoint.resume={tmp_path / 'step_10'}" in text) == bool(gone)
    assert resume(str(tmp_path / "step_10"), tmp_path).step == 10


# --- what must stay as it was ---

KL = ["algorithm.kl.coef=0.1"]
TAUGHT = [*KL, "algorithm.kl.reference_model=org/teacher"]
LORA = ["model.lora.rank=8"]
TARGETS = [*LORA, "model.lora.target_modules=q_proj+v_proj"]
PPO = ["algorithm=ppo", "critic.path=org/critic"]
SECOND = "model.path=org/second"
TEACHER = "algorithm.kl.reference_model"


def cfg_of(*overrides: str) -> RunConfig:
    model = [] if any(one.startswith("model.path=") for one in overrides) else ["model.path=org/first"]
    return load_config(["device=cpu", *model, *overrides])


def began(directory: Path, *overrides: str) -> Path:
    """A checkpoint of a run with these overrides."""
    tmp = checkpoint.begin(directory, 5)
    return checkpoint.commit(tmp, {"run": {"step": 5}, "origin": origin(cfg_of(*overrides))})


def changed(directory: Path, *overrides: str) -> dict[str, str]:
    """Key -> message of what keeps a run with these overrides from resuming there."""
    try:
        found = find_resume_point(cfg_of(*overrides), directory)
    except ConfigurationError as error:
        return {problem.key: problem.message for problem in error.problems}
    assert found is not None and found.step == 5
    return {}


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        (KL, [*KL, SECOND], "model.path"),
        (LORA, [*LORA, SECOND], "model.path"),
        (LORA, [*LORA, "model.lora.alpha=64"], "model.lora.alpha"),
        (LORA, ["model.lora.rank=16"], "model.lora.rank"),
        (LORA, [], "model.lora.rank"),
        (KL, [*KL, *LORA], "model.lora.rank"),
        (LORA, TARGETS, "model.lora.target_modules"),
        (TAUGHT, [*KL, f"{TEACHER}=org/second"], TEACHER),
        (KL, TAUGHT, TEACHER),
        (TAUGHT, KL, TEACHER),
        (PPO, ["algorithm=ppo", "critic.path=org/second"], "critic.path"),
        (PPO, ["algorithm=ppo"], "critic.path"),
    ],
)
def test_what_no_checkpoint_holds_must_stay_as_it_was(
    tmp_path: Path, before: list[str], after: list[str], key: str
) -> None:
    began(tmp_path, *before)
    found = changed(tmp_path, *after)
    assert list(found) == [key] and f"must stay {origin(cfg_of(*before))[key]}, as in" in found[key]
    assert changed(tmp_path, *before) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], [SECOND]),
        (PPO, [*PPO, SECOND]),
        (TAUGHT, [*TAUGHT, SECOND]),
        (TAUGHT, []),
        (KL, [*KL, "seed=7"]),
        (TARGETS, [*LORA, "model.lora.target_modules=v_proj+q_proj"]),
        ([*KL, "model.path=model"], [*KL, "model.path={here}/model"]),
    ],
)
def test_what_is_not_read_again_may_change_and_a_directory_is_the_same_by_any_path(
    here: Path, before: list[str], after: list[str]
) -> None:
    (here / "model").mkdir()
    began(here / "run", *before)
    assert changed(here / "run", *(one.format(here=here) for one in after)) == {}


def test_a_reference_drawn_from_the_seed_keeps_it_and_the_kind_of_device(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = ["model.path=.", "model.random_weights=true"]
    for name, reference in (("run", KL), ("itself", [*KL, f"{TEACHER}=."])):
        began(here / name, *drawn, *reference)
        assert list(changed(here / name, *drawn, *reference, "seed=7")) == ["seed"]
    cfg = load_config([*drawn, *KL])
    with monkeypatch.context() as patch:  # as on another host
        patch.setattr(checkpointing, "get_backend", lambda _: SimpleNamespace(name="cuda"))
        with pytest.raises(ConfigurationError, match=r"device\.name = cuda\n *must stay cpu"):
            find_resume_point(cfg, here / "run")
        assert find_resume_point(cfg, here / "run", is_device_here=False) is not None
    named = load_config([*drawn, "device=npu", "ray.address=auto"])
    assert origin(named)["device.name"] == "npu", "it need not be on the driver's host"


def test_earlier_checkpoints_have_the_teacher_under_another_key_or_no_origin(tmp_path: Path) -> None:
    known = origin(cfg_of(*TAUGHT))
    known["algorithm.kl.path"] = known.pop(TEACHER)
    checkpoint.commit(checkpoint.begin(tmp_path, 5), {"run": {"step": 5}, "origin": known})
    assert list(changed(tmp_path, *KL, f"{TEACHER}=org/second")) == [TEACHER]
    assert changed(tmp_path, *TAUGHT) == {}
    save(tmp_path / "without", 5)
    assert changed(tmp_path / "without", *KL) == changed(tmp_path / "without", *LORA) == {}


# --- the state of a run ---


def test_the_state_survives_json() -> None:
    def state() -> RunState:
        return RunState(started_at=100.0, wall_clock=lambda: 100.0)

    def evaluated(version: int, accuracy: float) -> dict[str, EvalMetrics]:
        return {"": EvalMetrics(version=version, accuracy=accuracy, num_prompts=4, truncated_frac=0.1, time_s=1.0)}

    before, after = state(), state()
    before.step, before.version = 12, 9
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert (after.first_accuracy, after.last_evaluation) == (None, None)
    before.add_evaluation(evaluated(0, 0.25))
    before.add_evaluation(evaluated(9, 0.5))
    kept = json.loads(json.dumps(before.state_dict()))
    after.load_state_dict(kept)
    assert after.state_dict() == before.state_dict()
    assert (after.step, after.version, after.live_version, after.resumed_from_step) == (12, 9, 9, 12)
    after.add_evaluation(evaluated(12, 0.9))
    assert after.first_accuracy == 0.25, "the first accuracy is that of the whole run"
    del kept["version"]  # as in checkpoints from when every step made a version
    after.load_state_dict(kept)
    assert (after.step, after.version, after.live_version) == (12, 12, 12)


def test_start_up_ends_with_the_first_prompt() -> None:
    now = [10.0]
    state = RunState(started_at=4.0, wall_clock=lambda: now[0])
    state.mark_dispatched()
    now[0] = 50.0
    state.mark_dispatched()
    assert (state.startup_s, state.time_s) == (6.0, 46.0)


# --- a whole `run` with scripted actors ---


async def nothing(*_: object, **_keys: object) -> Any:
    return None


class Start:
    """One `python -m trainer` in `path`, up to its training, which is empty. Whatever is named in `fails` raises it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.checkpoints = path, path / "checkpoints"
        self.fails: dict[str, Exception] = {}
        self.after_preflight: Callable[[], object] = lambda: None
        self.trained_from: list[int | None] = []
        self.seen_by_training: dict[str, list[Any]] = {}
        coordinator = SimpleNamespace(open=nothing, close=nothing, self_test=self._step("self_test"))
        devices = SimpleNamespace(acquire_for_training=nothing, publish=nothing, sync=nothing)
        actors = SimpleNamespace(close=nothing, learner=SimpleNamespace(check_directory=nothing))
        cluster = SimpleNamespace(placement=None, stop=lambda **_keys: None)

        async def train(driver: Any, *_: object) -> None:
            self.trained_from.append(driver._state.resumed_from_step)
            self.seen_by_training = self.seen()
            driver._state.stop("completed")

        for module, name, fake in (
            (run_module, "preflight", self._preflight),
            (run_module, "_start_cluster", self._step("start_cluster", cluster)),
            (run_module, "start_actors", self._step("start_actors")),
            (run_module, "ensure_model", nothing),
            (run_module, "plan_engines", lambda *_: EnginePlan(Seats(1, ""), None, in_turns=False)),
            (
                run_module.compose,
                "create_learner",
                self._step("create_learner", (actors.learner, Placement(bundles={}, units=[]))),
            ),
            (run_module.compose, "create_engines", lambda *_, **_keys: {}),
            (run_module.compose, "Actors", lambda **_: actors),
            (run_module.compose, "make_coordinator", lambda *_: coordinator),
            (run_module.compose, "make_devices", lambda *_: devices),
            (run_module.compose, "with_workers", lambda *_: actors),
            (run_module.Driver, "_train", train),
        ):
            monkeypatch.setattr(module, name, fake)

    def __call__(self, resume: str | Path = "auto", **sections: Any) -> int:
        cfg = config(weight_sync={"self_test": True}, checkpoint={"resume": str(resume)}, **sections)
        return run_module.run(replace(cfg, run_dir=str(self.path)), Scratch(), started_at=0.0)

    def _preflight(self, cfg: Any, *, on_device: Any) -> PreflightResult:
        unused: Any = SimpleNamespace(name="cpu", ray_resource=None)
        inputs = DataSets(train=prompt_set(), evaluation=())
        resumed = find_resume_point(cfg, self.checkpoints)
        self.after_preflight()
        return PreflightResult(backend=unused, placement=unused, inputs=inputs, models={}, resumed=resumed)

    def _step(self, name: str, result: Any = None) -> Any:
        async def step(*_: object, **_keys: object) -> Any:
            if name in self.fails:
                raise self.fails[name]
            return result

        return step

    def wrote(self, last_step: int, *checkpoints: int) -> None:
        """As an earlier process that made so many steps, evaluated twice and saved these."""
        self.path.mkdir(exist_ok=True)
        (self.path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, last_step + 1)))
        (self.path / "evaluations.jsonl").write_text(f'{{"version": 0}}\n{{"version": {last_step}}}\n')
        for step in checkpoints:
            save(self.checkpoints, step)

    def seen(self) -> dict[str, list[Any]]:
        """Steps and versions by file, and names of checkpoints."""
        files = {path.name: path for path in (*self.path.glob("metrics*"), *self.path.glob("evaluations*.jsonl"))}
        records = {name: [*map(json.loads, path.read_text().splitlines())] for name, path in files.items()}
        numbers = {name: [number for record in records[name] for number in record.values()] for name in records}
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
    """It resumes from an older checkpoint, and its learner finds that this one does not fit."""
    start.wrote(30, 10, 20, 30)
    before, older = start.seen(), start.checkpoints / "step_10"
    start.fails[when] = CheckpointError("the checkpoint is of another model")
    with pytest.raises(CheckpointError):
        start(older)
    assert start.seen() == before
    assert "resuming from" in start.log and "the checkpoint is of another model" in start.log
    assert json.loads((start.path / "summary.json").read_text())["resumed_from_step"] == 10
    start.fails.clear()
    assert start() == start(older) == 0
    assert start.trained_from == [30, 10], "until then the newest was still the one to resume from"


def test_what_does_not_lead_to_the_checkpoint_is_gone_when_training_begins(start: Start) -> None:
    start.wrote(30, 10, 20, 30)
    start(start.checkpoints / "step_10")
    assert start.seen_by_training == {
        "metrics.jsonl": list(range(1, 11)),
        "evaluations.jsonl": [0],
        ".": ["step_10"],
        "abandoned": ["step_20", "step_30"],
    }
    assert "step_20, step_30" in start.log and "20 later lines cut" in start.log
    assert "step_10; 0 groups that were in flight start again, 0 of them had finished" in start.log


@pytest.mark.parametrize("named", ["checkpoint", "run", "own"])
def test_the_same_command_resumes_from_what_followed_the_checkpoint_that_it_names(
    start: Start, tmp_path: Path, named: str
) -> None:
    """As of a job that is requeued. A run directory stands for its newest checkpoint."""
    path = save(start.checkpoints if named == "own" else tmp_path / "other" / "checkpoints", 10)
    path = tmp_path / "other" if named == "run" else path
    start(path)
    start(path)
    assert start.trained_from == [10, 10], "nothing was saved in between"
    save(start.checkpoints, 20)
    assert "before (checkpoint.resume)" not in start.log
    start.fails["self_test"] = RuntimeError("no memory")
    with pytest.raises(RuntimeError):
        start(path)
    start.fails.clear()
    if named == "own":
        shutil.rmtree(path)  # as checkpoint.keep_last has it
    start.wrote(25)
    start(path)
    assert start.trained_from == [10, 10, 20]
    assert start.seen_by_training == {"metrics.jsonl": list(range(1, 21)), "evaluations.jsonl": [0], ".": ["step_20"]}
    assert f"resumed from {path} before" in start.log
    start()
    start(path)
    assert start.trained_from[3:] == [20, 20]


def test_a_step_back_on_the_way_leaves_the_first_command_where_it_was(start: Start, tmp_path: Path) -> None:
    path = save(tmp_path / "other", 10)
    start(path)
    start.wrote(30, 20, 30)
    start(start.checkpoints / "step_20")
    start(path)
    assert start.trained_from == [10, 20, 20]
    assert start.seen_by_training["abandoned"] == ["step_30"]


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
    """The process that had the directory ends while the next one reads its data: it saves again, and prunes."""
    start.wrote(20, *([] if found is None else [found]))

    def end_of_the_other() -> None:
        save(start.checkpoints, 20)
        shutil.rmtree(start.checkpoints / f"step_{found}", ignore_errors=True)

    start.after_preflight = end_of_the_other
    assert start() == 0
    assert start.trained_from == [20] and "step_20" in start.log
    expected = {"metrics.jsonl": list(range(1, 21)), "evaluations.jsonl": [0, 20], ".": ["step_20"]}
    assert start.seen_by_training == expected


def test_what_a_checkpoint_must_be_is_asked_of_one_that_came_late_too(start: Start) -> None:
    start()
    written = (start.path / "config.yaml").read_text()
    start.after_preflight = lambda: save(start.checkpoints, 20)
    with pytest.raises(ConfigurationError, match="already has step_20"):
        start("never")
    assert start.trained_from == [None]
    assert (start.path / "config.yaml").read_text() == written
    assert not (start.path / "config.1.yaml").exists()


def test_a_division_of_devices_where_there_are_none_is_reported(start: Start) -> None:
    for number in (2, 1):
        assert start(rollout={"num_replicas": 2, "engines_per_device": number}) == 0
        assert ("rollout.engines_per_device=2 has no effect on cpu" in start.log) == (number == 2)
        shutil.rmtree(start.path)
