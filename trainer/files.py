"""Writing files so that a reader, a crash or a full disk never leaves half of anything."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """A reader sees the old file or the new one, never a part. Raises `OSError`; then the old file stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def append_whole(path: Path, data: bytes) -> None:
    """All of `data`, or nothing of it: what follows half a record could not be read either.

    Raises:
        OSError: it cannot be written; the file is unchanged.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        # Buffered: `write` and `close` write all of it or raise. A raw file may take a part, and only report how much.
        # What is longer than the buffer goes out in one call, so a reader sees no half line either.
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise


def append_line(path: Path, line: bytes) -> None:
    """As `append_whole`, after a last line that a crash tore is cut. `line` ends with its line break."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    append_whole(path, line)


def replace_directory(written: Path, final: Path) -> None:
    """Rename the directory `written` to `final`, in place of what is there.

    The older one is called `NAME.replaced` until the new one is there, so that a kill at any moment leaves one of them
    whole. What a kill has left over goes with the next call.
    """
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    written.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Bring a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def appears(path: Path, *, timeout_s: float) -> bool:
    """Whether the file is there within that time: a network file system shows what another host wrote a moment later.
    Blocks."""
    give_up = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.1)
    return True
