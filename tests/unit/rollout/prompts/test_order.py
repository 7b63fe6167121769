"""The order of prompts: seeded, complete, resumable exactly; with a curriculum and a pass-rate filter."""

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
from rollout.prompts.prompt_source import Curriculum, PromptSet, PromptSource, eval_subset, fingerprint
from rollout.types import Group, Prompt, Trajectory

BOUNDS = PassRateBounds(lowest=0.1, highest=0.9, retry_epochs=2, pass_threshold=1.0)
OUTSIDE, INSIDE = [0.0, 0.0], [0.0, 1.0]


def prompt_set(num_prompts: int, *, answer: str = "x", rewards: tuple[str, ...] = ()) -> PromptSet:
    prompts = tuple(
        Prompt(
            prompt_id=f"train/{i}",
            token_ids=np.array([i], np.int32),
            text=str(i),
            answer=answer,
            reward=rewards[i] if rewards else "",
        )
        for i in range(num_prompts)
    )
    return PromptSet(prompts=prompts, num_duplicates=0, num_overlong=0, fingerprint=fingerprint(prompts))


def stream(
    data: PromptSet | int, *, levels: list[float] | None = None, num_epochs: int = 1, **how: Any
) -> PromptSource:
    """`levels` of difficulty give it a curriculum."""
    order = None if levels is None else Curriculum(difficulties=np.array(levels), num_epochs=num_epochs)
    data = prompt_set(data) if isinstance(data, int) else data
    return PromptSource(data, **{"seed": 0, "shuffle": True, "curriculum": order, **how})


def filtered(num_prompts: int, *, seed: int = 0, start: dict[str, float] | None = None, **bounds: Any) -> PromptSource:
    rates = PassRateFilter(num_prompts, replace(BOUNDS, **bounds), start={} if start is None else start)
    return stream(num_prompts, seed=seed, pass_rates=rates)


def ids(source: PromptSource, count: int) -> list[str]:
    return [source.next().prompt_id for _ in range(count)]


def names(indices: Any) -> set[str]:
    return {f"train/{i}" for i in indices}


def resumed(source: PromptSource, into: PromptSource) -> PromptSource:
    into.load_state_dict(json.loads(json.dumps(source.state_dict())))
    return into


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


# The stream


@given(num_prompts=st.integers(1, 40), seed=st.integers(0, 2**40), num_epochs=st.integers(1, 4))
def test_every_epoch_shows_every_prompt_once(num_prompts: int, seed: int, num_epochs: int) -> None:
    source = stream(num_prompts, seed=seed)
    for epoch in range(num_epochs):
        assert source.epoch == epoch
        assert set(ids(source, num_prompts)) == names(range(num_prompts))


@settings(max_examples=40)
@given(
    levels=st.lists(st.integers(1, 4), min_size=1, max_size=20), has_curriculum=st.booleans(), seed=st.integers(0, 9),
    num_before=st.integers(0, 70), shuffle=st.booleans(),
)  # fmt: skip
def test_a_resumed_stream_continues_exactly(
    levels: list[float], has_curriculum: bool, seed: int, num_before: int, shuffle: bool
) -> None:
    how: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "levels": levels if has_curriculum else None}
    unbroken = stream(len(levels), num_epochs=2, **how)
    ids(unbroken, num_before)
    assert ids(resumed(unbroken, stream(len(levels), num_epochs=2, **how)), 50) == ids(unbroken, 50)


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    first, again, other = (stream(50, seed=seed) for seed in (1, 1, 2))
    epochs = [ids(first, 50) for _ in range(2)]
    assert [ids(again, 50) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    assert ids(other, 50) != epochs[0]


def test_without_shuffling_the_order_is_that_of_the_data_set() -> None:
    assert ids(stream(3, seed=5, shuffle=False), 7) == [f"train/{i}" for i in (0, 1, 2, 0, 1, 2, 0)]


RULED = {"levels": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, {"data": prompt_set(5)}, "num_prompts was 4, now 5"),
        ({}, {"data": prompt_set(4, answer="y")}, "fingerprint was"),
        ({}, {"seed": 1}, "seed was 0, now 1"),
        ({}, {"shuffle": False}, "shuffle was 1, now 0"),
        ({}, {"data": prompt_set(4, rewards=("", "", "", "math"))}, "rewards was none"),
        ({"data": prompt_set(4, rewards=("math", "", "", ""))}, {}, "rewards was .* now none"),
        (RULED, {"levels": [1.0, 3.0, 2.0, 4.0]}, "curriculum was"),
        (RULED, RULED | {"num_epochs": 2}, "curriculum was"),
        (RULED, {}, "curriculum was .* now none"),
        ({}, RULED, "curriculum was none"),
    ],
)
def test_an_order_that_cannot_continue_is_refused(before: dict[str, Any], now: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"cannot continue: .*{message}"):
        resumed(stream(**{"data": prompt_set(4), **before}), stream(**{"data": prompt_set(4), **now}))


