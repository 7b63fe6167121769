"""The cause of a failed engine start, from what it printed."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_BYTES = 1 << 20
"""Read from the end of what was printed."""
MAX_CHARS = 600
"""Of an error's message."""
_STREAMS = (1, 2)  # stdout and stderr, which vLLM's processes inherit
_PREFIX = re.compile(r"^(\x1b\[[0-9;]*m)*\([^)]*\)\s*(\x1b\[[0-9;]*m)*\s?([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
"""`(EngineCore pid=2402) ERROR 11-21 23:25:52 [core.py:1510] ` before every line; may be coloured."""
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(: |$)")
_POINTER = re.compile(r"see (the )?(root cause|stack ?trace|error|traceback)|initialization failed", re.IGNORECASE)
"""Errors that only report that another one happened."""


@contextlib.contextmanager
def printed_cause() -> Iterator[None]:
    """An error in the block that points elsewhere is raised with the cause that was printed meanwhile. Works where
    stdout or stderr is a file, as in every Ray actor; on a terminal the cause is above indeed."""
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
        # `from None`: of a chain of errors people see the first one, which contains nothing here.
        raise RuntimeError(f"the engine did not start: {causes[-1]}") from None


def find_cause(text: str) -> str:
    """The last error of the tracebacks in `text` that does not point to another one, as one line of at most
    `MAX_CHARS`; empty if there is none."""
    lines = [(_PREFIX.sub("", raw), raw) for raw in text.splitlines()]
    lines = [(raw[: len(raw) - len(line)].rstrip(), line) for line, raw in lines]
    cause, is_inside = "", False
    for number, (prefix, line) in enumerate(lines):
        if line.startswith(_TRACEBACK):
            is_inside = True
        elif is_inside and _ERROR.match(line):
            is_inside = False
            if not _POINTER.search(line):
                cause = _message(prefix, line, lines[number + 1 : number + 1 + MAX_CHARS])
    return cause


def _message(prefix: str, first: str, following: list[tuple[str, str]]) -> str:
    """An error of several lines as one. It ends at an empty line, another traceback, or another prefix: all lines of
    one record have the same, its second included."""
    more = takewhile(lambda one: one[0] == prefix and one[1].strip() and not one[1].startswith(_TRACEBACK), following)
    text = " ".join(" ".join([first, *(line for _, line in more)]).split())
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 4]} ..."


def _size(stream: int) -> int | None:
    try:
        found = os.fstat(stream)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _printed(stream: int, start: int) -> str:
    """Since the file had `start` bytes. Opened again, so that the position of the stream stays."""
    with contextlib.suppress(OSError), Path(f"/proc/self/fd/{stream}").open("rb") as file:
        file.seek(max(start, os.fstat(stream).st_size - MAX_BYTES))
        return file.read(MAX_BYTES).decode(errors="replace")
    return ""
