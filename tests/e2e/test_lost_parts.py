"""A whole run in which an engine is killed, then a rollout worker: it goes on, and nothing is lost. Then a learner is
killed, which ends it with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.trainer_process import TrainerProcess

    Start = Callable[..., TrainerProcess]

GONE_WITHIN_S = 30.0
ENDLESS = (
    "rollout.num_replicas=2",
    "rollout.max_retries=0",
    "rollout.group_size=4",
    "trainer.groups_per_step=8",
    "trainer.eval_every=0",
    "trainer.eval_at_start=false",
    "trainer.eval_at_end=false",
    "trainer.stop_at_accuracy=null",
    "checkpoint.save_at_end=false",
    "checkpoint.export_hf=false",
    "trainer.total_steps=100000",
)

pytestmark = pytest.mark.timeout(900)


def three_more_steps(run: TrainerProcess) -> None:
    steps = len(run.lines)
    run.until(lambda: len(run.lines) >= steps + 3)


def test_engine_and_rollout_worker_come_back_and_cost_no_group_and_the_loss_of_a_learner_is_the_end(
    start: Start, tmp_path: Path
) -> None:
    run = start(tmp_path / "run", *ENDLESS)
    run.until(lambda: len(run.lines) >= 3)

    run.process("ray::EngineActor").kill()
    run.until(lambda: "is back with version" in run.text)
    three_more_steps(run)
    lines = run.lines
    assert {line["sync/replicas_live"] for line in lines[-2:]} == {2}
    assert 1 in {line["sync/replicas_live"] for line in lines}, "the loss was noticed"
    assert lines[-1]["buffer/failed"] == 0, "requests went on elsewhere; no group had to begin again"

    run.process("ray::RolloutWorkerActor").kill()
    run.until(lambda: "rollout worker 0 is back" in run.text)
    three_more_steps(run)

    run.process("ray::LearnerWorker").kill()
    assert run.wait(timeout_s=180.0) == 1, run.text[-3000:]
    told = run.text.strip().splitlines()[-1]
    assert told.startswith("failed: ")
    assert "LearnerWorker" in told or "learner rank" in told or "learner 0" in told or "learner 1" in told
    assert run.summary["exit_reason"] == "failed"
    assert run.summary["error"] in told
    last = run.lines[-1]
    assert last["buffer/failed"] == last["buffer/retried"] <= 16, "each group that the worker had, once"
    assert [line["step"] for line in run.lines] == list(range(1, len(run.lines) + 1)), "training went on all the while"
    assert last["discarded_tokens"] == 0
    assert max(line["staleness/max"] for line in run.lines) <= 1
    assert not [name for name in last if name.startswith("buffer/dropped/")]
    assert run.left_over(within_s=GONE_WITHIN_S) == []
    assert run.scratch == []
