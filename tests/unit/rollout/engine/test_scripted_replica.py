"""What the replica of the simulations says of itself, in virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.types import SamplingParams
from tests.fakes.scripted_replica import ScriptedReplica, Workload
from tests.fakes.virtual_time import run_virtual

if TYPE_CHECKING:
    from rollout.engine.interface import EngineTimes

PROMPT = np.array([1, 2], np.int32)


async def consume(replica: ScriptedReplica, name: str, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens)
    async for _ in replica.stream_group([name], [PROMPT], [params]):
        pass


async def life() -> tuple[EngineTimes, EngineTimes, int]:
    workload = Workload(min_tokens=100, token_s=(0.1, 0.1), first_token_s=0.0)
    replica = ScriptedReplica("a", workload=workload, version=0, seed=0)

    async def times() -> EngineTimes:
        found = (await replica.load()).times
        assert found is not None
        return found

    await asyncio.sleep(5.0)
    first = asyncio.create_task(consume(replica, "first", 100))  # 10 s
    await asyncio.sleep(4.0)
    during = await times()
    await asyncio.gather(first, consume(replica, "second", 100))  # from 4 s on beside the first
    await asyncio.sleep(6.0)
    return during, await times(), replica.num_answers


def test_it_is_busy_while_it_has_any_request() -> None:
    during, after, num_answers = run_virtual(life())
    assert (during.busy_s, during.up_s) == pytest.approx((4.0, 9.0))
    assert (after.busy_s, after.up_s) == pytest.approx((14.0, 25.0))
    assert during.began_at == after.began_at
    assert num_answers == 2
