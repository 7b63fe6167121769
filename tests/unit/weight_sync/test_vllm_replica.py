"""AsyncLLMReplica around an engine that notes what was asked of it; test_weight_sync_vllm.py has a real one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.virtual_time import run_virtual
from weight_sync.messages import Reply, encode, reply_state
from weight_sync.vllm.replica import AsyncLLMReplica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weight_sync.messages import CommitResult

OK, FAILED, DIRTY = Reply(ok=True), Reply(ok=False, error="PullTimeout"), Reply(ok=False, error="X", dirty=True)


class Engine:
    """The calls of `AsyncLLM` that a replica makes. `answers` are the workers' next replies."""

    def __init__(self, *, has_fast_pause: bool = True) -> None:
        self.seen: list[object] = []
        self.answers: Sequence[Reply] = (OK, OK)
        self.is_paused = False
        self.pause_s = self.commit_s = self.resume_s = 0.0
        self.engine_core = self if has_fast_pause else object()

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        await asyncio.sleep(self.pause_s)
        self.seen.append(("pause", mode, clear_cache))
        self.is_paused = True

    async def resume_scheduler_async(self) -> None:
        await asyncio.sleep(self.resume_s)
        self.seen.append("resume")
        self.is_paused = False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self.pause_scheduler_async(mode, clear_cache)

    async def resume_generation(self) -> None:
        await self.resume_scheduler_async()

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[bytes]:
        assert self.is_paused or method != "ws_commit"
        await asyncio.sleep(self.commit_s)
        self.seen.append((method, *args))
        return [encode(answer) for answer in self.answers]


def replica_of(engine: Engine, **options: Any) -> AsyncLLMReplica:
    return AsyncLLMReplica(engine, name="r0", **options)


async def commit(replica: AsyncLLMReplica, version: int, *, timeout_s: float = 5.0) -> str:
    result = await replica.commit(version, "ws_commit", version, 1.0, timeout_s=timeout_s)
    return reply_state(result.results)


@pytest.mark.parametrize("has_fast_pause", [True, False], ids=["pauses the scheduler", "only the public calls"])
@pytest.mark.parametrize(
    ("in_flight", "mode", "clear_cache"),
    [("keep", "keep", False), ("recompute", "keep", True), ("abort", "abort", True)],
)
async def test_a_commit_pauses_calls_labels_and_resumes_in_this_order(
    in_flight: str, mode: str, clear_cache: bool, has_fast_pause: bool
) -> None:
    engine = Engine(has_fast_pause=has_fast_pause)
    replica = replica_of(engine, in_flight=in_flight, on_live=lambda version: engine.seen.append(("live", version)))
    assert (replica.version, await commit(replica, 7), replica.version) == (None, "ok", 7)
    assert engine.seen == [("pause", mode, clear_cache), ("ws_commit", 7, 1.0), ("live", 7), "resume"]
    assert replica.cache_salt == "v7"


def test_times_are_told_apart() -> None:
    engine = Engine()
    engine.pause_s, engine.commit_s, engine.resume_s = 0.05, 0.1, 0.02

    async def commit_at_virtual_time() -> CommitResult:
        replica = replica_of(engine, clock=asyncio.get_running_loop().time)
        return await replica.commit(1, "ws_commit", timeout_s=5.0)

    result = run_virtual(commit_at_virtual_time())
    assert result.drain_s == pytest.approx(0.05)
    assert result.pause_s == pytest.approx(0.12), "from the drain to the next step"
    assert result.resume_s == pytest.approx(0.02)


async def test_a_commit_that_changed_nothing_leaves_the_engine_generating_under_its_old_version() -> None:
    engine = Engine()
    replica = replica_of(engine)
    await commit(replica, 1)
    engine.answers = (FAILED, FAILED)
    assert await commit(replica, 2) == "failed"
    assert (replica.version, replica.is_dirty, engine.is_paused) == (1, False, False)


@pytest.mark.parametrize("answers", [(OK, DIRTY), (OK, FAILED), (DIRTY, DIRTY)])
async def test_a_mixture_stays_paused_until_a_commit_succeeds(answers: Sequence[Reply]) -> None:
    engine = Engine()
    replica = replica_of(engine)
    engine.answers = answers
    assert await commit(replica, 1) == "dirty"
    assert (replica.version, replica.is_dirty, engine.is_paused) == (None, True, True)
    engine.answers = (FAILED, FAILED)  # nobody wrote anything, so it still is one
    await commit(replica, 2)
    assert replica.is_dirty and engine.is_paused
    engine.answers = (OK, OK)
    await commit(replica, 2)
    assert (replica.version, replica.is_dirty, engine.is_paused) == (2, False, False)


async def test_workers_that_do_not_answer_may_hold_anything() -> None:
    engine = Engine()
    engine.commit_s = 10.0
    replica = replica_of(engine)
    with pytest.raises(TimeoutError, match=r"did not answer \w+ within [01]\.\d+ s; .*SyncOptions"):
        await commit(replica, 1, timeout_s=1.0)
    assert replica.is_dirty and engine.is_paused


async def test_an_engine_that_does_not_pause_in_time_goes_on() -> None:
    engine = Engine()
    engine.pause_s = 10.0
    replica = replica_of(engine)
    with pytest.raises(TimeoutError, match=r"did not pause within 0\.1 s; "):
        await commit(replica, 1, timeout_s=0.1)
    assert engine.seen == ["resume"]
    assert not replica.is_dirty


def test_a_caller_that_is_cancelled_leaves_no_engine_paused() -> None:
    engine = Engine()
    engine.commit_s = 0.1
    replica = replica_of(engine)

    async def cancel_in_the_commit() -> None:
        caller = asyncio.ensure_future(commit(replica, 1))
        await asyncio.sleep(0.03)
        assert engine.is_paused
        caller.cancel()
        await asyncio.sleep(0.2)

    run_virtual(cancel_in_the_commit())
    assert not engine.is_paused
    assert replica.version == 1
