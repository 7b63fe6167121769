"""Which engines lose their last requests: the plan, and the bound on what that costs."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.fleet.adaptive_limit import KV_ROOM
from rollout.fleet.consolidation import ConsolidationRule, EngineLoadView, engines_to_drain, has_doubled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RULE = ConsolidationRule(below=8, most=64)


def place(running: int, **fields: object) -> EngineLoadView:
    known: dict[str, object] = {"own": running, "may_leave": True}
    return EngineLoadView(running=running, **(known | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("places", "freed"),
    [
        ({"a": place(3)}, []),  # nowhere to go
        ({"a": place(8), "b": place(40)}, []),  # not worth it
        ({"a": place(0), "b": place(40)}, []),
        ({"a": place(7), "b": place(40)}, ["a"]),
        ({"a": place(7), "b": place(0)}, []),  # an empty one is no fuller one
        ({"a": place(3), "b": place(4), "c": place(5), "d": place(6)}, ["a", "b", "c"]),
        ({"a": place(3), "b": place(3)}, ["a"]),  # one of two equals
        ({"a": place(3, may_leave=False), "b": place(40)}, []),
        ({"a": place(3), "b": place(5, may_leave=False)}, ["a"]),  # takes, although it cannot give
        ({"a": place(3, own=0), "b": place(40)}, []),  # others have to move these
        ({"a": place(3), "b": place(62)}, []),  # more than fit
        ({"a": place(3), "b": place(61)}, ["a"]),
        ({"a": place(3), "b": place(40, is_queueing=True)}, []),
        ({"a": place(3), "b": place(40, limit=42)}, []),
        ({"a": place(3), "b": place(40, limit=43)}, ["a"]),
        ({"a": place(6, own=3), "b": place(40, own=20, limit=23)}, ["a"]),  # its share of the limit
        ({"a": place(6, own=1), "b": place(60)}, []),  # what others move goes there too
        ({"a": place(3, kv_frac=0.3), "b": place(40, kv_frac=KV_ROOM - 0.3)}, []),
        ({"a": place(3, kv_frac=0.3), "b": place(40, kv_frac=KV_ROOM - 0.31)}, ["a"]),
        ({"a": place(3, kv_frac=None), "b": place(40, kv_frac=0.99)}, ["a"]),  # nothing is known
        ({"a": place(3), "b": place(4), "c": place(60)}, ["a"]),  # c has room for one of them, which is then full
        ({"a": place(3), "b": place(4), "c": place(62)}, ["a"]),  # neither fits on c: a goes to b, which stays
        ({"a": place(2, kv_frac=0.3), "b": place(3, kv_frac=0.3), "c": place(9, kv_frac=0.4)}, ["a"]),
    ],
)
def test_what_is_freed(places: Mapping[str, EngineLoadView], freed: list[str]) -> None:
    assert engines_to_drain(places, RULE) == freed


def fits(places: Mapping[str, EngineLoadView], freed: Sequence[str], rule: ConsolidationRule) -> bool:
    """By trying every way: whether everything that is freed has room on fuller engines that are not."""
    kept = [name for name in places if name not in freed]
    for targets in itertools.product(kept, repeat=len(freed)):
        after = dict(places)
        for name, target in zip(freed, targets, strict=True):
            if after[target].running == 0 or not after[target].has_room(places[name], rule.most):
                break
            after[target] = after[target].joined(places[name])
        else:
            return True
    return False


some_place = st.builds(
    lambda running, own, limit, kv, leave: place(running, own=min(own, running), limit=limit, kv_frac=kv, **leave),
    st.integers(0, 12),
    st.integers(0, 12),
    st.none() | st.integers(1, 20),
    st.none() | st.floats(0, 1),
    st.fixed_dictionaries({"may_leave": st.booleans(), "is_queueing": st.booleans()}),
)


@given(st.lists(some_place, min_size=1, max_size=5), st.integers(2, 14), st.integers(4, 30))
def test_what_is_freed_fits_elsewhere_and_is_allowed_to_go(some: list[EngineLoadView], below: int, most: int) -> None:
    rule = ConsolidationRule(below=below, most=most)
    places = {f"e{index}": one for index, one in enumerate(some)}
    freed = engines_to_drain(places, rule)
    assert len(set(freed)) == len(freed)
    for name in freed:
        assert 0 < places[name].running < below
        assert places[name].own > 0
        assert places[name].may_leave
    assert fits(places, freed, rule)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(2, 14))
def test_a_plan_leaves_nothing_to_do_once_it_is_carried_out(sizes: list[int], below: int) -> None:
    """With room everywhere all that is below ends on one engine, or on those that are busy anyway."""
    rule = ConsolidationRule(below=below, most=1000)
    places = {f"e{index}": place(size) for index, size in enumerate(sizes)}
    freed = engines_to_drain(places, rule)
    kept = [name for name, one in places.items() if one.running and name not in freed]
    is_busy = [name for name in kept if places[name].running >= below]
    assert len(kept) == max(len(is_busy), min(1, sum(size > 0 for size in sizes)))
    moved = sum(places[name].running for name in freed)
    after = {name: place(0) if name in freed else one for name, one in places.items()}
    if freed:
        target = min(is_busy or kept, key=lambda name: places[name].running)
        after[target] = replace(after[target], running=after[target].running + moved)
    assert engines_to_drain({n: replace(p, may_leave=p.running < below) for n, p in after.items()}, rule) == []


@given(st.integers(1, 4000), st.integers(1, 40_000), st.integers(0, 2**32))
def test_no_request_goes_to_and_fro_whatever_the_plans(prompt: int, answer: int, seed: int) -> None:
    """Someone who wants it moved all the time, at any chunk, gets the number of moves and the cost of the docstring."""
    rng = random.Random(seed)
    length = num_sent = prompt
    costs: list[int] = []
    while length < prompt + answer:
        length = min(prompt + answer, length + rng.randint(1, 64))
        if has_doubled(length, num_sent):
            costs.append(length)
            num_sent = length
    assert len(costs) <= math.log2(length / prompt)
    assert sum(costs) <= 2 * length
