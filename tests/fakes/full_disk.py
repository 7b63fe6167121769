"""A disk that takes a part of what is written, and then no more."""

from __future__ import annotations

import contextlib
import resource
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `num_bytes`: what crosses it is written up to it, the rest is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
