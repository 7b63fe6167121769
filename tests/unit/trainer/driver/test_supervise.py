from __future__ import annotations

import asyncio

import pytest

from tests.fakes.virtual_time import run_virtual
from trainer.driver.supervise import Supervisor


async def after(seconds: float, error: Exception | None = None) -> None:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error


def supervised(main_s: float, *tasks: tuple[float, Exception | None, bool]) -> float:
    """Runs `main` beside tasks of (seconds, error, may_end); returns the time at the end."""

    async def run() -> float:
        async with Supervisor() as supervisor:
            for index, (seconds, error, may_end) in enumerate(tasks):
                supervisor.spawn(after(seconds, error), name=f"task {index}", may_end=may_end)
            await supervisor.until(after(main_s))
        await asyncio.sleep(0)  # what was cancelled last ends in this turn
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return asyncio.get_running_loop().time()

    return run_virtual(run())


def test_the_end_of_the_main_task_ends_everything() -> None:
    assert supervised(3.0, (100.0, None, False), (200.0, OSError(), True)) == pytest.approx(3.0)


def test_the_first_failure_wins_and_comes_at_once() -> None:
    with pytest.raises(OSError, match="first"):
        supervised(9.0, (2.0, ValueError("second"), False), (1.0, OSError("first"), True))


def test_a_helper_that_fails_with_the_main_task_is_the_cause() -> None:
    async def run() -> None:
        failed = asyncio.Event()

        async def helper() -> None:
            failed.set()
            raise OSError("cause")

        async def main() -> None:
            await failed.wait()
            raise ValueError("consequence")

        async with Supervisor() as supervisor:
            supervisor.spawn(helper(), name="helper")
            await supervisor.until(main())

    with pytest.raises(OSError, match="cause"):
        run_virtual(run())


def test_a_loop_that_ends_early_is_an_error_that_names_it() -> None:
    with pytest.raises(RuntimeError, match="task 1 ended early"):
        supervised(9.0, (100.0, None, False), (1.0, None, False))


def test_a_task_that_may_end_may_end() -> None:
    assert supervised(9.0, (1.0, None, True)) == pytest.approx(9.0)


def test_a_helper_that_was_spawned_later_is_watched_too() -> None:
    async def run() -> None:
        async with Supervisor() as supervisor:

            async def main() -> None:
                await asyncio.sleep(1)
                supervisor.spawn(after(1, OSError("late")), name="late")
                await asyncio.sleep(100)

            await supervisor.until(main())

    with pytest.raises(OSError, match="late"):
        run_virtual(run())


def test_nothing_is_left_running_after_a_failure() -> None:
    ended: list[str] = []

    async def cleaning_up() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(5)
            ended.append("clean")

    async def run() -> None:
        with pytest.raises(OSError, match="boom"):
            async with Supervisor() as supervisor:
                supervisor.spawn(cleaning_up(), name="slow")
                supervisor.spawn(after(1, OSError("boom")), name="bad")
                await supervisor.until(cleaning_up())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())
    assert ended == ["clean", "clean"]


def test_a_cancelled_run_cancels_everything() -> None:
    async def run() -> None:
        async with Supervisor() as supervisor:
            supervisor.spawn(asyncio.sleep(1000), name="sleeper")
            await supervisor.until(after(1000))

    async def main() -> None:
        task = asyncio.create_task(run())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
