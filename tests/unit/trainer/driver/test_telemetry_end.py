"""Responses of evaluations are written in the background, and only the end of a run waits for them."""

from __future__ import annotations

import asyncio
import io
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from tests.fakes.scripted_run import config, prompt_set, trajectory
from trainer.telemetry import session
from trainer.telemetry.run_dir import open_run_dir

if TYPE_CHECKING:
    from pathlib import Path

WAITS = "writing the responses of evaluations ..."


class Screen(io.StringIO):
    """Sets `seen` once the run reports what it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def write(self, text: str, /) -> int:
        if WAITS in text:
            self.seen.set()
        return super().write(text)


@pytest.mark.parametrize("is_slow", [False, True])
def test_only_the_end_of_a_run_waits_for_responses_and_reports_a_long_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr(session, "QUIET_S", 0.01 if is_slow else 60.0)
    screen, may_write, written, waited = Screen(), threading.Event(), list[str](), list[bool]()

    def write(_path: Path, answers: Any, **_how: Any) -> None:
        assert may_write.wait(10)
        waited.append(not is_slow or screen.seen.wait(10))
        written.extend(prompt.prompt_id for _, prompt, _ in answers)

    recorder: Any = SimpleNamespace(begin_evaluation=lambda folder, _: folder / "version_4.jsonl", write_answers=write)
    answers = [("", prompt, [trajectory(prompt, 0, [(4, 2)], reward=1.0)]) for prompt in prompt_set(3).prompts]
    cfg = replace(config(telemetry={"progress": "plain"}), run_dir=str(tmp_path / "run"))
    run_dir = open_run_dir(cfg)
    try:
        with session.opened(cfg, run_dir, Console(file=screen, width=200)) as sinks:
            telemetry = replace(sinks, recorder=recorder)
            assert asyncio.run(telemetry.record_answers(answers, version=4)) == "evaluations/version_4.jsonl"
            assert asyncio.run(replace(sinks, recorder=None).record_answers(answers, version=4)) is None
            assert asyncio.run(telemetry.record_answers([], version=4, failed="time was up")) is None
            sinks.thread.submit(written.append, "record of metrics").result(10)
            assert written == ["record of metrics"], "nothing waits for the responses yet"
            may_write.set()
    finally:
        run_dir.close()
    assert written[1:] == ["train/0", "train/1", "train/2"]
    assert waited == [True]
    shown = [line for line in screen.getvalue().splitlines() if line.startswith(WAITS)]
    assert len(shown) == 2 * is_slow
