"""Metric values that can be merged over ranks, micro-batches and groups, and are reduced once, at the end.

A mean of means is wrong as soon as the parts differ in size, so a `Mean` carries its sum and its count.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """Example: `Mean(sum=6.0, count=3)` reduces to 2.0; merged with `Mean(sum=0.0, count=1)` to 1.5."""

    sum: float
    count: float
    """Number or weight of the observations."""

    @classmethod
    def of(cls, values: Iterable[float] | np.ndarray) -> Mean:
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.float64)
        return cls(sum=float(array.sum()), count=array.size)

    def merged(self, other: Mean) -> Mean:
        return Mean(sum=self.sum + other.sum, count=self.count + other.count)

    def reduced(self) -> dict[str, object]:
        return {"": self.sum / self.count} if self.count else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Max:
    value: float

    def merged(self, other: Max) -> Max:
        # A NaN must not vanish: max() would drop it or keep it, depending on the order.
        broken = math.isnan(self.value) or math.isnan(other.value)
        return Max(value=math.nan if broken else max(self.value, other.value))

    def reduced(self) -> dict[str, object]:
        return {"": self.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    value: float

    def merged(self, other: Sum) -> Sum:
        return Sum(value=self.value + other.value)

    def reduced(self) -> dict[str, object]:
        return {"": self.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of whole numbers, e.g. tokens per staleness. Reduces to NAME/mean, /p50, /p90, /max and /histogram."""

    counts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Iterable[int] | np.ndarray) -> Histogram:
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.int64)
        found, counts = np.unique(array, return_counts=True)
        return cls(counts=dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def merged(self, other: Histogram) -> Histogram:
        return Histogram(counts=Counter(self.counts) + Counter(other.counts))

    def reduced(self) -> dict[str, object]:
        total = sum(self.counts.values())
        if not total:
            return {}
        ordered = sorted(self.counts.items())
        return {
            "/mean": sum(value * count for value, count in ordered) / total,
            "/p50": _quantile(ordered, 0.5 * total),
            "/p90": _quantile(ordered, 0.9 * total),
            "/max": ordered[-1][0],
            "/histogram": {str(value): count for value, count in ordered},
        }


Metric = Mean | Max | Sum | Histogram


def merge(*parts: Mapping[str, Metric]) -> dict[str, Metric]:
    """All metrics of all parts, those of the same name merged. Raises `TypeError` if one name has two kinds."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merged(name, merged[name], metric) if name in merged else metric
    return merged


def reduce_all(metrics: Mapping[str, Metric]) -> dict[str, object]:
    """One number per metric; a `Mean` or `Histogram` without observations is left out."""
    return {name + suffix: value for name, metric in metrics.items() for suffix, value in metric.reduced().items()}


def _merged(name: str, a: Metric, b: Metric) -> Metric:
    match a, b:
        case (Mean(), Mean()) | (Max(), Max()) | (Sum(), Sum()) | (Histogram(), Histogram()):
            return a.merged(b)  # pyright: ignore[reportArgumentType] - both are of one kind here
        case _:
            raise TypeError(f"metric {name} is both a {type(a).__name__} and a {type(b).__name__}; use one kind")


def _quantile(ordered: list[tuple[int, int]], rank: float) -> int:
    """The smallest value with at least `rank` observations at or below it."""
    seen = 0
    for value, count in ordered:
        seen += count
        if seen >= rank:
            return value
    return ordered[-1][0]
