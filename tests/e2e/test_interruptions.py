"""Runs that end before their time: kill -9, a closed terminal, Ctrl-C. What is left, and how they resume. One of them
loses its rollout worker, and goes on."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from trainer.learner.checkpoint import find_latest, step_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.trainer_process import TrainerProcess

    Start = Callable[..., TrainerProcess]

pytestmark = [pytest.mark.timing, pytest.mark.timeout(900)]

GONE_WITHIN_S = 30.0
ENDED_WITHIN_S = 10.0
"""Who ends in an orderly way has ended its processes first; the kernel may take a moment to bury them."""
SMALL = (
    "mode.max_staleness=4",
    "mode.in_flight=abort",
    "rollout.group_size=4",
    "trainer.groups_per_step=8",
    "trainer.eval_every=0",
    "trainer.eval_at_start=false",
    "trainer.eval_at_end=false",
    "trainer.stop_at_accuracy=null",
    "checkpoint.export_hf=false",
)
REWARD = "def reward(*, prompt, response, answer, metadata):\n    return float(response == answer)\n"
"""A custom function, so that it runs in a separate process."""
ENDLESS = "trainer.total_steps=100000"
LONG_EVALUATION = ("trainer.eval_at_end=true", "trainer.eval_samples=64", "trainer.eval_temperature=1")


def test_a_run_survives_kill_9_and_an_interrupt(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"

    (tmp_path / "mine.py").write_text(REWARD)
    reward = f"task.reward.name={tmp_path / 'mine.py'}:reward"

    killed = start(run_dir, *SMALL, ENDLESS, reward, "checkpoint.every_steps=1")
    killed.until(lambda: find_latest(checkpoints) is not None and len(killed.lines) >= 5)
    unfinished = _stop_learner_while_it_writes(killed, checkpoints)
    names = " ".join(killed.names)
    for expected in ("ray::LearnerActor", "ray::EngineActor", "EngineCore", "rollout.reward.child", "raylet"):
        assert expected in names
    killed.kill()
    assert killed.left_over(within_s=GONE_WITHIN_S) == []
    assert killed.summary["exit_reason"] == "failed" and "SIGKILL" in killed.summary["error"]
    assert killed.text.splitlines()[-1] == f"failed: {killed.summary['error']}"
    assert not (run_dir / "owner.lock").exists()

    latest = find_latest(checkpoints)
    assert latest is not None and unfinished.is_dir()
    before = step_of(latest)
    assert unfinished.name == f"step_{before + 1}.tmp"

    interrupted = start(run_dir, *SMALL, ENDLESS, reward, "checkpoint.every_steps=0", "learner.num_ranks=1")
    interrupted.until(lambda: "resuming after step" in interrupted.text and len(interrupted.lines) >= before + 2)
    interrupted.process("ray::RolloutWorkerActor").kill()
    interrupted.until(lambda: "rollout worker 0 is back" in interrupted.text)
    lost_at = len(interrupted.lines)
    interrupted.until(lambda: len(interrupted.lines) >= lost_at + 2)
    last = interrupted.lines[-1]
    assert last["fleet/worker_restarts"] == 1 and last["discarded_tokens"] == 0
    most = 5 * 8  # (S + 1) x B: each group that it had, once
    assert 0 < last["buffer/failed"] == last["buffer/retried"] <= most
    # A terminal is closed in the middle of a step, which takes longer than any of Ray's processes would take to end.
    assert not unfinished.exists()
    learner = interrupted.process("ray::LearnerActor")
    learner.suspend()
    time.sleep(0.5)
    interrupted.hang_up()
    time.sleep(4.0)
    learner.resume()
    assert interrupted.wait() == 130, interrupted.text[-3000:]
    assert interrupted.left_over(within_s=ENDED_WITHIN_S) == []
    assert interrupted.scratch == []
    # So is the session directory of the driver that was killed.
    assert killed.scratch == []
    summary = interrupted.summary
    assert summary["exit_reason"] == "interrupted"
    assert summary["resumed_from_step"] == before
    assert (checkpoints / f"step_{summary['steps']}").exists()
    assert_every_prompt_has_one_group_id(checkpoints, summary["steps"])


@pytest.mark.full
def test_a_resumed_run_that_loses_its_engine_when_all_is_trained_ends_in_order(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    interrupted = start(run_dir, *SMALL, ENDLESS)
    interrupted.until(lambda: len(interrupted.lines) >= 3)
    interrupted.interrupt()
    assert interrupted.wait() == 130, interrupted.text[-3000:]
    done = interrupted.summary["steps"]

    end = (f"trainer.total_steps={done + 3}", "checkpoint.export_hf=true", "rollout.max_engine_restarts=0")
    finished = start(run_dir, *SMALL, *end, *LONG_EVALUATION)
    finished.until(lambda: f"evaluating version {done + 3}" in finished.text)
    finished.process("ray::EngineActor").kill()
    assert finished.wait() == 0, finished.text[-3000:]
    assert f"the evaluation of version {done + 3} failed" in finished.text
    assert list((run_dir / "export").iterdir())
    assert finished.summary["exit_reason"] == "completed"
    assert finished.summary["resumed_from_step"] == done
    assert [line["step"] for line in finished.lines] == list(range(1, done + 4))
    assert {line["discarded_tokens"] for line in finished.lines} == {0}
    assert finished.left_over(within_s=ENDED_WITHIN_S) == []
    assert_every_prompt_has_one_group_id(run_dir / "checkpoints", done + 3)


def assert_every_prompt_has_one_group_id(checkpoints: Path, step: int) -> None:
    """It was trained or is owed, under one id, in whichever process."""
    driver = json.loads((checkpoints / f"step_{step}" / "driver.json").read_text())
    owed = {entry["group_id"] for entry in driver["buffer"]["prompts"]}
    assert driver["buffer"]["next_group_id"] == 8 * step + len(owed)


def _stop_learner_while_it_writes(run: TrainerProcess, checkpoints: Path) -> Path:
    """The directory of the checkpoint. It is suspended at moments when there is one, until it is the one who writes."""
    learner = run.process("ray::LearnerActor")
    give_up = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < give_up:
        if not (begun := list(checkpoints.glob("step_*.tmp"))):
            continue
        learner.suspend()
        time.sleep(0.5)
        if begun[0].exists():
            return begun[0]
        learner.resume()
    raise AssertionError("no checkpoint was being written")


@pytest.mark.full
def test_an_interrupt_during_the_start_leaves_nothing(start: Start, tmp_path: Path) -> None:
    """In the middle of everything: Ray is up, actors are importing, and the model is being made."""
    run = start(tmp_path / "run", *SMALL, ENDLESS, cache=tmp_path / "cache")
    run.until(lambda: any("trainer.builtin.tiny_model" in name for name in run.names))
    run.until(lambda: any("ray::LearnerActor" in name for name in run.names))
    run.interrupt()
    assert run.wait(timeout_s=180.0) == 130, run.text[-3000:]
    assert run.left_over(within_s=ENDED_WITHIN_S) == []
    assert run.scratch == []
    assert run.summary["exit_reason"] == "interrupted"
