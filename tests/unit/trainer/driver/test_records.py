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
    DataWait,
    EarlyLengths,
    GroupFlow,
    StepRecorder,
    StepTimes,
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
            prompt=prompts[i],
            trajectories=[trajectory(prompts[i], s, [(0, n)], reward=float(s)) for s in range(2)],
            start_version=0,
        )
        for i, n in enumerate(lengths)
    ]


LIMITS = {"num_ranks": 2, "max_tokens_per_micro_batch": 64, "max_response_tokens": 16}


def built(of: list[Group], *, step: int = 0) -> TrainBatch:
    return build_train_batch(of, step=step, algorithm=config().algorithm, **LIMITS)


RESULT = StepResult(
    step=0,
    metrics={"loss": Metric(sum=6.0, count=3.0), "grad_norm": Metric(sum=2.0)},
    seconds={"forward": 1.0, "backward": 2.0, "optimizer": 1.0, "step": 4.0},
)
TIMES = StepTimes(waited_for_data=DataWait(whole_s=3.0, beside_evaluation_s=1.0), waited_for_sync_s=0.5)


def test_rates_are_tokens_over_the_time_between_two_steps() -> None:
    now = [100.0]
    recorder = StepRecorder(clock=lambda: now[0])
    trained = groups([2, 4])
    for group in trained:
        recorder.count_generated(group)
    now[0] = 110.0
    record = recorder.step_record(trained, built(trained), RESULT, TIMES, max_staleness=1)
    num_tokens = 2 * (3 + 2) + 2 * (3 + 4)
    assert record["perf/step_s"] == 10.0
    assert record["perf/rollout_tokens_per_s"] == pytest.approx(12 / 10)
    assert record["perf/tokens_per_s"] == pytest.approx(num_tokens / 10)
    assert record["perf/train_tokens_per_s"] == pytest.approx(num_tokens / 4)
    assert record["learner/loss"] == 2.0
    assert (record["wait/learner_for_data_s"], record["wait/learner_for_sync_s"]) == (3.0, 0.5)
    now[0] = 115.0
    again = recorder.step_record(trained, built(trained), RESULT, TIMES, max_staleness=1)
    assert again["perf/step_s"] == 5.0
    assert again["perf/rollout_tokens_per_s"] == 0.0, "tokens were counted twice"


def test_a_preference_for_short_answers_shows_as_length_bias() -> None:
    recorder = StepRecorder(clock=lambda: 0.0)
    short, long = groups([1, 1]), groups([9, 9], first=2)
    for group in (*short, *long):
        recorder.count_generated(group)
    assert recorder.step_record(short, built(short), RESULT, TIMES, max_staleness=1)["length_bias/ks"] == 0.5
    assert recorder.step_record(long, built(long), RESULT, TIMES, max_staleness=1)["length_bias/ks"] == 0.0


def test_answers_of_several_token_sequences_that_are_all_trained_show_no_length_bias() -> None:
    recorder = StepRecorder(clock=lambda: 0.0)
    (group,) = groups([3])
    turn = group.trajectories[0].turns()[0]
    turns = (turn, replace(turn, begins_anew=True), replace(turn, begins_anew=True))
    trajectories = [Trajectory.of_turns(turns, status=t.status, reward=t.reward) for t in group.trajectories]
    group = replace(group, trajectories=trajectories)
    recorder.count_generated(group)
    record = recorder.step_record([group], built([group]), RESULT, TIMES, max_staleness=1)
    assert record["learner/num_sequences"] == 6 and record["length_bias/ks"] == 0.0


@pytest.mark.parametrize("groups_per_step", [3, 200, 300])
def test_what_is_trained_whole_shows_no_length_bias_in_whichever_order_it_finished(groups_per_step: int) -> None:
    recorder = StepRecorder(clock=lambda: 0.0)
    for step in range(4):
        trained = groups([1 + n % 13 for n in range(groups_per_step)], first=step * groups_per_step)
        for group in sorted(trained, key=lambda group: group.num_generated_tokens):
            recorder.count_generated(group)
        record = recorder.step_record(trained, built(trained), RESULT, TIMES, max_staleness=0)
        assert record["length_bias/ks"] == 0.0
    num_kept = len(recorder._generated_lengths)
    assert min(LENGTH_WINDOW_GROUPS, 4 * groups_per_step) <= num_kept < LENGTH_WINDOW_GROUPS + groups_per_step


