"""Who exported a block: enough to tell, later and in another process, whether that process still lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from weight_sync.device.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping


def describe_self() -> dict[str, str]:
    """Process id, start time and process-id namespace of this process, as handle attributes."""
    pid = os.getpid()
    return {"pid": str(pid), "start": _start_ticks(pid) or "", "pid_namespace": _pid_namespace()}


def is_self(attributes: Mapping[str, str]) -> bool:
    return all(attributes.get(key) == value for key, value in describe_self().items())


def require_alive(attributes: Mapping[str, str]) -> None:
    """Refuse a handle whose exporter is known to be gone.

    A process in another process-id namespace (another container) cannot be looked up; then the driver has to decide.

    Raises:
        DeviceError: the exporter has ended.
    """
    if attributes.get("pid_namespace") != _pid_namespace():
        return
    pid = attributes.get("pid", "")
    if not pid.isdigit() or _start_ticks(int(pid)) != attributes.get("start"):
        raise DeviceError(
            f"the process that exported this block (pid {pid or '?'}) has ended, and its memory with it; "
            "fetch a new handle from the process that replaces it"
        )


def _start_ticks(pid: int) -> str | None:
    """Start time in clock ticks since boot (field 22 of proc(5) stat); tells a reused pid from the old process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name (field 2) may contain spaces and parentheses: count from its last ")".
    fields = stat[stat.rindex(")") + 2 :].split()
    state, start = fields[0], fields[19]
    return None if state in {"Z", "X"} else start


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
