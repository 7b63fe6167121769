"""What one case measured: what counts as a failure, and results for people and for programs."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weight_sync.bench.case import Case
    from weight_sync.messages import PullReport, SyncReport

    Window = tuple[float, float]
    """(start, stop) on the host's monotonic clock."""

RESOURCES = ("allocations", "registrations", "communicators", "sockets", "control_connections")
"""Counters of things made; they must not grow after the first sync."""
GROWTH_LIMIT_BYTES = 64 << 20
"""Less is noise: lazily loaded device code, heap that is not given back."""
ROWS = {
    "publish_s": "learner blocked (publish)",
    "seal_s": "seal, beside training",
    "pull_s": "pull, slowest worker",
    "attest_s": "attest",
    "drain_s": "step under way at a pause",
    "pause_s": "generation paused",
    "commit_s": "commit",
    "end_to_end_s": "end to end (sync)",
    "total_s": "publish + sync",
}


class SyncSample(NamedTuple):
    """One sync. Times on the host's monotonic clock."""

    published: float
    publish_s: float
    """How long the slowest learner was blocked."""
    total_s: float
    report: SyncReport
    pulls: Mapping[str, PullReport]
    """By worker ("r0/1")."""
    commits: Mapping[str, Window]
    """By replica."""

    def seconds(self, figure: str) -> float:
        return getattr(self if figure in self._fields else self.report, figure)


