"""The last requests of a replica move to another one: whole answers, exact segments, and who may not move."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from rollout.engine.interface import EngineStatus
from rollout.fleet import generation as dispatch
from rollout.fleet.consolidation import ConsolidationRule
from rollout.types import SamplingParams
from tests.fakes.engine_client import FakeEngine, expected_answer
from tests.fakes.local_actor import view_of, watched
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker import generated, item, segments, worker
from trainer.driver.engine_monitor import POLL_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.worker.worker import RolloutWorker

MAX_TOKENS = 60
ANSWER = expected_answer(item().prompt.token_ids, MAX_TOKENS)
CALM = EngineStatus(running=0, waiting=0, kv_usage_frac=None, num_preemptions=None)
STEP_S = 0.2
"""Per chunk of three tokens; an answer takes 4 s, and is twice its prompt after one chunk."""
RULE: dict[str, Any] = {
    "repacking": ConsolidationRule(below=6, most=64),
    "sampling": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7),
}


def engine(name: str, **changes: Any) -> FakeEngine:
    return FakeEngine(name, **({"said_load": CALM, "step_s": STEP_S} | changes))


@contextlib.asynccontextmanager
async def watching(*engines: FakeEngine, **rule: Any) -> AsyncIterator[RolloutWorker]:
    busy = worker(*engines, **rule)
    async with watched(busy, *engines):
        yield busy


def begin(busy: RolloutWorker, *numbers: int, **fields: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(busy.run_group(item(group_id=number, **fields))) for number in numbers]


def test_the_last_group_of_a_replica_goes_on_with_the_others_and_the_next_new_one_finds_it_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "MAX_FRUITLESS_SUBMISSIONS", 1)  # a move is none

    async def main() -> None:
        lone, crowded = engine("e0", version=1), engine("e1", version=2)
        async with watching(lone, crowded, **RULE) as busy:
            early = begin(busy, 0, 1, 2, start_version=1)  # e0 gets 0 and 2
            await asyncio.sleep(0.01)
            late = begin(busy, 3, start_version=1)  # and e1 gets 1 and 3
            early[2].cancel()
            await asyncio.sleep(POLL_S + STEP_S)
            assert busy.report().in_flight == {"e0": 0, "e1": 12}
            (call,) = [call for call in lone.calls if call.request_ids[0].startswith("g0.")]
            assert call.is_closed
            moved = crowded.calls[-1]
            assert moved.request_ids[0].startswith("g0.")
            assert len(moved.token_ids) == 4, "the group stays together"
            lengths = [len(tokens) for tokens in moved.token_ids]
            assert min(lengths) >= 2 * 3
            report = busy.report()
            assert (report.migrated_requests, report.migrated_tokens) == (4, sum(lengths))
            kept = lengths[0] - 3
            group, *_ = await asyncio.gather(early[0], early[1], *late)
            assert all(generated(trajectory) == ANSWER for trajectory in group.trajectories)
            assert {tuple(segments(t)) for t in group.trajectories} == {((1, kept), (2, MAX_TOKENS - kept))}
            assert busy.report().migrated_requests == 4, "each moved once"
            assert len(lone.calls) == 2
            assert busy.report().lost_engines == {}
            new = begin(busy, 9, start_version=1)
            await asyncio.sleep(0.01)
            assert busy.report().in_flight == {"e0": 4, "e1": 0}
            await new[0]

    run_virtual(main())


def test_every_submission_has_a_seed_of_its_own_also_after_a_move() -> None:
    async def main() -> None:
        engines = [engine("e0"), engine("e1")]
        async with watching(*engines, **RULE) as busy:
            await asyncio.gather(*begin(busy, 0, 1))
            assert busy.report().migrated_requests == 4
            seeds = [params.seed for one in engines for call in one.calls for params in call.params]
            assert len(seeds) == len(set(seeds)) == 12

    run_virtual(main())


async def _without_a_move(*engines: FakeEngine, numbers: tuple[int, ...] = (0, 1), **rule: Any) -> None:
    async with watching(*engines, **rule) as busy:
        await asyncio.gather(*begin(busy, *numbers))
        assert (busy.report().migrated_requests, busy.report().migrated_tokens) == (0, 0)


def test_nothing_moves_without_the_rule() -> None:
    async def main() -> None:
        await _without_a_move(engine("e0"), engine("e1"), sampling=RULE["sampling"], numbers=(0, 1, 2))

    run_virtual(main())


class Holder:
    group_key, may_leave, num_asked = "g0", True, 0

    def leave(self) -> None:
        self.num_asked += 1


@pytest.mark.parametrize(("is_queued", "limit", "moves"), [(False, 6, True), (True, 6, False), (False, 3, False)])
def test_nothing_moves_while_something_waits_to_be_sent_or_beyond_a_limit(
    is_queued: bool, limit: int, moves: bool
) -> None:
    """Under a limit of six, three requests have room for one more beside them, but not for the four that wait."""

    async def main() -> None:
        engines, holder = [engine("e0"), engine("e1")], Holder()
        busy = worker(*engines, **RULE)
        scheduler, queued = busy._scheduler, []
        for group, num in (("g0", 1), ("g1", 3)):
            await scheduler.acquire(group, (0, 0), tokens=100 * num, num_requests=num)
        scheduler.limit("e0", 1)
        scheduler.limit("e1", limit)
        if is_queued:
            queued = [asyncio.create_task(scheduler.acquire("g2", (0, 2), tokens=1, num_requests=4))]
        async with watched(busy, *engines), scheduler.holding("e0", holder):
            await asyncio.sleep(2 * POLL_S + 0.1)
        assert scheduler.num_queued == 4 * is_queued
        assert holder.num_asked == moves
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)

    run_virtual(main())


def test_a_request_moves_only_once_it_is_twice_as_long_as_it_came() -> None:
    """One token per 0.3 s after three of prompt: the first look sees one, the second one three."""

    async def main() -> None:
        engines = [engine(name, step_s=0.3, chunk_tokens=1) for name in ("e0", "e1")]
        async with watching(*engines, **RULE) as busy:
            await asyncio.gather(*begin(busy, 0, 1))
            assert [len(tokens) for tokens in engines[1].calls[-1].token_ids] == [6] * 4

    run_virtual(main())


def test_nothing_moves_to_a_replica_that_no_longer_answers() -> None:
    class Mute(FakeEngine):
        async def load(self) -> EngineStatus:
            if self.calls:
                await asyncio.sleep(10_000)
            return await super().load()

    async def main() -> None:
        engines = [engine("e0", step_s=1.0), Mute("e1", step_s=1.0, said_load=CALM)]
        async with watching(*engines, **RULE) as busy:
            await asyncio.sleep(POLL_S + 0.1)
            await asyncio.gather(*begin(busy, 0, 1))
            assert busy.report().migrated_requests == 0
            assert busy.report().lost_engines == {}

    run_virtual(main())


def test_a_replica_that_says_nothing_takes_no_part() -> None:
    async def main() -> None:
        await _without_a_move(engine("e0"), engine("e1", said_load=None), **RULE)

    run_virtual(main())


def test_a_pinned_engine_gives_nothing_and_gets_nothing() -> None:
    async def main() -> None:
        engines = [engine("e0"), engine("e1")]
        busy = worker(*engines, **RULE)
        async with watched(busy, *engines) as fleet:
            groups = begin(busy, 0, 1)
            await asyncio.sleep(0.01)
            await fleet.pin("e0")
            await asyncio.gather(*groups)
            assert busy.report().migrated_requests == 0

    run_virtual(main())


def test_requests_that_others_sent_count_for_what_a_replica_has() -> None:
    async def main() -> None:
        crowd = EngineStatus(running=30, waiting=0, kv_usage_frac=None, num_preemptions=None)
        await _without_a_move(engine("e0", said_load=crowd), engine("e1", said_load=crowd), **RULE)

    run_virtual(main())


def test_nothing_moves_to_a_replica_in_which_requests_wait() -> None:
    async def main() -> None:
        queue = EngineStatus(running=7, waiting=1, kv_usage_frac=None, num_preemptions=None)
        await _without_a_move(engine("e0"), engine("e1", said_load=queue), **RULE)

    run_virtual(main())


def test_requests_go_on_when_the_replica_that_is_to_be_free_dies_before_it_gives_them_back() -> None:
    class Deaf(FakeEngine):
        def abort(self, request_ids: Any) -> None:
            pass

    async def main() -> None:
        deaf = Deaf("e0", said_load=CALM, step_s=STEP_S)
        async with watching(deaf, engine("e1"), **RULE) as busy:
            groups = begin(busy, 0, 1)
            await asyncio.sleep(POLL_S + STEP_S)
            assert busy.report().migrated_requests == 0
            busy.update(view_of(e0="lost"), {})
            for group in await asyncio.gather(*groups):
                assert all(generated(trajectory) == ANSWER for trajectory in group.trajectories)

    run_virtual(main())
