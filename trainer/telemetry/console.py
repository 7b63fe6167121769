"""What a person sees of a run: the log, and a live panel on a terminal or one line per step elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
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


_ETA_STEPS = 20
_PLAIN_EVERY_S = 1.0
HEARTBEAT_S = 60.0
"""Between two lines of a phase that lasts, where there is no panel."""
_ROOM_FOR_ECHO = 5
"""Columns right of the panel: a terminal shows two `^C` there before it begins a new line, which would tear it."""


@dataclass(slots=True, kw_only=True)
class ProgressState:
    """The fields that `Progress.update` may set. None is shown as a dash."""

    step: int = 0
    reward: float | None = None
    failed_frac: float | None = None
    """Responses without a reward, which is not in the mean of the others."""
    accuracy: float | None = None
    accuracy_version: int | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    rollout_tokens_per_s: float | None = None
    train_tokens_per_s: float | None = None
    response_tokens: float | None = None
    truncated_frac: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    step_s: float | None = None
    waiting_for: str = ""
    """What the trainer waits for now, e.g. "groups", "weights to be live"; empty while it computes."""
    buffer_ready: int | None = None
    buffer_running: int | None = None
    buffer_slots: int | None = None
    replicas_live: int | None = None
    replicas: int | None = None


_FIELDS = frozenset(field.name for field in dataclasses.fields(ProgressState))

_FROM_RECORD = {
    "step": "step",
    "reward/mean": "reward",
    "response/failed_frac": "failed_frac",
    "eval/accuracy": "accuracy",
    "eval/version": "accuracy_version",
    "staleness/mean": "staleness_mean",
    "staleness/max": "staleness_max",
    "perf/rollout_tokens_per_s": "rollout_tokens_per_s",
    "perf/train_tokens_per_s": "train_tokens_per_s",
    "response/tokens_mean": "response_tokens",
    "response/truncated_frac": "truncated_frac",
    "learner/entropy": "entropy",
    "learner/grad_norm": "grad_norm",
    "perf/step_s": "step_s",
    "buffer/num_ready": "buffer_ready",
    "buffer/num_running": "buffer_running",
    "buffer/num_slots": "buffer_slots",
    "sync/replicas_live": "replicas_live",
}


class Progress:
    """The display of one run. Methods are quick and may be called from the event loop.

    Example:
        with contextlib.closing(Progress(config, console=Console())) as progress:
            with progress.phase("starting Ray"):
                ...
            progress.update(waiting_for="groups", buffer_ready=3)
            progress.step(record)
    """

    def __init__(self, config: RunConfig, *, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = ProgressState(replicas=config.rollout.num_replicas)
        parts = (config.task.name, config.algorithm.name, config.mode.name, f"S={config.mode.max_staleness}")
        self._title = f"{config.name}: {', '.join(parts)}"
        self._total = config.trainer.total_steps
        console.file = cast("IO[str]", Screen(console.file))
        self._console = console
        self._clock = clock
        self._started_at = clock()
        self._phase = self._ended = ""
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
        """A part of the start or the end: says that it begins, and how long it took."""
        start, before = self._clock(), self._phase
        self._phase = name
        self._keep(f"{name} ...")
        if self._is_plain:
            self._show(f"{name} ...")
        outcome = "failed after "
        beat = threading.Event()
        if self._is_plain:
            threading.Thread(target=self._heartbeat, args=(name, start, beat), daemon=True).start()
        try:
            yield
            outcome = ""
        except (asyncio.CancelledError, KeyboardInterrupt):
            outcome = "interrupted after "
            raise
        finally:
            beat.set()
            self._phase = before
            self.note(f"{name} ... {outcome}{self._clock() - start:.1f} s")

    def _heartbeat(self, name: str, start: float, over: threading.Event) -> None:
        """Waits for: the end of the phase, which sets `over`."""
        while not over.wait(HEARTBEAT_S):
            self._show(f"{name} ... {self._clock() - start:.0f} s so far")

    def end(self, how: str) -> None:
        """The run is over: what the last picture says of it, such as "completed"."""
        self._ended = how

    def update(self, **fields: object) -> None:
        """Set fields of `ProgressState`. Raises `TypeError` for a name that it does not have."""
        unknown = fields.keys() - _FIELDS
        if unknown:
            raise TypeError(f"progress has no field {', '.join(sorted(unknown))}; it has {', '.join(sorted(_FIELDS))}")
        for name, value in fields.items():
            setattr(self.state, name, value)

    def step(self, record: Mapping[str, object]) -> None:
        """One optimizer step is done; `record` is its line of metrics.jsonl."""
        self.update(**{field: record[name] for name, field in _FROM_RECORD.items() if name in record})
        now = self._clock()
        self._step_times.append((now, self.state.step))
        is_due = now - self._last_plain >= _PLAIN_EVERY_S or "eval/accuracy" in record or self.state.step >= self._total
        if is_due:
            self._last_plain = now
            self._keep(self.line())
            if self._is_plain:
                self._show(self.line())

    def note(self, text: str) -> None:
        """One line that stays on the screen."""
        self._keep(text)
        if self._is_plain or self._live is not None:
            self._show(text)

    def _keep(self, text: str) -> None:
        """In log.txt."""
        logger.info("%s", text, extra=SHOWN_BEFORE)

    def _show(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last picture on the screen. Idempotent."""
        if self._live is not None:
            self._live.stop()

    def eta_s(self) -> float | None:
        """Seconds to the last step, by the pace of the last steps; None before the second one."""
        if len(self._step_times) < 2 or self._ended:
            return None
        (first_time, first_step), (last_time, last_step) = self._step_times[0], self._step_times[-1]
        if last_step <= first_step:
            return None
        left = (self._total - last_step) * (last_time - first_time) / (last_step - first_step)
        return max(0.0, left - (self._clock() - last_time))

    def line(self) -> str:
        """The state in one line of plain text."""
        s = self.state
        parts = [f"step {s.step}/{self._total}", f"reward {_reward(s)}"]
        if s.accuracy is not None:
            parts.append(f"accuracy {_accuracy(s)}")
        parts += self._learning()
        parts.append(f"staleness {_number(s.staleness_mean, '.2f')} max {_number(s.staleness_max, '.0f')}")
        parts.append(f"rollout {_rate(s.rollout_tokens_per_s)}, train {_rate(s.train_tokens_per_s)}")
        if s.step_s is not None:
            parts.append(f"step in {_seconds(s.step_s)}")
        return "  ".join([*parts, self._times()])

    def _times(self) -> str:
        """Since the start of the process, and to the last step where that is known."""
        eta, elapsed = self.eta_s(), _duration(self._clock() - self._started_at)
        return elapsed if eta is None else f"{elapsed}, {_duration(eta)} left"

    def _learning(self) -> list[str]:
        """What tells first that a run goes wrong; nothing of what is not known."""
        s = self.state
        parts = [] if s.response_tokens is None else [f"length {_length(s)}"]
        named = (("entropy", s.entropy), ("grad norm", s.grad_norm))
        return parts + [f"{name} {value:.3g}" for name, value in named if value is not None]

    def _trainer(self) -> str:
        if self.state.waiting_for:
            return f"waits for {self.state.waiting_for}"
        return "trains" if self._step_times else "starts"

    def _panel(self) -> RenderableType:
        s = self.state
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(f"step {s.step}/{self._total}", ProgressBar(total=self._total, completed=s.step), self._times())
        cells = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for _ in range(2):
            cells.add_column(style="dim", no_wrap=True)
            cells.add_column(ratio=1)
        staleness = f"{_number(s.staleness_mean, '.2f')}, max {_number(s.staleness_max, '.0f')}"
        buffer = f"{_number(s.buffer_ready, 'd')} ready, {_number(s.buffer_running, 'd')} running"
        waiting = self._ended or self._phase or self._trainer()
        engines = f"{_number(s.replicas_live, 'd')}/{_number(s.replicas, 'd')} live"
        cells.add_row("reward", _reward(s), "accuracy", _accuracy(s))
        cells.add_row("rollout", _rate(s.rollout_tokens_per_s), "train", _rate(s.train_tokens_per_s))
        cells.add_row("buffer", f"{buffer}, {_number(s.buffer_slots, 'd')} slots", "staleness", staleness)
        cells.add_row("length", _length(s), "entropy", _number(s.entropy, ".3g"))
        cells.add_row("step time", _seconds(s.step_s), "grad norm", _number(s.grad_norm, ".3g"))
        cells.add_row("engines", engines, "trainer", escape(waiting))
        width = max(1, self._console.width - _ROOM_FOR_ECHO)
        return Panel(Group(bar, cells), title=escape(self._title), title_align="left", width=width)


def _number(value: float | None, spec: str) -> str:
    if value is None:
        return "-"
    return format(int(value) if spec == "d" else value, spec)


def _reward(state: ProgressState) -> str:
    """Mean of the responses that have one, and the share of those that failed, if any did."""
    failed = f" ({state.failed_frac:.0%} failed)" if state.failed_frac else ""
    return f"{_number(state.reward, '.3f')}{failed}"


def _length(state: ProgressState) -> str:
    """Of the answers, in tokens, and how many ran into the limit."""
    cut = "" if state.truncated_frac is None else f" ({state.truncated_frac:.0%} cut)"
    return f"{_number(state.response_tokens, '.0f')}{cut}"


def _seconds(seconds: float | None) -> str:
    return f"{_number(seconds, '.1f')} s"


def _accuracy(state: ProgressState) -> str:
    version = "" if state.accuracy_version is None else f" (v{state.accuracy_version})"
    return f"{_number(state.accuracy, '.3f')}{version}"


def _rate(tokens_per_s: float | None) -> str:
    if tokens_per_s is None:
        return "- tok/s"
    return f"{tokens_per_s / 1000:.1f}k tok/s" if tokens_per_s >= 10_000 else f"{tokens_per_s:.0f} tok/s"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
