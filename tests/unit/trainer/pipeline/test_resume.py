from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import config
from trainer.config.errors import ConfigurationError
from trainer.learner import checkpoint
from trainer.pipeline.resume import find_resume
from trainer.pipeline.state import Evaluation, RunState

if TYPE_CHECKING:
    from pathlib import Path


def save(directory: Path, step: int) -> Path:
    tmp = checkpoint.begin(directory, step)
    (tmp / "weights").write_bytes(b"w" * 100)
    return checkpoint.commit(tmp, {"run": {"step": step}})


def resume(value: str, directory: Path) -> Any:
    return find_resume(config(checkpoint={"resume": value}), directory)


def test_auto_takes_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    for step in (5, 20, 10):
        save(tmp_path, step)
    (tmp_path / "step_30.tmp").mkdir()
    (tmp_path / "step_40").mkdir()
    found = resume("auto", tmp_path)
    assert (found.path, found.step) == (tmp_path / "step_20", 20)


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


def new_state(now: float = 100.0) -> RunState:
    return RunState(started_at=now, wall_clock=lambda: now)


def test_the_state_survives_json() -> None:
    state = new_state()
    state.step = 12
    state.add_evaluation(Evaluation(version=0, accuracy=0.25, num_prompts=4, truncated_frac=0.0, time_s=1.0))
    state.add_evaluation(Evaluation(version=10, accuracy=0.5, num_prompts=4, truncated_frac=0.1, time_s=2.0))
    again = new_state()
    again.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert again.state_dict() == state.state_dict()
    assert (again.step, again.live_version, again.resumed_from_step) == (12, 12, 12)
    assert again.first_accuracy == 0.25
    assert again.last_evaluation == state.last_evaluation
    again.add_evaluation(Evaluation(version=12, accuracy=0.9, num_prompts=4, truncated_frac=0.0, time_s=1.0))
    assert again.first_accuracy == 0.25, "the first accuracy is that of the whole run"


def test_a_state_without_evaluations_survives_too() -> None:
    again = new_state()
    again.load_state_dict(json.loads(json.dumps(new_state().state_dict())))
    assert (again.first_accuracy, again.last_evaluation) == (None, None)


def test_the_first_reason_to_stop_counts_and_only_an_interrupt_ends_a_wait() -> None:
    state = new_state()
    state.stop("accuracy_reached")
    assert not state.stop_requested.is_set()
    state.stop("interrupted")
    assert state.stop_requested.is_set()
    assert state.stop_reason == "accuracy_reached"


def test_start_up_ends_with_the_first_prompt() -> None:
    now = [10.0]
    state = RunState(started_at=4.0, wall_clock=lambda: now[0])
    state.mark_dispatched()
    now[0] = 50.0
    state.mark_dispatched()
    assert (state.startup_s, state.time_s) == (6.0, 46.0)
