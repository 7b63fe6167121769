"""Which Ctrl-C counts."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, cast

import pytest

from trainer.driver.run import SAME_SIGNAL_S, Driver, _on_signals


class State:
    """What an interrupt changes."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self.stop_reason: str | None = None

    def stop(self, reason: str) -> None:
        self.stop_reason = reason
        self.stop_requested.set()


@pytest.mark.parametrize(
    ("after_s", "stops_at_once"),
    [((0.0, 0.2), False), ((0.0, SAME_SIGNAL_S), True), ((0.0, 0.4, 0.8, 1.2), True), ((0.0, 0.4, 0.8), False)],
)
async def test_a_second_ctrl_c_stops_at_once_however_many_come_in_between(
    monkeypatch: pytest.MonkeyPatch, after_s: tuple[float, ...], stops_at_once: bool
) -> None:
    loop, nothing = asyncio.get_running_loop(), cast("Any", None)
    state, work = State(), loop.create_future()
    driver = Driver(nothing, cast("Any", state), nothing, nothing)
    driver._is_training = True
    with monkeypatch.context() as patch:
        for seconds in after_s:
            patch.setattr(loop, "time", lambda seconds=seconds: 1000.0 + seconds)
            driver._interrupt(cast("Any", work))
    assert state.stop_reason == "interrupted"
    assert work.cancelled() is stops_at_once


@pytest.mark.parametrize(
    ("number", "is_ignored", "counts"),
    [
        (signal.SIGINT, False, True),
        (signal.SIGINT, True, True),  # as shells start what runs in the background
        (signal.SIGTERM, False, True),
        (signal.SIGHUP, False, True),
        (signal.SIGHUP, True, False),  # nohup
    ],
)
def test_a_closed_terminal_interrupts_as_ctrl_c_does_unless_under_nohup(
    number: int, is_ignored: bool, counts: bool
) -> None:
    calls: list[int] = []

    async def main() -> None:
        with _on_signals(lambda: calls.append(number)) as listen:
            listen()
            os.kill(os.getpid(), number)
            for _ in range(3):  # the loop reads its wakeup pipe
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)

    before = signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        asyncio.run(main())
        if not counts:
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert calls == [number] * counts
