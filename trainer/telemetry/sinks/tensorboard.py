"""TensorBoard events, framed by TensorBoard's own writer: no torch, no TensorFlow."""

from __future__ import annotations

import io
import os
import socket
import time
from typing import TYPE_CHECKING

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] - generated
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] - generated
from tensorboard.summary.writer.record_writer import RecordWriter

from trainer.telemetry.append import append_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_FILE_VERSION = "brain.Event:2"


class TensorBoardSink:
    """Numbers become scalars; everything else is left to metrics.jsonl.

    With the first record it tells TensorBoard to hide what an earlier process wrote for that step and later ones.
    `EventFileWriter` is not used: after one write that the disk refuses, its thread writes nothing any more.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._clock = clock
        self._has_begun = False

    def write(self, record: Mapping[str, object]) -> None:
        """Raises `OSError` if it cannot be written; the file is as it was."""
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
            first = Event(wall_time=now, file_version=_FILE_VERSION)
            events = [first, Event(wall_time=now, step=step, session_log=start), *events]
        append_line(self._path, _framed(events))
        self._has_begun = True

    def close(self) -> None:
        """Nothing is held open."""


def _framed(events: list[Event]) -> bytes:
    """As they stand in an event file: each with its length and checksums."""
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()
