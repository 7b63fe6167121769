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
    """Publishing and commits, as their processes saw them."""

    def seconds(self, figure: str) -> float:
        if figure == "publish_s":  # how long the slowest learner was blocked
            return max(span.stopped - span.started for span in self.spans if span.phase == "publish")
        return self.stopped - self.started if figure == "total_s" else getattr(self.report, figure)

    def windows(self, worker: str) -> dict[str, Window]:
        """While bytes came in, and then their digests were taken. Reckoned from when the coordinator asked, so a
        message's way too early."""
        pull = self.pulls[worker]
        started = self.published + self.report.pin_s
        pulled = started + pull.pull_s
        return {"pull": (started, pulled), "attest": (pulled, pulled + pull.attest_s)}

    def timeline(self) -> list[dict[str, Any]]:
        """Phases in seconds since the start. Between a worker's digests and the commit are messages and the wait for a
        turn."""
        rows = [*self.spans, *((name, p, *window) for name in self.pulls for p, window in self.windows(name).items())]
        return [
            {"party": party, "phase": phase, "start_s": start - self.started, "stop_s": stop - self.started}
            for party, phase, start, stop in sorted(rows, key=lambda row: (row[0], row[2]))
        ]


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
        grown = [f"{name} grew by {by}" for name, by in self.grown_counters().items()]
        growth = self.memory_growth().items()
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

    def grown_counters(self) -> dict[str, int]:
        first, last = self.counters
        return {name: by for name in RESOURCES if (by := last.get(name, 0) - first.get(name, 0)) > 0}

    def memory_growth(self) -> dict[str, int]:
        first, last = self.memory
        return {name: nbytes - first.get(name, nbytes) for name, nbytes in last.items()}

    def figures(self) -> dict[str, dict[str, float]]:
        """Of every phase, in seconds, over the syncs that count."""
        return {name: spread(s.seconds(name) for s in self.samples) for name in ROWS} if self.samples else {}

    def worker_figures(self) -> dict[str, dict[str, float]]:
        """Seconds and GB/s of each worker's pulls."""
        found: dict[str, dict[str, float]] = {}
        for name, nbytes in self.worker_bytes.items():
            if seconds := [sample.pulls[name].pull_s for sample in self.samples if name in sample.pulls]:
                p50, slowest = spread(seconds).values()
                rates = {"gb_s_p50": rate(nbytes, p50), "gb_s_min": rate(nbytes, slowest)}
                found[name] = {"bytes": nbytes, "pull_s_p50": p50, "pull_s_max": slowest, **rates}
        return found

    def ceiling(self) -> dict[str, float]:
        """`ratio` is that of the best copy to the median pull."""
        if not self.ceiling_s or not self.samples:
            return {}
        copied, best, pulled = spread(self.ceiling_s), min(self.ceiling_s), self.figures()["pull_s"]["p50"]
        times = {"s_best": best, "s_p50": copied["p50"], "s_max": copied["max"]}
        ratio = best / pulled if pulled > 0 else math.inf
        return {**times, "gb_s_best": rate(max(self.worker_bytes.values()), best), "ratio": ratio}

    def typical(self) -> SyncSample | None:
        """The sync of median length."""
        ordered = sorted(self.samples, key=lambda sample: sample.stopped - sample.started)
        return ordered[len(ordered) // 2] if ordered else None

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values. `timeline` and `typical` are of the typical sync."""
        plain = ("device", "transport", "commit", "start_s", "open_s", "case_s", "baselines_skipped", "generation")
        problems, typical = self.problems(), self.typical()
        reports = {} if typical is None else {"sync": typical.report, "workers": typical.pulls}
        return {
            "case": msgspec.to_builtins(self.case),
            "label": self.case.label,
            "ok": not problems,
            "problems": problems,
            **{name: getattr(self, name) for name in plain},
            "num_syncs": len(self.samples),
            "figures": self.figures(),
            "workers": self.worker_figures(),
            "ceiling": self.ceiling(),
            "baselines": {
                name: {"seconds": spread(seconds), "bit_exact": name not in self.inexact}
                for name, seconds in self.baselines.items()
            },
            "retries": sum(sample.report.num_retries for sample in self.samples),
            "stalls": sum(sample.report.num_stalls for sample in self.samples),
            "mismatches": len(self.mismatches),
            "memory": {**dict(zip(("first", "last"), self.memory, strict=True)), "growth": self.memory_growth()},
            "counters": {**dict(zip(("first", "last"), self.counters, strict=True)), "grown": self.grown_counters()},
            "timeline": [] if typical is None else typical.timeline(),
            "typical": msgspec.to_builtins(reports),
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
    it = results.as_json()
    rows = [(ROWS[name], _p50_max(figure)) for name, figure in it["figures"].items()]
    rows += [
        (f"worker {name}", f"{_ms(of['pull_s_p50'])} p50 {of['gb_s_p50']:8.1f} GB/s ({of['bytes'] / 1e9:.3f} GB)")
        for name, of in it["workers"].items()
    ]
    if of := it["ceiling"]:
        reached = f"{_ms(of['s_best'])} best, {of['gb_s_best']:.1f} GB/s; pulls reach {of['ratio']:.3f} of it"
        rows.append(("ceiling (plain copies)", f"{_ms(of['s_p50'])} p50 {reached}"))
    rows += [
        (name, f"{_p50_max(of['seconds'])}, {'bit-exact' if of['bit_exact'] else 'DIFFERS'}")
        for name, of in it["baselines"].items()
    ]
    rows += [(name.removesuffix("_s"), _generation(name, value)) for name, value in it["generation"].items()]
    lines = [f"{it['label']} on {it['device']}: {it['transport'] or 'not opened'}, {it['commit']}"]
    lines += [f"  {name:<28}{text}" for name, text in rows]
    if it["baselines_skipped"]:
        lines.append(f"  no baselines: {it['baselines_skipped']}")
    if it["num_syncs"]:
        growth = max(it["memory"]["growth"].values(), default=0)
        lines.append(
            f"  {it['num_syncs']} syncs, {it['retries']} retries, {it['mismatches']} mismatches, "
            f"memory grew by {growth / 2**20:.1f} MiB, counters grew: {it['counters']['grown'] or 'none'}"
        )
    lines.append(f"  start {it['start_s']:.1f} s, open {it['open_s']:.2f} s, whole case {it['case_s']:.1f} s")
    return "\n".join([*lines, *(f"  FAILED: {problem}" for problem in it["problems"])]) + "\n"


def append_json(results: Results, path: Path) -> None:
    """One line per case, written as soon as the case is done."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(results.as_json()) + "\n")


def plot(results: Results, path: Path) -> str:
    """Draw the typical sync. Returns what was done, or why not."""
    typical = results.typical()
    if typical is None:
        return "no picture: no sync succeeded"
    try:
        matplotlib: Any = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = import_module("matplotlib.pyplot")
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib); the timeline is in the JSON"
    rows = typical.timeline()
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


def _generation(name: str, value: float) -> str:
    if name.endswith("tokens_s"):
        return f"{value:9.0f} per s"
    return _ms(value) if name.endswith("_s") else f"{value:9d}"


def _p50_max(figure: Mapping[str, float]) -> str:
    return f"{_ms(figure['p50'])} p50 {_ms(figure['max'])} max"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:9.2f} ms"
