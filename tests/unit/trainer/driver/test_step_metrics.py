"""What a step says of itself: rates, ages, length bias, queue times, idle engines and lost work."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.buffer.rollout_buffer import RolloutBuffer
from rollout.types import Group, Trajectory
from tests.fakes.metric_names import check_complete, check_known
from tests.fakes.scripted_run import config, prompt_set, sync_report, trajectory
from trainer.data.build import build_train_batch
from trainer.driver.step_metrics import (
    LENGTH_WINDOW_GROUPS,
    LengthBiasMonitor,
    QueueTimer,
    StepMetrics,
    buffer_record,
    ks_distance,
    sync_record,
    token_ages,
)
from trainer.learner.step_stats import Metric, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.data.batch import TrainBatch


NUMBERS = st.lists(st.integers(0, 12), min_size=1, max_size=30)


@given(NUMBERS, NUMBERS)
def test_the_ks_distance_is_the_largest_gap_of_the_two_distributions(a: list[int], b: list[int]) -> None:
    def share(side: list[int], limit: int) -> float:
        return sum(n <= limit for n in side) / len(side)

    slow = max(abs(share(a, limit) - share(b, limit)) for limit in range(13))
    assert ks_distance(a, b) == pytest.approx(slow)


def test_without_lengths_there_is_no_distance() -> None:
    assert ks_distance([], [3]) == ks_distance([3], []) == 0.0
    assert ks_distance([1, 1], [2, 2]) == 1.0


def groups(lengths: Sequence[int], *, first: int = 0) -> list[Group]:
    prompts = prompt_set(len(lengths)).prompts
    return [
        Group(
            group_id=first + i,
            prompt_id=prompts[i].prompt_id,
            trajectories=[trajectory(prompts[i], s, [(0, n)], reward=float(s)) for s in range(2)],
            start_version=0,
        )
        for i, n in enumerate(lengths)
    ]


WAITS = {"wait_for_batch_s": 3.0, "wait_for_eval_s": 1.0, "wait_for_sync_s": 0.5}
LIMITS = {"num_ranks": 2, "max_tokens_per_micro_batch": 64, "max_response_tokens": 16}


def built(of: list[Group], *, step: int = 0) -> TrainBatch:
    return build_train_batch(of, step=step, algorithm=config().algorithm, **LIMITS)


RESULT = StepResult(
    step=0,
    metrics={"loss": Metric(sum=6.0, count=3.0), "grad_norm": Metric(sum=2.0)},
    seconds={"forward": 1.0, "backward": 2.0, "optimizer": 1.0, "step": 4.0},
)


def test_rates_are_tokens_over_the_time_between_two_steps() -> None:
    now = [100.0]
    metrics = StepMetrics(clock=lambda: now[0])
    trained = groups([2, 4])
    for group in trained:
        metrics.count_generated(group)
    now[0] = 110.0
    record = metrics.step_record(trained, built(trained), RESULT, max_staleness=1, **WAITS)
    num_tokens = 2 * (3 + 2) + 2 * (3 + 4)
    assert record["perf/step_s"] == 10.0
    assert record["perf/rollout_tokens_per_s"] == pytest.approx(12 / 10)
    assert record["perf/tokens_per_s"] == pytest.approx(num_tokens / 10)
    assert record["perf/train_tokens_per_s"] == pytest.approx(num_tokens / 4)
    assert record["learner/loss"] == 2.0
    assert (record["time/wait_for_batch_s"], record["time/wait_for_sync_s"]) == (3.0, 0.5)
    now[0] = 115.0
    again = metrics.step_record(trained, built(trained), RESULT, max_staleness=1, **WAITS)
    assert again["perf/step_s"] == 5.0
    assert again["perf/rollout_tokens_per_s"] == 0.0, "tokens were counted twice"


def test_a_preference_for_short_answers_shows_as_length_bias() -> None:
    metrics = StepMetrics(clock=lambda: 0.0)
    short, long = groups([1, 1]), groups([9, 9], first=2)
    for group in (*short, *long):
        metrics.count_generated(group)
    assert metrics.step_record(short, built(short), RESULT, max_staleness=1, **WAITS)["length_bias/ks"] == 0.5
    assert metrics.step_record(long, built(long), RESULT, max_staleness=1, **WAITS)["length_bias/ks"] == 0.0


def test_answers_of_several_token_sequences_that_are_all_trained_show_no_length_bias() -> None:
    metrics = StepMetrics(clock=lambda: 0.0)
    (group,) = groups([3])
    turn = group.trajectories[0].turns()[0]
    turns = (turn, replace(turn, begins_anew=True), replace(turn, begins_anew=True))
    trajectories = [Trajectory.of_turns(turns, status=t.status, reward=t.reward) for t in group.trajectories]
    group = replace(group, trajectories=trajectories)
    metrics.count_generated(group)
    record = metrics.step_record([group], built([group]), RESULT, max_staleness=1, **WAITS)
    assert record["learner/num_sequences"] == 6 and record["length_bias/ks"] == 0.0


@pytest.mark.parametrize("groups_per_step", [3, 200, 300])
def test_what_is_trained_whole_shows_no_length_bias_in_whichever_order_it_finished(groups_per_step: int) -> None:
    metrics = StepMetrics(clock=lambda: 0.0)
    for step in range(4):
        trained = groups([1 + n % 13 for n in range(groups_per_step)], first=step * groups_per_step)
        for group in sorted(trained, key=lambda group: group.num_generated_tokens):
            metrics.count_generated(group)
        record = metrics.step_record(trained, built(trained), RESULT, max_staleness=0, **WAITS)
        assert record["length_bias/ks"] == 0.0
    num_kept = len(metrics.lengths._generated)
    assert min(LENGTH_WINDOW_GROUPS, 4 * groups_per_step) <= num_kept < LENGTH_WINDOW_GROUPS + groups_per_step


def test_answers_that_the_loss_leaves_out_are_not_among_the_trained_lengths() -> None:
    algorithm = replace(config().algorithm, mask_truncated=True)
    short, long = groups([2, 8])
    long = replace(long, trajectories=[replace(t, status="truncated") for t in long.trajectories])
    metrics = StepMetrics(clock=lambda: 0.0)
    for group in (short, long):
        metrics.count_generated(group)
    batch = build_train_batch([short, long], step=0, algorithm=algorithm, **LIMITS)
    assert metrics.step_record([short, long], batch, RESULT, max_staleness=0, **WAITS)["length_bias/ks"] == 0.5


def test_a_line_is_known_and_complete() -> None:
    trained = groups([2, 4])
    buffer = RolloutBuffer(groups_per_step=2, max_staleness=1, max_retries=0, max_filtered_batches_per_step=4)
    record = {
        "step": 1,
        "version": 1,
        "time_s": 0.0,
        **StepMetrics().step_record(trained, built(trained), RESULT, max_staleness=1, **WAITS),
        **buffer_record(buffer.stats()),
        **sync_record(sync_report(0), version_lag=1),
        **QueueTimer().step_record(trained, num_replicas=2, backpressure_s=0.0, engines_idle_frac=None),
    }
    check_known(record)
    check_complete(record)
    assert record["buffer/num_slots"] == 4
    assert record["sync/counter/allocations"] == 2
    assert record["sync/version_lag"] == 1


def answers(group_id: int, start_version: int, segments: Sequence[Sequence[tuple[int, int]]]) -> Group:
    """One trajectory per list of (version, tokens)."""
    prompt = prompt_set().prompts[0]
    return Group(
        group_id=group_id,
        prompt_id=prompt.prompt_id,
        trajectories=[trajectory(prompt, i, list(parts), reward=1.0) for i, parts in enumerate(segments)],
        start_version=start_version,
    )


def ages_of(of: list[Group], *, step: int) -> dict[str, object]:
    return token_ages(built(of, step=step), max_staleness=3)


def test_ages_are_counted_by_token() -> None:
    spread = [answers(0, 3, [[(3, 6), (5, 2)], [(4, 1)]]), answers(1, 5, [[(5, 1)], [(5, 0)]])]
    ages = ages_of(spread, step=5)
    assert ages == {
        "staleness/mean": pytest.approx(1.3),
        "staleness/max": 2.0,
        "staleness/age_frac/0": 0.3,
        "staleness/age_frac/1": 0.1,
        "staleness/age_frac/2": 0.6,
        "staleness/age_frac/3": 0.0,
        "staleness/p50": 2,
        "staleness/p90": 2,
    }
    assert ages_of(spread[::-1], step=5) == ages
    assert ages_of([], step=5) == {"staleness/mean": 0.0, "staleness/max": 0.0}, "every line has them"


def test_answers_that_are_not_trained_have_no_age_and_are_counted_by_reason() -> None:
    group = answers(0, 5, [[(5, 4)], [(5, 4)], [(3, 1000)]])
    lost = replace(group.trajectories[2], status="failed", reward=nan)
    mixed = [replace(group, trajectories=[*group.trajectories[:2], lost])]
    assert ages_of(mixed, step=5)["staleness/mean"] == 0.0
    record = StepMetrics(clock=lambda: 0.0).step_record(mixed, built(mixed, step=5), RESULT, max_staleness=3, **WAITS)
    assert record["response/excluded/failed"] == 1
    check_known(record)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8))
def test_ages_agree_with_a_list_of_every_token(segments: list[tuple[int, int]]) -> None:
    slow = sorted(3 - version for version, tokens in segments for _ in range(tokens))
    ages = ages_of([answers(0, 0, [segments, [(0, 0)]])], step=3)
    assert [ages[f"staleness/age_frac/{age}"] for age in range(4)] == [slow.count(a) / len(slow) for a in range(4)]
    for name, share in (("staleness/p50", 0.5), ("staleness/p90", 0.9)):
        assert ages[name] == next(a for a in slow if sum(b <= a for b in slow) >= share * len(slow))


def trained_at(lengths: LengthBiasMonitor, step: int, of: list[Group], *, max_staleness: int) -> dict[str, float]:
    """Metrics of cohorts after this step."""
    lengths.trained(of, built(of, step=step), max_staleness=max_staleness)
    return {name: value for name, value in lengths.record().items() if "early" in name}


def test_a_cohort_that_is_trained_whole_shows_no_preference() -> None:
    of = [answers(0, 0, [[(0, 1)], [(0, 1)]]), answers(1, 0, [[(0, 9)], [(0, 9)]])]
    found = trained_at(LengthBiasMonitor(), 0, of, max_staleness=0)
    assert found == {"length_bias/early_ks": 0.0, "length_bias/early_length_ratio": 1.0}


def test_a_cohort_whose_short_answers_are_trained_first_shows_it_once_the_long_ones_are_in() -> None:
    lengths = LengthBiasMonitor()
    early = [answers(0, 0, [[(0, 1)], [(0, 3)]])]
    assert trained_at(lengths, 0, early, max_staleness=1) == {}, "long answers may still be on their way"
    late = [answers(1, 0, [[(0, 9)], [(0, 11)]]), answers(2, 1, [[(1, 30)], [(1, 30)]])]
    expected = {"length_bias/early_ks": 0.5, "length_bias/early_length_ratio": 2 / 6}
    assert trained_at(lengths, 1, late, max_staleness=1) == expected


def test_answers_that_carry_no_loss_are_counted_in_tokens() -> None:
    trained = groups([2, 4])
    dropped = replace(trained[1], trajectories=[replace(trained[1].trajectories[0], status="failed", reward=nan)])
    record = StepMetrics().step_record([trained[0], dropped], built([trained[0]]), RESULT, max_staleness=1, **WAITS)
    assert record["discarded/masked_tokens"] == 0, "a failed answer is counted where it fails"
    record = StepMetrics().step_record(trained, built([trained[0]]), RESULT, max_staleness=1, **WAITS)
    assert record["discarded/masked_tokens"] == 2 * 4


@pytest.mark.parametrize(
    ("model_flops", "peak_flops", "mfu"), [(3e12, 4e12, 0.5), (None, 4e12, None), (3e12, None, None)]
)
def test_utilisation_is_of_all_devices_in_the_time_of_the_slowest_rank(
    model_flops: float | None, peak_flops: float | None, mfu: float | None
) -> None:
    result = replace(RESULT, seconds={"step": 1.5}, model_flops=model_flops, peak_flops=peak_flops)
    of = groups([3, 4, 5])
    record = StepMetrics().step_record(of, built(of), result, max_staleness=1, **WAITS)
    assert record.get("perf/mfu") == mfu
    check_known(record)


PROMPT = prompt_set(1).prompts[0]


def group(group_id: int, *, lengths: tuple[int, ...] = (2, 3)) -> Group:
    parts = [trajectory(PROMPT, i, [(0, n)], reward=1.0) for i, n in enumerate(lengths)]
    return Group(group_id=group_id, prompt_id=PROMPT.prompt_id, trajectories=parts, start_version=0)


class Story:
    """A queue timer and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.queue = QueueTimer(clock=lambda: self.now)

    def at(self, seconds: float) -> QueueTimer:
        self.now = 100.0 + seconds
        return self.queue


