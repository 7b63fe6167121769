"""`python -m trainer` as a child process whose every descendant is watched, so that a test can ask what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.fakes.process_life import command_line, is_running

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).resolve().parents[2]
LOOK_EVERY_S = 0.2


class TrainerProcess:
    """Starts at once, in a new session, in the environment of another `host` if asked. `close` stops what runs."""

    def __init__(
        self, run_dir: Path, *overrides: str, cache: Path, directory: Path = ROOT, host: Mapping[str, str] | None = None
    ) -> None:
        self.run_dir = run_dir
        self.output = run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.out")
        env = {**os.environ, "TANDEM_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        env |= {} if host is None else host
        # The suite may run under nohup, which would have a run ignore that its terminal is closed.
        command = ["env", "--default-signal=HUP", sys.executable, "-m", "trainer", f"run_dir={run_dir}"]
        command += ["telemetry.progress=plain", *overrides]
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=directory, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.pid = self._process.pid
        self._seen: dict[int, psutil.Process] = {}
        self._is_watching = True
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while self._is_watching:
            self._look()
            time.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        """Descendants by parenthood and by session; once seen, a process stays known,
        regardless of its parents."""
        for entry in (path.name for path in Path("/proc").iterdir()):
            if not entry.isdigit() or (pid := int(entry)) == self.pid or pid in self._seen:
                continue
            # Read by hand: this is done all the time, during runs that need the processor. A process may end meanwhile.
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                after_name = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                parent, session = int(after_name[1]), int(after_name[3])
                if {parent, session} & {self.pid, *self._seen}:
                    self._seen[pid] = psutil.Process(pid)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def names(self) -> set[str]:
        """Command lines of all descendants that run now."""
        return {command for process in list(self._seen.values()) if (command := command_line(process))}

    def process(self, name: str) -> psutil.Process:
        """The first descendant whose command line has `name` in it."""
        for process in list(self._seen.values()):
            if name in command_line(process):
                return process
        raise LookupError(f"no descendant is called {name}: {sorted(self.names)}")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl so far, without one that is still being written."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def until(self, condition: Callable[[], bool], *, timeout_s: float = 300.0) -> None:
        """Wait for a condition while the process runs. AssertionError with its last words otherwise."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process.poll() is None, f"ended with {self._process.returncode}:\n{self.text[-3000:]}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.text[-3000:]}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """What Ctrl-C on a terminal does: the whole foreground process group gets it."""
        os.killpg(self.pid, signal.SIGINT)

    def hang_up(self) -> None:
        """What the kernel does when a terminal is closed: its whole foreground process group gets it."""
        os.killpg(self.pid, signal.SIGHUP)

    def kill(self) -> None:
        """kill -9 of the driver alone."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, *, timeout_s: float = 600.0) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s} s:\n{self.text[-3000:]}") from None

    def left_over(self, *, within_s: float) -> list[str]:
        """Descendants and scratch directories that still exist after so long; returns early when there are none."""
        deadline = time.monotonic() + within_s
        while (left := self._running()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    @property
    def scratch(self) -> list[Path]:
        """Session directories of this driver's private cluster."""
        return list(Path(tempfile.gettempdir()).glob(f"tandem-ray-{self.pid}-*"))

    @property
    def num_seen(self) -> int:
        return len(self._seen)

    def close(self) -> None:
        """Kill what is left, so that a test that fails leaves nothing behind."""
        self._is_watching = False
        self._watcher.join()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        for process in self._seen.values():
            if is_running(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _running(self) -> list[str]:
        self._look()
        running = [process for process in list(self._seen.values()) if is_running(process)]
        return [f"{process.pid} {command_line(process)[:120]}" for process in running]
