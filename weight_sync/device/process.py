"""The process that exported memory, and the vendor's libraries it has loaded."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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


def mapped_libraries(stem: str, maps: str) -> list[str]:
    """Paths of the shared objects named `stem` in the text of /proc/<pid>/maps, in order, each once.

    Wheels rename libraries they carry: `libcudart-1f2e.so.12` counts as `libcudart`.
    """
    name = re.compile(re.escape(stem) + r"(-[0-9a-f]+)?\.so(\.[0-9.]+)?")
    found = dict.fromkeys(
        parts[5] for line in maps.splitlines() if len(parts := line.split(maxsplit=5)) == 6 and parts[5].startswith("/")
    )
    return [path for path in found if name.fullmatch(Path(path).name)]


def load_library(stem: str, *, installed: Iterable[Path], sonames: Iterable[str] = ()) -> ctypes.CDLL:
    """Load `stem`: what this process has mapped, else the `installed` files that exist, else the system's search path.

    Raises:
        DeviceError: none of them could be loaded; the message lists what was tried.
    """
    candidates = mapped_libraries(stem, Path("/proc/self/maps").read_text())
    candidates += [str(path) for path in installed if path.exists()]
    candidates += list(sonames)
    on_search_path = ctypes.util.find_library(stem.removeprefix("lib"))
    if on_search_path is not None:
        candidates.append(on_search_path)
    failures = []
    for candidate in dict.fromkeys(candidates):
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            failures.append(f"{candidate}: {error}")
    tried = "; ".join(failures) if failures else "nothing of that name was found"
    raise DeviceError(f"cannot load {stem} ({tried}); install the vendor's runtime or put it on LD_LIBRARY_PATH")
