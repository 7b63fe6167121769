"""What one case measured, what counts as a failure, and the figures made from it. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weight_sync.bench.case import Case
    from weight_sync.bench.processes import Span
    from weight_sync.messages import PullReport, SyncReport

RESOURCES = ("allocations", "registrations", "communicators", "sockets", "control_sessions")
"""Counters of things made; they must stand still after the first sync."""
GROWTH_LIMIT_BYTES = 64 << 20
"""Less is noise: lazily loaded device code, heap that is not given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSample:
    """One sync. Times on the host's monotonic clock."""

    started: float
    published: float
    stopped: float
    publish_s: float
    """How long the slowest learner was blocked."""
    report: SyncReport
    pulls: Mapping[str, PullReport]
    """By worker ("r0/1")."""
    spans: Sequence[Span]

    def pull_window(self, worker: str) -> tuple[float, float]:
        """While bytes came in. Reckoned from when the coordinator asked, so a message's way too early."""
        pull = self.pulls[worker]
        started = self.published + pull.lease_s
        return started, started + pull.pull_s

    def attest_window(self, worker: str) -> tuple[float, float]:
        """While digests were taken, right after all bytes."""
        _, pulled = self.pull_window(worker)
        return pulled, pulled + self.pulls[worker].attest_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineResult:
    seconds: Sequence[float]
    is_bit_exact: bool
    """Left the same bytes in every engine parameter as a weight sync of the same version."""
    has_written: bool
    """Every engine parameter differs from what it held before."""


@dataclass(slots=True, kw_only=True)
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
        found = [*self.failures, *self.mismatches]
        found += [f"{name} grew by {by} after the first sync" for name, by in self.grown_counters().items()]
        found += [
            f"memory of {name} grew by {by >> 20} MiB after the first sync"
            for name, by in self.memory_growth().items()
            if by > GROWTH_LIMIT_BYTES
        ]
        for name, baseline in self.baselines.items():
            if not (baseline.is_bit_exact and baseline.has_written):
                found.append(f"{name} and weight sync left different bytes in the engines")
        skipped = sum(sample.report.replicas_skipped for sample in self.samples)
        if skipped:
            found.append(f"replicas were left out {skipped} times")
        lost = self.generation.get("requests_lost", 0)
        if lost:
            found.append(f"{lost} requests were lost")
        return found

    def grown_counters(self) -> dict[str, int]:
        """Counters of resources that grew between the first sync and the last."""
        growth = {name: self.last_counters.get(name, 0) - self.first_counters.get(name, 0) for name in RESOURCES}
        return {name: by for name, by in growth.items() if by > 0}

    def memory_growth(self) -> dict[str, int]:
        """Process -> bytes in use after the last sync less those after the first."""
        return {name: last - self.first_memory.get(name, last) for name, last in self.last_memory.items()}

    def figures(self) -> dict[str, dict[str, float]]:
        """p50 and max over the syncs that count, of every phase. Seconds; `pull_gb_s` is that of the slowest worker."""
        samples = self.samples
        if not samples:
            return {}
        return {
            "publish_s": spread(sample.publish_s for sample in samples),
            "seal_s": spread(sample.report.seal_s for sample in samples),
            "pull_s": spread(sample.report.pull_s for sample in samples),
            "attest_s": spread(sample.report.attest_s for sample in samples),
            "drain_s": spread(sample.report.drain_s for sample in samples),
            "pause_s": spread(sample.report.pause_s for sample in samples),
            "commit_s": spread(sample.report.commit_s for sample in samples),
            "end_to_end_s": spread(sample.report.end_to_end_s for sample in samples),
            "total_s": spread(sample.stopped - sample.started for sample in samples),
        }

    def worker_figures(self) -> dict[str, dict[str, float]]:
        """Per worker: seconds and GB/s of its pulls."""
        found: dict[str, dict[str, float]] = {}
        for name, nbytes in self.worker_bytes.items():
            seconds = [sample.pulls[name].pull_s for sample in self.samples if name in sample.pulls]
            if seconds:
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
        """The slowest worker's plain copies, and the fraction of that speed that pulls reach.

        `ratio` is the best of the copies to the median of the pulls: a ceiling is what the machine can do.
        """
        if not self.ceiling_s or not self.samples:
            return {}
        copied, best = spread(self.ceiling_s), min(self.ceiling_s)
        nbytes = max(self.worker_bytes.values())
        pulled = self.figures()["pull_s"]["p50"]
        return {
            "s_best": best,
            "s_p50": copied["p50"],
            "s_max": copied["max"],
            "gb_s_best": rate(nbytes, best),
            "ratio": best / pulled if pulled > 0 else math.inf,
        }

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        middle = self.typical_sync()
        return {
            "case": msgspec.to_builtins(self.case),
            "label": self.case.label,
            "ok": not self.problems(),
            "problems": self.problems(),
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
                name: {"seconds": spread(b.seconds), "bit_exact": b.is_bit_exact and b.has_written}
                for name, b in self.baselines.items()
            },
            "baselines_skipped": self.baselines_skipped,
            "retries": sum(sample.report.num_retries for sample in self.samples),
            "stalls": sum(sample.report.num_stalls for sample in self.samples),
            "mismatches": len(self.mismatches),
            "memory": {"first": self.first_memory, "last": self.last_memory, "growth": self.memory_growth()},
            "counters": {"first": self.first_counters, "last": self.last_counters, "grown": self.grown_counters()},
            "generation": self.generation,
            "timeline": [] if middle is None else timeline(middle),
            "typical": {} if middle is None else _reports(middle),
        }

    def typical_sync(self) -> SyncSample | None:
        """The sync of median length."""
        ordered = sorted(self.samples, key=lambda sample: sample.stopped - sample.started)
        return ordered[len(ordered) // 2] if ordered else None


def _reports(sample: SyncSample) -> dict[str, Any]:
    """Everything that was reported about one sync, as it was reported."""
    pulls = {name: msgspec.to_builtins(pull) for name, pull in sample.pulls.items()}
    return {"sync": msgspec.to_builtins(sample.report), "workers": pulls}


def timeline(sample: SyncSample) -> list[dict[str, Any]]:
    """Phases of one sync, in seconds since its start.

    Publishing and commits are as their processes saw them. A pull is drawn from the request to sync and the wait for
    the learners' seals on; between its digests and the commit are messages, polling and the wait for a turn.
    """
    rows = [(span.party, span.phase, span.started, span.stopped) for span in sample.spans]
    for name in sample.pulls:
        pull, attest = sample.pull_window(name), sample.attest_window(name)
        rows += [(name, "pull", *pull), (name, "attest", *attest)]
    return [
        {"party": party, "phase": phase, "start_s": start - sample.started, "stop_s": stop - sample.started}
        for party, phase, start, stop in sorted(rows, key=lambda row: (row[0], row[2]))
    ]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and maximum."""
    found = list(values)
    return {"p50": statistics.median(found), "max": max(found)}


def rate(nbytes: int, seconds: float) -> float:
    """GB/s (10**9 bytes)."""
    return nbytes / seconds / 1e9 if seconds > 0 else math.inf
