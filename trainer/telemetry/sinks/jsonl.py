"""`metrics.jsonl` and `evaluations.jsonl`: one JSON object per line, on disk as soon as it is written."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class JsonlSink:
    """Appends to `path`. A line that a crash has left incomplete is cut off when the file is opened again."""

    def __init__(self, path: Path, *, name: str = "jsonl") -> None:
        self.name = name
        _cut_incomplete_line(path)
        # Unbuffered, and one write per line: a reader never sees half a line, a crash never loses a whole one.
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, object]) -> None:
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def truncate_after(path: Path, step: int, *, key: str = "step") -> int:
    """Remove the lines whose `key` is after `step`, and lines that are not complete. Returns how many were removed.

    A resumed run computes those steps again. The file is replaced atomically; a file that does not exist is left so.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _number_of(line, key) <= step]
    if len(kept) == len(lines):
        return 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)
    return len(lines) - len(kept)


def _number_of(line: bytes, key: str) -> float:
    """Infinity for a line that cannot be read, so that it is removed."""
    if not line.endswith(b"\n"):
        return float("inf")
    try:
        number = json.loads(line)[key]
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return number if isinstance(number, int | float) else float("inf")


def _cut_incomplete_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
