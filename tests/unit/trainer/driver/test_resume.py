from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import config
from trainer.config.algorithm import KlConfig
from trainer.config.schema import LoraConfig
from trainer.driver import checkpointing as resume_module
from trainer.driver.checkpointing import find_resume_point, log_resumed, origin, prepare_run_dir
from trainer.driver.state import EvalMetrics, RunState
from trainer.errors import ConfigurationError
from trainer.learner import checkpoint
from trainer.telemetry.run_dir import open_run_dir

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig


def save(directory: Path, step: int) -> Path:
    tmp = checkpoint.begin(directory, step)
    (tmp / "weights").write_bytes(b"w" * 100)
    return checkpoint.commit(tmp, {"run": {"step": step}, "buffer": {"prompts": [{}, {}, {}], "num_finished": 2}})


def resume(value: str, directory: Path) -> Any:
    return find_resume_point(config(checkpoint={"resume": value}), directory)


def test_auto_takes_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    for step in (5, 20, 10):
        save(tmp_path, step)
    (tmp_path / "step_30.tmp").mkdir()
    found = resume("auto", tmp_path)
    assert (found.path, found.step) == (tmp_path / "step_20", 20)


@pytest.mark.parametrize("given", ["", "checkpoints"])
def test_a_run_directory_is_resumed_from_its_newest_checkpoint(
    tmp_path: Path, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, mine = tmp_path / "other" / given, open_run_dir(replace(config(), run_dir=str(tmp_path / "mine")))
    for step in (100, 142):
        save(tmp_path / "other" / "checkpoints", step)
    cfg = config(checkpoint={"resume": str(wanted)})
    found = find_resume_point(cfg, mine.checkpoints)
    assert found is not None and found.step == 142
    log_resumed(cfg, found)
    prepare_run_dir(cfg, mine, found)
    assert "WARNING" not in [record.levelname for record in caplog.records]
    save(mine.checkpoints, 150)
    assert resume(str(wanted), mine.checkpoints).step == 150, "the same command once more"
    mine.close()


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


def test_a_directory_without_a_checkpoint_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no checkpoint") as caught:
        resume(str(tmp_path), tmp_path / "checkpoints")
    assert "delete" not in str(caught.value)


def test_auto_starts_afresh_without_a_checkpoint(tmp_path: Path) -> None:
    assert resume("auto", tmp_path / "none") is None
    assert resume("auto", tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_never_refuses_a_directory_that_has_a_checkpoint(tmp_path: Path) -> None:
    assert resume("never", tmp_path) is None
    save(tmp_path, 5)
    with pytest.raises(ConfigurationError, match="already has step_5") as caught:
        resume("never", tmp_path)
    assert "choose another run_dir" in str(caught.value)


def test_a_path_wins_over_what_is_in_the_run_directory(tmp_path: Path) -> None:
    other = save(tmp_path / "other", 3)
    save(tmp_path / "mine", 9)
    assert resume(str(other), tmp_path / "mine").step == 3


def test_an_older_checkpoint_of_the_same_run_leaves_the_later_ones_behind_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = open_run_dir(replace(config(), run_dir=str(tmp_path)))
    directory = run_dir.checkpoints

    def begin(value: str) -> None:
        prepare_run_dir(config(checkpoint={"resume": value}), run_dir, resume(value, directory))

    for step in (10, 40, 50):
        save(directory, step)
    begin(str(directory / "step_10"))
    assert "step_40, step_50" in caplog.text
    assert str(directory / "abandoned") in caplog.text
    assert sorted(path.name for path in (directory / "abandoned").iterdir()) == ["step_40", "step_50"]
    assert resume("auto", directory).step == 10, "also before anything new is saved"
    save(directory, 20)
    checkpoint.prune(directory, keep_last=2)
    assert resume("auto", directory).step == 20
    caplog.clear()
    begin("auto")
    assert "abandoned" not in caplog.text
    run_dir.close()


def test_a_resumed_run_says_what_it_goes_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, 10)
    with caplog.at_level("INFO"):
        log_resumed(config(), resume("auto", tmp_path))
    begin_anew = "3 groups that were under way begin anew, 2 of them had been finished"
    assert f"going on from {path}; {begin_anew}" in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "missing", "no such directory"])
def test_a_damaged_checkpoint_is_refused_and_never_passed_over(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 5)
    path = save(tmp_path, 10)
    wanted = "auto"
    if damage == "truncated":
        (path / "weights").write_bytes(b"w" * 50)
    elif damage == "missing":
        (path / "weights").unlink()
    else:
        wanted = str(tmp_path / "step_11")
    with pytest.raises(ConfigurationError, match=r"checkpoint\.resume") as caught:
        resume(wanted, tmp_path)
    assert "step_11" in str(caught.value) if damage == "no such directory" else "weights" in str(caught.value)


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
    earlier = {
        "algorithm.kl.reference_model" if key == "algorithm.kl.reference_model" else key: known[key] for key in known
    }
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
        patch.setattr(resume_module, "get_backend", lambda _: SimpleNamespace(name=next(backends)))
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
def test_a_checkpoint_that_does_not_tell_is_taken_as_it_is(tmp_path: Path, keys: dict[str, Any]) -> None:
    save(tmp_path, 5)
    assert find_resume_point(config(**keys, checkpoint={"resume": "auto"}), tmp_path).step == 5  # type: ignore[union-attr]


def new_state(now: float = 100.0) -> RunState:
    return RunState(started_at=now, wall_clock=lambda: now)


def evaluation(version: int, accuracy: float) -> EvalMetrics:
    return EvalMetrics(version=version, accuracy=accuracy, num_prompts=4, truncated_frac=0.1, time_s=1.0)


def test_the_state_survives_json() -> None:
    state = new_state()
    state.step = 12
    state.add_evaluation({"": evaluation(0, 0.25)})
    state.add_evaluation({"": evaluation(10, 0.5)})
    again = new_state()
    again.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert again.state_dict() == state.state_dict()
    assert (again.step, again.live_version, again.resumed_from_step) == (12, 12, 12)
    assert again.first_accuracy == 0.25
    assert again.last_evaluation == state.last_evaluation
    again.add_evaluation({"": evaluation(12, 0.9)})
    assert again.first_accuracy == 0.25, "the first accuracy is that of the whole run"


def test_a_state_without_evaluations_survives_too() -> None:
    again = new_state()
    again.load_state_dict(json.loads(json.dumps(new_state().state_dict())))
    assert (again.first_accuracy, again.last_evaluation) == (None, None)


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
