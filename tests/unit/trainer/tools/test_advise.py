"""Advice on runs that two machines with known speeds have played, so that the right diagnosis is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.played_run import SETUP, play
from trainer.config.compose import load_config
from trainer.config.plain import dump_yaml
from trainer.tools.advise import (
    SURE_STEPS,
    DeviceSplit,
    Diagnosis,
    Recommendation,
    as_arguments,
    diagnose,
    format_report,
    recommend,
    splits_of,
)
from trainer.tools.run_records import RunFacts, Setup, StepLine, TraceFacts, read_setup, steady

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def judged(
    lines: Sequence[StepLine], setup: Setup = SETUP, *, full_s: float | None = None
) -> tuple[Diagnosis, Recommendation]:
    """`full_s`: what a trace says of the engines' time for a step at their full rate; None without a trace."""
    trace = None if full_s is None else TraceFacts(engines_idle_s=0.0, evaluation_s=0.0, generation_full_s=full_s)
    facts = RunFacts(setup=setup, lines=lines, trace=trace)
    found = diagnose(facts)
    return found, recommend(found, facts)


def advice(
    generate_s: float, learn_s: float, *, setup: Setup = SETUP, sync_s: float = 0.0
) -> tuple[Diagnosis, Recommendation]:
    lines, _, _ = play(generate_s, learn_s, sync_s=sync_s, max_staleness=setup.max_staleness)
    return judged(steady(lines, max_staleness=setup.max_staleness)[0], setup)


def report(lines: Sequence[StepLine], setup: Setup = SETUP) -> str:
    return format_report(*judged(lines, setup), setup)


def with_slots(lines: list[StepLine], *slots: tuple[int, int]) -> list[StepLine]:
    """`slots`: (first step, slots that are open from it on)."""
    return [replace(one, num_slots=[number for first, number in slots if first <= one.step][-1]) for one in lines]


def constant(step_s: float, learn_s: float, data_s: float, *, idle_s: float, sync_s: float = 0.0) -> list[StepLine]:
    """As many steps as are enough, all alike."""
    line = StepLine(
        step=0, step_s=step_s, learner_s=learn_s, data_wait_s=data_s, sync_wait_s=sync_s, pack_s=0.0,
        engines_idle_s=idle_s, slot_wait_s=0.0, oldest_wait_s=0.0,
    )  # fmt: skip
    return [replace(line, step=step) for step in range(SURE_STEPS)]


def test_slow_engines_get_devices_of_the_learner() -> None:
    found, told = advice(9.0, 3.0)
    assert found.verdict == "generation_bound"
    assert (found.learning_s, found.generation_s) == (pytest.approx(3.0), pytest.approx(9.0))
    assert found.shares.learner_waits_for_data == pytest.approx(6 / 9)
    assert told.keys == {"learner.num_ranks": 2, "rollout.num_replicas": 6}
    assert told.step_s == pytest.approx(6.0), "9 x 4/6 = 3 x 4/2"
    # What the model promises is what the machines do.
    after, _ = advice(9.0 * 4 / 6, 3.0 * 4 / 2)
    assert (after.step_s, after.verdict) == (pytest.approx(6.0), "balanced")
    _, of_two = advice(9.0, 3.0, setup=replace(SETUP, num_ranks=1, num_replicas=1))
    assert of_two.keys == {"rollout.num_replicas": 2}, "two devices cannot be divided otherwise"


def test_a_slow_learner_gets_devices_of_the_engines() -> None:
    found, told = advice(3.0, 9.0)
    assert (found.verdict, found.generation_s) == ("training_bound", pytest.approx(3.0))
    assert found.shares.engines_idle == pytest.approx(6 / 9)
    assert (told.keys, told.step_s) == ({"learner.num_ranks": 6, "rollout.num_replicas": 2}, pytest.approx(6.0))


def test_a_balanced_run_is_left_alone() -> None:
    found, told = advice(5.0, 5.0)
    assert (found.verdict, told.keys, found.splits[0].num_ranks) == ("balanced", {}, 4)


