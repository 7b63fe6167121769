"""What the display is written to.

A terminal that is closed, a reader that is gone and a disk that is full take nothing any more, and end no run.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import IO, TYPE_CHECKING, Any

from trainer.telemetry.log import SHOWN_BEFORE

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Screen:
    """A file for `rich.console.Console`. From the first write that `file` refuses on, nothing is shown.

    Its descriptor leads to nowhere then: what is left in a buffer would be refused once more when the process ends, and
    change its exit code.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._is_gone = False

    def write(self, text: str) -> int:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        sayable = text.encode(encoding, "replace").decode(encoding)
        self._guarded(lambda: self._file.write(sayable))
        return len(text)

    def flush(self) -> None:
        self._guarded(self._file.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _guarded(self, call: Callable[[], object]) -> None:
        if self._is_gone:
            return
        try:
            call()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._is_gone = True
            logger.warning("nothing more is shown, since the screen takes nothing: %r", error, extra=SHOWN_BEFORE)
            with contextlib.suppress(OSError, ValueError):
                _lead_nowhere(self._file.fileno())


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
