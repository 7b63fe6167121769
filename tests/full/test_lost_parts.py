"""A whole run in which an evaluation takes one of two engines, then an engine is killed in mid-response, the other
one is stopped, then a rollout worker is killed: it continues, and nothing is lost. Then a learner is killed, which ends
it with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from trainer.tools.bench_workload import run_config, workload, write_inputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.trainer_process import TrainerProcess

    Start = Callable[..., TrainerProcess]

GONE_WITHIN_S = 30.0
MAX_STALENESS = 4
WORK = replace(workload("w1", is_tiny=True), min_response_tokens=320, max_response_tokens=360)
"""Responses take longer than steps, so many are under way whenever something is killed; their lengths are known."""
ENDLESS = (
    "device=cpu",
    "learner.num_ranks=2",
    f"mode.max_staleness={MAX_STALENESS}",
    "mode.in_flight=recompute",
    "rollout.stream_interval=8",
    "task.eval_size=256",
    "rollout.max_num_seqs=128",
    "rollout.num_replicas=2",
    "rollout.max_retries=0",
    "rollout.max_engine_restarts=9",
    "rollout.heartbeat_timeout_s=40",
    "trainer.eval_at_start=true",
    "weight_sync.timeout_s=20",
    "trainer.total_steps=100000",
)

pytestmark = [pytest.mark.timing, pytest.mark.timeout(900)]


def three_more_steps(run: TrainerProcess) -> None:
    steps = len(run.lines)
    run.until(lambda: len(run.lines) >= steps + 3)


def is_busy(run: TrainerProcess) -> bool:
    """Both engines have responses of several policy versions, so that not all of them have just begun."""
    last = run.lines[-1]
    in_flight = [last.get(f"engine/in_flight/replica_{index}", 0) for index in range(2)]
    return (
        min(in_flight) >= 5 * WORK.group_size and last["buffer/num_slots"] == (MAX_STALENESS + 1) * WORK.groups_per_step
    )


def num_returned(run: TrainerProcess) -> int:
    """Engines that took the place of a lost one; on a busy machine more than this test has stopped may have been."""
    return run.text.count("is back with version")


def lose_with_answers(run: TrainerProcess, lose: Callable[[], None]) -> None:
    """Loses an engine until responses of one continue elsewhere, from what they had. The engine metrics of a record may
    be seconds old, and an engine that is ahead of the learner may have ended all of its responses by then, or just
    begun all of them."""
    for _ in range(4):
        num_lines = len(run.lines)
        run.until(lambda before=num_lines: len(run.lines) > before and is_busy(run))
        rescued, num_returns = run.lines[-1]["engine/migrated_tokens"], num_returned(run)
        lose()
        run.until(lambda before=num_returns: num_returned(run) > before)
        three_more_steps(run)
        if run.lines[-1]["engine/migrated_tokens"] > rescued:
            return
    raise AssertionError(f"no response of a lost engine continued elsewhere: {run.text[-8000:]}")


def groups_of(run: TrainerProcess) -> list[dict[str, Any]]:
    """All that were recorded."""
    files = sorted(run.run_dir.glob("trajectories/*.jsonl"))
    return [
        json.loads(line) for file in files for line in file.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def test_engine_and_rollout_worker_come_back_and_cost_no_group_and_the_loss_of_a_learner_is_the_end(
    start: Start, tmp_path: Path
) -> None:
    config = run_config(WORK, *write_inputs(WORK, tmp_path / "inputs"))
    config["task"]["eval_path"] = config["task"]["train_path"]
    config["model"]["random_weights"] = True
    (tmp_path / "inputs" / "long.yaml").write_text(yaml.safe_dump(config))
    run = start(tmp_path / "run", "--config-dir", str(tmp_path / "inputs"), "--config-name", "long", *ENDLESS)
    run.until(lambda: any("eval/version" in line for line in run.lines))
    evaluated = next(index for index, line in enumerate(run.lines) if "eval/version" in line)
    assert run.lines[evaluated]["eval/version"] == 0
    meanwhile = run.lines[:evaluated]
    skipped = [line["sync/replicas_skipped"] for line in meanwhile]  # of the last sync that had ended then
    assert 1 in skipped, "no new version passed its engine by"
    assert set(skipped[skipped.index(1) :]) == {1}, "and none after it reached it"
    assert len(meanwhile) >= 2, "training continued during it"

    lose_with_answers(run, lambda: run.process("ray::EngineActor").kill())
    run.until(lambda: [line["sync/replicas_live"] for line in run.lines[-2:]] == [2, 2])
    lines = run.lines
    assert 1 in {line["sync/replicas_live"] for line in lines}, "the loss was noticed"
    assert lines[-1]["buffer/failed"] == 0, "requests continued elsewhere; no group had to begin again"

    lose_with_answers(run, lambda: run.process("EngineCore").suspend())  # lives, and gives no token
    assert run.lines[-1]["buffer/failed"] == 0

    run.process("ray::RolloutWorkerActor").kill()
    run.until(lambda: "rollout worker 0 is back" in run.text)
    three_more_steps(run)

    run.process("ray::LearnerActor").kill()
    assert run.wait(timeout_s=180.0) == 1, run.text[-3000:]
    last_words = run.text.strip().splitlines()[-1]
    assert last_words.startswith("failed: ")
    assert (
        "LearnerActor" in last_words
        or "learner rank" in last_words
        or "learner 0" in last_words
        or "learner 1" in last_words
    )
    assert run.summary["exit_reason"] == "failed"
    assert run.summary["error"] in last_words
    last = run.lines[-1]
    assert last["buffer/failed"] == last["buffer/retried"] <= (MAX_STALENESS + 1) * WORK.groups_per_step, (
        "each group that the worker had, once"
    )
    assert [line["step"] for line in run.lines] == list(range(1, len(run.lines) + 1)), (
        "training continued all the while"
    )
    assert last["discarded_tokens"] == 0
    assert max(line["staleness/max"] for line in run.lines) <= MAX_STALENESS
    for group in groups_of(run):
        lengths = WORK.lengths_of(int(group["prompt"]["prompt_id"].partition("/")[2]) - 1)
        generated = [a["num_generated_tokens"] for a in group["trajectories"]]
        assert not generated or sorted(generated) == sorted(lengths), "none was lost or came twice"
    versions = [response["versions"] for group in groups_of(run) for response in group["trajectories"]]
    assert max(map(len, versions)) > 1, "responses were under way when weights changed"
    assert not [name for name in last if name.startswith("buffer/dropped/")]
    assert run.left_over(within_s=GONE_WITHIN_S) == []
    assert run.scratch == []
