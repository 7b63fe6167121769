"""How long answers wait for room at an engine, as their `timings` say it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from rollout.agent.loop import MultiTurnLoop
from rollout.fleet.adaptive_limit import LimitRange
from rollout.types import SamplingParams
from tests.fakes.engine_client import FakeEngine
from tests.fakes.local_actor import view_of
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker import item, worker
from tests.unit.rollout.test_worker_agent import Countdown, Played, agent_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.agent.loop import Episode, Generate
    from rollout.types import Group, Prompt

ANSWER_S = 7.0
"""20 tokens, three in a second."""


def engine(name: str = "e0", **changes: Any) -> FakeEngine:
    return FakeEngine(name, step_s=1.0, **changes)


def room(num_requests: int) -> dict[str, Any]:
    return {"concurrency": LimitRange(lowest=num_requests, highest=num_requests)}


def waits(groups: Sequence[Group]) -> list[list[float]]:
    return [[round(t.timings["engine_wait_s"], 6) for t in group.generated] for group in groups]


def test_with_room_for_one_the_next_answers_wait_as_long_as_those_before_take() -> None:
    async def main() -> None:
        busy = worker(engine(), group_size=1, **room(1))
        groups = await asyncio.gather(*(busy.run_group(item(group_id=i)) for i in range(3)))
        assert waits(groups) == [[0.0], [ANSWER_S], [2 * ANSWER_S]]
        spent = [group.trajectories[0].timings["generate_s"] for group in groups]
        assert spent == pytest.approx([ANSWER_S, 2 * ANSWER_S, 3 * ANSWER_S]), "the wait is part of it"

    run_virtual(main())


def test_with_room_for_all_nobody_waits_and_an_evaluation_does_not_wait_for_training() -> None:
    async def main() -> None:
        busy = worker(engine(), greedy_baseline=True, **room(5))
        training = asyncio.create_task(busy.run_group(item()))
        evaluated = await busy.evaluate([item().prompt], SamplingParams(max_tokens=4), engine="e0")
        assert evaluated[0].timings["engine_wait_s"] == 0
        assert waits([await training]) == [[0.0] * 5]

    run_virtual(main())


def test_a_rest_of_the_only_engine_and_the_loss_of_one_count_as_waits() -> None:
    async def main() -> None:
        busy = worker(engine("e0", die_after_chunks=2), engine("e1"), group_size=1, **room(1))
        busy.update(view_of(e1="pinned"), {})
        running = asyncio.create_task(busy.run_group(item()))  # to e0, which is dead at 3 s
        await asyncio.sleep(8)
        busy.update(view_of(e1="live"), {})
        assert waits([await running]) == [[5.0]]

    run_virtual(main())


def test_waits_of_all_turns_of_an_answer_add_up() -> None:
    async def main() -> None:
        loop = MultiTurnLoop(lambda _: Countdown(2), max_turns=2)
        busy = agent_worker(loop, engine(stop_one_in=4), group_size=1, **room(1))
        alone = await agent_worker(loop, engine(stop_one_in=4), group_size=1).run_group(item())
        assert len(alone.trajectories[0].turns()) == 2
        groups = await asyncio.gather(*(busy.run_group(item(group_id=i)) for i in range(2)))
        generating_s = alone.trajectories[0].timings["generate_s"]
        for group in groups:
            (trajectory,) = group.trajectories
            waited_s = trajectory.timings["engine_wait_s"]
            assert waited_s > 0
            assert trajectory.timings["generate_s"] == pytest.approx(generating_s + waited_s)

    run_virtual(main())


def staggered() -> Any:
    """Asks in one turn, each trajectory a second after the one before."""
    calls = 0

    async def run(prompt: Prompt, max_tokens: int, generate: Generate) -> Episode:
        nonlocal calls
        calls += 1
        await asyncio.sleep(calls - 1)
        return await MultiTurnLoop(lambda _: Countdown(1), max_turns=1).run(prompt, max_tokens, generate)

    return Played(run)


def test_answers_of_a_group_have_waits_of_their_own() -> None:
    async def main() -> None:
        group = await agent_worker(staggered(), engine(), group_size=3, **room(1)).run_group(item())
        assert waits([group]) == [[0.0, ANSWER_S - 1, 2 * ANSWER_S - 2]]

    run_virtual(main())


def test_a_wait_that_is_given_up_counts() -> None:
    async def main() -> None:
        busy = agent_worker(staggered(), engine(), group_size=3, agent_timeout_s=8.5, **room(1))
        group = await busy.run_group(item())
        assert [t.status for t in group.trajectories] == ["truncated", "failed", "failed"]
        assert waits([group]) == [[0.0, ANSWER_S - 1, 8.5 - 2]], "the last one never came in"

    run_virtual(main())


def test_answers_that_are_all_given_up_give_their_place_up_at_once() -> None:
    async def thinks_instead(prompt: Prompt, max_tokens: int, generate: Generate) -> Episode:
        loop = MultiTurnLoop(lambda _: Countdown(1), max_turns=1)
        if prompt.prompt_id == "hasty":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(generate(prompt.token_ids, max_tokens), 1.0)
            await asyncio.sleep(4.0)
        return await loop.run(prompt, max_tokens, generate)

    async def main() -> None:
        busy = agent_worker(Played(thinks_instead), engine(), group_size=2, **room(2))
        groups = [asyncio.create_task(busy.run_group(item()))]
        await asyncio.sleep(0.5)
        groups.append(asyncio.create_task(busy.run_group(item(group_id=1, prompt_id="hasty"))))
        await asyncio.sleep(0.5)
        assert busy._scheduler.num_queued == 2
        await asyncio.sleep(1.0)
        assert (busy._scheduler.num_queued, groups[0].done()) == (0, False)
        await asyncio.gather(*groups)
        assert sum(busy._scheduler.outstanding_tokens.values()) == 0

    run_virtual(main())