def test_older_checkpoints_without_rewards_and_curriculum_continue() -> None:
    assert prompt_set(2).fingerprint == "349408ac797239a2", "checkpoints have it"
    state = stream(2).state_dict()
    del state["curriculum"], state["rewards"]
    stream(prompt_set(2, rewards=("", "math"))).load_state_dict(state)


def test_a_damaged_state_is_refused() -> None:
    source = stream(4)
    with pytest.raises(DataError, match="lacks epoch"):
        source.load_state_dict({"position": 0})
    with pytest.raises(DataError, match="position 4 is not within its 4 prompts"):
        source.load_state_dict(source.state_dict() | {"position": 4})


def test_prompts_are_found_by_id() -> None:
    assert stream(4).find("train/2").text == "2"
    with pytest.raises(DataError, match="no prompt 'train/9'"):
        stream(4).find("train/9")


def test_prompt_sets_that_cannot_be_streamed_are_refused() -> None:
    two = prompt_set(2)
    with pytest.raises(DataError, match="empty"):
        stream(replace(two, prompts=()))
    with pytest.raises(DataError, match="share one prompt_id"):
        stream(replace(two, prompts=two.prompts[:1] * 2))
    with pytest.raises(DataError, match=">= 0, got -1"):
        stream(two, seed=-1)


def test_the_evaluation_subset_is_fixed_and_drawn_from_everywhere() -> None:
    data = prompt_set(1000)
    subset = eval_subset(data, size=100)
    assert subset == eval_subset(data, size=100)
    indices = [int(p.text) for p in subset]
    assert len(indices) == 100 and indices == sorted(set(indices))
    assert 400 < np.mean(indices) < 600
    assert eval_subset(data, size=0) == eval_subset(data, size=5000) == data.prompts


# Curriculum


@settings(max_examples=40)
@given(
    levels=st.lists(st.integers(1, 4), min_size=1, max_size=30), seed=st.integers(0, 99), num_epochs=st.integers(1, 3)
)
def test_a_curriculum_is_from_easy_to_hard_shuffled_within_a_level_and_ends(
    levels: list[float], seed: int, num_epochs: int
) -> None:
    source = stream(len(levels), levels=levels, num_epochs=num_epochs, seed=seed)
    plain = stream(len(levels), seed=seed)
    for epoch in range(num_epochs + 2):
        usual = ids(plain, len(levels))
        by_level = sorted(usual, key=lambda name: levels[int(name.removeprefix("train/"))])
        assert ids(source, len(levels)) == (by_level if epoch < num_epochs else usual)


def test_the_difficulty_of_a_step_is_recorded() -> None:
    groups = [group(name, [1.0], group_id=i) for i, name in enumerate(("train/1", "train/2"))]
    assert stream(3, levels=[1.0, 5.0, 3.0]).record(groups)["difficulty_mean"] == 4.0


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


# Pass-rate filter


class Trainee:
    """Draws, responds with a fixed pass rate per prompt, and makes a version of every `per_version` groups."""

    def __init__(self, source: PromptSource, rates: dict[str, float], *, per_version: int = 4, done: int = 0) -> None:
        self.source, self.rates, self.per_version, self.done = source, rates, per_version, done

    def draw(self, count: int) -> list[str]:
        drawn: list[str] = []
        for _ in range(count):
            version = self.done // self.per_version
            drawn.append(self.source.next(version).prompt_id)
            rewards = responses(self.rates.get(drawn[-1], 0.5))
            self.source.observe(group(drawn[-1], rewards, group_id=self.done, version=version))
            self.done += 1
        return drawn


