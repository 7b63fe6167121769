"""Runs are played by two machines with known speeds, so the right diagnosis is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from trainer.config.dump import dump_yaml
from trainer.config.load import load_config
from trainer.tools.advise import SURE_STEPS, Diagnosis, Split, as_arguments, diagnose, in_words, splits_of
from trainer.tools.run_records import Setup, StepLine, TooFewSteps, TraceFacts, read_setup, steady

if TYPE_CHECKING:
    from pathlib import Path

SETUP = Setup(
    num_ranks=4,
    num_replicas=4,
    tensor_parallel_size=1,
    max_staleness=1,
    groups_per_step=8,
    group_size=4,
    max_num_seqs=32,
    sync_slots=2,
    device_name="an accelerator",
)


def play(generate_s: float, learn_s: float, *, sync_s: float = 0.0, max_staleness: int = 1) -> tuple[
    list[StepLine], list[tuple[float, float]], list[tuple[float, float]]
]:  # fmt: skip
    """Batch k is generated once the weights of step k - 1 - S are live, trained when it is there: (lines, generations,
    trainings). The learner waits `sync_s` after each step."""
    lines: list[StepLine] = []
    generations: list[tuple[float, float]] = []
    trainings: list[tuple[float, float]] = []
    live: list[float] = []
    at, idle_since, engine_free = 0.0, 0.0, 0.0
    for k in range(40):
        begin = max(engine_free, live[k - 1 - max_staleness] if k > max_staleness else 0.0)
        engine_free = begin + generate_s
        generations.append((begin, engine_free))
        ready = max(at, engine_free)
        trainings.append((ready, ready + learn_s))
        end = ready + learn_s + sync_s
        live.append(end)
        lines.append(
            StepLine(
                step=k + 1, step_s=end - at, learner_s=learn_s, data_wait_s=ready - at, sync_wait_s=sync_s,
                pack_s=0.1 * sync_s, engines_idle_s=begin - idle_since, slot_wait_s=begin - idle_since,
                forced_wait_s=0.0,
            )
        )  # fmt: skip
        at, idle_since = end, engine_free
    return lines, generations, trainings


def advice(generate_s: float, learn_s: float, *, setup: Setup = SETUP, sync_s: float = 0.0) -> Diagnosis:
    lines, _, _ = play(generate_s, learn_s, sync_s=sync_s, max_staleness=setup.max_staleness)
    return diagnose(steady(lines, max_staleness=setup.max_staleness).lines, setup, trace=None)


def with_slots(lines: list[StepLine], *slots: tuple[int, int]) -> list[StepLine]:
    """`slots`: (first step, slots that are open from it on)."""
    return [replace(one, num_slots=[number for first, number in slots if first <= one.step][-1]) for one in lines]


def test_steps_count_from_the_last_opening_of_slots_if_enough_are_left() -> None:
    lines, _, _ = play(9.0, 3.0)
    late = with_slots(lines, (1, 16), (20, 24))
    assert [line.step for line in steady(late, max_staleness=2).lines] == list(range(20, 41))
    too_late = with_slots(lines, (1, 16), (39, 24))
    assert [line.step for line in steady(too_late, max_staleness=2).lines] == list(range(5, 41))


def test_a_larger_bound_is_no_help_while_slots_that_the_bound_allows_are_closed() -> None:
    lines, _, _ = play(9.0, 9.0, max_staleness=0)  # both sides wait
    setup = replace(SETUP, max_staleness=2)
    some = diagnose(steady(with_slots(lines, (1, 16)), max_staleness=2).lines, setup, trace=None)
    assert some.findings.verdict == "both_wait"
    assert some.recommendation.keys == {}
    assert not any("S = 2 limits" in limit for limit in some.findings.limits)
    every = diagnose(steady(with_slots(lines, (1, 24)), max_staleness=2).lines, setup, trace=None)
    assert every.recommendation.keys == {"mode.max_staleness": 5}, "3 steps of 18 s are 6 of 9 s"
    assert any("S = 2 limits" in limit for limit in every.findings.limits)


def test_the_last_steps_of_a_run_that_is_over_do_not_count() -> None:
    lines, _, _ = play(9.0, 3.0)
    assert [line.step for line in steady(lines, max_staleness=3, has_ended=True).lines] == list(range(6, 38))
    assert steady(lines, max_staleness=0, has_ended=True).lines == steady(lines, max_staleness=0).lines
    with pytest.raises(TooFewSteps, match=r"the last 3 empty it, .* give a longer run"):
        steady(lines[:10], max_staleness=3, has_ended=True)


def at_full_rate(step_s: float) -> TraceFacts:
    return TraceFacts(engines_idle_s=0.0, evaluation_s=0.0, generation_full_s=step_s)


def test_a_learner_that_waits_for_long_answers_of_quick_engines_gets_a_larger_bound_and_no_engines() -> None:
    lines, _, _ = play(9.0, 6.0)
    told = diagnose(lines[5:], SETUP, trace=at_full_rate(4.0))
    assert told.findings.verdict == "tail_waits"
    assert told.recommendation.keys == {"mode.max_staleness": 2}
    assert told.recommendation.step_s == pytest.approx(6.0), "no wait for data is left, and engines take 4 s"
    assert "S = 1 limits" in told.findings.limits[0]
    assert "longest answers" in in_words(told, SETUP)
    closed = diagnose(with_slots(lines, (1, 8))[5:], SETUP, trace=at_full_rate(4.0))
    assert not closed.recommendation.keys and "ask later" in closed.recommendation.why
    slower = diagnose(lines[5:], SETUP, trace=at_full_rate(7.0))
    assert slower.findings.verdict == "tail_waits", "slower than the learner, but without tails still quicker than now"
    assert slower.recommendation.step_s == pytest.approx(7.0)
    slow = diagnose(lines[5:], SETUP, trace=at_full_rate(8.8))
    assert slow.findings.verdict == "learner_waits", "they have no tails to speak of"
    assert slow.recommendation.keys == {"learner.num_ranks": 3, "rollout.num_replicas": 5}


def test_engines_that_only_wait_for_slots_can_give_devices_away() -> None:
    lines, _, _ = play(8.0, 8.0)
    told = diagnose(lines[5:], SETUP, trace=at_full_rate(3.0))
    assert told.findings.verdict == "engines_wait"
    assert told.recommendation.keys == {"learner.num_ranks": 6, "rollout.num_replicas": 2}
    assert told.recommendation.step_s == pytest.approx(3.0 * 4 / 2), "the learner: 8 x 4/6"
    assert "wait for slots" in told.recommendation.why
    assert diagnose(lines[5:], SETUP, trace=at_full_rate(7.5)).findings.verdict == "balanced"
    saving = [replace(line, learner_s=3.0) for line in lines]
    busy = diagnose(saving[5:], SETUP, trace=at_full_rate(3.0))
    assert busy.findings.verdict == "balanced", "a learner that saves for five seconds learns no faster with more ranks"


@pytest.mark.parametrize(
    ("generate_s", "learn_s", "full_s", "needed"),
    [
        (18.9, 14.9, 7.9, 2),  # answers of up to 4,096 tokens on an H200: measured, 2 was enough and 1 was not
        (2.6, 7.5, 2.6, 1),
        (38.0, 19.4, 8.3, 2),
        (90.0, 10.0, 5.0, 9),
        (9.0, 3.0, 9.0, 1),  # no tails: a larger bound gives nothing
    ],
)
def test_a_run_that_takes_turns_gets_the_bound_that_its_longest_answers_need(
    generate_s: float, learn_s: float, full_s: float, needed: int
) -> None:
    lines, _, _ = play(generate_s, learn_s, max_staleness=0)
    told = diagnose(lines[3:], replace(SETUP, max_staleness=0), trace=at_full_rate(full_s))
    assert told.recommendation.keys == {"mode.max_staleness": needed}
    assert told.recommendation.step_s == pytest.approx(max(learn_s, full_s))


def test_a_bound_that_is_missed_by_far_is_raised_by_as_much() -> None:
    lines = [replace(line, step_s=30.0, data_wait_s=24.0, engines_idle_s=0.0) for line in play(9.0, 6.0)[0]]
    told = diagnose(lines[5:], SETUP, trace=at_full_rate(6.0))
    assert told.recommendation.keys == {"mode.max_staleness": 9}, "2 steps of 30 s are 10 of 6 s"


def test_slow_engines_get_devices_of_the_learner() -> None:
    told = advice(9.0, 3.0)
    found = told.findings
    assert found.verdict == "learner_waits"
    assert (found.learning_s, found.generation_s) == (pytest.approx(3.0), pytest.approx(9.0))
    assert found.shares.learner_waits_for_data == pytest.approx(6 / 9)
    assert told.recommendation.keys == {"learner.num_ranks": 2, "rollout.num_replicas": 6}
    assert told.recommendation.step_s == pytest.approx(6.0), "9 x 4/6 = 3 x 4/2"


def test_a_slow_learner_gets_devices_of_the_engines() -> None:
    told = advice(3.0, 9.0)
    assert told.findings.verdict == "engines_wait"
    assert told.findings.generation_s == pytest.approx(3.0)
    assert told.findings.shares.engines_idle == pytest.approx(6 / 9)
    assert told.recommendation.keys == {"learner.num_ranks": 6, "rollout.num_replicas": 2}
    assert told.recommendation.step_s == pytest.approx(6.0)


def test_a_balanced_run_is_left_alone() -> None:
    told = advice(5.0, 5.0)
    assert (told.findings.verdict, told.recommendation.keys) == ("balanced", {})
    assert told.findings.splits[0].num_ranks == 4


def test_a_learner_that_waits_for_free_slots_of_weight_sync_gets_one_more() -> None:
    told = advice(4.0, 3.0, sync_s=4.0)
    assert told.findings.verdict == "sync_waits"
    assert told.findings.shares.learner_waits_for_sync == pytest.approx(4 / 7)
    assert told.recommendation.keys == {"weight_sync.num_slots": 3}
    packing = [replace(line, pack_s=line.sync_wait_s) for line in play(4.0, 3.0, sync_s=4.0)[0]]
    assert diagnose(packing, SETUP, trace=None).recommendation.keys == {"trainer.groups_per_step": 16}


def test_taking_turns_is_told_from_being_slow() -> None:
    told = advice(5.0, 4.0, setup=replace(SETUP, max_staleness=0))
    found = told.findings
    assert found.verdict == "both_wait"
    assert found.step_s == pytest.approx(9.0)
    assert (found.learning_s, found.generation_s) == (pytest.approx(4.0), pytest.approx(5.0))
    assert told.recommendation.keys == {"mode.max_staleness": 1}
    assert told.recommendation.step_s == pytest.approx(5.0)
    assert advice(5.0, 4.0).findings.step_s == pytest.approx(5.0), "what is promised is what the other mode takes"
    assert "S = 0" in found.limits[0]


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_a_run_takes_the_bound_that_it_is_advised(mode: str, tmp_path: Path) -> None:
    cfg = load_config([f"mode={mode}"])
    (tmp_path / "config.yaml").write_text(dump_yaml(cfg))
    setup = replace(read_setup(tmp_path), device_name="an accelerator")
    told = advice(5.0, 4.0, setup=setup) if mode == "sync" else diagnose(TAILS[5:], setup, trace=at_full_rate(4.0))
    keys = told.recommendation.keys
    assert keys["mode.max_staleness"] == cfg.mode.max_staleness + 1
    assert load_config([f"mode={mode}", *as_arguments(told.recommendation).split()]).mode.name == "async"
    assert ("mode" in keys) == (mode != "async"), "and nothing that it has already"


TAILS = play(9.0, 6.0)[0]
"""The learner waits for the longest answers."""


def test_what_the_model_promises_is_what_the_machines_do() -> None:
    told = advice(9.0, 3.0)
    best = told.findings.splits[0]
    after = advice(9.0 * 4 / best.num_replicas, 3.0 * 4 / best.num_ranks)
    assert after.findings.step_s == pytest.approx(best.step_s)
    assert after.findings.verdict == "balanced"


def test_every_split_uses_all_devices_and_none_is_better() -> None:
    setup = replace(SETUP, num_ranks=3, num_replicas=2, tensor_parallel_size=2)
    splits = splits_of(setup, 5.0, 4.0, fixed_s=1.0)
    assert {(s.num_ranks, s.num_replicas) for s in splits} == {(5, 1), (3, 2), (1, 3)}
    slow = {(r, k): max(5.0 * 3 / r + 1.0, 4.0 * 2 / k) for r, k in ((5, 1), (3, 2), (1, 3))}
    assert {(s.num_ranks, s.num_replicas): s.step_s for s in splits} == pytest.approx(slow)
    assert [s.step_s for s in splits] == sorted(s.step_s for s in splits)


def standing_still(
    generate_s: float, learn_s: float, other_s: float, *, max_staleness: int = 1, engines_idle_s: float | None = None
) -> list[StepLine]:
    """Steady steps of a learner that stands still for `other_s` in each, for evaluations say. Engines are idle while it
    does and learns, as far as they are done, if nothing else is said."""
    own_s = learn_s + other_s
    step_s = own_s + generate_s if max_staleness == 0 else max(own_s, generate_s)
    line = StepLine(
        step=0, step_s=step_s, learner_s=learn_s, data_wait_s=step_s - own_s, sync_wait_s=0.0, pack_s=0.0,
        engines_idle_s=step_s - generate_s if engines_idle_s is None else engines_idle_s, slot_wait_s=0.0,
        forced_wait_s=0.0,
    )  # fmt: skip
    return [replace(line, step=step) for step in range(SURE_STEPS)]


def test_evaluations_that_the_learner_stands_still_for_are_no_learning_that_more_ranks_shorten() -> None:
    told = diagnose(standing_still(12.0, 9.5, 10.0), SETUP, trace=None)
    found = told.findings
    assert (found.step_s, found.learning_s, found.other_s) == (19.5, 9.5, pytest.approx(10))
    slow = {r: max(9.5 * 4 / r + 10.0, 12.0 * 4 / (8 - r)) for r in range(1, 8)}
    assert {split.num_ranks: split.step_s for split in found.splits} == pytest.approx(slow)
    assert told.recommendation.keys == {"learner.num_ranks": 5, "rollout.num_replicas": 3}
    assert told.recommendation.step_s == pytest.approx(9.5 * 4 / 5 + 10.0), "with all of it as learning: 15.6 s"
    assert found.floor_s == pytest.approx(19.5), "a larger S makes no evaluation shorter"


def test_what_is_neither_learning_nor_waiting_is_named_if_it_is_notable() -> None:
    told = in_words(diagnose(standing_still(12.0, 9.5, 10.0), SETUP, trace=None), SETUP)
    assert "if only learning counted: 9.5 s" in told
    assert "The rest, 10 s of a step (51%), is neither: evaluations and saves" in told
    assert "1.00 times the larger of learning with that rest and generation" in told
    little = in_words(diagnose(standing_still(12.0, 9.5, 0.4), SETUP, trace=None), SETUP)
    assert "rest" not in little
    assert "the larger of learning and generation" in little
    turns = replace(SETUP, takes_turns=True, max_staleness=0)
    shared = in_words(diagnose(standing_still(9.0, 9.5, 2.0, max_staleness=0), turns, trace=None), turns)
    assert "devices that change hands, evaluations and saves" in shared


def test_devices_are_no_remedy_for_evaluations_and_saves() -> None:
    engines_wait = diagnose(standing_still(17.0, 2.0, 18.0), replace(SETUP, num_ranks=1), trace=None)
    assert engines_wait.findings.verdict == "engines_wait"
    assert (engines_wait.recommendation.keys, "saves" in engines_wait.recommendation.why) == ({}, True)
    learns = diagnose(standing_still(17.0, 19.0, 1.0), replace(SETUP, num_ranks=1), trace=None)
    assert learns.recommendation.keys == {"learner.num_ranks": 2}
    saves = diagnose(standing_still(20.0, 9.0, 9.8, engines_idle_s=0.0), SETUP, trace=at_full_rate(4.0))
    assert saves.findings.verdict == "learner_waits", "with no wait for the longest answers a step would take 18.8 s"
    balanced = diagnose(standing_still(19.0, 9.5, 10.0), SETUP, trace=None)
    assert balanced.findings.verdict == "balanced"
    assert "evaluations and saves" in balanced.recommendation.why


def test_engines_that_answer_evaluations_while_the_learner_stands_still_are_not_counted_twice() -> None:
    setup = replace(SETUP, max_staleness=0)
    lines = standing_still(5.0, 4.0, 10.0, max_staleness=0, engines_idle_s=4.0)
    today = next(s for s in diagnose(lines, setup, trace=None).findings.splits if s.num_ranks == setup.num_ranks)
    assert today.step_s == pytest.approx(5 + 4 + 10)


def test_shared_cores_are_not_divided() -> None:
    assert advice(9.0, 3.0, setup=replace(SETUP, device_name="cpu")).recommendation.keys == {}
    turns = replace(SETUP, max_staleness=0)
    assert advice(9.0, 3.0, setup=turns).recommendation.keys == {"mode.max_staleness": 1}
    assert advice(9.0, 3.0, setup=replace(turns, device_name="cpu")).recommendation.keys == {}


def test_two_devices_cannot_be_divided_otherwise() -> None:
    told = advice(9.0, 3.0, setup=replace(SETUP, num_ranks=1, num_replicas=1))
    assert told.recommendation.keys == {"rollout.num_replicas": 2}


def test_few_slots_for_large_engines_are_named() -> None:
    assert any("groups_per_step" in limit for limit in advice(9.0, 3.0).findings.limits), "64 answers for 128 seats"
    assert not advice(9.0, 3.0, setup=replace(SETUP, max_num_seqs=16)).findings.limits


def test_old_groups_that_hold_the_learner_up_speak_for_a_larger_s() -> None:
    lines = [replace(line, forced_wait_s=2.0 * line.step) for line in play(9.0, 3.0)[0]]
    found = diagnose(lines[5:], SETUP, trace=None).findings
    assert found.shares.old_groups_hold_up == pytest.approx(2 * 34 / (9 * 35))
    assert "S = 1 limits" in found.limits[0]
    unseen = [replace(line, forced_wait_s=2.0 * line.step) for line in play(3.0, 9.0)[0]]
    assert diagnose(unseen[5:], SETUP, trace=None).findings.shares.old_groups_hold_up == 0, "nobody waited for them"


def taking_turns(generate_s: float, learn_s: float) -> list[StepLine]:
    """On four devices, S = 0: the learner waits while engines generate, and they while it learns."""
    line = StepLine(
        step=0, step_s=generate_s + learn_s, learner_s=learn_s, data_wait_s=generate_s, sync_wait_s=0.0, pack_s=0.0,
        engines_idle_s=learn_s, slot_wait_s=0.0, forced_wait_s=0.0,
    )  # fmt: skip
    return [replace(line, step=step) for step in range(SURE_STEPS)]


def test_taking_turns_is_compared_with_devices_of_their_own() -> None:
    setup = replace(SETUP, num_ranks=4, num_replicas=4, max_staleness=0, takes_turns=True)
    even = diagnose(taking_turns(6.0, 6.0), setup, trace=None)
    # Two devices each take twice as long, at once: nothing is gained.
    assert (even.findings.verdict, even.findings.splits[0].step_s) == ("take_turns", pytest.approx(12.0))
    assert not even.recommendation.keys
    uneven = diagnose(taking_turns(9.0, 3.0), setup, trace=None)
    assert uneven.findings.splits[0] == Split(num_ranks=1, num_replicas=3, step_s=pytest.approx(12.0))
    slow_turns = [replace(line, step_s=16.0, engines_idle_s=3.0 + 4.0) for line in taking_turns(9.0, 3.0)]
    lost = diagnose(slow_turns, setup, trace=None)
    assert lost.recommendation.keys == {
        "mode": "async", "mode.max_staleness": 1, "learner.num_ranks": 1, "rollout.num_replicas": 3,
    }  # fmt: skip
    assert lost.recommendation.step_s == pytest.approx(12.0)
    assert "take turns" in in_words(lost, setup)


def test_an_answer_that_spans_turns_is_as_long_as_all_of_them() -> None:
    setup = replace(SETUP, num_ranks=4, num_replicas=4, takes_turns=True)
    lines = [replace(line, step_s=20.0, engines_idle_s=12.0) for line in taking_turns(8.0, 8.0)]
    advised = {
        staleness: diagnose(lines, replace(setup, max_staleness=staleness), trace=None).recommendation.keys
        for staleness in (0, 4)
    }
    assert advised[0]["mode.max_staleness"] == 1
    assert advised[4]["mode.max_staleness"] == 5, "up to 5 turns of 8 s, on half of the engines, and 16 s of learning"


@pytest.mark.parametrize(
    ("num_devices", "step_s", "wait_s", "sync_s", "idle_s", "learn_s", "full_s", "measured_s"),
    [(2, 25.23, 15.90, 0.72, 10.80, 7.93, 4.95, 15.51), (4, 36.2, 23.3, 1.75, 20.0, 10.2, 6.2, 20.5)],
)
def test_of_runs_that_were_measured_it_says_what_devices_of_their_own_gave(
    num_devices: int, step_s: float, wait_s: float, sync_s: float, idle_s: float, learn_s: float, full_s: float,
    measured_s: float,
) -> None:  # fmt: skip
    """W1 with 3B on two and with 7B on four H200s, colocated, then asynchronous with as many on each side
    (docs/benchmarks.md)."""
    setup = replace(SETUP, num_ranks=num_devices, num_replicas=num_devices, max_staleness=0, takes_turns=True)
    line = StepLine(
        step=0, step_s=step_s, learner_s=learn_s, data_wait_s=wait_s, sync_wait_s=sync_s, pack_s=0.0,
        engines_idle_s=idle_s, slot_wait_s=0.0, forced_wait_s=0.0,
    )  # fmt: skip
    trace = TraceFacts(engines_idle_s=0.0, evaluation_s=0.0, generation_full_s=full_s)
    found = diagnose([replace(line, step=step) for step in range(SURE_STEPS)], setup, trace=trace)
    keys, half = found.recommendation.keys, num_devices // 2
    assert (keys["mode"], keys["learner.num_ranks"], keys["rollout.num_replicas"]) == ("async", half, half)
    assert keys["mode.max_staleness"] in (2, 3), "2 was enough"
    assert found.recommendation.step_s == pytest.approx(measured_s, rel=0.05)
    assert "mode=async mode.max_staleness=" in in_words(found, setup)


def test_without_idle_times_the_generation_bound_is_unknown() -> None:
    lines = [replace(line, engines_idle_s=None, slot_wait_s=None) for line in play(9.0, 3.0)[0]]
    found = diagnose(lines[5:], SETUP, trace=None).findings
    assert (found.generation_s, found.splits, found.verdict) == (None, (), "learner_waits")
    assert any("unknown" in text for text in found.unknown)


def test_the_first_steps_are_left_out_and_a_few_say_nothing() -> None:
    lines = play(9.0, 3.0)[0]
    assert [line.step for line in steady(lines[:7][::-1], max_staleness=1).lines] == [4, 5, 6, 7]
    with pytest.raises(TooFewSteps, match="5 steps since the start were recorded"):
        steady(lines[:5], max_staleness=1)


def test_responses_that_failed_are_said_and_nothing_else_is() -> None:
    lines, _, _ = play(9.0, 3.0)
    failed = [replace(line, failed_frac=0.5) for line in lines]
    assert any("50.0% of the responses failed" in text for text in diagnose(failed, SETUP, trace=None).findings.limits)
    assert not any("failed" in text for text in diagnose(lines, SETUP, trace=None).findings.limits)
