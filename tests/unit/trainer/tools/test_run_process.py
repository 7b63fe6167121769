"""A run that is compared has a deadline, and leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.fakes.process_life import is_running, wait_until
from trainer import subprograms
from trainer.tools import bench
from trainer.tools.bench import run_trainer

if TYPE_CHECKING:
    from pathlib import Path

DEAF = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""
"""Does not end when it is asked to, and has a child."""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run in the place of `python -m trainer`."""
    words: list[str] = []
    monkeypatch.setattr(subprograms, "command", lambda module, *arguments: [sys.executable, "-c", *words])
    monkeypatch.setattr(bench, "TWO_SIGNALS_S", 0.1)
    monkeypatch.setattr(bench, "END_S", 0.1)
    return words


def test_a_run_that_does_not_end_in_time_is_killed_with_its_children(tmp_path: Path, program: list[str]) -> None:
    program.append(DEAF)
    outcome = run_trainer([], output=tmp_path / "output.txt", timeout_s=2.0)
    assert (outcome.timed_out, outcome.exit_code) == (True, -signal.SIGKILL)
    assert outcome.problem == "did not end within 2 s"
    (pid,) = map(int, outcome.output)
    wait_until(lambda: not is_running(pid), within_s=20.0, what="its child runs on")


def test_a_run_that_fails_is_reported_with_its_last_lines(tmp_path: Path, program: list[str]) -> None:
    program.append("print('one\\n\\ntwo'); raise SystemExit(3)")
    outcome = run_trainer([], output=tmp_path / "output.txt", timeout_s=30.0)
    assert (outcome.timed_out, outcome.problem) == (False, "exit code 3: one | two")
    program[:] = ["print('done')"]
    assert run_trainer([], output=tmp_path / "output.txt", timeout_s=30.0).problem == ""


def test_an_interrupt_leaves_no_run_behind(tmp_path: Path, program: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program.append("import signal; signal.pause()")
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_trainer([], output=tmp_path / "output.txt", timeout_s=30.0)
    assert started[0].returncode == -signal.SIGTERM