def test_every_split_uses_all_devices_and_the_fastest_is_first() -> None:
    setup = replace(SETUP, num_ranks=3, num_replicas=2, tensor_parallel_size=2)
    splits = splits_of(setup, 5.0, 4.0, fixed_s=1.0)
    slow = {(r, k): max(5.0 * 3 / r + 1.0, 4.0 * 2 / k) for r, k in ((5, 1), (3, 2), (1, 3))}
    assert {(s.num_ranks, s.num_replicas): s.step_s for s in splits} == pytest.approx(slow)
    assert [s.step_s for s in splits] == sorted(s.step_s for s in splits)


def test_another_division_of_the_devices_comes_with_what_is_not_known_of_it() -> None:
    split = report(play(9.0, 3.0)[0][5:])
    assert "`python -m trainer --dry-run learner.num_ranks=2 rollout.num_replicas=6`" in split
    assert "What communication" in split
    assert "--dry-run" not in report(play(5.0, 5.0)[0][5:]), "nothing is to be changed"


def test_shared_cores_are_not_divided() -> None:
    on_cpu = replace(SETUP, device_name="cpu")
    assert advice(9.0, 3.0, setup=on_cpu)[1].keys == {}
    assert advice(9.0, 3.0, setup=replace(SETUP, max_staleness=0))[1].keys == {"mode.max_staleness": 1}
    assert advice(9.0, 3.0, setup=replace(on_cpu, max_staleness=0))[1].keys == {}


def test_a_learner_that_waits_for_free_slots_of_weight_sync_gets_one_more() -> None:
    found, told = advice(4.0, 3.0, sync_s=4.0)
    assert (found.verdict, found.shares.learner_waits_for_sync) == ("sync_waits", pytest.approx(4 / 7))
    assert told.keys == {"weight_sync.num_slots": 3}
    packing = [replace(line, pack_s=line.sync_wait_s) for line in play(4.0, 3.0, sync_s=4.0)[0]]
    assert judged(packing)[1].keys == {"trainer.groups_per_step": 16}


# S


def test_s_0_is_distinguished_from_being_slow() -> None:
    found, told = advice(5.0, 4.0, setup=replace(SETUP, max_staleness=0))
    assert (found.verdict, found.step_s) == ("overlap_limited", pytest.approx(9.0))
    assert (found.learning_s, found.generation_s) == (pytest.approx(4.0), pytest.approx(5.0))
    assert (told.keys, told.step_s) == ({"mode.max_staleness": 1}, pytest.approx(5.0))
    assert advice(5.0, 4.0)[0].step_s == pytest.approx(5.0), "what is promised is what the other mode takes"
    assert "S = 0" in found.limits[0]


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
def test_s_0_gets_the_bound_that_the_longest_answers_need(
    generate_s: float, learn_s: float, full_s: float, needed: int
) -> None:
    lines, _, _ = play(generate_s, learn_s, max_staleness=0)
    _, told = judged(lines[3:], replace(SETUP, max_staleness=0), full_s=full_s)
    assert (told.keys, told.step_s) == ({"mode.max_staleness": needed}, pytest.approx(max(learn_s, full_s)))


