"""Which Ctrl-C counts."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from trainer.pipeline.run import SAME_SIGNAL_S, Driver


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
