"""The picture of what the control plane costs; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

TARGET_MS = 1.0
GROUP_SIZE = 4
"""Answers per group, where a panel compares loads."""
Results = Sequence[dict[str, Any]]


def plot(virtual: Results, with_ray: Results, path: Path) -> None:
    """Cost against the load, and cost and memory against the length of the run."""
    import matplotlib as mpl  # pyright: ignore[reportMissingImports]

    mpl.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (loads, lengths, memory) = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    _draw_loads(loads, virtual, with_ray)
    _draw_lengths(lengths, memory, virtual, with_ray)
    for axes in (loads, lengths):
        axes.axhline(TARGET_MS, color="tab:red", linestyle="--", label=f"target {TARGET_MS:g} ms")
        axes.set(xscale="log", ylabel="CPU per trajectory [ms]")
        axes.set_ylim(bottom=0)
    memory.set(xscale="log", xlabel="length of the run [groups]", ylabel="largest memory [MiB]")
    memory.set_ylim(bottom=0)
    for axes in (loads, lengths, memory):
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _draw_loads(axes: Any, virtual: Results, with_ray: Results) -> None:
    one_process = [r for r in virtual if r["group_size"] == GROUP_SIZE]
    tuned = [r for r in one_process if r["rare_collections"]]
    default = [r for r in one_process if not r["rare_collections"]]
    x, y = "trajectories_in_flight_mean", "cpu_ms_per_trajectory"
    _line(axes, [r for r in with_ray if r["series"] == "load"], x, y, "o-", label="driver, with Ray")
    _line(axes, tuned, x, y, "s-", label="one process, without Ray")
    _line(axes, default, x, y, "x", label="the same, Python's own collector")
    axes.set(xlabel="trajectories in flight, mean", title=f"groups of {GROUP_SIZE}")


def _draw_lengths(axes: Any, memory: Any, virtual: Results, with_ray: Results) -> None:
    x, y = "groups_generated", "cpu_ms_per_trajectory"
    for size, marker in ((GROUP_SIZE, "o-"), (1, "^-")):
        rows = [r for r in with_ray if r["series"] == "length" and r["group_size"] == size]
        _line(axes, rows, x, y, marker, label=f"driver, with Ray, groups of {size}")
        _line(memory, rows, x, "private_max_mib", marker, label=f"driver, with Ray, groups of {size}")
    singles = [r for r in virtual if r["group_size"] == 1]
    _line(axes, singles, x, y, "s-", label="one process, groups of 1")
    _line(memory, singles, x, "rss_max_mib", "s-", label="one process, groups of 1")
    axes.set(xlabel="length of the run [groups]")


def _line(axes: Any, rows: Results, x: str, y: str, marker: str, *, label: str) -> None:
    rows = sorted(rows, key=lambda r: r[x])
    if rows:
        axes.plot([r[x] for r in rows], [r[y] for r in rows], marker, label=label)
