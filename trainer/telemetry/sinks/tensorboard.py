"""TensorBoard events, written with TensorBoard's own writer: no torch, no TensorFlow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] - generated
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] - generated
from tensorboard.summary.writer.event_file_writer import EventFileWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class TensorBoardSink:
    """Numbers become scalars; everything else is left to metrics.jsonl.

    With the first record it tells TensorBoard to hide what an earlier process wrote for that step and later ones.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._writer = EventFileWriter(str(folder))
        self._clock = clock
        self._has_begun = False

    def write(self, record: Mapping[str, object]) -> None:
        step = record["step"]
        assert isinstance(step, int), f"step must be an integer, got {step!r}"
        if not self._has_begun:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=self._clock(), step=step, session_log=start))
            self._has_begun = True
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._writer.add_event(Event(wall_time=self._clock(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