def test_a_learner_that_waits_for_long_answers_of_quick_engines_gets_a_larger_bound_and_no_engines() -> None:
    lines, _, _ = play(9.0, 6.0)
    found, told = judged(lines[5:], full_s=4.0)
    assert (found.verdict, told.keys) == ("long_tail", {"mode.max_staleness": 2})
    assert told.step_s == pytest.approx(6.0), "no wait for data is left, and engines take 4 s"
    assert "S = 1 limits" in found.limits[0]
    assert "longest answers" in format_report(found, told, SETUP)
    _, closed = judged(with_slots(lines, (1, 8))[5:], full_s=4.0)
    assert not closed.keys and "ask later" in closed.why
    slower, told = judged(lines[5:], full_s=7.0)
    assert slower.verdict == "long_tail", "slower than the learner, but without tails still quicker than now"
    assert told.step_s == pytest.approx(7.0)
    slow, told = judged(lines[5:], full_s=8.8)
    assert slow.verdict == "generation_bound", "they have no tails to speak of"
    assert told.keys == {"learner.num_ranks": 3, "rollout.num_replicas": 5}
    far = [replace(line, step_s=30.0, data_wait_s=24.0, engines_idle_s=0.0) for line in lines]
    assert judged(far[5:], full_s=6.0)[1].keys == {"mode.max_staleness": 9}, "2 steps of 30 s are 10 of 6 s"


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_a_run_accepts_the_bound_that_it_is_advised(mode: str, tmp_path: Path) -> None:
    cfg = load_config([f"mode={mode}"])
    (tmp_path / "config.yaml").write_text(dump_yaml(cfg))
    setup = replace(read_setup(tmp_path), device_name="an accelerator")
    _, told = advice(5.0, 4.0, setup=setup) if mode == "sync" else judged(play(9.0, 6.0)[0][5:], setup, full_s=4.0)
    assert told.keys["mode.max_staleness"] == cfg.mode.max_staleness + 1
    assert load_config([f"mode={mode}", *as_arguments(told).split()]).mode.name == "async"
    assert ("mode" in told.keys) == (mode != "async"), "and nothing that it has already"


def test_a_larger_bound_is_no_help_while_slots_that_the_bound_allows_are_closed() -> None:
    lines, _, _ = play(9.0, 9.0, max_staleness=0)  # both sides wait
    setup = replace(SETUP, max_staleness=2)
    some, told = judged(steady(with_slots(lines, (1, 16)), max_staleness=2)[0], setup)
    assert (some.verdict, told.keys) == ("overlap_limited", {})
    assert not any("S = 2 limits" in limit for limit in some.limits)
    every, told = judged(steady(with_slots(lines, (1, 24)), max_staleness=2)[0], setup)
    assert told.keys == {"mode.max_staleness": 5}, "3 steps of 18 s are 6 of 9 s"
    assert any("S = 2 limits" in limit for limit in every.limits)


def test_old_groups_that_hold_the_learner_up_speak_for_a_larger_s() -> None:
    lines = [replace(line, oldest_wait_s=2.0 * line.step) for line in play(9.0, 3.0)[0]]
    found, _ = judged(lines[5:])
    assert found.shares.old_groups_hold_up == pytest.approx(2 * 34 / (9 * 35))
    assert "S = 1 limits" in found.limits[0]
    unseen = [replace(line, oldest_wait_s=2.0 * line.step) for line in play(3.0, 9.0)[0]]
    assert judged(unseen[5:])[0].shares.old_groups_hold_up == 0, "nobody waited for them"


def test_engines_that_only_wait_for_slots_can_give_devices_away() -> None:
    lines, _, _ = play(8.0, 8.0)
    found, told = judged(lines[5:], full_s=3.0)
    assert (found.verdict, told.keys) == ("training_bound", {"learner.num_ranks": 6, "rollout.num_replicas": 2})
    assert told.step_s == pytest.approx(3.0 * 4 / 2), "the learner: 8 x 4/6"
    assert "wait for slots" in told.why
    assert judged(lines[5:], full_s=7.5)[0].verdict == "balanced"
    saving = [replace(line, learner_s=3.0) for line in lines]
    assert judged(saving[5:], full_s=3.0)[0].verdict == "balanced", "more ranks make no save of five seconds shorter"


def test_few_slots_for_large_engines_are_named() -> None:
    assert any("groups_per_step" in limit for limit in advice(9.0, 3.0)[0].limits), "64 answers for 128 seats"
    assert not advice(9.0, 3.0, setup=replace(SETUP, max_num_seqs=16))[0].limits


# Evaluations and saves that the learner stands still for


