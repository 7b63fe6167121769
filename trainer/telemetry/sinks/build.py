"""Which sinks a run has, and the writer that feeds them all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trainer.telemetry.jsonable import to_jsonable
from trainer.telemetry.sinks.jsonl import JsonlSink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainer.config.schema.run import RunConfig
    from trainer.telemetry.run_dir import RunDir
    from trainer.telemetry.sinks.base import MetricSink

logger = logging.getLogger(__name__)

_LOG_EVERY = 100


class MetricWriter:
    """Gives every record to every sink. A sink that fails is logged and counted, and never stops the run.

    The count stands in the next record as `telemetry/sink_errors`.
    """

    def __init__(self, sinks: Sequence[MetricSink], evaluations: MetricSink) -> None:
        self._sinks, self._evaluations = tuple(sinks), evaluations
        self._num_errors = {sink.name: 0 for sink in (*self._sinks, evaluations)}
        self._seen_nonfinite: set[str] = set()

    @property
    def num_errors(self) -> int:
        return sum(self._num_errors.values())

    def write(self, record: Mapping[str, object]) -> None:
        """`record` holds `step` and metrics by name. Numbers that are not finite are written as null and logged."""
        plain = {name: to_jsonable(value) for name, value in record.items()}
        self._report_nonfinite(record, plain)
        plain["telemetry/sink_errors"] = self.num_errors
        for sink in self._sinks:
            self._guarded(sink, lambda sink=sink: sink.write(plain))

    def write_evaluation(self, line: Mapping[str, object]) -> None:
        """One evaluation, as soon as it ended: several may end during one step."""
        plain = {name: to_jsonable(value) for name, value in line.items()}
        self._guarded(self._evaluations, lambda: self._evaluations.write(plain))

    def close(self) -> None:
        for sink in (*self._sinks, self._evaluations):
            self._guarded(sink, sink.close)

    def _guarded(self, sink: MetricSink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            count = self._num_errors[sink.name] = self._num_errors[sink.name] + 1
            if count % _LOG_EVERY == 1:
                logger.exception("metric sink %s failed (%d times so far); the run goes on", sink.name, count)

    def _report_nonfinite(self, record: Mapping[str, object], plain: Mapping[str, object]) -> None:
        for name, value in plain.items():
            if value is None and record[name] is not None and name not in self._seen_nonfinite:
                self._seen_nonfinite.add(name)
                logger.warning("metric %s is %s at step %s; it is written as null", name, record[name], record["step"])


def build_writer(config: RunConfig, run_dir: RunDir) -> MetricWriter:
    """The sinks of the `telemetry` section. Until the first record, lines of earlier processes may still be cut.

    metrics.jsonl and evaluations.jsonl must work, and raise `OSError` if they do not; any other sink that cannot be
    made is logged and left out.
    """
    sinks: list[MetricSink] = [JsonlSink(run_dir.metrics)]
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    wanted = {"tensorboard": config.telemetry.tensorboard, "wandb": config.telemetry.wandb}
    for name, make in makers.items():
        if not wanted[name]:
            continue
        try:
            sinks.append(make(config, run_dir))
        except Exception:
            logger.exception("metric sink %s cannot be made; the run goes on without it", name)
    return MetricWriter(sinks, JsonlSink(run_dir.evaluations, name="evaluations"))


def _tensorboard(config: RunConfig, run_dir: RunDir) -> MetricSink:
    from trainer.telemetry.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(run_dir.tensorboard)


def _wandb(config: RunConfig, run_dir: RunDir) -> MetricSink:
    from trainer.telemetry.sinks.wandb import WandbSink

    return WandbSink(config, run_dir)
