"""Advice on runs that two machines with known speeds have played, so that the right diagnosis is known."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.fakes.played_run import facts_of, play
from trainer.config.compose import load_config
from trainer.tools.advise import SURE_STEPS, Diagnosis, Recommendation, diagnose, format_report, recommend
from trainer.tools.advise import splits_of as splits_of_facts
from trainer.tools.run_records import StepLine, steady

if TYPE_CHECKING:
    from collections.abc import Sequence

S_0: Any = {"mode": {"max_staleness": 0}}
ONE_RANK: Any = {"learner": {"num_ranks": 1}}
COLOCATED: Any = {"mode": {"name": "colocated", "max_staleness": 0}}


def judged(lines: Sequence[StepLine], **given: Any) -> tuple[Diagnosis, Recommendation]:
    """`given`: see `facts_of`."""
    facts = facts_of(lines, **given)
    found = diagnose(facts)
    return found, recommend(found, facts)


def advice(generate_s: float, learn_s: float, *, sync_s: float = 0.0, **given: Any) -> tuple[Diagnosis, Recommendation]:
    staleness = given.get("mode", {}).get("max_staleness", 1)
    lines, _, _ = play(generate_s, learn_s, sync_s=sync_s, max_staleness=staleness)
    return judged(steady(lines, max_staleness=staleness)[0], **given)


def report(lines: Sequence[StepLine], **given: Any) -> str:
    return format_report(*judged(lines, **given), facts_of(lines, **given))


def with_slots(lines: list[StepLine], *slots: tuple[int, int]) -> list[StepLine]:
    """`slots`: (first step, slots that are open from it on)."""
    return [replace(one, num_slots=[number for first, number in slots if first <= one.step][-1]) for one in lines]


def constant(step_s: float, learn_s: float, data_s: float, *, idle_s: float, sync_s: float = 0.0) -> list[StepLine]:
    """As many steps as are enough, all alike."""
    line = StepLine(
        step=0, step_s=step_s, learner_s=learn_s, data_wait_s=data_s, sync_wait_s=sync_s, pack_s=0.0,
        engines_idle_s=idle_s, slot_wait_s=0.0,
    )  # fmt: skip
    return [replace(line, step=step) for step in range(SURE_STEPS)]


def split(ranks: int, replicas: int) -> dict[str, int | str]:
    return {"learner.num_ranks": ranks, "rollout.num_replicas": replicas}


@pytest.mark.parametrize(
    ("speeds", "given", "verdict", "keys", "step_s"),
    [
        ((9, 3), {}, "generation_bound", split(2, 6), 6),  # 9 x 4/6 = 3 x 4/2
        ((3, 9), {}, "training_bound", split(6, 2), 6),
        ((5, 5), {}, "balanced", {}, None),
        ((9, 3), {**ONE_RANK, "rollout": {"num_replicas": 1}}, "generation_bound", {"rollout.num_replicas": 2}, None),
        ((5, 4), S_0, "overlap_limited", {"mode.max_staleness": 1}, 5),
        ((9, 3), {"device": "cpu"}, "generation_bound", {}, None),
        ((9, 3), {"device": "cpu", **S_0}, "overlap_limited", {}, None),
    ],
)
def test_the_slower_side_gets_devices_and_what_alternates_a_larger_s(
    speeds: tuple[int, int], given: Any, verdict: str, keys: dict[str, int | str], step_s: float | None
) -> None:
    found, told = advice(*speeds, **given)
    assert (found.verdict, told.keys) == (verdict, keys)
    assert told.step_s == (None if step_s is None else pytest.approx(step_s))
    assert (found.learning_s, found.generation_s) == (pytest.approx(speeds[1]), pytest.approx(speeds[0]))


def test_what_is_promised_is_what_the_machines_then_do() -> None:
    assert advice(9.0, 3.0)[0].shares.learner_waits_for_data == pytest.approx(6 / 9)
    after, _ = advice(9.0 * 4 / 6, 3.0 * 4 / 2)
    assert (after.step_s, after.verdict) == (pytest.approx(6.0), "balanced")
    alternating, _ = advice(5.0, 4.0, **S_0)
    assert alternating.step_s == pytest.approx(9.0) and "S = 0" in alternating.limits[0]
    assert advice(5.0, 4.0)[0].step_s == pytest.approx(5.0)


def test_every_split_uses_all_devices_and_the_fastest_is_first() -> None:
    facts = facts_of([], learner={"num_ranks": 3}, rollout={"num_replicas": 2, "tensor_parallel_size": 2})
    splits = splits_of_facts(facts, 5.0, 4.0, fixed_s=1.0)
    slow = {(r, k): max(5.0 * 3 / r + 1.0, 4.0 * 2 / k) for r, k in ((5, 1), (3, 2), (1, 3))}
    assert {(s.num_ranks, s.num_replicas): s.step_s for s in splits} == pytest.approx(slow)
    assert [s.step_s for s in splits] == sorted(s.step_s for s in splits)


def test_another_division_of_the_devices_comes_with_what_is_not_known_of_it() -> None:
    told = report(play(9.0, 3.0)[0][5:])
    assert "`python -m trainer --dry-run learner.num_ranks=2 rollout.num_replicas=6`" in told
    assert "What communication" in told
    assert "--dry-run" not in report(play(5.0, 5.0)[0][5:]), "nothing is to be changed"


def test_a_learner_that_waits_for_free_slots_of_weight_sync_gets_one_more() -> None:
    found, told = advice(4.0, 3.0, sync_s=4.0)
    assert (found.verdict, found.shares.learner_waits_for_sync) == ("sync_waits", pytest.approx(4 / 7))
    assert told.keys == {"weight_sync.num_slots": 3}
    packing = [replace(line, pack_s=line.sync_wait_s) for line in play(4.0, 3.0, sync_s=4.0)[0]]
    assert judged(packing)[1].keys == {"trainer.groups_per_step": 16}


# S


@pytest.mark.parametrize(
    ("generate_s", "learn_s", "full_s", "needed"),
    [
        (18.9, 14.9, 7.9, 2),  # responses of up to 4,096 tokens on an H200: measured, 2 was enough and 1 was not
        (2.6, 7.5, 2.6, 1),
        (38.0, 19.4, 8.3, 2),
        (90.0, 10.0, 5.0, 9),
        (9.0, 3.0, 9.0, 1),  # no tails: a larger bound gives nothing
    ],
)
def test_s_0_gets_the_bound_that_the_longest_responses_need(
    generate_s: float, learn_s: float, full_s: float, needed: int
) -> None:
    lines, _, _ = play(generate_s, learn_s, max_staleness=0)
    _, told = judged(lines[3:], full_s=full_s, **S_0)
    assert (told.keys, told.step_s) == ({"mode.max_staleness": needed}, pytest.approx(max(learn_s, full_s)))


@pytest.mark.parametrize(
    ("full_s", "verdict", "keys", "step_s"),
    [
        (4.0, "long_tail", {"mode.max_staleness": 2}, 6.0),  # no wait for data is left, and engines take 4 s
        (7.0, "long_tail", {"mode.max_staleness": 2}, 7.0),  # slower than the learner, but quicker without tails
        (8.8, "generation_bound", split(3, 5), 8.0),  # no tails to speak of
    ],
)
def test_a_learner_that_waits_for_long_responses_of_quick_engines_gets_a_larger_bound_and_no_engines(
    full_s: float, verdict: str, keys: dict[str, int | str], step_s: float
) -> None:
    lines = play(9.0, 6.0)[0][5:]
    found, told = judged(lines, full_s=full_s)
    assert (found.verdict, told.keys, told.step_s) == (verdict, keys, pytest.approx(step_s))
    assert ("S = 1 limits: the longest responses" in report(lines, full_s=full_s)) == (verdict == "long_tail")


def test_the_larger_bound_covers_as_much_time_as_today_and_waits_for_closed_slots() -> None:
    lines = play(9.0, 6.0)[0][5:]
    far = [replace(line, step_s=30.0, data_wait_s=24.0, engines_idle_s=0.0) for line in lines]
    assert judged(far, full_s=6.0)[1].keys == {"mode.max_staleness": 9}, "2 steps of 30 s are 10 of 6 s"
    _, closed = judged(with_slots(lines, (1, 8)), full_s=4.0)
    assert not closed.keys and "ask later" in closed.why
    waiting, _, _ = play(9.0, 9.0, max_staleness=0)  # both sides wait
    for num_open, keys in ((16, {}), (24, {"mode.max_staleness": 5})):  # 3 steps of 18 s are 6 of 9 s
        steps = steady(with_slots(waiting, (1, num_open)), max_staleness=2)[0]
        found, told = judged(steps, mode={"max_staleness": 2})
        assert (found.verdict, told.keys) == ("overlap_limited", keys)
        assert any("S = 2 limits" in limit for limit in found.limits) == bool(keys)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_a_run_accepts_the_bound_that_it_is_advised(mode: str) -> None:
    cfg = load_config([f"mode={mode}"])
    sections = {name: asdict(cfg)[name] for name in ("mode", "learner", "rollout")}
    _, told = advice(5.0, 4.0, **sections) if mode == "sync" else judged(play(9.0, 6.0)[0][5:], full_s=4.0, **sections)
    assert told.keys["mode.max_staleness"] == cfg.mode.max_staleness + 1
    assert load_config([f"mode={mode}", *told.arguments.split()]).mode.name == "async"
    assert ("mode" in told.keys) == (mode != "async"), "and nothing that it has already"


def test_old_groups_that_hold_the_learner_up_speak_for_a_larger_s() -> None:
    lines = [replace(line, oldest_wait_s=2.0 * line.step) for line in play(9.0, 3.0)[0]]
    found, _ = judged(lines[5:])
    assert found.shares.old_groups_hold_up == pytest.approx(2 * 34 / (9 * 35))
    assert "S = 1 limits" in found.limits[0]
    unseen = [replace(line, oldest_wait_s=2.0 * line.step) for line in play(3.0, 9.0)[0]]
    assert judged(unseen[5:])[0].shares.old_groups_hold_up == 0, "nothing waited for them"


def test_engines_that_only_wait_for_slots_can_give_devices_away() -> None:
    lines = play(8.0, 8.0)[0][5:]
    found, told = judged(lines, full_s=3.0)
    assert (found.verdict, told.keys) == ("training_bound", split(6, 2))
    assert told.step_s == pytest.approx(3.0 * 4 / 2), "the learner: 8 x 4/6"
    assert "wait for slots" in told.why
    assert judged(lines, full_s=7.5)[0].verdict == "balanced"
    saving = [replace(line, learner_s=3.0) for line in lines]
    assert judged(saving, full_s=3.0)[0].verdict == "balanced", "more ranks make no save of five seconds shorter"


def test_few_slots_for_large_engines_are_named() -> None:
    assert any("groups_per_step" in limit for limit in advice(9.0, 3.0)[0].limits), "64 responses, engines take 128"
    assert not advice(9.0, 3.0, rollout={"max_num_seqs": 16})[0].limits


# Evaluations and saves that the learner stands still for


def standing_still(
    generate_s: float, learn_s: float, other_s: float, *, max_staleness: int = 1, engines_idle_s: float | None = None
) -> list[StepLine]:
    """Of a learner that stands still for `other_s` in each step. Engines are idle while it does and learns, as far as
    they are done, if nothing else is given."""
    own_s = learn_s + other_s
    step_s = own_s + generate_s if max_staleness == 0 else max(own_s, generate_s)
    idle_s = step_s - generate_s if engines_idle_s is None else engines_idle_s
    return constant(step_s, learn_s, step_s - own_s, idle_s=idle_s)


def test_what_the_learner_stands_still_for_is_no_learning_that_more_ranks_shorten() -> None:
    found, told = judged(standing_still(12.0, 9.5, 10.0))
    assert (found.step_s, found.learning_s, found.other_s) == (19.5, 9.5, pytest.approx(10))
    slow = {r: max(9.5 * 4 / r + 10.0, 12.0 * 4 / (8 - r)) for r in range(1, 8)}
    assert {split.num_ranks: split.step_s for split in found.splits} == pytest.approx(slow)
    assert told.keys == split(5, 3)
    assert told.step_s == pytest.approx(9.5 * 4 / 5 + 10.0), "with all of it as learning: 15.6 s"
    assert found.floor_s == pytest.approx(19.5), "a larger S makes no evaluation shorter"


def test_what_is_neither_learning_nor_waiting_is_named_if_it_is_notable() -> None:
    told = report(standing_still(12.0, 9.5, 10.0))
    assert "if only learning counted: 9.5 s" in told
    assert "The rest, 10 s of a step (51%), is neither: evaluations and saves" in told
    assert "1.00 times the larger of learning with that rest and generation" in told
    little = report(standing_still(12.0, 9.5, 0.4))
    assert "rest" not in little and "the larger of learning and generation" in little
    assert "switching of devices, evaluations and saves" in report(
        standing_still(9.0, 9.5, 2.0, max_staleness=0), **COLOCATED
    )


def test_devices_are_no_remedy_for_evaluations_and_saves() -> None:
    found, told = judged(standing_still(17.0, 2.0, 18.0), **ONE_RANK)
    assert (found.verdict, told.keys, "saves" in told.why) == ("training_bound", {}, True)
    assert judged(standing_still(17.0, 19.0, 1.0), **ONE_RANK)[1].keys == {"learner.num_ranks": 2}
    saves, _ = judged(standing_still(20.0, 9.0, 9.8, engines_idle_s=0.0), full_s=4.0)
    assert saves.verdict == "generation_bound", "with no wait for the longest responses a step would take 18.8 s"
    balanced, told = judged(standing_still(19.0, 9.5, 10.0))
    assert (balanced.verdict, "evaluations and saves" in told.why) == ("balanced", True)
    # Engines that serve evaluations while the learner stands still are not counted twice.
    lines = standing_still(5.0, 4.0, 10.0, max_staleness=0, engines_idle_s=4.0)
    assert next(s for s in judged(lines, **S_0)[0].splits if s.num_ranks == 4).step_s == pytest.approx(5 + 4 + 10)


def test_evaluations_that_are_the_smaller_wait_are_named_next_to_the_advice() -> None:
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
    at_start = [replace(line, data_wait_s=0.0, evaluation_wait_s=6.0) for line in lines[5:]]
    _, told = judged(at_start, trainer={"eval_every": 0})
    assert (told.keys, told.step_s, "task.eval_size" in told.why) == ({}, None, True), "there is no period to change"


# Colocated


def test_colocated_is_compared_with_separate_devices() -> None:
    """On four devices, S = 0: the learner waits while engines generate, and they while it learns."""
    even, told = judged(constant(12.0, 6.0, 6.0, idle_s=6.0), **COLOCATED)
    # Two devices each take twice as long, at once: nothing is gained.
    assert (even.verdict, even.splits[0].step_s, told.keys) == ("colocated", pytest.approx(12.0), {})
    uneven, _ = judged(constant(12.0, 3.0, 9.0, idle_s=3.0), **COLOCATED)
    best = uneven.splits[0]
    assert (best.num_ranks, best.num_replicas, best.step_s) == (1, 3, pytest.approx(12.0))
    lines = constant(16.0, 3.0, 9.0, idle_s=3.0 + 4.0)
    _, told = judged(lines, **COLOCATED)
    assert told.keys == {"mode": "async", "mode.max_staleness": 1, **split(1, 3)}
    assert told.step_s == pytest.approx(12.0)
    text = report(lines, **COLOCATED)
    assert "alternate" in text and "--dry-run mode=async mode.max_staleness=1 " in text


@pytest.mark.parametrize(("staleness", "advised"), [(0, 1), (4, 5)])
def test_a_response_that_spans_turns_is_as_long_as_all_of_them(staleness: int, advised: int) -> None:
    """Up to 5 turns of 8 s, on half of the engines, and 16 s of learning."""
    mode = {"name": "colocated", "max_staleness": staleness}
    assert judged(constant(20.0, 8.0, 8.0, idle_s=12.0), mode=mode)[1].keys["mode.max_staleness"] == advised


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
    sizes: Any = {"learner": {"num_ranks": num_devices}, "rollout": {"num_replicas": num_devices}}
    keys = (told := judged(lines, full_s=full_s, **COLOCATED, **sizes)[1]).keys
    assert keys == {"mode": "async", **split(num_devices // 2, num_devices // 2)} | {
        "mode.max_staleness": keys["mode.max_staleness"]
    }
    assert keys["mode.max_staleness"] in (2, 3), "2 was enough"
    assert told.step_s == pytest.approx(measured_s, rel=0.05)


def test_what_is_unknown_and_what_failed_is_named() -> None:
    lines = play(9.0, 3.0)[0][5:]
    found, _ = judged([replace(line, engines_idle_s=None, slot_wait_s=None) for line in lines])
    assert (found.generation_s, found.splits, found.verdict) == (None, (), "generation_bound")
    assert any("unknown" in text for text in found.unknown)
    assert "50.0% of the responses failed" in judged([replace(line, failed_frac=0.5) for line in lines])[0].limits[0]
    assert not any("failed" in text for text in judged(lines)[0].limits)