def standing_still(
    generate_s: float, learn_s: float, other_s: float, *, max_staleness: int = 1, engines_idle_s: float | None = None
) -> list[StepLine]:
    """Of a learner that stands still for `other_s` in each step. Engines are idle while it does and learns, as far as
    they are done, if nothing else is said."""
    own_s = learn_s + other_s
    step_s = own_s + generate_s if max_staleness == 0 else max(own_s, generate_s)
    idle_s = step_s - generate_s if engines_idle_s is None else engines_idle_s
    return constant(step_s, learn_s, step_s - own_s, idle_s=idle_s)


def test_what_the_learner_stands_still_for_is_no_learning_that_more_ranks_shorten() -> None:
    found, told = judged(standing_still(12.0, 9.5, 10.0))
    assert (found.step_s, found.learning_s, found.other_s) == (19.5, 9.5, pytest.approx(10))
    slow = {r: max(9.5 * 4 / r + 10.0, 12.0 * 4 / (8 - r)) for r in range(1, 8)}
    assert {split.num_ranks: split.step_s for split in found.splits} == pytest.approx(slow)
    assert told.keys == {"learner.num_ranks": 5, "rollout.num_replicas": 3}
    assert told.step_s == pytest.approx(9.5 * 4 / 5 + 10.0), "with all of it as learning: 15.6 s"
    assert found.floor_s == pytest.approx(19.5), "a larger S makes no evaluation shorter"


def test_what_is_neither_learning_nor_waiting_is_named_if_it_is_notable() -> None:
    told = report(standing_still(12.0, 9.5, 10.0))
    assert "if only learning counted: 9.5 s" in told
    assert "The rest, 10 s of a step (51%), is neither: evaluations and saves" in told
    assert "1.00 times the larger of learning with that rest and generation" in told
    little = report(standing_still(12.0, 9.5, 0.4))
    assert "rest" not in little and "the larger of learning and generation" in little
    turns = replace(SETUP, is_colocated=True, max_staleness=0)
    shared = report(standing_still(9.0, 9.5, 2.0, max_staleness=0), turns)
    assert "devices that change hands, evaluations and saves" in shared


def test_devices_are_no_remedy_for_evaluations_and_saves() -> None:
    found, told = judged(standing_still(17.0, 2.0, 18.0), replace(SETUP, num_ranks=1))
    assert (found.verdict, told.keys, "saves" in told.why) == ("training_bound", {}, True)
    assert judged(standing_still(17.0, 19.0, 1.0), replace(SETUP, num_ranks=1))[1].keys == {"learner.num_ranks": 2}
    saves, _ = judged(standing_still(20.0, 9.0, 9.8, engines_idle_s=0.0), full_s=4.0)
    assert saves.verdict == "generation_bound", "with no wait for the longest answers a step would take 18.8 s"
    balanced, told = judged(standing_still(19.0, 9.5, 10.0))
    assert (balanced.verdict, "evaluations and saves" in told.why) == ("balanced", True)


def test_engines_that_answer_evaluations_while_the_learner_stands_still_are_not_counted_twice() -> None:
    setup = replace(SETUP, max_staleness=0)
    lines = standing_still(5.0, 4.0, 10.0, max_staleness=0, engines_idle_s=4.0)
    today = next(s for s in judged(lines, setup)[0].splits if s.num_ranks == setup.num_ranks)
    assert today.step_s == pytest.approx(5 + 4 + 10)


def test_evaluations_that_are_the_smaller_wait_are_named_beside_the_advice() -> None:
    lines = [
        replace(line, data_wait_s=line.data_wait_s - 1.0, evaluation_wait_s=1.0, engines_idle_s=0.0)
        for line in play(9.0, 3.0)[0]
    ]
    found, _ = judged(lines[5:])
    assert found.verdict == "generation_bound"
    assert found.other_s == pytest.approx(1.0), "no split of the devices makes it shorter"
    assert any("11% of the time the learner waited for them" in limit for limit in found.limits)
    little = report([replace(line, evaluation_wait_s=0.1) for line in lines[5:]])
    assert "valuations limit" not in little and "for evaluations" not in little


