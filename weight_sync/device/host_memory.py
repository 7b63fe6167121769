"""Free and total memory of this host, as a container sees it."""

from __future__ import annotations

from pathlib import Path


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(free, total) bytes: what the kernel calls available, capped by the control group's limit (v2 or v1)."""
    info = _table(root / "proc/meminfo", scale=1024)
    free, total = info["MemAvailable"], info["MemTotal"]
    cgroup = root / "sys/fs/cgroup"
    for limit_path, used_path, stat_path, inactive in (
        (cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat", "inactive_file"),
        (
            cgroup / "memory/memory.limit_in_bytes",
            cgroup / "memory/memory.usage_in_bytes",
            cgroup / "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, used = _number(limit_path), _number(used_path)
        if limit is None or used is None or limit >= total:
            continue
        # File cache counts as used but is given back on demand.
        reclaimable = _table(stat_path).get(inactive, 0) if stat_path.exists() else 0
        total = limit
        free = min(free, max(0, limit - used + reclaimable))
    return free, total


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _table(path: Path, *, scale: int = 1) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) * scale for row in rows if len(row) >= 2 and row[1].isdigit()}
