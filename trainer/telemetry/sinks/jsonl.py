"""`metrics.jsonl` and `evaluations.jsonl`: one JSON object per line, on disk as soon as it is written."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from trainer.telemetry.append import append_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class JsonlSink:
    """Appends to `path`, which is opened for every line: before the first one it may be cut, or moved away.

    A line that a crash has left incomplete is cut off at once. Raises `OSError` if the file cannot be written.
    """

    def __init__(self, path: Path, *, name: str = "jsonl") -> None:
        self.name = name
        self._path = path
        _cut_incomplete_line(path)
        path.open("ab").close()

    def write(self, record: Mapping[str, object]) -> None:
        append_line(self._path, json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Nothing is held open."""


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
