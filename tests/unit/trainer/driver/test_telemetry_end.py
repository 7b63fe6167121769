"""What a run still says when it is over and its records are not yet written."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from tests.fakes.scripted_run import config
from trainer.telemetry import session as telemetry
from trainer.telemetry.run_dir import open_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

WRITING = "writing the responses of evaluations"


class Screen(io.StringIO):
    """Calls `seen` when the end of the run says what it waits for."""

    def __init__(self, seen: Callable[[], object]) -> None:
        super().__init__()
        self._seen = seen

    def write(self, text: str, /) -> int:
        if f"{WRITING} ..." in text:
            self._seen()
        return super().write(text)


def end_of_run(tmp_path: Path, screen: Screen, work: Callable[[], object]) -> list[str]:
    """Lines on the screen of a run that leaves this work to its end."""
    cfg = replace(config(telemetry={"progress": "plain"}), run_dir=str(tmp_path / "run"))
    run_dir = open_run_dir(cfg)
    try:
        with telemetry.opened(cfg, run_dir, Console(file=screen, width=200)) as sinks:
            sinks.slow_thread.submit(work)
    finally:
        run_dir.close()
    return screen.getvalue().splitlines()


def test_answers_that_take_long_to_write_are_told_while_the_run_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "QUIET_S", 0.01)
    told, waited = threading.Event(), []
    lines = end_of_run(tmp_path, Screen(told.set), lambda: waited.append(told.wait(10)))
    assert waited == [True], "it was told before the answers were written"
    assert lines[0] == f"{WRITING} ..."
    assert lines[1].startswith(f"{WRITING} ... ")


def test_answers_that_are_written_at_once_are_not_worth_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "QUIET_S", 60.0)
    assert end_of_run(tmp_path, Screen(lambda: None), lambda: None) == []
