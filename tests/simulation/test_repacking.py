"""Requests that move so that replicas are free, in whole runs: every promise holds, and a request moves seldom."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.scripted_replica import ScriptedReplica, Workload
from tests.simulation.fleet import Plan
from tests.simulation.test_control_plane import check_promises, check_tables, play, quiet

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from rollout.types import FinishReason
    from tests.simulation.world import Simulation

__all__ = ["quiet"]


@dataclass
class Notes:
    """What the replicas were sent, and when they had something to do."""

    sent: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Sample of an attempt at a group -> its tokens, each time that it was sent to a replica."""
    spells: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Replica -> (beginning, end) of every call."""

    def busy_s(self) -> float:
        """Sum over replicas of the time with at least one call."""
        total = 0.0
        for spells in self.spells.values():
            until = 0.0
            for begin, end in sorted(spells):
                total += max(0.0, end - max(begin, until))
                until = max(until, end)
        return total


@contextlib.contextmanager
def notes() -> Iterator[Notes]:
    """Of the scripted replicas in this block."""
    taken, stream_group = Notes(), ScriptedReplica.stream_group

    async def noting(self: ScriptedReplica, request_ids: Any, token_ids: Any, params: Any) -> Any:
        for request_id, tokens in zip(request_ids, token_ids, strict=True):
            taken.sent[request_id.rpartition("/")[0]].append(len(tokens))
        clock = asyncio.get_running_loop().time
        begin = clock()
        try:
            async with aclosing(stream_group(self, request_ids, token_ids, params)) as stream:
                async for item in stream:
                    yield item
        finally:
            taken.spells[self.name].append((begin, clock()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedReplica, "stream_group", noting)
        yield taken


def moved(run: Simulation) -> tuple[int, int]:
    """Requests and tokens."""
    reports = [local.worker.report() for local in run.workers]
    return sum(one.migrated_requests for one in reports), sum(one.migrated_tokens for one in reports)


worlds: dict[str, Any] = {
    "num_steps": st.integers(2, 12),
    "groups_per_step": st.integers(1, 6),
    "max_staleness": st.integers(0, 3),
    "group_size": st.integers(1, 4),
    "num_replicas": st.integers(2, 5),
    "num_workers": st.integers(1, 2),
    "workload": st.builds(
        Workload,
        min_tokens=st.sampled_from([1, 16]),
        tail=st.sampled_from([0.7, 1.2, 3.0]),
        first_token_s=st.sampled_from([0.0, 0.2]),
        stream_interval=st.sampled_from([1, 7, 64]),
        kv_requests=st.sampled_from([4, 64]),
    ),
    "max_response_tokens": st.sampled_from([20, 200, 800]),
    "train_s": st.sampled_from([0.0, 1.0, 30.0]),
    "sync_s": st.sampled_from([0.0, 1.0]),
    "pause_s": st.sampled_from([0.0, 3.0]),
    "most_requests": st.sampled_from([0, 4, 16]),
    "repack_below": st.integers(2, 20),
    "seed": st.integers(0, 2**32),
}
troubles: dict[str, Any] = {
    "aborts_at_commit": st.booleans(),
    "death_every_s": st.sampled_from([0.0, 3.0, 20.0]),
    "restart_s": st.sampled_from([0.0, 10.0, 500.0]),
    "max_restarts": st.sampled_from([0, 1, 1000]),
    "reward_error_frac": st.sampled_from([0.0, 0.1]),
    "group_error_frac": st.sampled_from([0.0, 0.0, 0.1]),
    "max_retries": st.integers(0, 2),
}


@settings(max_examples=80, deadline=None)
@given(st.builds(Plan, **worlds, **troubles))
def test_every_promise_holds_while_requests_move(plan: Plan) -> None:
    run = play(plan)
    check_promises(run)
    check_tables(run)


@settings(max_examples=50, deadline=None)
@given(plan=st.builds(Plan, **worlds))
def test_a_request_moves_only_at_twice_its_length_and_its_moves_cost_at_most_twice_its_tokens(plan: Plan) -> None:
    """Where no replica is lost and no commit gives anything back, whatever is sent again has moved."""
    with notes() as taken:
        run = play(plan)
    check_promises(run)
    num_moved = num_tokens = 0
    for lengths in taken.sent.values():
        assert all(after >= 2 * before for before, after in pairwise(lengths))
        assert sum(lengths[1:]) <= 2 * lengths[-1]
        num_moved, num_tokens = num_moved + len(lengths) - 1, num_tokens + sum(lengths[1:])
    assert moved(run) == (num_moved, num_tokens)


CAP = 4000


class LongTailed(Workload):
    """A response that continues elsewhere ends where it would have: its length is drawn above what it has."""

    def draw_tokens(self, rng: random.Random, budget: int) -> tuple[int, FinishReason]:
        so_far = CAP - budget
        left = max(1, int(max(self.min_tokens, so_far) * rng.paretovariate(self.tail)) - so_far)
        return (left, "stop") if left < budget else (budget, "length")


def long_tailed(**changes: Any) -> Plan:
    sizes: dict[str, Any] = {"num_steps": 80, "groups_per_step": 8, "group_size": 4, "num_replicas": 4}
    workload = LongTailed(tail=1.3, token_s=(0.02, 0.02), first_token_s=0.0)
    return Plan(**(sizes | {"workload": workload, "max_response_tokens": CAP, "train_s": 5.0, "seed": 3} | changes))


def test_replicas_are_free_for_longer_at_the_price_of_some_prefixes() -> None:
    """The figures of docs/rollout.md, at 200 steps."""
    tokens_per_busy_s: dict[int, float] = {}
    for below in (0, 8):
        with notes() as taken:
            run = play(long_tailed(repack_below=below))
        check_promises(run)
        num_trained = sum(run.books.ages.values())
        tokens_per_busy_s[below] = num_trained / taken.busy_s()
        num_moved, num_tokens = moved(run)
        assert (num_moved > 0) == (below > 0)
        assert num_tokens < 0.25 * num_trained
    assert tokens_per_busy_s[8] > 1.1 * tokens_per_busy_s[0]
