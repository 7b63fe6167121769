"""The display: what a person reads, on a terminal and elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.text import Text

from trainer.config.convert import to_run_config
from trainer.telemetry import console as progress_module
from trainer.telemetry.console import Progress, Screen

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(kind: str, *, terminal: bool = False, clock: Clock | None = None) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    config, _ = to_run_config({"telemetry": {"progress": kind}, "trainer": {"total_steps": 10}})
    console = Console(file=out, force_terminal=terminal, width=110, _environ={"TERM": "xterm"})
    return Progress(config, console=console, clock=clock or Clock()), out


def record(step: int, **more: Any) -> dict[str, object]:
    return {
        "step": step, "reward/mean": 0.5, "staleness/mean": 0.25, "staleness/max": 1,
        "perf/rollout_tokens_per_s": 15000.0, "perf/train_tokens_per_s": 800.0, **more,
    }  # fmt: skip


def test_elsewhere_each_step_is_one_line_with_the_numbers_and_time_left() -> None:
    clock = Clock()
    progress, out = make("auto", clock=clock)
    for step in (1, 2, 3):
        clock.now += 3.0
        progress.step(record(step))
    assert out.getvalue().splitlines()[-1] == (
        "step 3/10  reward 0.500  staleness 0.25 max 1  rollout 15.0k tok/s, train 800 tok/s  0m09s, 0m21s left"
    )
    assert progress.eta_s() == pytest.approx(21.0)


def test_fast_steps_share_a_line_but_evaluations_and_the_last_step_are_always_shown() -> None:
    clock = Clock()
    progress, out = make("plain", clock=clock)
    for step in range(1, 11):
        clock.now += 0.1
        extra = {"eval/accuracy": 0.75, "eval/version": 5} if step == 6 else {}
        progress.step(record(step, **extra))
    shown = out.getvalue().splitlines()
    assert [line.split()[1] for line in shown] == ["1/10", "6/10", "10/10"]
    assert "accuracy 0.750 (v5)" in shown[1]


def test_a_line_has_what_tells_first_that_a_run_goes_wrong() -> None:
    progress, out = make("plain")
    more = {
        "response/tokens_mean": 311.7, "response/truncated_frac": 0.125, "learner/entropy": 0.31234,
        "learner/grad_norm": 12.34, "perf/step_s": 34.06,
    }  # fmt: skip
    progress.step(record(1, **more))
    assert out.getvalue() == (
        "step 1/10  reward 0.500  length 312 (12% cut)  entropy 0.312  grad norm 12.3  staleness 0.25 max 1  "
        "rollout 15.0k tok/s, train 800 tok/s  step in 34.1 s  0m00s\n"
    )


@pytest.mark.parametrize("kind", ["plain", "rich", "off"])
def test_the_log_has_phases_notes_and_steps_whatever_is_shown(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress, _ = make(kind, terminal=True, clock=clock)
    with caplog.at_level(logging.INFO), progress.phase("starting Ray"):
        clock.now += 2.0
    with caplog.at_level(logging.INFO):
        progress.note("100% of it")
        progress.step(record(1))
    progress.close()
    kept = caplog.messages
    assert kept[:3] == ["starting Ray ...", "starting Ray ... 2.0 s", "100% of it"]
    assert kept[3].startswith("step 1/10  reward 0.500")
    assert all(vars(entry)["shown_before"] for entry in caplog.records), "the screen has its own"


class Gone(io.StringIO):
    """A terminal that may be closed."""

    is_gone = False

    def write(self, text: str) -> int:
        if self.is_gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_a_screen_that_is_gone_ends_no_run(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    config, _ = to_run_config({"telemetry": {"progress": kind}})
    screen = Gone()
    console = Console(file=screen, force_terminal=kind == "rich", width=110, _environ={"TERM": "xterm"})
    progress = Progress(config, console=console)
    progress.note("here")
    screen.is_gone = True
    with progress.phase("stopping"):
        progress.step(record(1))
    progress.note("the last word")
    progress.close()
    assert caplog.text.count("nothing more is shown") == 1
    assert "here" in screen.getvalue()


def test_a_reader_that_is_gone_leaves_nothing_to_be_refused_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="ascii") as pipe:
        screen = Screen(pipe)
        for _ in range(2):
            screen.write("a line\n")
            screen.flush()
        pipe.write("what is left")
    assert capfd.readouterr().err == ""


def test_a_character_that_a_screen_cannot_say_is_replaced(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        Screen(file).write("0.5 ± 0.1")
    assert (tmp_path / "out").read_text() == "0.5 ? 0.1"


def test_phases_are_timed_and_failures_are_said() -> None:
    clock = Clock()
    progress, out = make("plain", clock=clock)
    with progress.phase("starting Ray"):
        clock.now += 4.1
    with contextlib.suppress(RuntimeError), progress.phase("starting engines"):
        raise RuntimeError
    with contextlib.suppress(asyncio.CancelledError), progress.phase("saving"):
        raise asyncio.CancelledError
    assert out.getvalue().splitlines() == [
        "starting Ray ...", "starting Ray ... 4.1 s", "starting engines ...", "starting engines ... failed after 0.0 s",
        "saving ...", "saving ... interrupted after 0.0 s",
    ]  # fmt: skip


def test_the_panel_leaves_room_for_what_a_terminal_shows_of_ctrl_c() -> None:
    """`^C` appears behind its last line. Where it wraps, the cursor is a line lower than the next picture expects, and
    the first line of this one stays."""
    progress, _ = make("rich", terminal=True)
    with progress._console.capture() as capture:
        progress._console.print(progress._panel())
    widest = max(Text.from_ansi(line).cell_len for line in capture.get().splitlines())
    assert widest + len("^C") < progress._console.width
    progress.close()


def test_a_long_phase_says_that_it_still_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "HEARTBEAT_S", 0.01)
    clock = Clock()
    progress, out = make("plain", clock=clock)
    with progress.phase("compiling"):
        clock.now += 61.0
        deadline = time.monotonic() + 20.0
        while "compiling ... 61 s so far" not in out.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert out.getvalue().splitlines()[-1] == "compiling ... 61.0 s"


def test_the_panel_says_what_the_run_does_and_at_last_how_it_ended() -> None:
    clock = Clock()
    progress, _ = make("rich", terminal=True, clock=clock)

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
    progress.close()


def test_a_terminal_gets_a_panel_with_everything() -> None:
    progress, out = make("auto", terminal=True)
    progress.update(waiting_for="groups [32]", buffer_ready=3, buffer_running=5, buffer_slots=64, replicas_live=1)
    progress.step(record(2, **{"eval/accuracy": 0.75, "eval/version": 1}))
    progress.note("a note with [brackets]")
    progress.close()
    progress.close()
    shown = out.getvalue()
    for words in (
        "step 2/10", "0.500", "0.750 (v1)", "0.25, max 1", "15.0k tok/s", "800 tok/s", "3 ready, 5 running, 64 slots",
        "waits for groups [32]", "1/1 live", "a note with [brackets]",
    ):  # fmt: skip
        assert words in shown


def test_off_is_silent() -> None:
    progress, out = make("off", terminal=True)
    with progress.phase("starting"):
        progress.step(record(1))
    progress.close()
    assert out.getvalue() == ""


def test_an_unknown_field_is_refused() -> None:
    progress, _ = make("off")
    with pytest.raises(TypeError, match="has no field rewrd"):
        progress.update(rewrd=1)


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_the_share_of_failed_responses_is_beside_the_reward_that_does_not_count_them(kind: str) -> None:
    progress, out = make(kind, terminal=kind == "rich")
    progress.step(record(1, **{"response/failed_frac": 0.0}))
    progress.step(record(10, **{"response/failed_frac": 0.53, "reward/mean": 1.0}))
    progress.close()
    assert "1.000 (53% failed)" in out.getvalue() and "(0% failed)" not in out.getvalue()