def test_every_wait_of_a_group_has_its_own_figure() -> None:
    story = Story()
    story.at(0).admitted(0)
    story.at(1).admitted(1)
    story.at(2).claimed(0)
    story.at(2).claimed(1)
    story.at(5).finished(group(0))
    story.at(12).finished(group(1))
    story.at(20).taken([group(0), group(1)])
    record = story.at(30).step_record([group(0), group(1)], num_replicas=1, backpressure_s=0.0, engines_idle_frac=None)
    queues = {name.removeprefix("queue/"): value for name, value in record.items() if name.startswith("queue/")}
    assert queues == {
        "admitted_to_claimed_s": 1.5, "admitted_to_claimed_s_max": 2.0,
        "claimed_to_finished_s": 6.5, "claimed_to_finished_s_max": 10.0,
        "finished_to_taken_s": 11.5, "finished_to_taken_s_max": 15.0,
    }  # fmt: skip
    assert not story.queue._times, "a trained group is forgotten"


def test_the_wait_for_an_engine_is_that_of_the_steps_answers() -> None:
    def waited(group_id: int, *seconds: float) -> Group:
        whole = group(group_id, lengths=(2,) * len(seconds))
        answers = zip(whole.trajectories, seconds, strict=True)
        return replace(whole, trajectories=[replace(t, timings={"engine_wait_s": s}) for t, s in answers])

    groups = [waited(0, 0.0, 2.0), waited(1, 4.0, 10.0)]
    record = Story().queue.step_record(groups, num_replicas=1, backpressure_s=0.0, engines_idle_frac=None)
    assert (record["queue/engine_slot_s"], record["queue/engine_slot_s_max"]) == (4.0, 10.0)


