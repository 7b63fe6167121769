"""Keeps what is warned of in a process whose log is not the one that people read."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_LOGGERS = ("trainer", "rollout", "weight_sync")


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """The texts of our own warnings and errors that are logged inside, in order; other handlers get them too."""
    keeper = _Keeper(logging.WARNING)
    loggers = [logging.getLogger(name) for name in OWN_LOGGERS]
    for logger in loggers:
        logger.addHandler(keeper)
    try:
        yield keeper.texts
    finally:
        for logger in loggers:
            logger.removeHandler(keeper)


class _Keeper(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
