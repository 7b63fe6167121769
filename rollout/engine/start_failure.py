"""Why an engine did not start. vLLM's processes print it, and what it raises here only says to look above."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_BYTES = 1 << 20
"""Of what was printed; the end of it."""
_STREAMS = (1, 2)
"""File descriptors of stdout and stderr, which vLLM's processes inherit."""
_PREFIX = re.compile(r"^(\x1b\[[0-9;]*m)*\([^)]*\)\s*(\x1b\[[0-9;]*m)*\s?([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
"""`(EngineCore pid=2402) ERROR 11-21 23:25:52 [core.py:1510] ` before every line; may be coloured."""
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(: |$)")
_POINTER = re.compile(r"see (the )?(root cause|stack ?trace|error|traceback)|initialization failed", re.IGNORECASE)
"""Errors that only say that another one happened."""


@contextlib.contextmanager
def printed_cause() -> Iterator[None]:
    """In the block, an error that points elsewhere is raised with the cause that was printed meanwhile.

    That is known where stdout or stderr is a file, as in every Ray actor. On a terminal the cause is above indeed.
    """
    before = {stream: _size(stream) for stream in _STREAMS}
    try:
        yield
    except Exception as error:
        if not (isinstance(error, EngineDead) or _POINTER.search(str(error))):
            raise
        texts = [_printed(stream, start) for stream, start in before.items() if start is not None]
        causes = [cause for cause in map(find_cause, texts) if cause]
        if not causes:
            raise
        # `from None`: of a chain of errors people are shown the first one, which here says nothing.
        raise RuntimeError(f"the engine did not start: {causes[-1]}") from None


def find_cause(text: str) -> str:
    """The last error of the tracebacks in `text` that is not a pointer to another one; empty if there is none. Pure."""
    cause, is_inside = "", False
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw)
        if line.startswith(_TRACEBACK):
            is_inside = True
        elif is_inside and _ERROR.match(line):
            is_inside = False
            cause = cause if _POINTER.search(line) else line.strip()
    return cause


def _size(stream: int) -> int | None:
    try:
        found = os.fstat(stream)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _printed(stream: int, start: int) -> str:
    """What has been written since the file had `start` bytes. Opened anew: the position of the stream stays."""
    with contextlib.suppress(OSError), Path(f"/proc/self/fd/{stream}").open("rb") as file:
        file.seek(max(start, os.fstat(stream).st_size - MOST_BYTES))
        return file.read(MOST_BYTES).decode(errors="replace")
    return ""
