"""The worker between groups and replicas: limits, rests, and replicas that are taken away while they generate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.engine.interface import EngineStatus
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import EngineView, FleetView
from rollout.types import SamplingParams
from tests.fakes.engine_client import FakeEngine
from tests.fakes.local_actor import view_of
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker import ANSWER, MAX_TOKENS, generated, item, segments, worker

CALM = EngineStatus(running=4, waiting=0, kv_usage_frac=0.3, num_preemptions=0)


def bounds(lowest: int, highest: int) -> dict[str, Any]:
    return {"concurrency": LimitRange(lowest=lowest, highest=highest)}


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
        assert busy.report().num_queued == 0
        asked = [int(call.request_ids[0].split(".")[0][1:]) for engine in engines for call in engine.calls]
        assert sorted(asked) == sorted(numbers)
        for engine in engines:
            later = [int(call.request_ids[0].split(".")[0][1:]) for call in engine.calls[2:]]
            assert later == sorted(later)

    run_virtual(main())


def test_what_a_lost_engine_was_generating_goes_on_elsewhere_from_its_prefix() -> None:
    async def main() -> None:
        lost, other = FakeEngine("e0", version=1), FakeEngine("e1", version=2)
        busy = worker(lost, other)
        running = asyncio.create_task(busy.run_group(item(start_version=1)))
        await asyncio.sleep(0.035)  # three chunks of three tokens
        busy.update(view_of(e0="lost"), {})
        group = await running
        assert all(generated(t) == ANSWER for t in group.trajectories)
        assert {tuple(segments(t)) for t in group.trajectories} == {((1, 9), (2, MAX_TOKENS - 9))}
        assert lost.calls[0].is_closed
        assert [len(tokens) for tokens in other.calls[0].token_ids] == [3 + 9] * 4
        assert busy._scheduler.outstanding_tokens == {"e0": 0, "e1": 0}

    run_virtual(main())


def test_a_replica_that_hangs_in_a_pause_is_left_as_soon_as_it_is_lost() -> None:
    async def main() -> None:
        busy = worker(FakeEngine("e0", hangs=True), FakeEngine("e1"))
        running = asyncio.create_task(busy.run_group(item()))
        await asyncio.sleep(1.0)
        busy.update(view_of(e0="lost"), {})
        began = asyncio.get_running_loop().time()
        await running
        assert asyncio.get_running_loop().time() - began < 0.1

    run_virtual(main())


def test_the_loss_of_the_last_engine_fails_the_group_with_the_reason() -> None:
    async def main() -> None:
        busy = worker(FakeEngine("e0", hangs=True))
        running = asyncio.create_task(busy.run_group(item()))
        await asyncio.sleep(1.0)
        busy.update(view_of(e0="lost"), {})
        with pytest.raises(Exception, match="e0: weight sync: dead"):
            await running

    run_virtual(main())


def test_a_pinned_engine_finishes_what_it_has_and_serves_an_evaluation_but_gets_no_new_group() -> None:
    async def main() -> None:
        leased, other = FakeEngine("e0", version=1), FakeEngine("e1", version=1)
        busy = worker(leased, other)
        running = asyncio.create_task(busy.run_group(item(group_id=0, start_version=1)))
        await asyncio.sleep(0.015)
        busy.update(view_of(e0="pinned"), {})
        other.version = 2  # a commit that passes e0 by
        new = await asyncio.gather(*(busy.run_group(item(group_id=i, start_version=2)) for i in range(1, 6)))
        assert {t.policy_versions for group in new for t in group.trajectories} == {(2,)}
        assert {t.policy_versions for t in (await running).trajectories} == {(1,)}
        evaluated = await busy.evaluate([item().prompt], SamplingParams(max_tokens=4, temperature=0.0), engine="e0")
        assert evaluated[0].policy_versions == (1,)
        assert busy.report().lost_engines == {}
        leased.version = 2
        busy.update(view_of(e0="live"), {})
        await busy.run_group(item(group_id=7, start_version=2))
        assert len(leased.calls) == 3

    run_virtual(main())


def test_a_group_whose_engine_dies_while_the_other_one_is_evaluated_goes_on_there_from_what_it_has() -> None:
    async def main() -> None:
        dying, leased = FakeEngine("e0", die_after_chunks=8), FakeEngine("e1")
        busy = worker(dying, leased, request_timeout_s=60.0)
        busy.update(view_of(e1="pinned"), {})
        running = asyncio.create_task(busy.run_group(item()))
        await asyncio.sleep(50.0)
        assert not running.done()
        busy.update(view_of(e1="live"), {})
        assert {t.status for t in (await running).trajectories} == {"truncated"}
        assert [generated(t) for t in (await running).trajectories] == [ANSWER] * 4
        assert busy.report().recovered_tokens == 8 * dying.chunk_tokens

    run_virtual(main())


def test_a_group_that_waits_too_long_for_the_end_of_an_evaluation_is_no_failure() -> None:
    """`NoReplica` costs it no retry; a time-out would."""

    async def main() -> None:
        busy = worker(FakeEngine("e0"), FakeEngine("e1"), request_timeout_s=60.0)
        busy.update(view_of(e0="lost", e1="pinned"), {})
        with pytest.raises(NoReplica, match=r"e1: pinned; e0: weight sync: dead"):
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
        assert (busy.report().num_queued, busy._scheduler.outstanding_tokens) == (0, {"e0": 0})

    run_virtual(main())


def test_limits_follow_loads_that_are_new_and_a_new_engine_starts_over() -> None:
    full = EngineStatus(running=4, waiting=0, kv_usage_frac=0.99, num_preemptions=0)

    def view(num_polls: int, *, incarnation: int = 0) -> FleetView:
        loads = {"a": CALM, "b": full, "c": None}
        engines = {
            name: EngineView(incarnation=incarnation, state="live", load=load, num_polls=num_polls)
            for name, load in loads.items()
        }
        return FleetView(epoch=1, engines=engines, handles={})

    async def main() -> None:
        busy = worker(*(FakeEngine(name, hangs=True) for name in "abc"), **bounds(1, 8))
        groups = [asyncio.create_task(busy.run_group(item(group_id=i))) for i in range(6)]
        await asyncio.sleep(0.1)
        assert busy.update(view(0), {}).limits == {"a": 8, "b": 8, "c": 8}, "nothing is known yet"
        for _ in range(2):
            report = busy.update(view(1), {})
            assert report.limits == {"a": 8, "b": 4, "c": 8}, "told twice, it counts once"
            assert report.in_flight == {"a": 8, "b": 8, "c": 8}
        new = busy.update(view(0, incarnation=1), {"b": FakeEngine("b")})
        assert new.limits == {"a": 8, "b": 8, "c": 8}
        for task in groups:
            task.cancel()
        await asyncio.gather(*groups, return_exceptions=True)

    run_virtual(main())


def test_an_engine_that_this_worker_lost_stays_out_until_a_new_one_takes_its_place() -> None:
    async def main() -> None:
        busy = worker(FakeEngine("e0", die_after_chunks=0), FakeEngine("e1"))
        await busy.run_group(item())
        assert busy.update(view_of(e0="live"), {}).lost_engines == {"e0": (0, "e0 was killed")}
        assert list(busy.update(view_of(e0="starting", incarnation=1), {}).lost_engines) == ["e0"]
        new = FakeEngine("e0")
        assert busy.update(view_of(e0="live", incarnation=1), {"e0": new}).lost_engines == {}
        await busy.run_group(item(group_id=6))
        assert len(new.calls) == 1

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