def responses(rate: float) -> list[float]:
    return [1.0] * round(rate * 4) + [0.0] * (4 - round(rate * 4))


@settings(max_examples=40)
@given(num_prompts=st.integers(2, 24), seed=st.integers(0, 99), retry_epochs=st.integers(1, 3), data=st.data())
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
    trainee = Trainee(filtered(4, retry_epochs=1), {"train/2": 1.0}, per_version=1)
    assert len(trainee.draw(4)) == 4
    assert "train/2" not in trainee.draw(3)
    trainee.rates["train/2"] = 0.5
    for _ in range(3):
        assert "train/2" in trainee.draw(4)


@settings(max_examples=40)
@given(
    num_prompts=st.integers(3, 20), seed=st.integers(0, 99), num_before=st.integers(0, 60),
    per_version=st.integers(1, 9), hard=st.sets(st.integers(1, 19)),
)  # fmt: skip
def test_a_resumed_filter_has_the_same_future(
    num_prompts: int, seed: int, num_before: int, per_version: int, hard: set[int]
) -> None:
    rates = dict.fromkeys(names(hard), 0.0)
    unbroken = Trainee(filtered(num_prompts, seed=seed), rates, per_version=per_version)
    unbroken.draw(num_before)
    source = resumed(unbroken.source, filtered(num_prompts, seed=seed))
    assert Trainee(source, rates, per_version=per_version, done=num_before).draw(60) == unbroken.draw(60)
    assert source.record([]) == unbroken.source.record([])
    assert source.state_dict() == unbroken.source.state_dict()


@settings(max_examples=40)
@given(order=st.permutations(range(6)))
def test_within_a_version_it_does_not_matter_which_group_ends_first(order: list[int]) -> None:
    """Also where one prompt has two groups, and where a draw comes between them."""
    source, other, rates = filtered(5, retry_epochs=1), filtered(5, retry_epochs=1), [0.0, 0.5, 1.0, 0.5, 0.5, 0.0]
    drawn = [source.next(0).prompt_id for _ in rates]
    groups = [group(drawn[i], responses(rate), group_id=i) for i, rate in enumerate(rates)]
    later: list[str] = []
    for position in order:
        source.observe(groups[position])
        later.append(source.next(0).prompt_id)
    later += [source.next(1).prompt_id for _ in range(9)]
    for one in groups:
        other.observe(one)
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
    record = source.record([])
    assert (record["skipped/too_easy"], record["pass_rate_mean"]) == (1, 0.75)


@pytest.mark.parametrize(("retry_epochs", "per_version"), [(1, 50), (2, 1), (5, 4)])
def test_a_run_without_a_prompt_left_ends_with_thresholds_and_rates(retry_epochs: int, per_version: int) -> None:
    rates = {f"train/{i}": float(i % 3 == 0) for i in range(12)}
    trainee = Trainee(filtered(12, retry_epochs=retry_epochs), rates, per_version=per_version)
    with pytest.raises(NoProgress, match=r"all 12 prompts .*min=0\.1 to task\.pass_rate_max=0\.9") as error:
        trainee.draw(100)
    assert trainee.done <= max(24, per_version)
    assert "pass rate (rewards of at least task.pass_threshold=1): 0: 8, 1: 4. Widen" in str(error.value)


@pytest.mark.parametrize("order", permutations(range(3)))
@pytest.mark.parametrize(
    ("groups", "ends"),
    [
        ([("train/0", INSIDE), ("train/1", OUTSIDE), ("train/0", OUTSIDE)], True),
        ([("train/1", OUTSIDE), ("train/0", OUTSIDE), ("train/0", INSIDE)], False),
        ([("train/1", OUTSIDE), ("train/0", INSIDE), ("train/0", OUTSIDE)], False),
    ],
)
def test_a_run_ends_if_all_are_outside_without_a_group_inside_in_between_whichever_ends_first(
    groups: list[tuple[str, list[float]]], ends: bool, order: tuple[int, ...]
) -> None:
    source = filtered(2)
    for group_id in order:
        source.observe(group(*groups[group_id], group_id=group_id))
        source.next(0)
    with pytest.raises(NoProgress) if ends else nullcontext():
        source.next(1)


