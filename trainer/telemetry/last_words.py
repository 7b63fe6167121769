"""The records of a run whose driver was killed, or ended by Ray when its raylet had died."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from trainer.telemetry.run_dir import LOCK
from trainer.telemetry.session import Summary, write_summary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ACTOR_LOGS = "actor_logs"
MAX_LOG_BYTES = 4 * 2**20
"""Of the end of each actor log."""
KILLED = "the driver process was killed (SIGKILL), perhaps by the kernel for lack of memory"
RAYLET_DIED = "Ray ended the driver process because its raylet died, perhaps killed by the kernel for lack of memory"
GCS_DIED = "Ray ended the driver process because its control service (GCS) was gone for a minute"
_TRIES, _TRY_EVERY_S = 20, 0.05
"""The kernel takes a moment to free the lock of a killed process."""


def write(run_dir: Path, scratch: Path, known: Mapping[str, Any]) -> None:
    """Write summary.json, actor_logs and the last line of log.txt and of the screen; remove owner.lock. Nothing if the
    directory belongs to another process by now.

    Args:
        scratch: Ray's session directory, with the logs of driver and actors.
        known: `seed`, and `started_at` in Unix seconds.

    Raises:
        OSError: the directory is gone, or the disk refuses it.
    """
    with (run_dir / LOCK).open("r+") as lock:
        if not _is_locked(lock.fileno()):
            return
        reason = _reason(scratch)
        copy_logs(scratch, run_dir / ACTOR_LOGS)
        step, version = _last_step(run_dir / "metrics.jsonl")
        summary = Summary(
            exit_reason="failed",
            steps=step,
            version=version,
            wall_s=time.time() - known["started_at"],
            startup_s=None,
            first_accuracy=None,
            last_accuracy=None,
            seed=known["seed"],
            error=reason,
        )
        write_summary(run_dir / "summary.json", summary)
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        with (run_dir / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"{now}.000Z ERROR   {__name__}: {reason}\n")
        (run_dir / LOCK).unlink(missing_ok=True)
        sys.stderr.write(f"\nsee {run_dir / 'log.txt'} and {run_dir / ACTOR_LOGS}\nfailed: {reason}\n")


def copy_logs(scratch: Path, target: Path) -> None:
    """The end of what each actor printed, and the servers that they were forked from. Raises `OSError`."""
    logs = scratch / "session_latest" / "logs"
    for source in sorted([*logs.glob("worker-*.err"), *logs.glob("worker-*.out"), *scratch.glob("*.log")]):
        size = source.stat().st_size
        if not size:
            continue
        target.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as handle, (target / source.name).open("wb") as copy:
            handle.seek(max(0, size - MAX_LOG_BYTES))
            shutil.copyfileobj(handle, copy)


def _is_locked(descriptor: int) -> bool:
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_TRY_EVERY_S)
        else:
            return True
    return False


def _reason(scratch: Path) -> str:
    logs = (scratch / "session_latest" / "logs").glob("python-core-driver-*.log")
    lines = [line.lower() for log in logs for line in log.read_text(errors="replace").splitlines()[-20:]]
    if any("failed to connect to gcs within" in line for line in lines):
        return GCS_DIED
    return RAYLET_DIED if any("raylet" in line and "exit" in line for line in lines) else KILLED


def _last_step(metrics: Path) -> tuple[int, int]:
    """Step and version of the last whole record; (0, 0) if none can be read."""
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        last = json.loads([line for line in lines if line.endswith("\n")][-1])
        return int(last["step"]), int(last["version"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # none yet, or damaged
        return 0, 0
