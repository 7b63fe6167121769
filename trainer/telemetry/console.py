"""What a person sees of a run: the log, and a live panel on a terminal or one line per step elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from trainer.errors import first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from rich.console import RenderableType

    from trainer.config.schema import RunConfig


logger = logging.getLogger(__name__)

OWN_LOGGERS = ("trainer", "rollout", "weight_sync", "__main__", "py.warnings")
"""The console shows all their records, and warnings of others; the file has everything."""
FILE_ONLY = {"file_only": True}
"""`extra` of a record that the console has shown, or cannot show."""
_VERY_CHATTY = ("urllib3", "httpx", "httpcore", "filelock", "fsspec", "matplotlib", "numexpr", "markdown_it", "asyncio")


@contextlib.contextmanager
def logging_to(path: Path, *, level: str, console: Console) -> Generator[None]:
    """Log to `path` and `console` until the block ends; with the `console` of `Progress`, above its panel."""
    file = _LogFile(path, encoding="utf-8")
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    file.setFormatter(formatter)
    handlers = (file, _console_handler(console))
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in ("", *_VERY_CHATTY)}
    root.setLevel(level.upper())
    for name in _VERY_CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in handlers:
        root.addHandler(handler)
    thread_hook, threading.excepthook = threading.excepthook, _log_thread_failure
    try:
        yield
    finally:
        threading.excepthook = thread_hook
        if file.num_refused:
            logger.warning("%s could not take %d lines when they were logged", path, file.num_refused)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)


def _log_thread_failure(args: threading.ExceptHookArgs) -> None:
    """Python uses stderr alone, which may be closed."""
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = "a thread" if args.thread is None else f"thread {args.thread.name}"
        logger.error("%s has failed", name, exc_info=args.exc_value)


class _LogFile(logging.FileHandler):
    """Counts lines that the disk refuses; `logging` would print a traceback for each."""

    num_refused = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that `logging` calls
        if isinstance(sys.exception(), OSError):
            self.num_refused += 1
        else:
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # its buffer may be refused again
            super().close()


class _BriefFormatter(logging.Formatter):
    """Shows the first cause of an error; the file has the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        brief = copy.copy(record)
        brief.exc_info = brief.exc_text = brief.stack_info = None
        if record.exc_info is not None and record.exc_info[1] is not None:
            brief.msg, brief.args = f"{record.getMessage()}: {one_line(first_cause(record.exc_info[1]))}", None
        return super().format(brief)


def _console_handler(console: Console) -> logging.Handler:
    handler, style = logging.StreamHandler(console.file), "%(asctime)s %(levelname)s %(name)s: %(message)s"
    if console.is_terminal:
        options = {"show_path": False, "omit_repeated_times": False, "log_time_format": "%H:%M:%S"}
        handler, style = RichHandler(console=console, **options), "%(message)s"
    handler.setFormatter(_BriefFormatter(style, datefmt="%H:%M:%S"))
    handler.addFilter(
        lambda record: (
            not getattr(record, "file_only", False)
            and (record.levelno >= logging.WARNING or record.name.split(".")[0] in OWN_LOGGERS)
        )
    )
    return handler


