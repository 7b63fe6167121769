"""Appends lines to the files of a run, each of them whole."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def append_line(path: Path, line: bytes) -> None:
    """All of `line`, or nothing of it: behind half a line on a full disk the next one could not be read either.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        # Buffered: `write` and `close` write all of it or raise. A raw file may take a part of it, and say no more than
        # how much. What is longer than the buffer goes out in one call, so a reader sees no half line either.
        with path.open("ab") as file:
            file.write(line)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise
