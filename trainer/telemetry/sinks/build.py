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

    def __init__(self, sinks: Sequence[MetricSink], evaluations: MetricSink, *, missing: Sequence[str] = ()) -> None:
        """`missing`: sinks that were asked for and cannot be made. Each record is one that they did not get."""
        self._sinks, self._evaluations, self._missing = tuple(sinks), evaluations, tuple(missing)
        self._num_errors = dict.fromkeys((*(sink.name for sink in (*self._sinks, evaluations)), *missing), 0)
        self._told: set[str] = set()
        """Metrics whose value could not be written, which is in the log."""

    @property
    def num_errors(self) -> int:
        return sum(self._num_errors.values())

    def write(self, record: Mapping[str, object]) -> None:
        """`record` holds `step` and metrics by name. Numbers that are not finite are written as null and logged."""
        plain = self._plain(record)
        plain["telemetry/sink_errors"] = self.num_errors
        for sink in self._sinks:
            self._guarded(sink, lambda sink=sink: sink.write(plain))
        for name in self._missing:
            self._num_errors[name] += 1

    def write_evaluation(self, line: Mapping[str, object]) -> None:
        """One evaluation, as soon as it ended: several may end during one step."""
        plain = self._plain(line)
        self._guarded(self._evaluations, lambda: self._evaluations.write(plain))

    def close(self) -> None:
        for sink in (*self._sinks, self._evaluations):
            self._guarded(sink, sink.close)
        for name, count in self._num_errors.items():
            if count:
                logger.warning("metric sink %s failed %d times in all; metrics are missing there", name, count)

    def _guarded(self, sink: MetricSink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            count = self._num_errors[sink.name] = self._num_errors[sink.name] + 1
            if count % _LOG_EVERY == 1:
                logger.exception("metric sink %s failed (%d times so far); the run goes on", sink.name, count)

    def _plain(self, record: Mapping[str, object]) -> dict[str, object]:
        """As JSON says it. What cannot be said is left out, or null, and logged the first time."""
        plain: dict[str, object] = {}
        for name, value in record.items():
            try:
                plain[name] = to_jsonable(value)
            except TypeError as error:
                self._tell_once(name, f"metric {name} is left out: {error}")
                continue
            if plain[name] is None and value is not None:
                where = f"step {record['step']}" if "step" in record else "an evaluation"
                self._tell_once(name, f"metric {name} is {value} at {where}; it is written as null")
        return plain

    def _tell_once(self, name: str, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning("%s", what)


def build_writer(config: RunConfig, run_dir: RunDir) -> MetricWriter:
    """The sinks of the `telemetry` section. Until the first record, lines of earlier processes may still be cut.

    metrics.jsonl and evaluations.jsonl must work, and raise `OSError` if they do not; any other sink that cannot be
    made is logged, left out, and counted at every record.
    """
    sinks: list[MetricSink] = [JsonlSink(run_dir.metrics)]
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    wanted = {"tensorboard": config.telemetry.tensorboard, "wandb": config.telemetry.wandb}
    missing: list[str] = []
    for name, make in makers.items():
        if not wanted[name]:
            continue
        try:
            sinks.append(make(config, run_dir))
        except Exception:
            logger.exception("metric sink %s cannot be made; the run goes on without it", name)
            missing.append(name)
    return MetricWriter(sinks, JsonlSink(run_dir.evaluations, name="evaluations"), missing=missing)


def _tensorboard(config: RunConfig, run_dir: RunDir) -> MetricSink:
    from trainer.telemetry.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(run_dir.tensorboard)


def _wandb(config: RunConfig, run_dir: RunDir) -> MetricSink:
    from trainer.telemetry.sinks.wandb import WandbSink

    return WandbSink(config, run_dir)
