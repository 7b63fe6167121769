"""Observations of a step -> its metrics: rates, rewards, ages, length bias, waits and lost work."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.buffer.rollout_buffer import RolloutBuffer
from rollout.types import Group, ToolUse, Trajectory
from tests.fakes.metric_names import check_complete, check_known
from tests.fakes.scripted_run import config, prompt_set, sync_report, trajectory
from tests.unit.trainer.data.conftest import make_group, make_trajectory, make_turn
from trainer.data.build import build_train_batch
from trainer.driver.step_metrics import (
    LENGTH_WINDOW_GROUPS,
    LengthBiasMonitor,
    QueueTimer,
    StepMetrics,
    batch_record,
    batch_stats,
    buffer_record,
    ks_distance,
    sync_record,
    token_ages,
)
from trainer.learner.step_stats import Metric, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.data.batch import TrainBatch

PROMPT = prompt_set(1).prompts[0]
LIMITS = {"num_ranks": 2, "max_tokens_per_micro_batch": 64, "max_response_tokens": 16}
RESULT = StepResult(
    step=0,
    metrics={"loss": Metric(sum=6.0, count=3.0), "grad_norm": Metric(sum=2.0)},
    seconds={"forward": 1.0, "backward": 2.0, "optimizer": 1.0, "step": 4.0},
)


def sampled(group_id: int, start_version: int, *responses: Sequence[tuple[int, int]]) -> Group:
    """Each response is a list of (version, tokens); the n-th has the reward n."""
    return Group(
        group_id=group_id,
        prompt_id=PROMPT.prompt_id,
        trajectories=[trajectory(PROMPT, i, list(parts), reward=float(i)) for i, parts in enumerate(responses)],
        start_version=start_version,
    )


def of_lengths(*lengths: int, first: int = 0) -> list[Group]:
    """Groups of two responses of one length."""
    return [sampled(first + i, 0, [(0, n)], [(0, n)]) for i, n in enumerate(lengths)]


def built(groups: list[Group], *, step: int = 0, **algorithm: Any) -> TrainBatch:
    return build_train_batch(groups, step=step, algorithm=replace(config().algorithm, **algorithm), **LIMITS)


def record_of(
    groups: list[Group],
    batch: TrainBatch | None = None,
    *,
    metrics: StepMetrics | None = None,
    version: int = 0,
    result: StepResult = RESULT,
    generated: Sequence[Group] = (),
) -> dict[str, Any]:
    metrics = StepMetrics() if metrics is None else metrics
    for group in generated:
        metrics.count_generated(group)
    waits = {"wait_for_batch_s": 3.0, "wait_for_eval_s": 1.0, "wait_for_sync_s": 0.5}
    batch = built(groups) if batch is None else batch
    of_step = {"version": version, "max_staleness": 1}
    record = batch_record(groups, batch, **of_step) | metrics.step_record(groups, batch, result, **of_step, **waits)
    check_known(record)
    return record


def test_rates_are_tokens_over_the_time_between_two_steps() -> None:
    now = [100.0]
    metrics, groups = StepMetrics(clock=lambda: now[0]), of_lengths(2, 4)
    now[0] = 110.0
    record = record_of(groups, metrics=metrics, generated=groups)
    num_tokens = 2 * (3 + 2) + 2 * (3 + 4)
    assert {name: record[name] for name in record if name.startswith("perf/")} == {
        "perf/step_s": 10.0,
        "perf/rollout_tokens_per_s": pytest.approx(12 / 10),
        "perf/tokens_per_s": pytest.approx(num_tokens / 10),
        "perf/train_tokens_per_s": pytest.approx(num_tokens / 4),
        "perf/learner_busy_frac": 0.4,
    }
    assert (record["learner/loss"], record["time/wait_for_batch_s"], record["time/wait_for_sync_s"]) == (2.0, 3.0, 0.5)
    now[0] = 115.0
    again = record_of(groups, metrics=metrics)
    assert (again["perf/step_s"], again["perf/rollout_tokens_per_s"]) == (5.0, 0.0), "tokens are counted once"


@pytest.mark.parametrize(("model", "peak", "mfu"), [(3e12, 4e12, 0.5), (None, 4e12, None), (3e12, None, None)])
def test_utilisation_is_of_all_devices_in_the_time_of_the_slowest_rank(
    model: float | None, peak: float | None, mfu: float | None
) -> None:
    result = replace(RESULT, seconds={"step": 1.5}, model_flops=model, peak_flops=peak)
    assert record_of(of_lengths(3, 4, 5), result=result).get("perf/mfu") == mfu


def test_a_record_is_known_and_complete() -> None:
    groups = of_lengths(2, 4)
    buffer = RolloutBuffer(groups_per_step=2, max_staleness=1, max_retries=0, max_filtered_batches_per_step=4)
    record = {
        **record_of(groups),
        **buffer_record(buffer.stats()),
        **sync_record(sync_report(0)),
        **QueueTimer().step_record(groups, num_replicas=2, backpressure_s=0.0, engines_idle_frac=None),
    }
    record |= {"step": 1, "version": 1, "time_s": 0.0, "sync/version_lag": 1}
    check_known(record)
    check_complete(record)
    assert (record["buffer/num_slots"], record["sync/counter/allocations"]) == (4, 2)


# --- rewards, turns and tool calls ---


def test_a_baseline_has_its_own_metric_and_counts_in_no_other() -> None:
    plain = [make_group([make_trajectory(0), make_trajectory(1)], group_id=i) for i in range(2)]
    greedy = make_trajectory(2, reward=0.25, num_tokens=90, version=1, status="truncated")
    with_baselines = [replace(plain[0], baseline=greedy), replace(plain[1], baseline=replace(greedy, reward=0.75))]
    stats = batch_stats(with_baselines, 3)
    assert stats.pop("reward/greedy_mean") == 0.5
    assert stats == batch_stats(plain, 3)
    metrics = StepMetrics()
    metrics.count_generated(with_baselines[0])
    assert (metrics._generated_tokens, list(metrics.lengths._generated)) == (98, [[4, 4]])
    right = make_group([make_trajectory(0, reward=1.0), make_trajectory(1, reward=1.0)])
    alike, better = (replace(right, baseline=make_trajectory(2, reward=reward)) for reward in (1.0, 0.0))
    assert batch_stats([alike, better], 0)["reward/zero_variance_frac"] == 0.5, "only one teaches nothing"


def test_rewards_of_turns_count_in_the_mean_and_have_their_own() -> None:
    turns = make_turn(2, [(0, 3)], reward=0.5), make_turn(1, [(0, 1)], reward=1.5)
    stats = batch_stats([make_group([make_trajectory(0, turns=turns, reward=1.0), make_trajectory(1, reward=1.0)])], 0)
    assert (stats["reward/mean"], stats["reward/turns_mean"], stats["reward/zero_variance_frac"]) == (2.0, 1.0, 0.0)
    assert "reward/turns_mean" not in batch_stats([make_group([make_trajectory(0), make_trajectory(1)])], 0)


LAST_TURN_IS_EMPTY = make_turn(2, [(0, 3)]), make_turn(1, [(0, 1)]), make_turn(4, [])
FAILED = make_trajectory(2, num_tokens=0, reward=nan, status="failed")
USED = [ToolUse(num_calls=4, num_errors=2), ToolUse(num_calls=1, num_errors=1), ToolUse(), None]


def using(*tools: ToolUse | None) -> list[Trajectory]:
    return [make_trajectory(index, tool_use=one) for index, one in enumerate(tools)]


@pytest.mark.parametrize(
    ("trajectories", "expected"),
    [
        pytest.param(using(None, None), {}, id="single turns without tools"),
        pytest.param([make_trajectory(0, turns=LAST_TURN_IS_EMPTY), make_trajectory(1), FAILED], {"turns_mean": 1.5},
                     id="turns that the policy generated, without failed responses"),
        pytest.param(using(*USED), {"turns_mean": 1.0, "tool_calls_mean": 5 / 3, "tool_errors": 3.0},
                     id="calls are a mean over agents that count, errors a number"),
        pytest.param(using(ToolUse(), ToolUse()), {"turns_mean": 1.0, "tool_calls_mean": 0.0, "tool_errors": 0.0},
                     id="tools that nobody called"),
    ],
)  # fmt: skip
def test_turns_and_tool_calls_of_agents(trajectories: list[Trajectory], expected: dict[str, float]) -> None:
    baseline = make_trajectory(9, tool_use=ToolUse(num_calls=9, num_errors=9))
    stats = batch_stats([replace(make_group(trajectories), baseline=baseline)], 0)
    check_known(stats)
    found = {name.removeprefix("agent/"): value for name, value in stats.items() if name.startswith("agent/")}
    assert found == expected


# --- ages ---


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8))
def test_ages_agree_with_a_list_of_every_token(segments: list[tuple[int, int]]) -> None:
    slow = sorted(3 - version for version, tokens in segments for _ in range(tokens))
    assert token_ages(built([sampled(0, 0, segments, [(0, 0)])]), version=3, max_staleness=3) == {
        "staleness/mean": pytest.approx(sum(slow) / len(slow)),
        "staleness/max": slow[-1],
        **{f"staleness/age_frac/{age}": slow.count(age) / len(slow) for age in range(4)},
        **{
            f"staleness/p{n}": next(a for a in slow if sum(b <= a for b in slow) * 100 >= n * len(slow))
            for n in (50, 90)
        },
    }


def test_responses_that_are_not_trained_have_no_age_and_are_counted_by_reason_and_in_tokens() -> None:
    nothing = token_ages(built([]), version=5, max_staleness=3)
    assert nothing == {"staleness/mean": 0.0, "staleness/max": 0.0}, "every record has them"
    group = sampled(0, 5, [(5, 4)], [(5, 4)], [(3, 1000)])
    lost = replace(group.trajectories[2], status="failed", reward=nan)
    record = record_of([replace(group, trajectories=[*group.trajectories[:2], lost])], version=5)
    assert (record["staleness/mean"], record["response/excluded/failed"]) == (0.0, 1)
    assert record["discarded/masked_tokens"] == 0, "a failed response is counted where it fails"
    groups = of_lengths(2, 4)
    assert record_of(groups, built([groups[0]]))["discarded/masked_tokens"] == 2 * 4


# --- length bias ---

NUMBERS = st.lists(st.integers(0, 12), min_size=1, max_size=30)


@given(NUMBERS, NUMBERS)
def test_the_ks_distance_is_the_largest_gap_of_the_two_distributions(a: list[int], b: list[int]) -> None:
    shares = [[sum(n <= limit for n in side) / len(side) for limit in range(13)] for side in (a, b)]
    assert ks_distance(a, b) == pytest.approx(max(abs(x - y) for x, y in zip(*shares, strict=True)))
    assert ks_distance([], a) == ks_distance(a, []) == 0.0


def test_a_preference_for_short_responses_shows_as_length_bias() -> None:
    metrics, short, long = StepMetrics(), of_lengths(1, 1), of_lengths(9, 9, first=2)
    assert record_of(short, metrics=metrics, generated=[*short, *long])["length_bias/ks"] == 0.5
    assert record_of(long, metrics=metrics)["length_bias/ks"] == 0.0
    left_out = replace(long[0], trajectories=[replace(t, status="truncated") for t in long[0].trajectories])
    groups = [short[0], left_out]
    record = record_of(groups, built(groups, mask_truncated=True), generated=groups)
    assert record["length_bias/ks"] == 0.5, "the loss leaves one out"


def test_responses_of_several_token_sequences_that_are_all_trained_show_no_length_bias() -> None:
    (group,) = of_lengths(3)
    turn = group.trajectories[0].turns()[0]
    turns = (turn, replace(turn, begins_anew=True), replace(turn, begins_anew=True))
    trajectories = [Trajectory.of_turns(turns, status=t.status, reward=t.reward) for t in group.trajectories]
    group = replace(group, trajectories=trajectories)
    record = record_of([group], generated=[group])
    assert record["learner/num_sequences"] == 6 and record["length_bias/ks"] == 0.0


@pytest.mark.parametrize("groups_per_step", [3, 200, 300])
def test_what_is_trained_whole_shows_no_length_bias_in_whichever_order_it_finished(groups_per_step: int) -> None:
    metrics = StepMetrics()
    for step in range(4):
        groups = of_lengths(*(1 + n % 13 for n in range(groups_per_step)), first=step * groups_per_step)
        by_length = sorted(groups, key=lambda group: group.num_generated_tokens)
        assert record_of(groups, metrics=metrics, generated=by_length)["length_bias/ks"] == 0.0
    num_kept = len(metrics.lengths._generated)
    assert min(LENGTH_WINDOW_GROUPS, 4 * groups_per_step) <= num_kept < LENGTH_WINDOW_GROUPS + groups_per_step


def test_a_cohort_whose_short_responses_are_trained_first_shows_it_once_the_long_ones_are_in() -> None:
    def early_after(monitor: LengthBiasMonitor, version: int, groups: list[Group]) -> dict[str, float]:
        monitor.trained(groups, built(groups, step=version), version=version, max_staleness=1)
        return {name.removeprefix("length_bias/early_"): v for name, v in monitor.record().items() if "early" in name}

    lengths = LengthBiasMonitor()
    assert early_after(lengths, 0, [sampled(0, 0, [(0, 1)], [(0, 3)])]) == {}, "long responses may still come"
    late = [sampled(1, 0, [(0, 9)], [(0, 11)]), sampled(2, 1, [(1, 30)], [(1, 30)])]
    assert early_after(lengths, 1, late) == {"ks": 0.5, "length_ratio": 2 / 6}
    lengths, whole = LengthBiasMonitor(), of_lengths(1, 9)
    early_after(lengths, 0, whole)
    assert early_after(lengths, 1, whole) == {"ks": 0.0, "length_ratio": 1.0}, "the whole cohort is trained"


# --- waits and lost work ---


class Story:
    """A queue timer and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.queue = QueueTimer(clock=lambda: self.now)

    def at(self, seconds: float) -> QueueTimer:
        self.now = 100.0 + seconds
        return self.queue

    def record(self, seconds: float, groups: Sequence[Group] = (), **how: Any) -> dict[str, float]:
        given: dict[str, Any] = {"num_replicas": 1, "backpressure_s": 0.0, "engines_idle_frac": None} | how
        return self.at(seconds).step_record(groups, **given)


