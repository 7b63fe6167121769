"""Free and total memory of this host, as this process may use it: a container or a batch job may be given less."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Files(NamedTuple):
    """A version of control groups: where it is mounted under /sys/fs/cgroup, and what it calls things."""

    mounts: tuple[str, ...]
    limit: str
    used: str
    inactive: str
    """File cache counts as used but is given back on demand; this row of memory.stat says how much."""


_V2 = _Files((".", "unified"), "memory.max", "memory.current", "inactive_file")
_V1 = _Files(("memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(free, total) bytes: what the kernel calls available, capped by the limits of this process's control groups.

    A limit binds all groups below it, so each one from the process's own group up to the root counts. A group that
    cannot be read, as one outside a container, is skipped.
    """
    info = _table((root / "proc/meminfo").read_text().splitlines(), scale=1024)
    free, physical = info["MemAvailable"], info["MemTotal"]
    total = physical
    for files, group in _groups(root):
        limit, used = _number(group / files.limit), _number(group / files.used)
        if limit is None or used is None or limit >= physical:
            continue
        reclaimable = _table(_lines(group / "memory.stat")).get(files.inactive, 0)
        total = min(total, limit)
        free = min(free, max(0, limit - used + reclaimable))
    return free, total


def _groups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """Folders of the groups that hold this process, for both versions: its own, and all above it."""
    for files, own in ((_V2, _own_group(root, "")), (_V1, _own_group(root, "memory"))):
        for mount in files.mounts:
            for group in (own, *own.parents):
                yield files, root / "sys/fs/cgroup" / mount / group


def _own_group(root: Path, controller: str) -> PurePosixPath:
    """From /proc/self/cgroup, whose rows are number:controllers:/path; version 2 has no controllers there.

    The mount's root where there is no such row, and where the path leads out of the mount (`/../job`), as it does in a
    container that the process entered later.
    """
    for row in _lines(root / "proc/self/cgroup"):
        _, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        own = PurePosixPath(path.lstrip("/"))
        if controller in controllers.split(",") and ".." not in own.parts:
            return own
    return PurePosixPath()


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    """Empty if there is no such file, or it may not be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _table(lines: list[str], *, scale: int = 1) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in lines)
    return {row[0]: int(row[1]) * scale for row in rows if len(row) >= 2 and row[1].isdigit()}