def test_evaluations_at_the_start_alone_leave_no_period_to_change() -> None:
    lines = [replace(line, data_wait_s=0.0, evaluation_wait_s=6.0, engines_idle_s=0.0) for line in play(9.0, 3.0)[0]]
    _, told = judged(lines[5:])
    assert (told.keys, told.step_s, "task.eval_size" in told.why) == ({}, None, True)


# Colocated


def test_colocated_is_compared_with_separate_devices() -> None:
    """On four devices, S = 0: the learner waits while engines generate, and they while it learns."""
    setup = replace(SETUP, max_staleness=0, is_colocated=True)
    even, told = judged(constant(12.0, 6.0, 6.0, idle_s=6.0), setup)
    # Two devices each take twice as long, at once: nothing is gained.
    assert (even.verdict, even.splits[0].step_s, told.keys) == ("colocated", pytest.approx(12.0), {})
    uneven, _ = judged(constant(12.0, 3.0, 9.0, idle_s=3.0), setup)
    assert uneven.splits[0] == DeviceSplit(num_ranks=1, num_replicas=3, step_s=pytest.approx(12.0))
    lines = constant(16.0, 3.0, 9.0, idle_s=3.0 + 4.0)
    _, told = judged(lines, setup)
    assert told.keys == {
        "mode": "async", "mode.max_staleness": 1, "learner.num_ranks": 1, "rollout.num_replicas": 3,
    }  # fmt: skip
    assert told.step_s == pytest.approx(12.0)
    assert "take turns" in report(lines, setup) and "--dry-run mode=async mode.max_staleness=1 " in report(lines, setup)


def test_an_answer_that_spans_turns_is_as_long_as_all_of_them() -> None:
    lines = constant(20.0, 8.0, 8.0, idle_s=12.0)

    def advised(staleness: int) -> Any:
        return judged(lines, replace(SETUP, is_colocated=True, max_staleness=staleness))[1].keys["mode.max_staleness"]

    assert advised(0) == 1
    assert advised(4) == 5, "up to 5 turns of 8 s, on half of the engines, and 16 s of learning"


@pytest.mark.parametrize(
    ("num_devices", "lines", "full_s", "measured_s"),
    [
        (2, constant(25.23, 7.93, 15.90, sync_s=0.72, idle_s=10.80), 4.95, 15.51),
        (4, constant(36.2, 10.2, 23.3, sync_s=1.75, idle_s=20.0), 6.2, 20.5),
    ],
)
def test_of_runs_that_were_measured_it_predicts_what_separate_devices_gave(
    num_devices: int, lines: list[StepLine], full_s: float, measured_s: float
) -> None:
    """W1 with 3B on two and with 7B on four H200s, colocated, then asynchronous with as many on each side
    (docs/benchmarks.md)."""
    setup = replace(SETUP, num_ranks=num_devices, num_replicas=num_devices, max_staleness=0, is_colocated=True)
    _, told = judged(lines, setup, full_s=full_s)
    keys, half = told.keys, num_devices // 2
    assert (keys["mode"], keys["learner.num_ranks"], keys["rollout.num_replicas"]) == ("async", half, half)
    assert keys["mode.max_staleness"] in (2, 3), "2 was enough"
    assert told.step_s == pytest.approx(measured_s, rel=0.05)


# What is unknown, and what failed


def test_without_idle_times_the_generation_bound_is_unknown() -> None:
    lines = [replace(line, engines_idle_s=None, slot_wait_s=None) for line in play(9.0, 3.0)[0]]
    found, _ = judged(lines[5:])
    assert (found.generation_s, found.splits, found.verdict) == (None, (), "generation_bound")
    assert any("unknown" in text for text in found.unknown)


def test_responses_that_failed_are_named() -> None:
    lines, _, _ = play(9.0, 3.0)
    failed = [replace(line, failed_frac=0.5) for line in lines]
    assert any("50.0% of the responses failed" in text for text in judged(failed)[0].limits)
    assert not any("failed" in text for text in judged(lines)[0].limits)
