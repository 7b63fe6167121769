"""Logging of the driver: to the screen, and all of it to `log.txt`."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

from rich.logging import RichHandler

from trainer.config.errors import first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from rich.console import Console

logger = logging.getLogger(__name__)

OWN_LOGGERS = ("trainer", "rollout", "weight_sync", "__main__", "py.warnings")
"""Everybody else is a third party: warnings and worse on the screen, the rest only in the file."""

SHOWN_BEFORE = {"shown_before": True}
"""`extra` of a record for the file alone: the screen had it before the log was open."""

_VERY_CHATTY = ("urllib3", "httpx", "httpcore", "filelock", "fsspec", "matplotlib", "numexpr", "markdown_it", "asyncio")
_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s"


@contextlib.contextmanager
def logging_to(path: Path, *, level: str, console: Console) -> Generator[None]:
    """Log to `path` and `console` until the block ends; then everything is as before.

    The same `console` as that of the display, so that log lines go above a live panel and do not tear it.
    """
    file = _LogFile(path, encoding="utf-8")
    formatter = logging.Formatter(_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    file.setFormatter(formatter)
    screen = _Brief(_screen_handler(console))
    screen.addFilter(_is_for_the_screen)
    root = logging.getLogger()
    before, levels = root.level, {name: logging.getLogger(name).level for name in _VERY_CHATTY}
    root.setLevel(level.upper())
    for name in _VERY_CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    handlers = (file, screen)
    for handler in handlers:
        root.addHandler(handler)
    thread_hook, threading.excepthook = threading.excepthook, _log_end_of_thread
    try:
        yield
    finally:
        threading.excepthook = thread_hook
        if file.num_refused:
            logger.warning("%s could not take %d lines when they were logged", path, file.num_refused)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(before)
        for name, old in levels.items():
            logging.getLogger(name).setLevel(old)


def _log_end_of_thread(args: threading.ExceptHookArgs) -> None:
    """What ended a thread. Python tells it to stderr alone, which may be gone."""
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = "a thread" if args.thread is None else f"thread {args.thread.name}"
        logger.error("%s has failed", name, exc_info=args.exc_value)


class _LogFile(logging.FileHandler):
    """Counts the lines that the disk refuses, where a handler of `logging` shows a traceback for each of them."""

    num_refused = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that `logging` calls
        if isinstance(sys.exception(), OSError):
            self.num_refused += 1
        else:
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of what it still holds
            super().close()


class _Brief(logging.Handler):
    """Passes records on with the first cause of an error in place of its traceback, which is for the file."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler

    def emit(self, record: logging.LogRecord) -> None:
        brief = copy.copy(record)
        brief.exc_info = brief.exc_text = brief.stack_info = None
        if record.exc_info is not None and record.exc_info[1] is not None:
            brief.msg, brief.args = f"{record.getMessage()}: {one_line(first_cause(record.exc_info[1]))}", None
        self._handler.handle(brief)

    def close(self) -> None:
        self._handler.close()
        super().close()


def _screen_handler(console: Console) -> logging.Handler:
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S", omit_repeated_times=False)
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    return handler


def _is_for_the_screen(record: logging.LogRecord) -> bool:
    if getattr(record, "shown_before", False):
        return False
    return record.levelno >= logging.WARNING or record.name.split(".")[0] in OWN_LOGGERS