def test_answers_that_the_loss_leaves_out_are_not_among_the_trained_lengths() -> None:
    algorithm = replace(config().algorithm, mask_truncated=True)
    short, long = groups([2, 8])
    long = replace(long, trajectories=[replace(t, status="truncated") for t in long.trajectories])
    recorder = StepRecorder(clock=lambda: 0.0)
    for group in (short, long):
        recorder.count_generated(group)
    batch = build_train_batch([short, long], step=0, algorithm=algorithm, **LIMITS)
    assert recorder.step_record([short, long], batch, RESULT, TIMES, max_staleness=0)["length_bias/ks"] == 0.5


def test_a_line_is_known_and_complete() -> None:
    trained = groups([2, 4])
    buffer = RolloutBuffer(groups_per_step=2, max_staleness=1, max_retries=0, max_refills_per_step=4)
    record = {
        "step": 1,
        "version": 1,
        "time_s": 0.0,
        **StepRecorder().step_record(trained, built(trained), RESULT, TIMES, max_staleness=1),
        **buffer_record(buffer.stats()),
        **sync_record(sync_report(0), version_lag=1),
        **GroupFlow().step_record(trained, num_replicas=2, slot_wait_s=0.0, engines_idle_frac=None),
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
        prompt=prompt,
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
    record = StepRecorder(clock=lambda: 0.0).step_record(mixed, built(mixed, step=5), RESULT, TIMES, max_staleness=3)
    assert record["response/untrained/failed"] == 1
    check_known(record)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8))
def test_ages_agree_with_a_list_of_every_token(segments: list[tuple[int, int]]) -> None:
    slow = sorted(3 - version for version, tokens in segments for _ in range(tokens))
    ages = ages_of([answers(0, 0, [segments, [(0, 0)]])], step=3)
    assert [ages[f"staleness/age_frac/{age}"] for age in range(4)] == [slow.count(a) / len(slow) for a in range(4)]
    for name, share in (("staleness/p50", 0.5), ("staleness/p90", 0.9)):
        assert ages[name] == next(a for a in slow if sum(b <= a for b in slow) >= share * len(slow))


def test_a_cohort_that_is_trained_whole_shows_no_preference() -> None:
    early = EarlyLengths()
    early.trained([answers(0, 0, [[(0, 1)]]), answers(1, 0, [[(0, 9)]])], step=0, max_staleness=0)
    assert early.record() == {"length_bias/early_ks": 0.0, "length_bias/early_length_ratio": 1.0}


def test_a_cohort_whose_short_answers_are_trained_first_shows_it_once_the_long_ones_are_in() -> None:
    early = EarlyLengths()
    early.trained([answers(0, 0, [[(0, 1)], [(0, 3)]])], step=0, max_staleness=1)
    assert early.record() == {}, "long answers may still be on their way"
    early.trained([answers(1, 0, [[(0, 9)], [(0, 11)]]), answers(2, 1, [[(1, 99)]])], step=1, max_staleness=1)
    assert early.record() == {"length_bias/early_ks": 0.5, "length_bias/early_length_ratio": 2 / 6}
    assert early.record()["length_bias/early_length_ratio"] < 1


def test_answers_that_carry_no_loss_are_counted_in_tokens() -> None:
    trained = groups([2, 4])
    dropped = replace(trained[1], trajectories=[replace(trained[1].trajectories[0], status="failed", reward=nan)])
    record = StepRecorder().step_record([trained[0], dropped], built([trained[0]]), RESULT, TIMES, max_staleness=1)
    assert record["discarded/excluded_tokens"] == 0, "a failed answer is counted where it fails"
    record = StepRecorder().step_record(trained, built([trained[0]]), RESULT, TIMES, max_staleness=1)
    assert record["discarded/excluded_tokens"] == 2 * 4


@pytest.mark.parametrize(
    ("model_flops", "peak_flops", "mfu"), [(3e12, 4e12, 0.5), (None, 4e12, None), (3e12, None, None)]
)
def test_utilisation_is_of_all_devices_in_the_time_of_the_slowest_rank(
    model_flops: float | None, peak_flops: float | None, mfu: float | None
) -> None:
    result = replace(RESULT, seconds={"step": 1.5}, model_flops=model_flops, peak_flops=peak_flops)
    of = groups([3, 4, 5])
    times = StepTimes(waited_for_data=DataWait(whole_s=9.0, beside_evaluation_s=0.0), waited_for_sync_s=9.0)
    record = StepRecorder().step_record(of, built(of), result, times, max_staleness=1)
    assert record.get("perf/mfu") == mfu
    check_known(record)
