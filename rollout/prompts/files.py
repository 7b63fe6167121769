"""Which files a path names, and which reader their suffix asks for. Light: the checks of the configuration use it."""

from __future__ import annotations

import difflib
from pathlib import Path

from rollout.errors import DataError

FILE_READERS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
"""Suffix -> the reader of such files. Files have no splits: a reader of files reads all that its path names."""


def reader_of_suffix(path: str) -> str | None:
    """The reader that `auto` means for the suffix alone; None where that does not tell."""
    return FILE_READERS.get(Path(path).suffix)


def files_of(given: str, reader: str) -> list[Path]:
    """The file, or those of the directory that this reader of files reads, by name.

    Raises:
        DataError: there is no such file or directory, or nothing to read in it.
    """
    path = Path(given).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise missing(given)
    suffixes = [suffix for suffix, name in FILE_READERS.items() if name == reader]
    files = sorted(p for p in path.iterdir() if p.suffix in suffixes)
    if not files:
        raise DataError(f"directory {given!r} holds no {' or '.join(suffixes)} file; check the path")
    return files


def missing(given: str) -> DataError:
    """That there is no such path, with names that are near."""
    path = Path(given).expanduser()
    if path.parent.is_dir():
        names = [p.name for p in path.parent.iterdir()]
        near = [str(path.parent / n) for n in difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)]
        hint = f"did you mean {' or '.join(near)}?" if near else f"nothing in {path.parent} has a similar name"
    else:
        hint = f"its directory {path.parent} does not exist either"
    return DataError(f"data set {given!r} does not exist; {hint} (paths are relative to {Path.cwd()})")