@settings(max_examples=40)
@given(
    num_prompts=st.integers(2, 5), retry_epochs=st.integers(1, 9), seed=st.integers(0, 9),
    num_before=st.integers(0, 8), passed=st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=20),
)  # fmt: skip
def test_epochs_without_a_prompt_are_skipped_as_if_each_turn_had_been_taken(
    num_prompts: int, retry_epochs: int, seed: int, num_before: int, passed: list[int]
) -> None:
    """The last prompt goes outside after some draws: then all may be in cooldown, anywhere in an epoch."""
    last, counts = num_prompts - 1, [1] * (num_before + 1) + [0] + passed
    start = dict.fromkeys(names(range(last)), 0.0)
    source, slow = (filtered(num_prompts, seed=seed, start=start, retry_epochs=retry_epochs) for _ in range(2))
    assert slow._pass_rates is not None
    slow._pass_rates.skip_epochs = lambda: 0  # type: ignore[method-assign]
    prompt_id = f"train/{last}"
    with suppress(NoProgress):
        for group_id, count in enumerate(counts):
            for each in (source, slow):
                each.observe(group(prompt_id, [1.0] * count + [0.0] * (2 - count), group_id=group_id))
            prompt_id = slow.next(group_id + 1).prompt_id
            assert source.next(group_id + 1).prompt_id == prompt_id
            assert source.state_dict() == slow.state_dict()
            assert source.record([]) == slow.record([])


def test_a_cooldown_of_a_million_epochs_takes_no_million_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    source, turns, skips = filtered(4, retry_epochs=10**6), Counter[str](), PassRateFilter.skips
    observe(source, *((f"train/{i}", OUTSIDE) for i in range(3)), ("train/3", INSIDE), ("train/3", OUTSIDE))

    def counted(self: PassRateFilter, prompt_id: str) -> bool:
        turns[prompt_id] += 1
        assert turns.total() <= 3 * 4
        return skips(self, prompt_id)

    monkeypatch.setattr(PassRateFilter, "skips", counted)
    first = source.next()
    state = source.state_dict()
    assert (state["epoch"], state["position"]) == (10**6, 1)
    assert source.record([]) == {
        "epoch": 10**6, "skipped/too_hard": 4e6, "skipped/too_easy": 0.0, "pass_rate_mean": 0.0, "prompts_excluded": 0,
    }  # fmt: skip
    assert {first.prompt_id, *ids(source, 3)} == names(range(4))


def test_offline_pass_rates_that_leave_nothing_are_refused_before_the_run() -> None:
    source = filtered(2, start={"train/0": 0.0, "train/1": 0.95})
    with pytest.raises(DataError, match=r"all 2 prompts .* \(in task\.pass_rate_column, .*0: 1, below 1: 1"):
        source.require_prompt()
    with pytest.raises(NoProgress):
        source.next()
    filtered(2, start={"train/0": 0.0, "train/1": 0.9}).require_prompt()
    stream(2).require_prompt()


# A filter that resumes


def test_a_resumed_run_knows_what_was_found_outside_before_and_is_refused_if_that_leaves_nothing() -> None:
    source = filtered(2)
    observe(source, ("train/0", OUTSIDE))
    source.next()
    again = resumed(source, filtered(2))
    observe(again, ("train/1", [1.0, 1.0]), first=1)
    with pytest.raises(NoProgress, match="0: 1, 1: 1"):
        again.next()
    with pytest.raises(DataError, match="in the checkpoint"):
        resumed(again, filtered(2)).require_prompt()
    resumed(again, filtered(2, lowest=0.0)).require_prompt()


def test_newer_rates_of_a_checkpoint_count_more_than_the_column() -> None:
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


def test_an_older_checkpoint_that_counted_groups_as_outside_before_their_version_was_over_continues() -> None:
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
    without = resumed(source, stream(4))
    assert set(ids(resumed(without, filtered(4)), 4)) == names(range(4))
