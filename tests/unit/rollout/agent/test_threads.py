from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rollout.agent.threads import AllThreadsHang, UserThreads


async def test_threads_that_outlive_their_callers_are_counted_and_logged_until_they_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads, release = UserThreads("tool", max_threads=3), threading.Event()
    for number in (1, 2, 3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await threads.run(release.wait)
        assert threads.num_hanging == number
    assert [record.getMessage()[:12] for record in caplog.records] == ["1 of 3 threa", "2 of 3 threa"]
    began = time.monotonic()
    with pytest.raises(AllThreadsHang, match="all 3 threads for tools still run calls"):
        await threads.run(release.wait)
    assert time.monotonic() - began < 1.0, "it does not wait out its time"
    release.set()
    async with asyncio.timeout(5):
        while threads.num_hanging:
            await asyncio.sleep(0.01)
    assert await threads.run(int, "7") == 7
    threads.close()


async def test_a_call_that_never_got_a_thread_hangs_none() -> None:
    threads, release = UserThreads("agent", max_threads=1), threading.Event()
    running = asyncio.create_task(threads.run(release.wait, 5.0))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await threads.run(release.wait)
    assert threads.num_hanging == 0
    release.set()
    assert await running
    threads.close()
