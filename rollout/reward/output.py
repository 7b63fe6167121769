"""What reward processes print: passed on to the log of the process that they belong to, up to a bound."""

from __future__ import annotations

import contextlib
import logging
import os

logger = logging.getLogger(__name__)

MOST_BYTES = 64 << 20


class Output:
    """Of all reward processes of a pool, replaced ones included, so a reward that prints without end fills no disk."""

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor, self._left = descriptor, MOST_BYTES

    def pass_on(self, data: bytes) -> None:
        """Writes what there is room for, and drops the rest. The processes can always go on printing."""
        if self._left <= 0:
            return
        data = data[: self._left]
        self._left -= len(data)
        with contextlib.suppress(OSError):  # a disk that is full, a terminal that is gone: no reason to fail a reward
            while data:
                data = data[os.write(self._descriptor, data) :]
        if self._left <= 0:
            logger.warning(
                "rewards have printed %d MiB, as much as is kept: what they print from here on is dropped; have the "
                "reward function print less",
                MOST_BYTES >> 20,
            )
