"""The worker between groups and replicas: limits, rests, and replicas that are taken away while they generate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.engine.interface import EngineLoad
from rollout.fleet.adaptive_limit import Bounds
from rollout.fleet.engine_monitor import ANSWER_S, LOOK_S
from rollout.fleet.scheduler import NoReplica
from rollout.types import SamplingParams
from tests.fakes.engine_client import FakeEngine
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker import ANSWER, MAX_TOKENS, generated, item, segments, worker

CALM = EngineLoad(running=4, waiting=0, kv_usage_frac=0.3, num_preemptions=0)


def bounds(lowest: int, highest: int) -> dict[str, Any]:
    return {"concurrency": Bounds(lowest=lowest, highest=highest)}


class Counting(FakeEngine):
    """Notes how many requests it has at most, and whose calls come when."""

    most, now = 0, 0

    async def stream_group(self, request_ids: Any, token_ids: Any, params: Any) -> Any:
        self.now += len(request_ids)
        self.most = max(self.most, self.now)
        left = len(request_ids)
        try:
            async for index, chunk in super().stream_group(request_ids, token_ids, params):
                if chunk.finish_reason is not None:
                    self.now, left = self.now - 1, left - 1
                yield index, chunk
        finally:
            self.now -= left


def test_a_replica_never_has_more_than_its_limit_and_older_groups_come_first() -> None:
    async def main() -> None:
        engines = [Counting("e0"), Counting("e1")]
        busy = worker(*engines, **bounds(9, 9))
        numbers = [3, 9, 1, 7, 2, 8, 5, 6, 4, 0]
        groups = await asyncio.gather(*(busy.run_group(item(group_id=number)) for number in numbers))
        assert all(generated(t) == ANSWER for group in groups for t in group.trajectories)
        assert [engine.most for engine in engines] == [8, 8], "two groups of four each; three would be twelve"
        assert busy.loads().held == 0
        asked = [int(call.request_ids[0].split(".")[0][1:]) for engine in engines for call in engine.calls]
        assert sorted(asked) == sorted(numbers)
        for engine in engines:
            later = [int(call.request_ids[0].split(".")[0][1:]) for call in engine.calls[2:]]
            assert later == sorted(later)

    run_virtual(main())


def test_what_a_quarantined_replica_was_generating_goes_on_elsewhere_from_its_prefix() -> None:
    async def main() -> None:
        lost, other = FakeEngine("e0", version=1), FakeEngine("e1", version=2)
        busy = worker(lost, other)
        running = asyncio.create_task(busy.run_group(item(start_version=1)))
        await asyncio.sleep(0.035)  # three chunks of three tokens
        busy.quarantine("e0", "weight sync: dirty")
        group = await running
        assert all(generated(t) == ANSWER for t in group.trajectories)
        assert {tuple(segments(t)) for t in group.trajectories} == {((1, 9), (2, MAX_TOKENS - 9))}
        assert lost.calls[0].is_closed
        assert [len(tokens) for tokens in other.calls[0].token_ids] == [3 + 9] * 4
        assert busy.outstanding_tokens == {"e0": 0, "e1": 0}

    run_virtual(main())


def test_a_replica_that_hangs_in_a_pause_is_left_as_soon_as_it_is_quarantined() -> None:
    async def main() -> None:
        busy = worker(FakeEngine("e0", hangs=True), FakeEngine("e1"))
        running = asyncio.create_task(busy.run_group(item()))
        await asyncio.sleep(1.0)
        busy.quarantine("e0", "weight sync: dead")
        began = asyncio.get_running_loop().time()
        await running
        assert asyncio.get_running_loop().time() - began < 0.1

    run_virtual(main())


def test_quarantine_of_the_last_replica_fails_the_group_with_the_reason() -> None:
    async def main() -> None:
        busy = worker(FakeEngine("e0", hangs=True))
        running = asyncio.create_task(busy.run_group(item()))
        await asyncio.sleep(1.0)
        busy.quarantine("e0", "weight sync: dead")
        with pytest.raises(Exception, match="e0: weight sync: dead"):
            await running

    run_virtual(main())


def test_a_replica_at_rest_finishes_what_it_has_and_serves_an_evaluation_but_gets_no_new_group() -> None:
    async def main() -> None:
        leased, other = FakeEngine("e0", version=1), FakeEngine("e1", version=1)
        busy = worker(leased, other)
        running = asyncio.create_task(busy.run_group(item(group_id=0, start_version=1)))
        await asyncio.sleep(0.015)
        busy.rest("e0")
        other.version = 2  # a commit that passes e0 by
        new = await asyncio.gather(*(busy.run_group(item(group_id=i, start_version=2)) for i in range(1, 6)))
        assert {t.policy_versions for group in new for t in group.trajectories} == {(2,)}
        assert {t.policy_versions for t in (await running).trajectories} == {(1,)}
        evaluated = await busy.evaluate([item().prompt], SamplingParams(max_tokens=4, temperature=0.0), engine="e0")
        assert evaluated[0].policy_versions == (1,)
        assert busy.quarantined == {}
        leased.version = 2
        busy.resume("e0")
        await busy.run_group(item(group_id=7, start_version=2))
        assert len(leased.calls) == 3

    run_virtual(main())


def test_a_group_whose_engine_dies_while_the_other_one_is_evaluated_goes_on_there_from_what_it_has() -> None:
    async def main() -> None:
        dying, leased = FakeEngine("e0", die_after_chunks=8), FakeEngine("e1")
        busy = worker(dying, leased, request_timeout_s=60.0)
        busy.rest("e1")
        running = asyncio.create_task(busy.run_group(item()))
        await asyncio.sleep(50.0)
        assert not running.done()
        busy.resume("e1")
        assert {t.status for t in (await running).trajectories} == {"truncated"}
        assert [generated(t) for t in (await running).trajectories] == [ANSWER] * 4
        assert busy.loads().rescued_tokens == 8 * dying.chunk_tokens

    run_virtual(main())


def test_a_group_that_waits_too_long_for_the_end_of_an_evaluation_is_no_failure() -> None:
    """`NoReplica` costs it no retry; a time-out would."""

    async def main() -> None:
        busy = worker(FakeEngine("e0"), FakeEngine("e1"), request_timeout_s=60.0)
        busy.quarantine("e0", "weight sync: dead")
        busy.rest("e1")
        with pytest.raises(NoReplica, match=r"e1: at rest; e0: weight sync: dead"):
            await busy.run_group(item())
        assert asyncio.get_running_loop().time() == pytest.approx(60.0, abs=0.1)

    run_virtual(main())


def test_a_wait_for_room_counts_as_time_of_the_request() -> None:
    async def main() -> None:
        busy = worker(FakeEngine("e0", hangs=True), request_timeout_s=10.0, **bounds(4, 4))
        groups = [asyncio.create_task(busy.run_group(item(group_id=i))) for i in range(2)]
        for group in groups:
            with pytest.raises(TimeoutError):
                await group
        assert asyncio.get_running_loop().time() == pytest.approx(10.0, abs=0.1)
        assert (busy.loads().held, busy.outstanding_tokens) == (0, {"e0": 0})

    run_virtual(main())


def test_limits_follow_what_each_engine_says_and_a_new_engine_starts_over() -> None:
    async def main() -> None:
        calm, full, silent = FakeEngine("a", said_load=CALM), FakeEngine("b"), FakeEngine("c")
        full.said_load = EngineLoad(running=4, waiting=0, kv_usage_frac=0.99, num_preemptions=0)
        for engine in (calm, full, silent):
            engine.hangs = True
        busy = worker(calm, full, silent, **bounds(1, 8))
        watching = asyncio.create_task(busy.watch_loads())
        groups = [asyncio.create_task(busy.run_group(item(group_id=i))) for i in range(6)]
        await asyncio.sleep(LOOK_S + 0.1)
        report = busy.loads()
        assert {name: one.limit for name, one in report.replicas.items()} == {"a": 8, "b": 4, "c": 8}
        assert {name: one.in_flight for name, one in report.replicas.items()} == {"a": 8, "b": 8, "c": 8}
        assert (report.replicas["b"].load, report.replicas["c"].load) == (full.said_load, None)
        busy.replace(FakeEngine("b", said_load=CALM))
        assert busy.loads().replicas["b"].limit == 8
        await asyncio.sleep(2 * LOOK_S)
        assert not watching.done()
        for task in (*groups, watching):
            task.cancel()
        await asyncio.gather(*groups, watching, return_exceptions=True)

    run_virtual(main())


def test_an_engine_that_does_not_answer_delays_no_look_at_the_others_for_long() -> None:
    class Mute(FakeEngine):
        async def load(self) -> EngineLoad:
            await asyncio.sleep(10_000)
            raise AssertionError

    async def main() -> None:
        busy = worker(FakeEngine("a", said_load=CALM), Mute("b"), **bounds(1, 8))
        watching = asyncio.create_task(busy.watch_loads())
        await asyncio.sleep(LOOK_S + 0.1)
        assert busy.loads().replicas["a"].load == CALM
        await asyncio.sleep(3 * (LOOK_S + ANSWER_S))
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    run_virtual(main())


def test_samples_of_an_evaluation_have_seeds_of_their_own_which_repeat() -> None:
    async def main() -> None:
        engine = FakeEngine("e0")
        busy, prompt = worker(engine), item(prompt_id="test/1").prompt
        params = SamplingParams(max_tokens=4, temperature=0.8)
        for _ in range(2):
            await busy.evaluate([prompt] * 3, params, engine="e0")
        first, second = ([one.seed for one in call.params] for call in engine.calls)
        assert first == second
        assert len(set(first)) == 3
        assert None not in first

    run_virtual(main())
