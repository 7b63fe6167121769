"""The last requests of a replica move to another one: whole answers, exact segments, and who may not move."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from rollout.engine.interface import EngineLoad
from rollout.fleet import generation as dispatch
from rollout.fleet.consolidation import Repacking
from rollout.fleet.engine_monitor import LOOK_S, LoadWatch
from rollout.fleet.scheduler import Router, Turnstile
from rollout.types import SamplingParams
from tests.fakes.engine_client import FakeEngine, expected_answer
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker import generated, item, segments, worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.fleet.engine_monitor import LoadReport
    from rollout.worker.worker import RolloutWorker

MAX_TOKENS = 60
ANSWER = expected_answer(item().prompt.token_ids, MAX_TOKENS)
CALM = EngineLoad(running=0, waiting=0, kv_usage_frac=None, num_preemptions=None)
STEP_S = 0.2
"""Per chunk of three tokens; an answer takes 4 s, and is twice its prompt after one chunk."""
RULE: dict[str, Any] = {
    "repacking": Repacking(below=6, most=64),
    "sampling": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7),
}


def engine(name: str, **changes: Any) -> FakeEngine:
    return FakeEngine(name, **({"said_load": CALM, "step_s": STEP_S} | changes))


@contextlib.asynccontextmanager
async def watched(busy: RolloutWorker) -> AsyncIterator[RolloutWorker]:
    watching = asyncio.create_task(busy.watch_loads())
    try:
        yield busy
        assert not watching.done()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def begin(busy: RolloutWorker, *numbers: int, **fields: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(busy.run_group(item(group_id=number, **fields))) for number in numbers]


def in_flight(report: LoadReport) -> dict[str, int]:
    return {name: one.in_flight for name, one in report.replicas.items()}


def test_the_last_group_of_a_replica_goes_on_with_the_others_and_the_next_new_one_finds_it_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "MAX_FRUITLESS_SUBMISSIONS", 1)  # a move is none

    async def main() -> None:
        lone, crowded = engine("e0", version=1), engine("e1", version=2)
        async with watched(worker(lone, crowded, **RULE)) as busy:
            early = begin(busy, 0, 1, 2, start_version=1)  # e0 gets 0 and 2
            await asyncio.sleep(0.01)
            late = begin(busy, 3, start_version=1)  # and e1 gets 1 and 3
            early[2].cancel()
            await asyncio.sleep(LOOK_S + STEP_S)
            assert in_flight(busy.loads()) == {"e0": 0, "e1": 12}
            (call,) = [call for call in lone.calls if call.request_ids[0].startswith("g0.")]
            assert call.is_closed
            moved = crowded.calls[-1]
            assert moved.request_ids[0].startswith("g0.")
            assert len(moved.token_ids) == 4, "the group stays together"
            lengths = [len(tokens) for tokens in moved.token_ids]
            assert min(lengths) >= 2 * 3
            report = busy.loads()
            assert (report.moved_requests, report.moved_tokens) == (4, sum(lengths))
            kept = lengths[0] - 3
            group, *_ = await asyncio.gather(early[0], early[1], *late)
            assert all(generated(trajectory) == ANSWER for trajectory in group.trajectories)
            assert {tuple(segments(t)) for t in group.trajectories} == {((1, kept), (2, MAX_TOKENS - kept))}
            assert busy.loads().moved_requests == 4, "each moved once"
            assert len(lone.calls) == 2
            assert busy.quarantined == {}
            new = begin(busy, 9, start_version=1)
            await asyncio.sleep(0.01)
            assert in_flight(busy.loads()) == {"e0": 4, "e1": 0}
            await new[0]

    run_virtual(main())


def test_every_submission_has_a_seed_of_its_own_also_after_a_move() -> None:
    async def main() -> None:
        engines = [engine("e0"), engine("e1")]
        async with watched(worker(*engines, **RULE)) as busy:
            await asyncio.gather(*begin(busy, 0, 1))
            assert busy.loads().moved_requests == 4
            seeds = [params.seed for one in engines for call in one.calls for params in call.params]
            assert len(seeds) == len(set(seeds)) == 12

    run_virtual(main())


async def _without_a_move(busy: RolloutWorker, *numbers: int) -> None:
    async with watched(busy):
        await asyncio.gather(*begin(busy, *numbers))
        assert (busy.loads().moved_requests, busy.loads().moved_tokens) == (0, 0)


def test_nothing_moves_without_the_rule() -> None:
    async def main() -> None:
        await _without_a_move(worker(engine("e0"), engine("e1"), sampling=RULE["sampling"]), 0, 1, 2)

    run_virtual(main())


class Guest:
    group_key, may_leave, num_asked = "g0", True, 0

    def leave(self) -> None:
        self.num_asked += 1


@pytest.mark.parametrize(("is_held", "limit", "moves"), [(False, 6, True), (True, 6, False), (False, 3, False)])
def test_nothing_moves_while_something_waits_to_be_sent_or_beyond_a_limit(
    is_held: bool, limit: int, moves: bool
) -> None:
    """Under a limit of six, three requests have room for one more beside them, but not for the four that wait."""

    async def main() -> None:
        turnstile, guest = Turnstile(Router(["e0", "e1"])), Guest()
        watch = LoadWatch(
            {"e0": engine("e0"), "e1": engine("e1")},
            turnstile,
            bounds=None,
            silence_timeout_s=100.0,
            give_up=lambda _name, _reason: None,
            repacking=RULE["repacking"],
        )
        for group, num in (("g0", 1), ("g1", 3)):
            await turnstile.enter(group, (0, 0), tokens=100 * num, num_requests=num)
        turnstile.limit("e0", 1)
        turnstile.limit("e1", limit)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(watch.run())]
        if is_held:
            tasks += [asyncio.create_task(turnstile.enter("g2", (0, 2), tokens=1, num_requests=4))]
        async with turnstile.stay("e0", guest):
            await asyncio.sleep(LOOK_S + 0.1)
        assert turnstile.num_held == 4 * is_held
        assert guest.num_asked == moves
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_virtual(main())


def test_a_request_moves_only_once_it_is_twice_as_long_as_it_came() -> None:
    """One token per 0.3 s after three of prompt: the first look sees one, the second one three."""

    async def main() -> None:
        engines = [engine(name, step_s=0.3, chunk_tokens=1) for name in ("e0", "e1")]
        async with watched(worker(*engines, **RULE)) as busy:
            await asyncio.gather(*begin(busy, 0, 1))
            assert [len(tokens) for tokens in engines[1].calls[-1].token_ids] == [6] * 4

    run_virtual(main())


def test_nothing_moves_to_a_replica_that_no_longer_answers() -> None:
    class Mute(FakeEngine):
        async def load(self) -> EngineLoad:
            if self.calls:
                await asyncio.sleep(10_000)
            return await super().load()

    async def main() -> None:
        engines = [engine("e0", step_s=1.0), Mute("e1", step_s=1.0, said_load=CALM)]
        async with watched(worker(*engines, **RULE)) as busy:
            await asyncio.sleep(LOOK_S + 0.1)
            await asyncio.gather(*begin(busy, 0, 1))
            assert busy.loads().moved_requests == 0
            assert busy.quarantined == {}

    run_virtual(main())


def test_a_replica_that_says_nothing_takes_no_part() -> None:
    async def main() -> None:
        await _without_a_move(worker(engine("e0"), engine("e1", said_load=None), **RULE), 0, 1)

    run_virtual(main())


def test_a_replica_at_rest_gives_nothing_and_gets_nothing() -> None:
    async def main() -> None:
        async with watched(worker(engine("e0"), engine("e1"), **RULE)) as busy:
            groups = begin(busy, 0, 1)
            await asyncio.sleep(0.01)
            busy.rest("e0")
            await asyncio.gather(*groups)
            assert busy.loads().moved_requests == 0

    run_virtual(main())


def test_requests_that_others_sent_count_for_what_a_replica_has() -> None:
    async def main() -> None:
        crowd = EngineLoad(running=30, waiting=0, kv_usage_frac=None, num_preemptions=None)
        await _without_a_move(worker(engine("e0", said_load=crowd), engine("e1", said_load=crowd), **RULE), 0, 1)

    run_virtual(main())


def test_nothing_moves_to_a_replica_in_which_requests_wait() -> None:
    async def main() -> None:
        queue = EngineLoad(running=7, waiting=1, kv_usage_frac=None, num_preemptions=None)
        await _without_a_move(worker(engine("e0"), engine("e1", said_load=queue), **RULE), 0, 1)

    run_virtual(main())


def test_requests_go_on_when_the_replica_that_is_to_be_free_dies_before_it_gives_them_back() -> None:
    class Deaf(FakeEngine):
        def abort(self, request_ids: Any) -> None:
            pass

    async def main() -> None:
        deaf = Deaf("e0", said_load=CALM, step_s=STEP_S)
        async with watched(worker(deaf, engine("e1"), **RULE)) as busy:
            groups = begin(busy, 0, 1)
            await asyncio.sleep(LOOK_S + STEP_S)
            assert busy.loads().moved_requests == 0
            busy.quarantine("e0", "weight sync: dead")
            for group in await asyncio.gather(*groups):
                assert all(generated(trajectory) == ANSWER for trajectory in group.trajectories)

    run_virtual(main())
