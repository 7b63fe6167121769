"""One row of docs/metrics.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """`name` may end in `/*`: any one word stands there."""

    name: str
    unit: str
    meaning: str
    healthy: str


def row(name: str, unit: str, meaning: str, healthy: str) -> MetricInfo:
    return MetricInfo(name=name, unit=unit, meaning=meaning, healthy=healthy)
