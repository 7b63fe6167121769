from __future__ import annotations

import asyncio

import pytest

from rollout.engine.weight_commit import AdmissionGate


async def test_closing_waits_for_requests_in_the_passage() -> None:
    gate, log = AdmissionGate(), []
    leave = asyncio.Event()

    async def enter() -> None:
        async with gate.passage():
            log.append("in")
            await leave.wait()
            log.append("out")

    async def close() -> None:
        async with gate.closed():
            log.append("closed")

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    closing = asyncio.create_task(close())
    await asyncio.sleep(0.01)
    assert log == ["in"]
    leave.set()
    await asyncio.gather(entering, closing)
    assert log == ["in", "out", "closed"]


async def test_nobody_passes_a_closed_gate_and_all_pass_when_it_opens() -> None:
    gate, passed = AdmissionGate(), []

    async def enter(name: int) -> None:
        async with gate.passage():
            passed.append(name)

    async with gate.closed():
        entering = [asyncio.create_task(enter(i)) for i in range(5)]
        await asyncio.sleep(0.01)
        assert passed == []
        assert gate.num_waiting == 5
    await asyncio.gather(*entering)
    assert sorted(passed) == [0, 1, 2, 3, 4]
    assert gate.num_waiting == 0


async def test_two_closers_take_turns() -> None:
    gate, inside, most = AdmissionGate(), 0, 0

    async def close() -> None:
        nonlocal inside, most
        async with gate.closed():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*[close() for _ in range(4)])
    assert most == 1


async def test_a_cancelled_waiter_or_a_failing_commit_does_not_block_the_gate() -> None:
    gate = AdmissionGate()

    async def enter() -> None:
        async with gate.passage():
            pass

    try:
        async with gate.closed():
            waiting = asyncio.create_task(enter())
            await asyncio.sleep(0)
            waiting.cancel()
            raise RuntimeError("commit failed")
    except RuntimeError:
        pass
    await asyncio.wait_for(enter(), 1)
    assert gate.num_waiting == 0


@pytest.mark.parametrize("turns", range(4))
async def test_a_request_that_is_cancelled_on_its_way_out_is_out(turns: int) -> None:
    """Ten pass one behind the other once the gate opens, and are cancelled wherever they are by then."""
    gate = AdmissionGate()

    async def enter() -> None:
        async with gate.passage():
            pass

    async with gate.closed():
        tasks = [asyncio.create_task(enter()) for _ in range(10)]
        await asyncio.sleep(0.001)
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(1), gate.closed():
        assert gate.num_waiting == 0
