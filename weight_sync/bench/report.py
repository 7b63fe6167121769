"""What one case measured: what counts as a failure, and results for people, for programs and for the eye."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from weight_sync.bench.case import Case
    from weight_sync.bench.processes import Span
    from weight_sync.messages import PullReport, SyncReport

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
COLORS = {"publish": "tab:orange", "pull": "tab:blue", "attest": "tab:cyan", "commit": "tab:red"}


@dataclass(frozen=True, kw_only=True)
class SyncSample:
    """One sync. Times on the host's monotonic clock."""

    started: float
    published: float
    stopped: float
    report: SyncReport
    pulls: Mapping[str, PullReport]
    """By worker ("r0/1")."""
    spans: Sequence[Span]

    def seconds(self, figure: str) -> float:
        if figure == "publish_s":  # how long the slowest learner was blocked
            return max(span.stopped - span.started for span in self.spans if span.phase == "publish")
        return self.stopped - self.started if figure == "total_s" else getattr(self.report, figure)

    def windows(self, worker: str) -> dict[str, tuple[float, float]]:
        """While bytes came in, and then their digests were taken. Reckoned from when the coordinator asked, so a
        message's way too early."""
        pull = self.pulls[worker]
        started = self.published + pull.lease_s
        pulled = started + pull.pull_s
        return {"pull": (started, pulled), "attest": (pulled, pulled + pull.attest_s)}

    def reports(self) -> dict[str, Any]:
        return msgspec.to_builtins({"sync": self.report, "workers": self.pulls})

    def timeline(self) -> list[dict[str, Any]]:
        """Phases in seconds since the start. Publishing and commits are as their processes saw them; between a worker's
        digests and the commit are messages and the wait for a turn."""
        rows = [*self.spans, *((name, *row) for name in self.pulls for row in _flat(self.windows(name)))]
        return [
            {"party": party, "phase": phase, "start_s": start - self.started, "stop_s": stop - self.started}
            for party, phase, start, stop in sorted(rows, key=lambda row: (row[0], row[2]))
        ]


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    seconds: Sequence[float]
    is_bit_exact: bool
    """Every engine parameter differs from before, and is what a weight sync of the same version leaves."""


@dataclass(kw_only=True)
class Results:
    """Filled in while a case runs; whatever is there when it fails is still worth printing."""

    case: Case
    device: str = "no device"
    failures: list[str] = field(default_factory=list)
    total_s: float = 0.0
    start_s: float = 0.0
    open_s: float = 0.0
    transport: str = ""
    commit: str = ""
    worker_bytes: Mapping[str, int] = field(default_factory=dict)
    samples: list[SyncSample] = field(default_factory=list)
    first_memory: Mapping[str, int] = field(default_factory=dict)
    last_memory: Mapping[str, int] = field(default_factory=dict)
    first_counters: Mapping[str, int] = field(default_factory=dict)
    last_counters: Mapping[str, int] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    baselines: dict[str, BaselineResult] = field(default_factory=dict)
    baselines_skipped: str = ""
    ceiling_s: list[float] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Every reason why this case is not a success."""
        grown = [f"{name} grew by {by}" for name, by in self.grown_counters().items()]
        grown += [
            f"memory of {name} grew by {by >> 20} MiB"
            for name, by in self.memory_growth().items()
            if by > GROWTH_LIMIT_BYTES
        ]
        wrong = [name for name, baseline in self.baselines.items() if not baseline.is_bit_exact]
        skipped = sum(sample.report.replicas_skipped for sample in self.samples)
        lost = self.generation.get("requests_lost", 0)
        return [
            *self.failures,
            *self.mismatches,
            *(f"{growth} after the first sync" for growth in grown),
            *(f"{name} and weight sync left different bytes in the engines" for name in wrong),
            *([f"replicas were left out {skipped} times"] if skipped else []),
            *([f"{lost} requests were lost"] if lost else []),
        ]

    def grown_counters(self) -> dict[str, int]:
        """Counters of resources that grew between the first sync and the last."""
        growth = {name: self.last_counters.get(name, 0) - self.first_counters.get(name, 0) for name in RESOURCES}
        return {name: by for name, by in growth.items() if by > 0}

    def memory_growth(self) -> dict[str, int]:
        """Process -> bytes in use after the last sync less those after the first."""
        return {name: last - self.first_memory.get(name, last) for name, last in self.last_memory.items()}

    def figures(self) -> dict[str, dict[str, float]]:
        """p50 and max over the syncs that count, of every phase, in seconds."""
        return {name: spread(s.seconds(name) for s in self.samples) for name in ROWS} if self.samples else {}

    def worker_figures(self) -> dict[str, dict[str, float]]:
        """Per worker: seconds and GB/s of its pulls."""
        found: dict[str, dict[str, float]] = {}
        for name, nbytes in self.worker_bytes.items():
            if seconds := [sample.pulls[name].pull_s for sample in self.samples if name in sample.pulls]:
                pull = spread(seconds)
                found[name] = {
                    "bytes": nbytes,
                    "pull_s_p50": pull["p50"],
                    "pull_s_max": pull["max"],
                    "gb_s_p50": rate(nbytes, pull["p50"]),
                    "gb_s_min": rate(nbytes, pull["max"]),
                }
        return found

    def ceiling(self) -> dict[str, float]:
        """The slowest worker's plain copies. `ratio` is that of the best of them to the median pull."""
        if not self.ceiling_s or not self.samples:
            return {}
        copied, best = spread(self.ceiling_s), min(self.ceiling_s)
        pulled = self.figures()["pull_s"]["p50"]
        return {
            "s_best": best,
            "s_p50": copied["p50"],
            "s_max": copied["max"],
            "gb_s_best": rate(max(self.worker_bytes.values()), best),
            "ratio": best / pulled if pulled > 0 else math.inf,
        }

    def num_retries(self) -> int:
        return sum(sample.report.num_retries for sample in self.samples)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values. `timeline` and `typical` are of the sync of median length."""
        ordered = sorted(self.samples, key=lambda sample: sample.stopped - sample.started)
        typical = ordered[len(ordered) // 2] if ordered else None
        problems = self.problems()
        return {
            "case": msgspec.to_builtins(self.case),
            "label": self.case.label,
            "ok": not problems,
            "problems": problems,
            "device": self.device,
            "transport": self.transport,
            "commit": self.commit,
            "num_syncs": len(self.samples),
            "start_s": self.start_s,
            "open_s": self.open_s,
            "case_s": self.total_s,
            "figures": self.figures(),
            "workers": self.worker_figures(),
            "ceiling": self.ceiling(),
            "baselines": {
                name: {"seconds": spread(baseline.seconds), "bit_exact": baseline.is_bit_exact}
                for name, baseline in self.baselines.items()
            },
            "baselines_skipped": self.baselines_skipped,
            "retries": self.num_retries(),
            "stalls": sum(sample.report.num_stalls for sample in self.samples),
            "mismatches": len(self.mismatches),
            "memory": {"first": self.first_memory, "last": self.last_memory, "growth": self.memory_growth()},
            "counters": {"first": self.first_counters, "last": self.last_counters, "grown": self.grown_counters()},
            "generation": self.generation,
            "timeline": [] if typical is None else typical.timeline(),
            "typical": {}
            if typical is None
            else msgspec.to_builtins({"sync": typical.report, "workers": typical.pulls}),
        }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and maximum."""
    found = list(values)
    return {"p50": statistics.median(found), "max": max(found)}


