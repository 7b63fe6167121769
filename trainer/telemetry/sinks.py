"""Where metrics go: metrics.jsonl, TensorBoard, and the writer that feeds every sink. Imports without torch."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from trainer.files import append_line, append_whole, write_atomically
from trainer.telemetry.run_dir import encode_json, to_jsonable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.telemetry.run_dir import RunDir

logger = logging.getLogger(__name__)

_LOG_EVERY = 100


class MetricSink(Protocol):
    """Takes one record per step. May raise any exception: `MetricWriter` logs and counts it."""

    name: str

    def write(self, record: Mapping[str, object]) -> None:
        """`record` is JSON-able and holds `step`."""
        ...

    def close(self) -> None:
        """Write out what is buffered. Called once."""
        ...


class MetricWriter:
    """Gives every record to every sink. A sink that fails is logged, and counted in `telemetry/sink_errors` of the next
    record."""

    def __init__(self, sinks: Sequence[MetricSink], evaluations: MetricSink, *, missing: Sequence[str] = ()) -> None:
        """`missing`: sinks that cannot be opened. Each record counts as an error of theirs."""
        self._sinks, self._evaluations, self._missing = tuple(sinks), evaluations, tuple(missing)
        self._num_errors = dict.fromkeys((*(sink.name for sink in (*self._sinks, evaluations)), *missing), 0)
        self._warned: set[str] = set()
        """Metrics whose value could not be written, each logged once."""

    @property
    def num_errors(self) -> int:
        return sum(self._num_errors.values())

    def write(self, record: Mapping[str, object]) -> None:
        """`record` holds `step` and metrics by name. Numbers that are not finite become null and are logged."""
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
                logger.exception("metric sink %s failed (%d times so far); the run continues", sink.name, count)

    def _plain(self, record: Mapping[str, object]) -> dict[str, object]:
        plain: dict[str, object] = {}
        for name, value in record.items():
            try:
                plain[name] = to_jsonable(value)
            except TypeError as error:
                self._warn_once(name, f"metric {name} is skipped: {error}")
                continue
            if plain[name] is None and value is not None:
                where = f"step {record['step']}" if "step" in record else "an evaluation"
                self._warn_once(name, f"metric {name} is {value} at {where}; it is written as null")
        return plain

    def _warn_once(self, name: str, what: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s", what)


def build_writer(config: RunConfig, run_dir: RunDir) -> MetricWriter:
    """The sinks of the `telemetry` section. Raises `OSError` if metrics.jsonl or evaluations.jsonl cannot be written;
    any other sink that cannot be opened is logged, and counted at every record."""

    def wandb() -> MetricSink:
        from trainer.telemetry.wandb import WandbSink

        return WandbSink(config, run_dir)

    sinks: list[MetricSink] = [JsonlSink(run_dir.metrics)]
    openers: dict[str, Callable[[], MetricSink]] = {}
    if config.telemetry.tensorboard:
        openers["tensorboard"] = lambda: TensorBoardSink(run_dir.tensorboard)
    if config.telemetry.wandb:
        openers["wandb"] = wandb
    missing: list[str] = []
    for name, open_sink in openers.items():
        try:
            sinks.append(open_sink())
        except Exception:
            logger.exception("metric sink %s cannot be opened; the run continues without it", name)
            missing.append(name)
    return MetricWriter(sinks, JsonlSink(run_dir.evaluations, name="evaluations"), missing=missing)


class JsonlSink:
    """Appends to `path`, which is opened for every record: before the first it may be cut, or moved. Raises
    `OSError`."""

    def __init__(self, path: Path, *, name: str = "jsonl") -> None:
        self.name = name
        self._path = path
        path.open("ab").close()

    def write(self, record: Mapping[str, object]) -> None:
        append_line(self._path, encode_json(record) + b"\n")

    def close(self) -> None:
        """Nothing is held open."""


def truncate_after(path: Path, step: int, *, key: str = "step") -> int:
    """Remove the records whose `key` is after `step`, and incomplete ones; atomically. Returns how many."""
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _number_of(line, key) <= step]
    if len(kept) < len(lines):
        write_atomically(path, b"".join(kept))
    return len(lines) - len(kept)


def _number_of(line: bytes, key: str) -> float:
    """Infinity for a damaged record, so that it is removed."""
    try:
        number = json.loads(line)[key]
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return number if isinstance(number, int | float) else float("inf")


class TensorBoardSink:
    """Numbers become scalars. The first record hides what an earlier process wrote for that step and later ones.

    `EventFileWriter` is not used: after one refused write its thread writes nothing any more.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._clock = clock
        self._has_begun = False

    def write(self, record: Mapping[str, object]) -> None:
        """Raises `OSError` if it cannot be written; the file is unchanged."""
        step = record["step"]
        assert isinstance(step, int), f"step must be an integer, got {step!r}"
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float)
        ]
        now = self._clock()
        events = [Event(wall_time=now, step=step, summary=Summary(value=values))]
        if not self._has_begun:
            start = SessionLog(status=SessionLog.START)
            first = Event(wall_time=now, file_version="brain.Event:2")
            events = [first, Event(wall_time=now, step=step, session_log=start), *events]
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)  # adds lengths and checksums
        for event in events:
            writer.write(event.SerializeToString())
        append_whole(self._path, buffer.getvalue())
        self._has_begun = True

    def close(self) -> None:
        """Nothing is held open."""
