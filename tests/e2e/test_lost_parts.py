"""A whole run in which a rollout worker is killed: it goes on, and nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.trainer_process import TrainerProcess

    Start = Callable[..., TrainerProcess]

GONE_WITHIN_S = 15.0
ENDLESS = (
    "learner.num_ranks=1",
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

pytestmark = pytest.mark.timeout(600)


def end(run: TrainerProcess) -> dict[str, Any]:
    """Three steps more, then the end in order; the last line of metrics."""
    steps = len(run.lines)
    run.until(lambda: len(run.lines) >= steps + 3)
    run.interrupt()
    assert run.wait(timeout_s=60.0) == 130, run.text[-3000:]
    assert [line["step"] for line in run.lines] == list(range(1, len(run.lines) + 1)), "training went on all the while"
    assert run.left_over(within_s=GONE_WITHIN_S) == []
    last = run.lines[-1]
    assert last["discarded_tokens"] == 0
    assert max(line["staleness/max"] for line in run.lines) <= 1
    assert not [name for name in last if name.startswith("buffer/dropped/")]
    return last


def test_a_rollout_worker_that_is_killed_comes_back_and_costs_no_group(start: Start, tmp_path: Path) -> None:
    run = start(tmp_path / "run", *ENDLESS, "rollout.max_retries=0")
    run.until(lambda: len(run.lines) >= 3)
    run.process("ray::RolloutWorkerActor").kill()
    run.until(lambda: "rollout worker 0 is back" in run.text, timeout_s=240.0)
    last = end(run)
    assert last["buffer/failed"] == last["buffer/retried"] <= 16, "each group that it had, once"
