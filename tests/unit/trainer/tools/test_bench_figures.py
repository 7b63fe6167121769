"""A run with known speeds: engines make 100 tokens/s, the learner takes 4 s, and who waits for whom is written down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.telemetry.metrics import METRICS
from trainer.tools.bench_figures import (
    ENTRIES,
    BenchPlan,
    TooShort,
    engine_rate,
    figures_of,
    per_step,
    start_up,
    step_flops,
    timeline_of,
)
from trainer.tools.bench_workload import Case, Workload, workload
from trainer.tools.run_records import Span

WORK = replace(
    workload("uniform", is_tiny=True),
    prompt_tokens=10,
    min_response_tokens=50,
    max_response_tokens=50,
    groups_per_step=2,
    group_size=2,
)
"""A group has 100 tokens, a step 200 generated and 240 trained ones."""
STEP_S, LEARN_S, NUM_STEPS = 10.0, 4.0, 6
SYNC = Case(name="sync 1+1", mode="sync", num_ranks=1, num_replicas=1, tensor_parallel_size=1)
ASYNC_2 = replace(SYNC, name="async 1+1", mode="async", overrides=("mode.max_staleness=2",))
PLAN = BenchPlan(work=WORK, case=SYNC, warmup=2, num_steps=4, peak_tflops=None)


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "perf/step_s": STEP_S, "learner/step_s": LEARN_S, "learner/num_tokens": 240.0,
        "learner/num_loss_tokens": 200.0, "time/wait_for_batch_s": 5.5, "time/wait_for_sync_s": 0.5,
        "time/engines_idle_s": 5.0, "sync/pause_s": 0.01 * step, "sync/end_to_end_s": 0.5, "sync/pull_s": 0.4,
        "staleness/mean": 0.5, "staleness/max": float(step % 2), "buffer/failed": 3, "discarded_tokens": 0,
        "perf/rollout_tokens_per_s": 20.0, "time/backpressure_s": 1.5, "length_bias/ks": 0.25, **changes,
    }  # fmt: skip


def sync_run(num_steps: int = NUM_STEPS) -> tuple[list[dict[str, Any]], list[Span]]:
    """Step k: its two groups are generated one after the other in [10k, 10k + 4], trained in [10k + 6, 10k + 10]."""
    spans: list[Span] = []
    for k in range(num_steps):
        at = STEP_S * k
        spans += [
            Span(track="groups", name=f"group {2 * k}", begin_s=at, end_s=at + 1),
            Span(track="groups", name=f"group {2 * k + 1}", begin_s=at + 1, end_s=at + 4),
            Span(track="learner", name=f"step {k}", begin_s=at + 6, end_s=at + 10),
            Span(track="engine replica_0", name=f"paused for v{k}", begin_s=at, end_s=at + 0.1),
            Span(track="sync", name=f"sync v{k}", begin_s=at, end_s=at + 0.5),
            Span(track="sync", name=f"pull v{k} replica_0", begin_s=at, end_s=at + 0.4),
        ]
    return [record(k + 1) for k in range(num_steps)], spans


def test_bounds_and_their_ratio_come_from_the_same_run() -> None:
    found = figures_of(*sync_run(), PLAN)
    # 200 tokens in the 4 s in which the engine was busy.
    assert found.engines.tokens_per_s == pytest.approx(50)
    assert (found.generation_s, found.learning_s, found.bound_s) == (pytest.approx(4), 4, 4)
    assert found.ratio == pytest.approx(10 / 4)
    assert found.engines.busy_frac == pytest.approx(0.4)
    assert found.engines.groups_running == pytest.approx(0.4)


def test_tokens_per_second_count_prompts_once_per_answer_and_all_devices() -> None:
    found = figures_of(*sync_run(), PLAN)
    assert (found.tokens_per_step, found.num_devices) == (240, 2)
    assert found.tokens_per_s_per_device == pytest.approx(240 / 10 / 2)
    shared = replace(SYNC, mode="colocated", num_ranks=1)
    assert figures_of(*sync_run(), replace(PLAN, case=shared)).tokens_per_s_per_device == pytest.approx(24)


def test_groups_that_span_turns_on_shared_devices_take_no_time_while_engines_sleep() -> None:
    """Every group is with the engines for two of their turns of 4 s, between which the learner has the devices."""
    records, spans = sync_run(7)
    shared = replace(SYNC, name="shared", mode="colocated", num_replicas=1, overrides=("mode.max_staleness=1",))
    turns: list[Span] = []
    for k in range(7):
        at = STEP_S * k
        turns += [
            Span(track="devices", name="sleep", begin_s=at + 4, end_s=at + 5),
            Span(track="groups", name=f"group {2 * k}", begin_s=at, end_s=at + 14),
            Span(track="groups", name=f"group {2 * k + 1}", begin_s=at, end_s=at + 14),
            Span(track="engine replica_0", name=f"paused for v{k + 1}", begin_s=at + 9.9, end_s=at + 10),
        ]
    spans = [span for span in spans if span.track == "learner"] + turns
    found = figures_of(records, spans, replace(PLAN, case=shared))
    # Always four groups, which together make 200 tokens in 4 s.
    assert found.engines.tokens_per_s == pytest.approx(50)
    assert found.engines.full_tokens_per_s == pytest.approx(50)
    assert (found.generation_s, found.generation_full_s) == (pytest.approx(4), pytest.approx(4))
    assert found.engines.busy_frac == pytest.approx(0.4)
    assert found.ratio == pytest.approx(10 / 4)


def test_the_first_steps_do_not_count() -> None:
    records, spans = sync_run()
    records[0] |= {"perf/step_s": 500.0, "learner/step_s": 100.0, "learner/num_tokens": 1.0}
    records[1] |= {"perf/step_s": 300.0}
    records[5] |= {"perf/step_s": 14.0}
    found = figures_of(records, spans, PLAN)
    assert found.steps == (3, 6)
    assert (found.step_s.mean, found.step_s.min, found.step_s.max) == (11, 10, 14)
    assert (found.learning_s, found.tokens_per_step) == (4, 240)


def run_that_empties() -> tuple[list[dict[str, Any]], list[Span]]:
    """S = 2, all 8 steps made. In the last two nothing is generated any more, and every number is another."""
    records, spans = sync_run(8)
    other = ("perf/", "learner/", "wait/", "sync/", "staleness/")
    for line in records[6:]:
        line |= {name: 7.0 * value for name, value in line.items() if name.startswith(other)}
    return records, [s for s in spans if not (s.track == "groups" and s.begin_s >= 6 * STEP_S)]


def test_the_last_steps_of_a_run_do_not_count() -> None:
    varied = replace(PLAN, work=replace(WORK, max_response_tokens=4096))
    found = figures_of(*run_that_empties(), replace(varied, case=ASYNC_2))
    assert found == figures_of(*sync_run(6), varied)
    assert found.steps == (3, 6)


def test_the_last_steps_are_left_out_of_the_rate_once_and_not_twice() -> None:
    records, spans = run_that_empties()
    spans += [Span(track="groups", name="group 90", begin_s=54.0, end_s=60.0)]  # in step 6, the last that counts
    found = engine_rate(records, spans, replace(PLAN, case=ASYNC_2))
    assert found.busy_frac == pytest.approx((4 * 4 + 6) / 40)


@pytest.mark.parametrize(("num_steps", "last"), [(5, 5), (6, 6), (7, 6), (8, 6)])
def test_a_run_that_was_cut_off_keeps_all_steps_before_the_last_s(num_steps: int, last: int) -> None:
    records, spans = run_that_empties()
    ends_s = num_steps * STEP_S
    found = figures_of(records[:num_steps], [s for s in spans if s.end_s <= ends_s], replace(PLAN, case=ASYNC_2))
    assert found.steps == (3, last)
    assert (found.step_s.max, found.learning_s, found.engines_idle_s) == (STEP_S, LEARN_S, 5.0)
    # Groups that had not ended then left no trace, so two more steps are left out of the rate.
    assert found.engines.tokens_per_s == pytest.approx(50)


@pytest.mark.parametrize(("case", "total"), [(SYNC, 6), (replace(SYNC, mode="async"), 7), (ASYNC_2, 8)])
def test_a_run_makes_more_steps_than_count(case: Case, total: int) -> None:
    plan = replace(PLAN, case=case)
    assert plan.total_steps == total
    assert [step for step in range(1, total + 1) if plan.counts(step)] == [3, 4, 5, 6]


def test_waits_pauses_and_staleness_are_those_of_the_steady_steps() -> None:
    found = figures_of(*sync_run(), PLAN)
    assert (found.learner_waits_for_data_s, found.learner_waits_for_sync_s) == (5.5, 0.5)
    assert (found.sync_pause_s.min, found.sync_pause_s.max) == (0.03, 0.06)
    assert found.sync_pause_s.mean == pytest.approx(0.045)
    assert (found.staleness_mean, found.staleness_max, found.failed_attempts) == (0.5, 1.0, 3)
    assert found.devices_change_hands_s == 0


def test_devices_that_change_hands_are_added_up() -> None:
    records, spans = sync_run()
    for line in records:
        line |= {"devices/sleep_s": 1.0, "devices/onload_s": 0.5, "devices/offload_s": 0.25, "devices/free_frac": 0.9}
    assert figures_of(records, spans, PLAN).devices_change_hands_s == 1.75


def test_groups_that_never_ended_do_not_lower_the_rate() -> None:
    """S = 1: what runs when the run ends leaves no trace, though the engines were busy with it."""
    records, spans = sync_run()
    asynchronous = replace(PLAN, case=replace(SYNC, mode="async"))
    ended = [s for s in spans if not (s.track == "groups" and s.begin_s >= STEP_S * (NUM_STEPS - 1))]
    assert engine_rate(records, ended, asynchronous).tokens_per_s == pytest.approx(50)
    assert engine_rate(records, ended, asynchronous).busy_frac == pytest.approx(0.4)
    assert engine_rate(records, ended, PLAN).busy_frac < 0.4


def test_a_group_counts_with_the_part_that_lies_within() -> None:
    records, spans = sync_run()
    spans.append(Span(track="groups", name="group 90", begin_s=-80.0, end_s=120.0))  # half a token per second
    found = engine_rate(records, spans, PLAN)
    assert found.busy_frac == 1
    assert found.tokens_per_s == pytest.approx((4 * 200 + 40 * 0.5) / 40)


def test_an_engine_is_idle_while_there_are_fewer_groups_than_engines() -> None:
    two = replace(PLAN, case=replace(SYNC, num_replicas=2))
    found = engine_rate(*sync_run(), two)
    assert found.busy_frac == pytest.approx(0.2)
    assert found.tokens_per_s == pytest.approx(100)


def test_the_full_rate_leaves_out_the_tail_in_which_few_groups_run() -> None:
    records, spans = sync_run()
    four = replace(PLAN, work=replace(WORK, groups_per_step=4))
    spans = [s for s in spans if s.track != "groups"]
    for k in range(NUM_STEPS):
        at = STEP_S * k
        spans.append(Span(track="groups", name=f"group {2 * k}", begin_s=at, end_s=at + 1))
        spans.append(Span(track="groups", name=f"group {2 * k + 1}", begin_s=at, end_s=at + 5))
    found = figures_of(records, spans, four)
    assert found.engines.full_tokens_per_s == pytest.approx(100 + 20)  # both run
    assert found.engines.tokens_per_s == pytest.approx(200 / 5)
    assert found.generation_full_s == pytest.approx(200 / 120)
    many = replace(PLAN, work=replace(WORK, groups_per_step=8))
    assert figures_of(records, spans, many).generation_full_s is None


def test_only_the_strict_ratio_sees_a_learner_that_waits_for_one_straggler() -> None:
    """Three groups take 5 s and one takes all 10: the engine is never empty, the learner waits 4 s of each step."""
    records = [record(k + 1, **{"learner/step_s": 6.0, "learner/num_loss_tokens": 400.0}) for k in range(NUM_STEPS)]
    spans = [s for s in sync_run()[1] if s.track != "groups"]
    for k in range(NUM_STEPS):
        at = STEP_S * k
        spans += [Span(track="groups", name=f"group {4 * k + i}", begin_s=at, end_s=at + 5) for i in range(3)]
        spans.append(Span(track="groups", name=f"group {4 * k + 3}", begin_s=at, end_s=at + 10))
    found = figures_of(records, spans, replace(PLAN, work=replace(WORK, groups_per_step=4)))
    assert (found.generation_s, found.ratio) == (pytest.approx(10), pytest.approx(1))
    assert found.generation_full_s == pytest.approx(400 / (3 * 20 + 10))
    assert found.strict_ratio == pytest.approx(10 / 6)


def test_the_strict_ratio_is_of_the_larger_side_at_the_full_rate_and_unknown_without_that_rate() -> None:
    found = figures_of(
        *sync_run(), PLAN
    )  # one group of two is half: 50 tokens/s, so 4 s as long as the learner computes
    assert found.strict_ratio == pytest.approx(10 / 4)
    assert replace(found, generation_full_s=8.0).strict_ratio == pytest.approx(10 / 8)
    assert replace(found, generation_full_s=3.0).strict_ratio == pytest.approx(10 / 4)
    many = replace(PLAN, work=replace(WORK, groups_per_step=8))
    assert figures_of(*sync_run(), many).strict_ratio is None


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_run_that_is_too_short_says_so(num_steps: int) -> None:
    with pytest.raises(TooShort, match=f"{num_steps} steps ended"):
        figures_of(*sync_run(num_steps), PLAN)


def test_an_asynchronous_run_needs_more_steps_for_the_rate() -> None:
    asynchronous = replace(PLAN, case=replace(SYNC, mode="async"))
    with pytest.raises(TooShort, match="needs 4"):
        figures_of(*sync_run(3), asynchronous)
    assert figures_of(*sync_run(4), asynchronous).steps == (3, 4)


def test_operations_are_those_of_the_matrices_and_of_causal_attention() -> None:
    work: Workload = replace(WORK, shape="tiny")
    # Per block: q, k, v, o of 64 x 64, gate, up, down of 64 x 128; two blocks; vocabulary 128.
    blocks, head = 2 * (4 * 64 * 64 + 3 * 64 * 128), 128 * 64
    found = step_flops(work, num_tokens=1000, num_loss_tokens=800, attention_tokens=50)
    assert found == 6 * (blocks * 1000 + head * 800 + 2 * 64 * 50 * 1000)


def test_operations_of_the_7b_shape_are_six_per_weight_and_token() -> None:
    work = workload("w1", is_tiny=False)
    found = step_flops(work, num_tokens=1.0, num_loss_tokens=1.0, attention_tokens=0.0)
    embedding = 152064 * 3584
    assert found == pytest.approx(6 * (work.architecture().num_params - embedding), rel=1e-3)


def test_utilisation_is_of_the_learner_while_it_computes() -> None:
    found = figures_of(*sync_run(), replace(PLAN, peak_tflops=1e-3, case=replace(SYNC, num_ranks=2)))
    assert found.mfu == pytest.approx(found.model_tflop / 4 / 2 / 1e-3)
    assert figures_of(*sync_run(), PLAN).mfu is None
    own = replace(PLAN, peak_tflops=1e-3, case=replace(SYNC, overrides=("model.path=/models/own",)))
    assert figures_of(*sync_run(), own).mfu is None, "its shape is not the workload's"


def test_the_start_up_adds_up_to_the_first_step() -> None:
    records, spans = sync_run()
    output = ["starting Ray ...", "starting Ray ... 4.5 s", "loading ... failed after 2.0 s",
              "starting engines and learners ... 20.0 s", "step 1/6  reward 1", "stopping ... 9.0 s"]  # fmt: skip
    found = start_up(records, spans, output, started_at=-30.0)
    assert found == {
        "to_first_prompt_s": 30.0,
        "to_first_step_s": 36.0,
        "phase: starting Ray": 4.5,
        "phase: starting engines and learners": 20.0,
        "checks and imports": 5.5,
        "first rollout": 6.0,
    }
    assert start_up([], [], output, started_at=0.0) == {}


def test_the_timeline_begins_behind_the_warm_up() -> None:
    found = timeline_of(*sync_run(), PLAN)
    assert found["seconds"] == 40
    assert found["learner"] == [[6, 10], [16, 20], [26, 30], [36, 40]]
    assert found["running"][:4] == [[0, 1], [1, 1], [4, 0], [10, 1]]
    assert len(found["paused"]) == len(found["syncs"]) == 4
    assert timeline_of(*run_that_empties(), replace(PLAN, case=ASYNC_2)) == found
    assert timeline_of(*run_that_empties(), replace(PLAN, case=ASYNC_2, num_steps=1))["seconds"] == 10
    assert timeline_of(*sync_run(2), PLAN) == {}


def test_every_step_is_kept_as_its_record_says_with_whether_it_counted() -> None:
    found = per_step([record(step) for step in range(1, 9)], replace(PLAN, case=ASYNC_2))
    assert [entry["step"] for entry in found if entry["is_counted"]] == [3, 4, 5, 6]
    assert found[2] == {
        "step": 3, "is_counted": True, "step_s": 10.0, "learner_step_s": 4.0,
        "generated_tokens": 200,  # 20 per second
        "trained_tokens": 240.0, "loss_tokens": 200.0, "learner_waits_for_data_s": 5.5, "learner_waits_for_sync_s": 0.5,
        "engines_idle_s": 5.0, "producer_waits_for_slots_s": 1.5, "staleness_mean": 0.5, "staleness_max": 1.0,
        "length_bias_ks": 0.25, "sync_pause_s": 0.03,
    }  # fmt: skip
    (other,) = per_step([{"step": 1, "perf/step_s": 2.0}], PLAN)
    assert (other["step_s"], other["length_bias_ks"], other["generated_tokens"]) == (2.0, None, None)
    assert set(ENTRIES.values()) | {"perf/rollout_tokens_per_s"} <= {row.name for row in METRICS}
