"""What a person sees: everything goes to log.txt; the console gets what can be read there, and its loss ends no run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.text import Text

from tests.fakes.full_disk import file_limit
from tests.fakes.process_life import wait_until
from trainer.config.schema import RunConfig, TelemetryConfig, TrainerConfig
from trainer.telemetry import console as console_module
from trainer.telemetry.console import FILE_ONLY, Progress, SafeStream, logging_to

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def display(
    kind: Any, *, terminal: bool = False, out: io.StringIO | None = None
) -> tuple[Progress, io.StringIO, Clock]:
    out, clock = io.StringIO() if out is None else out, Clock()
    config = RunConfig(telemetry=TelemetryConfig(progress=kind), trainer=TrainerConfig(total_steps=10))
    console = Console(file=out, force_terminal=terminal, width=110, _environ={"TERM": "xterm"})
    return Progress(config, console=console, clock=clock), out, clock


def record(step: int, **more: Any) -> dict[str, object]:
    return {
        "step": step, "reward/mean": 0.5, "staleness/mean": 0.25, "staleness/max": 1,
        "perf/rollout_tokens_per_s": 15000.0, "perf/train_tokens_per_s": 800.0, **more,
    }  # fmt: skip


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_shows_the_first_cause_and_the_file_has_the_traceback(tmp_path: Path, is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, color_system=None, width=200)
    with logging_to(tmp_path / "log.txt", level="info", console=console):
        try:
            raise RuntimeError("rank 0 failed") from OSError("disk full")
        except RuntimeError:
            logging.getLogger("trainer.test").exception("the run failed in step %d", 3)
    logged = (tmp_path / "log.txt").read_text()
    assert "Traceback" in logged and "OSError: disk full" in logged
    assert "the run failed in step 3: OSError: disk full" in out.getvalue()
    assert "Traceback" not in out.getvalue()


def test_third_parties_are_quiet_on_the_console_and_kept_in_the_file(tmp_path: Path) -> None:
    root = logging.getLogger()
    before, out = (root.level, list(root.handlers)), io.StringIO()
    with logging_to(tmp_path / "log.txt", level="info", console=Console(file=out)):
        logging.getLogger("trainer.driver").info("step done")
        logging.getLogger("trainer.driver").debug("detail")
        logging.getLogger("trainer.driver").warning("said at first", extra=FILE_ONLY)
        logging.getLogger("some_library").info("chatter")
        logging.getLogger("some_library").warning("trouble")
        logging.getLogger("urllib3").info("connection")
    assert (root.level, root.handlers) == before
    shown, kept = out.getvalue(), (tmp_path / "log.txt").read_text()
    assert "step done" in shown and "trouble" in shown and "chatter" not in shown
    assert "step done" in kept and "chatter" in kept and "detail" not in kept and "connection" not in kept
    assert "said at first" in kept and "said at first" not in shown


def test_lines_that_a_full_disk_refuses_are_counted_and_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, log = tmp_path / "log.txt", io.StringIO(), logging.getLogger("trainer.x")
    with logging_to(path, level="info", console=Console(file=out, width=200)):
        log.info("before")
        with file_limit(path.stat().st_size + 20):
            for number in range(3):
                log.info("refused %d", number)
        log.info("behind")
    kept = path.read_text()
    assert "before" in kept and kept.count("behind") == 1 and "could not take 3 lines" in kept
    assert out.getvalue().count("could not take 3 lines") == 1 and "refused 2" in out.getvalue()
    assert capsys.readouterr().err == "", "logging shows a traceback for each"
    with file_limit(path.stat().st_size), logging_to(path, level="info", console=Console(file=out)):
        log.info("never taken")
    assert "never taken" not in path.read_text()


def test_an_error_that_ends_a_thread_is_in_the_log(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("the socket is gone")

    before, out = threading.excepthook, io.StringIO()
    with logging_to(tmp_path / "log.txt", level="info", console=Console(file=out)):
        thread = threading.Thread(target=fail, name="listener")
        thread.start()
        thread.join()
    assert threading.excepthook is before
    assert "thread listener has failed" in (tmp_path / "log.txt").read_text()
    assert "thread listener has failed: ValueError: the socket is gone" in out.getvalue()


MORE = {
    "response/tokens_mean": 311.7, "response/truncated_frac": 0.125, "learner/entropy": 0.31234,
    "learner/grad_norm": 12.34, "perf/step_s": 34.06,
}  # fmt: skip
MORE_WORDS = (
    "reward 0.500  length 312 (12% cut)  entropy 0.312  grad norm 12.3  staleness 0.25 max 1  "
    "rollout 15.0k tok/s, train 800 tok/s  step in 34.1 s  0m09s, 0m21s left"
)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "reward 0.500  staleness 0.25 max 1  rollout 15.0k tok/s, train 800 tok/s  0m09s, 0m21s left"),
        (MORE, MORE_WORDS),
    ],
)
def test_without_a_terminal_each_step_is_one_line_with_its_numbers_and_the_time_left(
    more: dict[str, float], words: str
) -> None:
    progress, out, clock = display("auto")
    for step in (1, 2, 3):
        clock.now += 3.0
        progress.step(record(step, **more))
    assert out.getvalue().splitlines()[-1] == f"step 3/10  {words}"
    assert progress.eta_s() == pytest.approx(21.0)


def test_fast_steps_share_a_line_but_evaluations_and_the_last_step_are_always_shown() -> None:
    progress, out, clock = display("plain")
    for step in range(1, 11):
        clock.now += 0.1
        progress.step(record(step, **({"eval/accuracy": 0.75, "eval/version": 5} if step == 6 else {})))
    shown = out.getvalue().splitlines()
    assert [line.split()[1] for line in shown] == ["1/10", "6/10", "10/10"]
    assert "accuracy 0.750 (v5)" in shown[1]


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_the_share_of_failed_responses_is_beside_the_reward_that_does_not_count_them(kind: str) -> None:
    progress, out, _ = display(kind, terminal=kind == "rich")
    progress.step(record(1, **{"response/failed_frac": 0.0}))
    progress.step(record(10, **{"response/failed_frac": 0.53, "reward/mean": 1.0}))
    progress.close()
    assert "1.000 (53% failed)" in out.getvalue() and "(0% failed)" not in out.getvalue()


@pytest.mark.parametrize("kind", ["plain", "rich", "off"])
def test_the_log_has_phases_notes_and_steps_whatever_is_shown(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    progress, out, clock = display(kind, terminal=True)
    with caplog.at_level(logging.INFO), progress.phase("starting Ray"):
        clock.now += 2.0
    with caplog.at_level(logging.INFO):
        progress.note("100% of it")
        progress.step(record(1))
    progress.close()
    assert caplog.messages[:3] == ["starting Ray ...", "starting Ray ... 2.0 s", "100% of it"]
    assert caplog.messages[3].startswith("step 1/10  reward 0.500")
    assert all(vars(entry)["file_only"] for entry in caplog.records), "the console has its own"
    assert (out.getvalue() == "") is (kind == "off")


def test_phases_are_timed_long_ones_show_that_they_last_and_failures_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "HEARTBEAT_S", 0.01)
    progress, out, clock = display("plain")
    with progress.phase("compiling"):
        clock.now += 61.0
        wait_until(lambda: "compiling ... 61 s so far" in out.getvalue(), within_s=20.0, what="no sign of life")
    monkeypatch.setattr(console_module, "HEARTBEAT_S", 60.0)
    with contextlib.suppress(RuntimeError), progress.phase("starting engines"):
        raise RuntimeError
    with contextlib.suppress(asyncio.CancelledError), progress.phase("saving"):
        raise asyncio.CancelledError
    assert out.getvalue().splitlines()[-5:] == [
        "compiling ... 61.0 s", "starting engines ...", "starting engines ... failed after 0.0 s",
        "saving ...", "saving ... interrupted after 0.0 s",
    ]  # fmt: skip


def test_a_terminal_gets_a_panel_with_everything() -> None:
    progress, out, _ = display("auto", terminal=True)
    progress.update(waiting_for="groups [32]", step=1)
    slots = {"buffer/num_ready": 3, "buffer/num_running": 5, "buffer/num_slots": 64, "sync/replicas_live": 1}
    progress.step(record(2, **slots, **{"eval/accuracy": 0.75, "eval/version": 1}))
    progress.note("a note with [brackets]")
    progress.close()
    progress.close()
    for words in (
        "step 2/10", "0.500", "0.750 (v1)", "0.25 max 1", "15.0k tok/s", "800 tok/s", "3 ready, 5 running, 64 slots",
        "waits for groups [32]", "1/1 live", "a note with [brackets]",
    ):  # fmt: skip
        assert words in out.getvalue()


def test_the_panel_shows_what_the_run_does_and_at_last_how_it_ended() -> None:
    progress, _, clock = display("rich", terminal=True)

    def shown() -> str:
        with progress._console.capture() as capture:
            progress._console.print(progress._panel())
        return capture.get()

    assert "starts" in shown()
    with progress.phase("opening weight sync"):
        assert "opening weight sync" in shown()
    for step in (1, 2, 3):
        clock.now += 3.0
        progress.step(record(step))
    assert "trains" in shown() and "0m09s, 0m21s left" in shown()
    progress.end("interrupted")
    assert "interrupted" in shown() and " left" not in shown() and "0m09s" in shown()
    # `^C` appears behind the last line. Where that wraps, the cursor is a line lower than the next picture expects.
    assert max(Text.from_ansi(line).cell_len for line in shown().splitlines()) + len("^C") < progress._console.width
    progress.close()


class Closable(io.StringIO):
    """A terminal that may be closed."""

    is_closed = False

    def write(self, text: str) -> int:
        if self.is_closed:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_a_closed_terminal_ends_no_run(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    terminal = Closable()
    progress, _, _ = display(kind, terminal=kind == "rich", out=terminal)
    progress.note("here")
    terminal.is_closed = True
    with progress.phase("stopping"):
        progress.step(record(1))
    progress.note("the last word")
    progress.close()
    assert caplog.text.count("disabling console output") == 1
    assert "here" in terminal.getvalue()


def test_a_closed_pipe_leaves_nothing_to_be_refused_at_exit(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="ascii") as pipe:
        stream = SafeStream(pipe)
        for _ in range(2):
            stream.write("a line\n")
            stream.flush()
        pipe.write("what is left")
    assert capfd.readouterr().err == ""


def test_a_character_that_the_terminal_cannot_encode_is_replaced(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        SafeStream(file).write("0.5 ± 0.1")
    assert (tmp_path / "out").read_text() == "0.5 ? 0.1"