def rate(nbytes: int, seconds: float) -> float:
    """GB/s (10**9 bytes)."""
    return nbytes / seconds / 1e9 if seconds > 0 else math.inf


def table(results: Results) -> str:
    """A few lines that say everything of note."""
    lines = [f"{results.case.label} on {results.device}: {results.transport or 'not opened'}, {results.commit}"]
    found = [(ROWS[name], _p50_max(figure)) for name, figure in results.figures().items()]
    found += [
        (f"worker {name}", f"{_ms(it['pull_s_p50'])} p50 {it['gb_s_p50']:8.1f} GB/s ({it['bytes'] / 1e9:.3f} GB)")
        for name, it in results.worker_figures().items()
    ]
    if it := results.ceiling():
        reached = f"{_ms(it['s_best'])} best, {it['gb_s_best']:.1f} GB/s; pulls reach {it['ratio']:.3f} of it"
        found.append(("ceiling (plain copies)", f"{_ms(it['s_p50'])} p50 {reached}"))
    found += [
        (name, f"{_p50_max(spread(it.seconds))}, {'bit-exact' if it.is_bit_exact else 'DIFFERS'}")
        for name, it in results.baselines.items()
    ]
    found += [(name.removesuffix("_s"), _generation(name, value)) for name, value in results.generation.items()]
    lines += [f"  {name:<28}{text}" for name, text in found]
    if results.baselines_skipped:
        lines.append(f"  no baselines: {results.baselines_skipped}")
    if results.samples:
        growth = max(results.memory_growth().values(), default=0)
        lines.append(
            f"  {len(results.samples)} syncs, {results.num_retries()} retries, {len(results.mismatches)} mismatches, "
            f"memory grew by {growth / 2**20:.1f} MiB, counters grew: {results.grown_counters() or 'none'}"
        )
    lines.append(f"  start {results.start_s:.1f} s, open {results.open_s:.2f} s, whole case {results.total_s:.1f} s")
    lines += [f"  FAILED: {problem}" for problem in results.problems()]
    return "\n".join(lines) + "\n"


def append_json(results: Results, path: Path) -> None:
    """One line per case, written as soon as the case is done."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(results.as_json()) + "\n")


def plot(results: Results, path: Path) -> str:
    """Draw the timeline of the median sync. Returns what was done, or why not."""
    rows: list[dict[str, Any]] = results.as_json()["timeline"]
    if not rows:
        return "no picture: no sync succeeded"
    try:
        matplotlib: Any = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = import_module("matplotlib.pyplot")
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib); the timeline is in the JSON"
    parties = sorted({row["party"] for row in rows}, reverse=True)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.35 * len(parties)))
    for row in rows:
        start, width = 1000 * row["start_s"], 1000 * (row["stop_s"] - row["start_s"])
        axes.barh(parties.index(row["party"]), width, left=start, color=COLORS[row["phase"]], height=0.6)
    axes.set_yticks(range(len(parties)), parties)
    axes.set_xlabel("milliseconds since publish began")
    axes.set_title(f"{results.case.label}: one sync, {results.transport}")
    axes.legend(handles=[pyplot.Rectangle((0, 0), 1, 1, color=c, label=name) for name, c in COLORS.items()])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"picture: {path}"


def _flat(windows: Mapping[str, tuple[float, float]]) -> list[tuple[str, float, float]]:
    return [(phase, *window) for phase, window in windows.items()]


def _generation(name: str, value: float) -> str:
    if name.endswith("tokens_s"):
        return f"{value:9.0f} per s"
    return _ms(value) if name.endswith("_s") else f"{value:9d}"


def _p50_max(figure: Mapping[str, float]) -> str:
    return f"{_ms(figure['p50'])} p50 {_ms(figure['max'])} max"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:9.2f} ms"