def group(group_id: int, *, lengths: tuple[int, ...] = (2, 3), waits: tuple[float, ...] = (0.0, 0.0)) -> Group:
    """With seconds that its responses waited for an engine."""
    whole = sampled(group_id, 0, *([(0, n)] for n in lengths))
    pairs = zip(whole.trajectories, waits, strict=True)
    return replace(whole, trajectories=[replace(t, timings={"engine_wait_s": wait_s}) for t, wait_s in pairs])


def test_every_wait_of_a_group_has_its_own_figure() -> None:
    story, groups = Story(), [group(0, waits=(0.0, 2.0)), group(1, waits=(4.0, 10.0))]
    story.at(0).admitted(0)
    story.at(1).admitted(1)
    story.at(2).claimed(0)
    story.at(2).claimed(1)
    story.at(5).finished(groups[0])
    story.at(12).finished(groups[1])
    story.at(20).taken(groups)
    record = story.record(30, groups)
    assert {name.removeprefix("queue/"): value for name, value in record.items() if name.startswith("queue/")} == {
        "pending_s": 1.5, "pending_s_max": 2.0,
        "rollout_s": 6.5, "rollout_s_max": 10.0,
        "ready_s": 11.5, "ready_s_max": 15.0,
        "engine_slot_s": 4.0, "engine_slot_s_max": 10.0,
    }  # fmt: skip
    assert not story.queue._times, "a trained group is forgotten"


