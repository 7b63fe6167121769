"""Ends engine processes whose owner was killed, and removes their shared memory.

vLLM's engine process does not notice that its parent is gone: after a SIGKILL (out of memory, `ray.kill`) it lives on
with its device memory. Workers that it has notice that it is gone, but end of their own accord, and so never out of a
call to their device that hangs. A tiny process of its own session holds the reading end of a pipe; the kernel closes
the other end with the owner, however it dies. Can go when vLLM's processes are killed with their parents.

Tensor-parallel engines talk through named shared memory (hundreds of megabytes), which outlives processes that are
killed. What they have mapped of it when they are up, and at their end, is unlinked once they are dead. The process that
does this is a grandchild: Ray kills the children of an actor that it ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROGRAM = """
import os, signal, sys
NAMES = ("psm_", "vllm_dist_", "sem.mp-")
engines = list(zip(sys.argv[1::2], sys.argv[2::2]))
def birth(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""
def segments():
    found = set()
    for pid, born in engines:
        try:
            lines = open(f"/proc/{pid}/maps").read().splitlines() if birth(pid) == born else []
        except OSError:
            continue
        paths = (line.split(None, 5)[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)"))
        found.update(path for path in paths if path.startswith(tuple("/dev/shm/" + name for name in NAMES)))
    return found
left = segments()
if os.fork():
    os._exit(0)
print(flush=True)
sys.stdin.read()
left |= segments()
for pid, born in engines:
    if birth(pid) == born:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
for path in left:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
"""


class OrphanReaper:
    """Kills `pids` when this process ends, or with `close`, and unlinks their shared memory; those that are gone by now
    are left out. Start times are compared, so no reused pid is hit."""

    def __init__(self, pids: Sequence[int]) -> None:
        arguments = [text for pid in pids if (born := _birth(pid)) for text in (str(pid), born)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={},  # without the mark of the run, whose own reaper would end it before it is done
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has seen their shared memory, and is nobody's child
        self._process.wait()
        self._is_closed = False

    def close(self) -> None:
        """Kill what is left of them: the workers of an engine process that has crashed are nobody's, and nobody else
        knows their pids any more. Idempotent; takes milliseconds."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                self._process.communicate(timeout=5.0)


def _birth(pid: int) -> str:
    """Start time of a process in clock ticks since boot; field 22 of /proc/PID/stat. Empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""