@dataclass(kw_only=True)
class Results:
    """Filled in while a case runs; whatever is there when it fails is still worth printing."""

    case: Case
    device: str = "no device"
    failures: list[str] = field(default_factory=list)
    case_s: float = 0.0
    start_s: float = 0.0
    open_s: float = 0.0
    transport: str = ""
    commit: str = ""
    worker_bytes: Mapping[str, int] = field(default_factory=dict)
    samples: list[SyncSample] = field(default_factory=list)
    memory: list[Mapping[str, int]] = field(default_factory=lambda: [{}, {}])
    """Bytes in use of every process, after the first sync and after the last."""
    counters: list[Mapping[str, int]] = field(default_factory=lambda: [{}, {}])
    """Likewise."""
    mismatches: list[str] = field(default_factory=list)
    baselines: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of its rounds, by name."""
    inexact: list[str] = field(default_factory=list)
    """Baselines after which an engine parameter was the same as before, or not what a weight sync leaves."""
    baselines_skipped: str = ""
    ceiling_s: list[float] = field(default_factory=list)
    """The slowest worker's plain copies."""
    generation: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Every reason why this case is not a success."""
        grown = [f"{name} grew by {by}" for name, by in _growth(self.counters).items() if name in RESOURCES and by > 0]
        growth = _growth(self.memory).items()
        grown += [f"memory of {name} grew by {by >> 20} MiB" for name, by in growth if by > GROWTH_LIMIT_BYTES]
        skipped = sum(sample.report.replicas_skipped for sample in self.samples)
        lost = self.generation.get("requests_lost", 0)
        return [
            *self.failures,
            *self.mismatches,
            *(f"{growth} after the first sync" for growth in grown),
            *(f"{name} and weight sync left different bytes in the engines" for name in self.inexact),
            *([f"replicas were left out {skipped} times"] if skipped else []),
            *([f"{lost} requests were lost"] if lost else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values. Of every phase median and maximum, in seconds, over the syncs that count."""
        plain = ("device", "transport", "commit", "start_s", "open_s", "case_s", "baselines_skipped", "generation")
        problems, samples = self.problems(), self.samples
        return {
            "case": msgspec.to_builtins(self.case),
            "label": self.case.label,
            "ok": not problems,
            "problems": problems,
            **{name: getattr(self, name) for name in plain},
            "num_syncs": len(samples),
            "figures": {name: spread([s.seconds(name) for s in samples]) for name in ROWS} if samples else {},
            "workers": dict(self._workers()),
            "ceiling": self._ceiling(),
            "baselines": {
                name: {"seconds": spread(seconds), "bit_exact": name not in self.inexact}
                for name, seconds in self.baselines.items()
            },
            "retries": sum(sample.report.num_retries for sample in samples),
            "mismatches": len(self.mismatches),
            "memory": _growth(self.memory),
            "counters": {name: by for name, by in _growth(self.counters).items() if name in RESOURCES},
        }

    def _workers(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Of each worker's pulls."""
        for name, nbytes in self.worker_bytes.items():
            if seconds := [sample.pulls[name].pull_s for sample in self.samples if name in sample.pulls]:
                p50 = statistics.median(seconds)
                yield name, {"bytes": nbytes, "pull_s_p50": p50, "gb_s_p50": rate(nbytes, p50)}

    def _ceiling(self) -> dict[str, float]:
        """`ratio` is that of the best copy to the median pull."""
        if not self.ceiling_s or not self.samples:
            return {}
        best, pulled = min(self.ceiling_s), statistics.median(sample.report.pull_s for sample in self.samples)
        times = {"s_best": best, "s_p50": statistics.median(self.ceiling_s)}
        ratio = best / pulled if pulled > 0 else math.inf
        return {**times, "gb_s_best": rate(max(self.worker_bytes.values()), best), "ratio": ratio}


def _growth(both: Sequence[Mapping[str, int]]) -> dict[str, int]:
    first, last = both
    return {name: value - first.get(name, value) for name, value in last.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and maximum."""
    return {"p50": statistics.median(values), "max": max(values)}


def rate(nbytes: int, seconds: float) -> float:
    """GB/s (10**9 bytes)."""
    return nbytes / seconds / 1e9 if seconds > 0 else math.inf


def table(it: Mapping[str, Any]) -> str:
    """A few lines that say everything of note of what `as_json` gave."""

    def ms(seconds: float) -> str:
        return f"{1000 * seconds:9.2f} ms"

    def both(figure: Mapping[str, float]) -> str:
        return f"{ms(figure['p50'])} p50 {ms(figure['max'])} max"

    def generation(name: str, value: float) -> str:
        return (
            f"{value:9.0f} per s" if name.endswith("tokens_s") else ms(value) if name.endswith("_s") else f"{value:9d}"
        )

    rows = [(ROWS[name], both(figure)) for name, figure in it["figures"].items()]
    rows += [
        (f"worker {name}", f"{ms(of['pull_s_p50'])} p50 {of['gb_s_p50']:8.1f} GB/s ({of['bytes'] / 1e9:.3f} GB)")
        for name, of in it["workers"].items()
    ]
    if of := it["ceiling"]:
        reached = f"{ms(of['s_best'])} best, {of['gb_s_best']:.1f} GB/s; pulls reach {of['ratio']:.3f} of it"
        rows.append(("ceiling (plain copies)", f"{ms(of['s_p50'])} p50 {reached}"))
    rows += [
        (name, f"{both(of['seconds'])}, {'bit-exact' if of['bit_exact'] else 'DIFFERS'}")
        for name, of in it["baselines"].items()
    ]
    rows += [(name.removesuffix("_s"), generation(name, value)) for name, value in it["generation"].items()]
    lines = [f"{it['label']} on {it['device']}: {it['transport'] or 'not opened'}, {it['commit']}"]
    lines += [f"  {name:<28}{text}" for name, text in rows]
    if it["baselines_skipped"]:
        lines.append(f"  no baselines: {it['baselines_skipped']}")
    if it["num_syncs"]:
        grown = {name: by for name, by in it["counters"].items() if by > 0}
        lines.append(
            f"  {it['num_syncs']} syncs, {it['retries']} retries, {it['mismatches']} mismatches, memory grew by "
            f"{max(it['memory'].values(), default=0) / 2**20:.1f} MiB, counters grew: {grown or 'none'}"
        )
    lines.append(f"  start {it['start_s']:.1f} s, open {it['open_s']:.2f} s, whole case {it['case_s']:.1f} s")
    return "\n".join([*lines, *(f"  FAILED: {problem}" for problem in it["problems"])]) + "\n"