@pytest.mark.parametrize(("num_replicas", "idle_s"), [(1, 20.0 + 10.0), (2, 20.0 + 10.0 / 2 + 10.0), (4, 42.5)])
def test_until_engines_report_one_without_a_group_is_taken_for_idle(num_replicas: int, idle_s: float) -> None:
    story = Story()
    for group_id in (0, 1):
        story.at(0).admitted(group_id)
    story.at(20).claimed(0)  # one with the engines for 5 s, two for 10 s, one for 5 s, none for 10 s
    story.at(25).claimed(1)
    story.at(35).finished(group(0))
    story.at(40).finished(group(1))
    record = story.record(50, num_replicas=num_replicas, backpressure_s=4.0)
    assert record["perf/groups_running"] == pytest.approx((5 + 20 + 5) / 50)
    assert record["time/engines_idle_s"] == pytest.approx(idle_s)
    assert record["perf/engines_busy_frac"] == pytest.approx(1 - idle_s / 50)
    record = story.record(70, num_replicas=2, engines_idle_frac=0.375, backpressure_s=7.0)
    assert (record["time/engines_idle_s"], record["perf/engines_busy_frac"]) == (7.5, 0.625), "as they report it"
    assert record["time/backpressure_s"] == 3.0, "since the record before"


def test_lost_work_is_counted_by_kind() -> None:
    story = Story()
    for group_id in range(4):
        story.at(0).admitted(group_id)
        story.at(0).claimed(group_id)
    story.at(1).filtered(group(0))
    story.at(2).failed(1, "retried")
    story.at(3).failed(2, "dropped")
    whole = group(3, lengths=(4, 6))
    failed = replace(whole.trajectories[0], status="failed", reward=nan, num_lost_tokens=3)
    scored = replace(whole.trajectories[1], num_lost_tokens=8)
    story.at(4).finished(replace(whole, trajectories=[failed, scored]))
    record = story.record(9)
    lost = {name.removeprefix("discarded/"): v for name, v in record.items() if name.startswith("discarded/")}
    assert lost == {"filtered_tokens": 5, "failed_tokens": 7, "unused_tokens": 8, "retried_s": 2.0, "dropped_s": 3.0}
    assert set(story.queue._times) == {1, 3}, "filtered and dropped groups are forgotten"
    assert story.record(10)["discarded/filtered_tokens"] == 0
    story.at(11).claimed(1)
    story.at(12).finished(group(1))
    story.at(12).taken([group(1)])
    assert story.record(12, [group(1)])["queue/pending_s"] == 9.0, "a retry waits again"
