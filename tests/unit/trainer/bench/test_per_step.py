from __future__ import annotations

from dataclasses import replace

from tests.unit.trainer.bench.test_figures import ASYNC_2, HOW, record
from trainer.telemetry.metrics import METRICS
from trainer.tools.bench_figures import ENTRIES, per_step


def test_an_entry_is_what_the_record_says() -> None:
    (found,) = per_step([record(3)], HOW)
    assert found == {
        "step": 3,
        "is_counted": True,
        "step_s": 10.0,
        "learner_step_s": 4.0,
        "generated_tokens": 200,  # 20 per second
        "trained_tokens": 240.0,
        "loss_tokens": 200.0,
        "learner_waits_for_data_s": 5.5,
        "learner_waits_for_sync_s": 0.5,
        "engines_idle_s": 5.0,
        "producer_waits_for_slots_s": 1.5,
        "staleness_mean": 0.5,
        "staleness_max": 1.0,
        "length_bias_ks": 0.25,
        "sync_pause_s": 0.03,
    }


def test_warm_up_and_last_steps_are_there_and_do_not_count() -> None:
    found = per_step([record(step) for step in range(1, 9)], replace(HOW, case=ASYNC_2))
    assert [(entry["step"], entry["is_counted"]) for entry in found] == [
        (1, False), (2, False), (3, True), (4, True), (5, True), (6, True), (7, False), (8, False),
    ]  # fmt: skip


def test_what_a_record_does_not_have_is_none() -> None:
    (found,) = per_step([{"step": 1, "perf/step_s": 2.0}], HOW)
    assert (found["step_s"], found["length_bias_ks"], found["generated_tokens"]) == (2.0, None, None)
    assert set(found) == {"step", "is_counted", "generated_tokens", *ENTRIES}


def test_every_number_is_a_metric_that_runs_have() -> None:
    assert set(ENTRIES.values()) | {"perf/rollout_tokens_per_s"} <= {row.name for row in METRICS}
