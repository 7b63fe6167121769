"""Every metric that a line of metrics.jsonl may hold: name, unit, meaning, healthy range. docs/metrics.md shows it."""

from __future__ import annotations

from trainer.telemetry.metric_rows.engines import ENGINES
from trainer.telemetry.metric_rows.learner import LEARNER
from trainer.telemetry.metric_rows.outcomes import OUTCOMES
from trainer.telemetry.metric_rows.pace import PACE
from trainer.telemetry.metric_rows.row import MetricInfo
from trainer.telemetry.metric_rows.stock import STOCK

SECTIONS: dict[str, tuple[MetricInfo, ...]] = {
    "What is learned, from what": OUTCOMES,
    "Pace and waits": PACE,
    "Weight sync and engines": ENGINES,
    "Learner": LEARNER,
    "Buffer, data and telemetry": STOCK,
}
"""By the heading in docs/metrics.md."""

METRICS: tuple[MetricInfo, ...] = tuple(metric for section in SECTIONS.values() for metric in section)

__all__ = ["METRICS", "SECTIONS", "MetricInfo"]
