"""Pass-rate filter and curriculum: who is drawn, who rests, and that a resumed stream goes on the same way."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import DataError, NoProgress
from rollout.prompts.datasets import numbers
from rollout.prompts.pass_rate_filter import PassRateBounds, PassRateFilter
from rollout.prompts.prompt_source import Curriculum, PromptSource
from rollout.types import Group, Prompt, Trajectory
from tests.unit.rollout.prompts.test_source import ids, prompt_set

BOUNDS = PassRateBounds(lowest=0.1, highest=0.9, retry_epochs=2, pass_threshold=1.0)


def group(prompt_id: str, rewards: list[float], *, group_id: int, version: int = 0) -> Group:
    """NaN is a response without a reward."""
    responses = [
        Trajectory.of_turns([], reward=reward, status="failed" if np.isnan(reward) else "completed")
        for reward in rewards
    ]
    return Group(group_id=group_id, prompt_id=prompt_id, trajectories=responses, start_version=version)


def observe(source: PromptSource, *groups: tuple[str, list[float]], first: int = 0) -> None:
    """Groups of version 0 came back, in order of their ids."""
    for group_id, (prompt_id, rewards) in enumerate(groups, start=first):
        source.observe(group(prompt_id, rewards, group_id=group_id))


def resumed(source: PromptSource, into: PromptSource) -> PromptSource:
    into.load_state_dict(json.loads(json.dumps(source.state_dict())))
    return into


def filtered(num_prompts: int, *, seed: int = 0, start: dict[str, float] | None = None, **bounds: Any) -> PromptSource:
    rates = PassRateFilter(num_prompts, replace(BOUNDS, **bounds), start={} if start is None else start)
    return PromptSource(prompt_set(num_prompts), seed=seed, shuffle=True, pass_rates=rates)


class Trainee:
    """Draws, answers with a fixed pass rate per prompt, and makes a version of every `per_version` groups."""

    def __init__(self, source: PromptSource, rates: dict[str, float], *, per_version: int = 4, done: int = 0) -> None:
        self.source, self.rates, self.per_version, self.done = source, rates, per_version, done

    def draw(self, count: int) -> list[str]:
        drawn: list[str] = []
        for _ in range(count):
            version = self.done // self.per_version
            prompt = self.source.next(version)
            drawn.append(prompt.prompt_id)
            passed = round(self.rates.get(prompt.prompt_id, 0.5) * 4)
            rewards = [1.0] * passed + [0.0] * (4 - passed)
            self.source.observe(group(prompt.prompt_id, rewards, group_id=self.done, version=version))
            self.done += 1
        return drawn


def names(indices: Any) -> set[str]:
    return {f"train/{i}" for i in indices}


@settings(deadline=None)
@given(
    num_prompts=st.integers(2, 24),
    seed=st.integers(0, 99),
    retry_epochs=st.integers(1, 3),
    data=st.data(),
)
def test_what_is_inside_is_drawn_in_every_epoch_and_what_is_outside_is_probed_again(
    num_prompts: int, seed: int, retry_epochs: int, data: st.DataObject
) -> None:
    outside = names(data.draw(st.sets(st.integers(1, num_prompts - 1), max_size=num_prompts - 1)))
    rates = {name: data.draw(st.sampled_from([0.0, 1.0])) for name in sorted(outside)}
    source = filtered(num_prompts, seed=seed, retry_epochs=retry_epochs)
    trainee, drawn = Trainee(source, rates, per_version=1), set[tuple[int, str]]()
    num_epochs = 2 * (retry_epochs + 1) + 1
    while source.epoch < num_epochs:
        (name,) = trainee.draw(1)
        state = source.state_dict()
        of_epoch = state["epoch"] - (state["position"] == 0)
        assert (of_epoch, name) not in drawn, "twice in one epoch"
        drawn.add((of_epoch, name))
    inside, probes = names(range(num_prompts)) - outside, range(0, num_epochs, retry_epochs + 1)
    expected = {(epoch, name) for epoch in range(num_epochs) for name in inside}
    expected |= {(epoch, name) for epoch in probes for name in outside}
    assert {(epoch, name) for epoch, name in drawn if epoch < num_epochs} == expected


def test_a_probe_inside_the_bounds_brings_a_prompt_back() -> None:
    source = filtered(4, retry_epochs=1)
    trainee = Trainee(source, {"train/2": 1.0}, per_version=1)
    assert len(trainee.draw(4)) == 4
    assert "train/2" not in trainee.draw(3)
    trainee.rates["train/2"] = 0.5
    for _ in range(3):
        assert "train/2" in trainee.draw(4)


@settings(deadline=None)
@given(
    num_prompts=st.integers(3, 20),
    seed=st.integers(0, 99),
    num_before=st.integers(0, 60),
    per_version=st.integers(1, 9),
    hard=st.sets(st.integers(1, 19)),
)
def test_a_resumed_stream_has_the_same_future(
    num_prompts: int, seed: int, num_before: int, per_version: int, hard: set[int]
) -> None:
    rates = dict.fromkeys(names(hard), 0.0)
    unbroken = Trainee(filtered(num_prompts, seed=seed), rates, per_version=per_version)
    unbroken.draw(num_before)
    source = resumed(unbroken.source, filtered(num_prompts, seed=seed))
    assert Trainee(source, rates, per_version=per_version, done=num_before).draw(60) == unbroken.draw(60)
    assert source.record([]) == unbroken.source.record([])
    assert source.state_dict() == unbroken.source.state_dict()


@settings(deadline=None)
@given(order=st.permutations(range(6)))
def test_within_a_version_it_does_not_matter_which_group_ends_first(order: list[int]) -> None:
    """Also where one prompt has two groups, and where a draw comes between them."""
    source, rates = filtered(5, retry_epochs=1), [0.0, 0.5, 1.0, 0.5, 0.5, 0.0]
    drawn = [source.next(0).prompt_id for _ in rates]
    later: list[str] = []
    for position in order:
        rewards = [1.0] * round(rates[position] * 4) + [0.0] * (4 - round(rates[position] * 4))
        source.observe(group(drawn[position], rewards, group_id=position, version=0))
        later.append(source.next(0).prompt_id)
    later += [source.next(1).prompt_id for _ in range(9)]
    other = filtered(5, retry_epochs=1)
    for position, rate in enumerate(rates):
        rewards = [1.0] * round(rate * 4) + [0.0] * (4 - round(rate * 4))
        other.observe(group(drawn[position], rewards, group_id=position, version=0))
    assert [other.next(0).prompt_id for _ in range(12)] == [*drawn, *later[:6]]
    assert [other.next(1).prompt_id for _ in range(9)] == later[6:]


def test_offline_pass_rates_count_from_the_first_draw_on() -> None:
    source = filtered(6, start={"train/1": 0.0, "train/4": 1.0, "train/5": 0.5}, retry_epochs=1)
    assert names({1, 4}).isdisjoint(ids(source, 4))
    assert names({1, 4}) <= set(ids(source, 6))
    assert source.record([]) == {
        "epoch": 2, "skipped/too_hard": 1.0, "skipped/too_easy": 1.0, "pass_rate_mean": 0.5, "prompts_excluded": 0,
    }  # fmt: skip


def test_a_pass_rate_is_that_of_scored_responses_and_the_reward_that_passes_can_be_set() -> None:
    source = filtered(3, retry_epochs=1, pass_threshold=0.4)
    observe(source, ("train/0", [float("nan"), 0.4, 1.0]), ("train/1", [float("nan")] * 3), ("train/2", [0.4, 0.3]))
    assert set(ids(source, 5)) == names({0, 1, 2})
    assert source.record([])["skipped/too_easy"] == 1
    assert source.record([])["pass_rate_mean"] == 0.75


@pytest.mark.parametrize("retry_epochs", [1, 2, 5])
@pytest.mark.parametrize("per_version", [1, 4, 50])
def test_a_run_without_a_prompt_left_ends_with_thresholds_and_rates(retry_epochs: int, per_version: int) -> None:
    trainee = Trainee(
        filtered(12, retry_epochs=retry_epochs), {f"train/{i}": float(i % 3 == 0) for i in range(12)},
        per_version=per_version,
    )  # fmt: skip
    with pytest.raises(NoProgress, match=r"all 12 prompts .*min=0\.1 to task\.pass_rate_max=0\.9") as error:
        trainee.draw(100)
    assert trainee.done <= max(24, per_version)
    assert "pass rate (rewards of at least task.pass_threshold=1): 0: 8, 1: 4. Widen" in str(error.value)


OUTSIDE, INSIDE = [0.0, 0.0], [0.0, 1.0]


@pytest.mark.parametrize("order", permutations(range(3)))
@pytest.mark.parametrize(
    ("groups", "ends"),
    [
        ([("train/0", INSIDE), ("train/1", OUTSIDE), ("train/0", OUTSIDE)], True),
        ([("train/1", OUTSIDE), ("train/0", OUTSIDE), ("train/0", INSIDE)], False),
        ([("train/1", OUTSIDE), ("train/0", INSIDE), ("train/0", OUTSIDE)], False),
    ],
)
def test_whether_a_run_ends_does_not_depend_on_which_group_of_a_version_is_back_first(
    groups: list[tuple[str, list[float]]], ends: bool, order: tuple[int, ...]
) -> None:
    source = filtered(2)
    for group_id in order:
        source.observe(group(*groups[group_id], group_id=group_id))
        source.next(0)
    with pytest.raises(NoProgress) if ends else nullcontext():
        source.next(1)


def test_a_group_inside_between_keeps_the_run_going() -> None:
    source = filtered(2)
    for group_id, (name, rewards) in enumerate([("train/0", OUTSIDE), ("train/1", INSIDE), ("train/1", OUTSIDE)]):
        observe(source, (name, rewards), first=group_id)
        source.next()
    observe(source, ("train/0", OUTSIDE), first=3)
    with pytest.raises(NoProgress):
        source.next()


def test_a_resumed_run_knows_what_was_found_outside_before() -> None:
    source = filtered(2)
    observe(source, ("train/0", OUTSIDE))
    source.next()
    again = resumed(source, filtered(2))
    observe(again, ("train/1", [1.0, 1.0]), first=1)
    with pytest.raises(NoProgress, match="0: 1, 1: 1"):
        again.next()


@settings(deadline=None)
@given(
    num_prompts=st.integers(2, 5),
    retry_epochs=st.integers(1, 9),
    seed=st.integers(0, 9),
    num_before=st.integers(0, 8),
    passed=st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=20),
)
def test_epochs_without_a_prompt_are_skipped_as_if_each_turn_had_been_taken(
    num_prompts: int, retry_epochs: int, seed: int, num_before: int, passed: list[int]
) -> None:
    """The last prompt is inside, and goes outside after some draws: then all may rest, anywhere in an epoch."""
    last, counts = num_prompts - 1, [1] * (num_before + 1) + [0] + passed
    start = dict.fromkeys(names(range(last)), 0.0)
    source, slow = (filtered(num_prompts, seed=seed, start=start, retry_epochs=retry_epochs) for _ in range(2))
    assert slow._pass_rates is not None
    slow._pass_rates.skip_epochs = lambda: 0  # type: ignore[method-assign]
    prompt_id = f"train/{last}"
    with suppress(NoProgress):
        for group_id, count in enumerate(counts):
            for stream in (source, slow):
                rewards = [1.0] * count + [0.0] * (2 - count)
                stream.observe(group(prompt_id, rewards, group_id=group_id))
            prompt_id = slow.next(group_id + 1).prompt_id
            assert source.next(group_id + 1).prompt_id == prompt_id
            assert source.state_dict() == slow.state_dict()
            assert source.record([]) == slow.record([])


def all_outside(*, retry_epochs: int) -> PromptSource:
    """Three of the four were outside before the last group inside, which was one of the fourth."""
    source = filtered(4, retry_epochs=retry_epochs)
    outside = [(f"train/{i}", OUTSIDE) for i in range(3)]
    observe(source, *outside, ("train/3", INSIDE), ("train/3", OUTSIDE))
    return source


def test_a_rest_of_a_million_epochs_takes_no_million_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    source, turns, skips = all_outside(retry_epochs=10**6), Counter[str](), PassRateFilter.skips

    def counted(self: PassRateFilter, prompt_id: str) -> bool:
        turns[prompt_id] += 1
        assert turns.total() <= 3 * 4
        return skips(self, prompt_id)

    monkeypatch.setattr(PassRateFilter, "skips", counted)
    first = source.next()
    assert source.state_dict() | {"pass_rates": None} == source.state_dict() | {
        "epoch": 10**6, "position": 1, "pass_rates": None,
    }  # fmt: skip
    assert source.record([]) == {
        "epoch": 10**6, "skipped/too_hard": 4e6, "skipped/too_easy": 0.0, "pass_rate_mean": 0.0, "prompts_excluded": 0,
    }  # fmt: skip
    assert {first.prompt_id, *ids(source, 3)} == names(range(4))


@pytest.mark.parametrize("num_drawn", range(5))
def test_a_stream_that_resumes_where_all_are_passed_over_has_the_same_future(num_drawn: int) -> None:
    unbroken = all_outside(retry_epochs=1000)
    ids(unbroken, num_drawn)
    again = resumed(unbroken, filtered(4, retry_epochs=1000))
    assert ids(again, 9) == ids(unbroken, 9)
    assert again.state_dict() == unbroken.state_dict()


def test_offline_pass_rates_that_leave_nothing_are_refused_before_the_run() -> None:
    source = filtered(2, start={"train/0": 0.0, "train/1": 0.95})
    with pytest.raises(DataError, match=r"all 2 prompts .* \(in task\.pass_rate_column, .*0: 1, below 1: 1"):
        source.require_prompt()
    with pytest.raises(NoProgress):
        source.next()
    filtered(2, start={"train/0": 0.0, "train/1": 0.9}).require_prompt()
    PromptSource(prompt_set(2), seed=0, shuffle=True).require_prompt()


def test_a_resumed_run_goes_by_its_newer_rates_where_the_column_alone_leaves_nothing() -> None:
    start = {"train/0": 0.0, "train/1": 0.05}
    source = filtered(2, start=start, lowest=0.05)
    observe(source, ("train/1", INSIDE))
    source.next()
    narrower = resumed(source, filtered(2, start=start))
    narrower.require_prompt()
    assert ids(narrower, 1) == ["train/1"]


def test_a_column_of_pass_rates_that_comes_with_a_resume_counts_for_prompts_without_a_rate() -> None:
    source = filtered(4)
    observe(source, ("train/0", INSIDE))
    source.next()
    again = resumed(source, filtered(4, start={"train/0": 0.0, "train/1": 1.0, "train/2": 0.5}))
    state = again.state_dict()["pass_rates"]
    assert state["rates"] == {"train/0": 0.5, "train/1": 1.0, "train/2": 0.5}
    assert (state["resting"], state["outside"]) == ({"train/1": 2}, ["train/1"])
    assert "train/1" not in ids(again, 6)


def test_a_checkpoint_that_leaves_nothing_is_refused_before_the_run() -> None:
    source = filtered(2)
    observe(source, ("train/0", OUTSIDE), ("train/1", OUTSIDE))
    with pytest.raises(NoProgress):
        source.next()
    with pytest.raises(DataError, match="in the checkpoint"):
        resumed(source, filtered(2)).require_prompt()
    resumed(source, filtered(2, lowest=0.0)).require_prompt()


def test_a_checkpoint_that_counted_groups_as_outside_before_their_version_was_over_continues() -> None:
    source = filtered(3)
    source.next(0)
    observe(source, ("train/1", OUTSIDE))
    state = json.loads(json.dumps(source.state_dict()))
    state["pass_rates"]["outside"] = ["train/1"]
    again = filtered(3)
    again.load_state_dict(state)
    again.next(1)
    source.next(1)
    assert again.state_dict() == source.state_dict()


def test_bounds_may_change_between_runs() -> None:
    source = filtered(4, start={"train/0": 0.0})
    assert set(ids(resumed(source, filtered(4, lowest=0.0)), 4)) == names(range(4))
    without = resumed(source, PromptSource(prompt_set(4), seed=0, shuffle=True))
    assert set(ids(resumed(without, filtered(4)), 4)) == names(range(4))


def curriculum(difficulties: list[float], *, num_epochs: int = 1, seed: int = 0) -> PromptSource:
    order = Curriculum(difficulties=np.array(difficulties), num_epochs=num_epochs)
    return PromptSource(prompt_set(len(difficulties)), seed=seed, shuffle=True, curriculum=order)


@settings(deadline=None)
@given(
    levels=st.lists(st.integers(1, 4), min_size=1, max_size=30), seed=st.integers(0, 99), num_epochs=st.integers(1, 3)
)
def test_a_curriculum_goes_from_easy_to_hard_and_ends(levels: list[int], seed: int, num_epochs: int) -> None:
    source = curriculum([float(level) for level in levels], num_epochs=num_epochs, seed=seed)
    plain = PromptSource(prompt_set(len(levels)), seed=seed, shuffle=True)
    for epoch in range(num_epochs + 2):
        shown, usual = ids(source, len(levels)), ids(plain, len(levels))
        assert sorted(shown) == sorted(usual)
        if epoch < num_epochs:
            shown_levels = [levels[int(name.removeprefix("train/"))] for name in shown]
            assert shown_levels == sorted(levels)
            for level in set(levels):
                block = [name for name in usual if levels[int(name.removeprefix("train/"))] == level]
                assert [name for name in shown if name in block] == block, "shuffled within a level"
        else:
            assert shown == usual


@settings(deadline=None)
@given(num_before=st.integers(0, 30), seed=st.integers(0, 9))
def test_a_resumed_curriculum_continues_exactly(num_before: int, seed: int) -> None:
    unbroken = curriculum([3, 1, 2, 2, 1, 1, 3], num_epochs=2, seed=seed)
    ids(unbroken, num_before)
    again = resumed(unbroken, curriculum([3, 1, 2, 2, 1, 1, 3], num_epochs=2, seed=seed))
    assert ids(again, 30) == ids(unbroken, 30)


def test_another_curriculum_cannot_continue() -> None:
    saved = curriculum([1, 2, 3]).state_dict()
    for other in (curriculum([1, 3, 2]), curriculum([1, 2, 3], num_epochs=2)):
        with pytest.raises(DataError, match="cannot continue: curriculum was"):
            other.load_state_dict(saved)
    with pytest.raises(DataError, match="now none"):
        PromptSource(prompt_set(3), seed=0, shuffle=True).load_state_dict(saved)


def test_a_checkpoint_from_before_there_was_a_curriculum_goes_on() -> None:
    plain = PromptSource(prompt_set(3), seed=0, shuffle=True)
    old = {name: value for name, value in plain.state_dict().items() if name != "curriculum"}
    plain.load_state_dict(old)
    with pytest.raises(DataError, match="curriculum was none"):
        curriculum([1, 2, 3]).load_state_dict(old)


def test_the_difficulty_of_a_step_is_told() -> None:
    source = curriculum([1.0, 5.0, 3.0])
    groups = [group(name, [1.0], group_id=i) for i, name in enumerate(("train/1", "train/2"))]
    assert source.record(groups)["difficulty_mean"] == 4.0


def with_metadata(*columns: dict[str, object]) -> list[Prompt]:
    return [replace(p, metadata=c) for p, c in zip(prompt_set(len(columns)).prompts, columns, strict=True)]


def test_a_column_gives_one_number_per_prompt() -> None:
    prompts = with_metadata({"level": 3, "info": {"rate": 0.5}}, {"level": 1.5, "info": {"rate": None}})
    assert numbers(prompts, "level", setting="task.difficulty_column") == [3.0, 1.5]
    assert numbers(prompts, "info.rate", setting="task.pass_rate_column") == [0.5, None]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"lvl": 3}, "prompt train/1: no column 'level'; .* are: lvl; set task.difficulty_column"),
        ({}, "are: none"),
        ({"level": "hard"}, "holds str 'hard'"),
        ({"level": True}, "holds bool True"),
        ({"level": float("nan")}, "holds float nan"),
        ({"level": 10**400}, "holds int 1000"),
    ],
)
def test_a_column_that_is_no_number_is_refused(value: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        numbers(with_metadata({"level": 1}, value), "level", setting="task.difficulty_column")