@pytest.mark.parametrize(("num_replicas", "idle_s"), [(1, 20.0 + 10.0), (2, 20.0 + 10.0 / 2 + 10.0), (4, 42.5)])
def test_until_engines_speak_one_without_a_group_is_taken_for_idle(num_replicas: int, idle_s: float) -> None:
    story = Story()
    for group_id in (0, 1):
        story.at(0).admitted(group_id)
    story.at(20).claimed(0)  # one with the engines for 5 s, two for 10 s, one for 5 s, none for 10 s
    story.at(25).claimed(1)
    story.at(35).finished(group(0))
    story.at(40).finished(group(1))
    record = story.at(50).step_record([], num_replicas=num_replicas, backpressure_s=0.0, engines_idle_frac=None)
    assert record["perf/groups_running"] == pytest.approx((5 + 20 + 5) / 50)
    slow = sum(max(0, num_replicas - n) / num_replicas for n in [0] * 20 + [1] * 5 + [2] * 10 + [1] * 5 + [0] * 10)
    assert record["time/engines_idle_s"] == pytest.approx(slow)
    assert record["perf/engines_busy_frac"] == pytest.approx(1 - slow / 50)
    assert slow == idle_s


def test_what_engines_say_of_themselves_counts() -> None:
    story = Story()
    story.at(0).admitted(0)
    story.at(0).claimed(0)
    record = story.at(20).step_record([], num_replicas=2, backpressure_s=0.0, engines_idle_frac=0.375)
    assert (record["time/engines_idle_s"], record["perf/engines_busy_frac"]) == (7.5, 0.625)


