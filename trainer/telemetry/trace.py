"""trace.json: what each part of a run did when, for a trace viewer. Times are Unix time.

The file is an array of events, and complete after every flush: each batch is written with the closing bracket, over
that of the batch before. The trace format allows a missing bracket, so viewers read a torn file, too; a resumed run
cuts the torn line. Every process of a run has a `pid`, counted from 1, and numbers its tracks and spans again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import time
from typing import IO, TYPE_CHECKING

from trainer.telemetry.run_dir import encode_json

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path


logger = logging.getLogger(__name__)

_FLUSH_EVENTS = 256
_FLUSH_AFTER_S = 1.0
_MAX_EVENTS = 2_000_000
_END = b"\n]\n"
_PID = re.compile(rb'"pid":(\d+)')


class Tracer:
    """Writes spans to `path`, if there is one. Safe to use from several threads.

    Tracks are rows of the picture, e.g. "learner", "engine 0", "sync", and appear at their first span. One process
    writes at most `max_events`, and keeps at most a few hundred in memory.
    """

    def __init__(
        self, path: Path | None, *, clock: Callable[[], float] = time.time, max_events: int = _MAX_EVENTS
    ) -> None:
        self._clock = clock
        self._max_events = max_events
        self._file, self._pid = None, 1
        if path is not None:
            try:
                self._file, self._pid = _open_trace(path)
            except OSError as error:
                logger.warning("%s cannot be opened (%s); the run continues without a trace", path, error)
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._tracks: dict[str, int] = {}
        self._num_events = 0
        self._next_id = 0
        self._flushed_at = clock()
        self.num_dropped = 0
        """Events over the limit, or that the disk refused."""
        self._is_wanted = path is not None

    @contextlib.contextmanager
    def span(self, track: str, name: str, *, overlapping: bool = False, **args: object) -> Generator[None]:
        """Time the block. `overlapping` if spans of this track do not nest, such as requests in flight."""
        start_s = self._clock()
        try:
            yield
        finally:
            self.add_span(track, name, start_s=start_s, end_s=self._clock(), overlapping=overlapping, **args)

    def add_span(
        self, track: str, name: str, *, start_s: float, end_s: float, overlapping: bool = False, **args: object
    ) -> None:
        """In Unix time. Also logged at level debug."""
        logger.debug("%s: %s took %.3f s %s", track, name, end_s - start_s, args or "")
        event = {"name": name, "cat": track, "ts": start_s * 1e6, "args": args}
        if not overlapping:
            self._add(track, {**event, "ph": "X", "dur": max(0.0, end_s - start_s) * 1e6})
            return
        with self._lock:
            self._next_id += 1
            number = self._next_id
        self._add(track, {**event, "ph": "b", "id": number})
        self._add(track, {"name": name, "cat": track, "ph": "e", "id": number, "ts": end_s * 1e6})

    def close(self) -> None:
        """Write pending events and close the file. Idempotent; later events are dropped and counted."""
        with self._lock:
            self._flush()
            if self._file is not None:
                self._file.close()

    def _add(self, track: str, event: dict[str, object]) -> None:
        if not self._is_wanted:
            return
        with self._lock:
            if self._file is None or self._num_events >= self._max_events or self._file.closed:
                self.num_dropped += 1
                return
            if not self._tracks:
                self._append({"name": "process_name", "ph": "M", "args": {"name": f"start {self._pid}"}}, tid=0)
            if track not in self._tracks:
                self._tracks[track] = len(self._tracks) + 1
                name = {"name": "thread_name", "ph": "M", "args": {"name": track}}
                self._append(name, tid=self._tracks[track])
            self._append(event, tid=self._tracks[track])
            if len(self._pending) >= _FLUSH_EVENTS or self._clock() - self._flushed_at >= _FLUSH_AFTER_S:
                self._flush()

    def _append(self, event: dict[str, object], *, tid: int) -> None:
        self._pending.append(encode_json({**event, "pid": self._pid, "tid": tid}))
        self._num_events += 1

    def _flush(self) -> None:
        self._flushed_at = self._clock()
        if self._file is None or self._file.closed or not self._pending:
            return
        batch, self._pending = self._pending, []
        try:
            _append_events(self._file, batch)
        except OSError as error:
            if self.num_dropped == 0:
                logger.warning("trace.json cannot be written (%s); the run continues without these events", error)
            self.num_dropped += len(batch)


def _open_trace(path: Path) -> tuple[IO[bytes], int]:
    """The file, perhaps continued, and the pid of this process."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rstrip()
    if whole.endswith(b"]"):
        body = whole[:-1].rstrip()
    else:
        # Torn by a crash: the last line break follows a whole event.
        body = whole[: whole.rfind(b"\n")].rstrip().rstrip(b",") if b"\n" in whole else b""
    file = path.open("r+b" if content else "wb", buffering=0)
    try:
        file.seek(0)
        file.write((body or b"[") + _END)
        file.truncate()
    except OSError:
        file.close()
        raise
    return file, _last_pid(body) + 1


def _last_pid(body: bytes) -> int:
    """Of the last event, which is the greatest; 0 without any."""
    found = _PID.match(body, max(0, body.rfind(b'"pid":')))
    return int(found[1]) if found else 0


def _append_events(file: IO[bytes], events: list[bytes]) -> None:
    """All of them, or none. Raises `OSError`."""
    end = file.seek(0, 2) - len(_END)
    is_first = end == 1
    batch = (b"\n" if is_first else b",\n") + b",\n".join(events) + _END
    file.seek(end)
    if file.write(batch) < len(batch):  # a full disk takes a part, and the next batch would follow a torn one
        file.truncate(end)
        file.seek(end)
        file.write(_END)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
