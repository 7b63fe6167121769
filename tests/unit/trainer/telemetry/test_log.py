"""Everything goes to log.txt; the screen gets what a person can read."""

from __future__ import annotations

import io
import logging
import threading
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.fakes.full_disk import file_limit
from trainer.telemetry.console import logging_to

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_traceback_goes_to_the_file_and_its_first_cause_to_the_screen(tmp_path: Path, is_terminal: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, color_system=None, width=200)
    with logging_to(tmp_path / "log.txt", level="info", console=console):
        try:
            raise RuntimeError("rank 0 failed") from OSError("disk full")
        except RuntimeError:
            logging.getLogger("trainer.test").exception("the run failed in step %d", 3)
    logged = (tmp_path / "log.txt").read_text()
    assert "Traceback" in logged
    assert "OSError: disk full" in logged
    assert "the run failed in step 3: OSError: disk full" in screen.getvalue()
    assert "Traceback" not in screen.getvalue()


def test_only_warnings_of_third_parties_reach_the_screen(tmp_path: Path) -> None:
    screen = io.StringIO()
    with logging_to(tmp_path / "log.txt", level="info", console=Console(file=screen)):
        logging.getLogger("someone").info("chatter")
        logging.getLogger("someone").warning("trouble")
        logging.getLogger("trainer.x").info("ours")
    assert "chatter" not in screen.getvalue()
    assert "trouble" in screen.getvalue()
    assert "ours" in screen.getvalue()
    assert "chatter" in (tmp_path / "log.txt").read_text()


def test_lines_that_a_full_disk_refuses_are_counted_and_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, screen, log = tmp_path / "log.txt", io.StringIO(), logging.getLogger("trainer.x")
    with logging_to(path, level="info", console=Console(file=screen, width=200)):
        log.info("before")
        with file_limit(path.stat().st_size + 20):
            for number in range(3):
                log.info("refused %d", number)
        log.info("behind")
    kept = path.read_text()
    assert "before" in kept and kept.count("behind") == 1 and "could not take 3 lines" in kept
    assert screen.getvalue().count("could not take 3 lines") == 1
    assert "refused 2" in screen.getvalue()
    assert capsys.readouterr().err == "", "logging shows a traceback for each"
    with file_limit(path.stat().st_size), logging_to(path, level="info", console=Console(file=screen)):
        log.info("never taken")
    assert "never taken" not in path.read_text()


def test_an_error_that_ends_a_thread_is_in_the_log(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("the socket is gone")

    before, out = threading.excepthook, io.StringIO()
    with logging_to(tmp_path / "log.txt", level="info", console=Console(file=out)):
        thread = threading.Thread(target=fail, name="listener")
        thread.start()
        thread.join()
    assert threading.excepthook is before
    written = (tmp_path / "log.txt").read_text()
    assert "thread listener has failed" in written
    assert "Traceback" in written
    assert "thread listener has failed: ValueError: the socket is gone" in out.getvalue()