def test_a_line_is_about_the_time_since_the_line_before() -> None:
    story = Story()
    record = story.at(10).step_record([], num_replicas=1, backpressure_s=4.0, engines_idle_frac=None)
    assert record["time/engines_idle_s"] == 10.0
    story.at(10).admitted(0)
    story.at(10).claimed(0)
    record = story.at(16).step_record([], num_replicas=1, backpressure_s=7.0, engines_idle_frac=None)
    assert (record["time/engines_idle_s"], record["time/backpressure_s"]) == (0.0, 3.0)
    assert record["perf/engines_busy_frac"] == 1.0


def test_lost_work_is_told_apart() -> None:
    story = Story()
    for group_id in range(4):
        story.at(0).admitted(group_id)
        story.at(0).claimed(group_id)
    story.at(1).filtered(group(0))
    story.at(2).failed(1, "retried")
    story.at(3).failed(2, "dropped")
    whole = group(3, lengths=(4, 6))
    unjudged = replace(whole.trajectories[0], status="failed", reward=nan, num_lost_tokens=3)
    judged = replace(whole.trajectories[1], num_lost_tokens=8)
    story.at(4).finished(replace(whole, trajectories=[unjudged, judged]))
    record = story.at(9).step_record([], num_replicas=1, backpressure_s=0.0, engines_idle_frac=None)
    lost = {name.removeprefix("discarded/"): v for name, v in record.items() if name.startswith("discarded/")}
    assert lost == {"filtered_tokens": 5, "failed_tokens": 7, "given_up_tokens": 8, "retried_s": 2.0, "dropped_s": 3.0}
    assert set(story.queue._times) == {1, 3}, "filtered and dropped groups are forgotten"
    again = story.at(10).step_record([], num_replicas=1, backpressure_s=0.0, engines_idle_frac=None)
    assert again["discarded/filtered_tokens"] == 0
    story.at(11).claimed(1)
    story.at(12).finished(group(1))
    story.at(12).taken([group(1)])
    record = story.at(12).step_record([group(1)], num_replicas=1, backpressure_s=0.0, engines_idle_frac=None)
    assert record["queue/pending_s"] == 9.0, "a retry waits anew"


def test_tokens_of_a_baseline_count_as_generated_but_not_in_the_lengths() -> None:
    prompt = prompt_set(1).prompts[0]
    samples = [trajectory(prompt, i, [(0, 2)], reward=1.0) for i in range(2)]
    greedy = trajectory(prompt, 2, [(0, 7)], reward=1.0)
    metrics = StepMetrics(clock=lambda: 0.0)
    metrics.count_generated(
        Group(group_id=0, prompt_id=prompt.prompt_id, trajectories=samples, start_version=0, baseline=greedy)
    )
    assert (metrics._generated_tokens, list(metrics.lengths._generated)) == (11, [[2, 2]])