class SafeStream:
    """A file for `rich.console.Console` that writes nothing after the first refused write. Then its descriptor points
    to /dev/null: else Python would flush the rest of a buffer at exit, be refused again, and change the exit code."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._is_closed = False

    def write(self, text: str) -> int:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        encodable = text.encode(encoding, "replace").decode(encoding)
        self._guarded(lambda: self._file.write(encodable))
        return len(text)

    def flush(self) -> None:
        self._guarded(self._file.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _guarded(self, call: Callable[[], object]) -> None:
        if self._is_closed:
            return
        try:
            call()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._is_closed = True
            logger.warning("console closed; disabling console output: %r", error, extra=FILE_ONLY)
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._file.fileno())
                os.close(null)


_ETA_STEPS = 20
_PLAIN_EVERY_S = 1.0
HEARTBEAT_S = 60.0
"""Between lines of a long phase, without a panel."""
_ROOM_FOR_ECHO = 5
"""Columns right of the panel for `^C`: a line that wraps would tear the panel."""


class Progress:
    """The display of one run. Its methods do not block the event loop.

    Args:
        age_s: of the run, which has checked its inputs by now.
    """

    def __init__(
        self, config: RunConfig, *, console: Console, age_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics: dict[str, Any] = {"step": 0}
        """The latest value of each metric, by name."""
        parts = (config.task.name, config.algorithm.name, config.mode.name, f"S={config.mode.max_staleness}")
        self._title = f"{config.name}: {', '.join(parts)}"
        self._total, self._num_replicas = config.trainer.total_steps, config.rollout.num_replicas
        console.file = cast("IO[str]", SafeStream(console.file))
        self._console = console
        self._clock = clock
        self._started_at = clock() - age_s
        self._phase = self._ended = self._waiting_for = ""
        self._step_times: deque[tuple[float, int]] = deque(maxlen=_ETA_STEPS + 1)
        self._last_plain = float("-inf")
        mode = config.telemetry.progress
        if mode == "auto":
            mode = "rich" if console.is_terminal and not console.is_dumb_terminal else "plain"
        self._is_plain = mode == "plain"
        self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=4) if mode == "rich" else None
        if self._live is not None:
            self._live.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """A part of the start or the end of a run, shown with its duration."""
        start, before = self._clock(), self._phase
        self._phase = name
        self._log(f"{name} ...")
        outcome, is_over = "failed after ", threading.Event()
        if self._is_plain:
            self._show(f"{name} ...")
            threading.Thread(target=self._heartbeat, args=(name, start, is_over), daemon=True).start()
        try:
            yield
            outcome = ""
        except (asyncio.CancelledError, KeyboardInterrupt):
            outcome = "interrupted after "
            raise
        finally:
            is_over.set()
            self._phase = before
            self.note(f"{name} ... {outcome}{self._clock() - start:.1f} s")

    def _heartbeat(self, name: str, start: float, is_over: threading.Event) -> None:
        while not is_over.wait(HEARTBEAT_S):
            self._show(f"{name} ... {self._clock() - start:.0f} s so far")

    def end(self, how: str) -> None:
        """The last picture shows `how`, such as "completed"."""
        self._ended = how

    def update(
        self,
        *,
        step: int | None = None,
        accuracy: float | None = None,
        accuracy_version: int | None = None,
        waiting_for: str | None = None,
    ) -> None:
        """What is known before the next record. `waiting_for` is empty while the trainer computes."""
        known = {"step": step, "eval/accuracy": accuracy, "eval/version": accuracy_version}
        self._metrics |= {name: value for name, value in known.items() if value is not None}
        if waiting_for is not None:
            self._waiting_for = waiting_for

    def step(self, record: Mapping[str, object]) -> None:
        """One optimizer step ended, with this record of metrics.jsonl."""
        self._metrics |= record
        now, step = self._clock(), self._metrics["step"]
        self._step_times.append((now, step))
        if now - self._last_plain >= _PLAIN_EVERY_S or "eval/accuracy" in record or step >= self._total:
            self._last_plain = now
            self._log(self.line())
            if self._is_plain:
                self._show(self.line())

    def note(self, text: str) -> None:
        """One line that stays on the console."""
        self._log(text)
        if self._is_plain or self._live is not None:
            self._show(text)

    def _log(self, text: str) -> None:
        logger.info("%s", text, extra=FILE_ONLY)

    def _show(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the last picture on the console. Idempotent."""
        if self._live is not None:
            self._live.stop()

    def eta_s(self) -> float | None:
        """Seconds to the last step, at the pace of the latest steps; None before the second one."""
        if len(self._step_times) < 2 or self._ended:
            return None
        (first_time, first_step), (last_time, last_step) = self._step_times[0], self._step_times[-1]
        if last_step <= first_step:
            return None
        left = (self._total - last_step) * (last_time - first_time) / (last_step - first_step)
        return max(0.0, left - (self._clock() - last_time))

    def line(self) -> str:
        """The state as plain text. A metric without a value yet is left out, or a dash."""
        texts, known = self._texts(), self._metrics
        parts = {
            "step": f"step {known['step']}/{self._total}",
            "reward/mean": f"reward {texts['reward']}",
            "eval/accuracy": f"accuracy {texts['accuracy']}",
            "response/tokens_mean": f"length {texts['length']}",
            "learner/entropy": f"entropy {texts['entropy']}",
            "learner/grad_norm": f"grad norm {texts['grad norm']}",
            "staleness/mean": f"staleness {texts['staleness']}",
            "perf/rollout_tokens_per_s": f"rollout {texts['rollout']}, train {texts['train']}",
            "perf/step_s": f"step in {texts['step time']}",
        }
        always = ("reward/mean", "staleness/mean", "perf/rollout_tokens_per_s")
        shown = [text for name, text in parts.items() if name in always or known.get(name) is not None]
        return "  ".join([*shown, self._times()])

    def _panel(self) -> RenderableType:
        step = self._metrics["step"]
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(f"step {step}/{self._total}", ProgressBar(total=self._total, completed=step), self._times())
        cells = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for _ in range(2):
            cells.add_column(style="dim", no_wrap=True)
            cells.add_column(ratio=1)
        texts = list(itertools.chain.from_iterable(self._texts().items()))
        for begin in range(0, len(texts), 4):
            cells.add_row(*texts[begin : begin + 4])
        width = max(1, self._console.width - _ROOM_FOR_ECHO)
        return Panel(Group(bar, cells), title=escape(self._title), title_align="left", width=width)

    def _texts(self) -> dict[str, str]:
        """By label, in the order of the panel: two in a row."""
        number, known = self._number, self._metrics
        failed, cut = (known.get(f"response/{name}_frac") for name in ("failed", "truncated"))
        version = known.get("eval/version")
        names = ("buffer/num_ready", "buffer/num_running", "buffer/num_slots")
        return {
            "reward": number("reward/mean", ".3f") + (f" ({failed:.0%} failed)" if failed else ""),
            "accuracy": number("eval/accuracy", ".3f") + ("" if version is None else f" (v{version})"),
            "rollout": self._rate("rollout"),
            "train": self._rate("train"),
            "buffer": ", ".join(f"{number(name, '.0f')} {name.rpartition('_')[2]}" for name in names),
            "staleness": f"{number('staleness/mean', '.2f')} max {number('staleness/max', '.0f')}",
            "length": number("response/tokens_mean", ".0f") + ("" if cut is None else f" ({cut:.0%} cut)"),
            "entropy": number("learner/entropy", ".3g"),
            "step time": f"{number('perf/step_s', '.1f')} s",
            "grad norm": number("learner/grad_norm", ".3g"),
            "engines": f"{number('sync/replicas_live', '.0f')}/{self._num_replicas} live",
            "trainer": escape(self._ended or self._phase or self._activity()),
        }

    def _activity(self) -> str:
        if self._waiting_for:
            return f"waits for {self._waiting_for}"
        return "trains" if self._step_times else "starts"

    def _times(self) -> str:
        eta, elapsed = self.eta_s(), _duration(self._clock() - self._started_at)
        return elapsed if eta is None else f"{elapsed}, {_duration(eta)} left"

    def _number(self, metric: str, spec: str) -> str:
        value = self._metrics.get(metric)
        return "-" if value is None else format(value, spec)

    def _rate(self, side: str) -> str:
        rate = self._metrics.get(f"perf/{side}_tokens_per_s")
        if rate is None:
            return "- tok/s"
        return f"{rate / 1000:.1f}k tok/s" if rate >= 10_000 else f"{rate:.0f} tok/s"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
