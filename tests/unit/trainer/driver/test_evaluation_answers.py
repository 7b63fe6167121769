"""Answers of evaluations are written beside everything else, and all of them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import config, prompt_set, telemetry_in, trajectory
from trainer.driver.evaluation import Answered, keep_answers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.telemetry.session import Telemetry

ANSWERS = [
    Answered(prompt=prompt, trajectories=[trajectory(prompt, 0, [(4, 2)], reward=1.0)])
    for prompt in prompt_set(5).prompts
]
ALL = [one.prompt.prompt_id for one in ANSWERS]


class Recorder:
    """Writes into a list, the first time only when it may."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.may_write = threading.Event()

    def begin_evaluation(self, folder: Path, version: int) -> Path:
        return folder / f"version_{version}.jsonl"

    def write_answers(self, _path: Path, answers: Any, **_how: Any) -> None:
        assert self.may_write.wait(10)
        self.done += [prompt.prompt_id for _, prompt, _ in answers]


def test_nobody_waits_for_the_answers_but_the_end_of_the_process() -> None:
    recorder = Recorder()
    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as slow_thread:
        run_dir = SimpleNamespace(answers=Path("evaluations"))
        telemetry: Any = SimpleNamespace(recorder=recorder, thread=thread, slow_thread=slow_thread, run_dir=run_dir)
        assert asyncio.run(keep_answers(telemetry, ANSWERS, version=4)) == "evaluations/version_4.jsonl"
        thread.submit(recorder.done.append, "line of metrics").result(10)
        assert recorder.done == ["line of metrics"], "it has returned, and nothing could be written yet"
        slow_thread.shutdown(wait=False)
        recorder.may_write.set()
    assert recorder.done == ["line of metrics", *ALL]


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    with telemetry_in(config(), tmp_path / "run") as sinks:
        yield sinks


def keep(telemetry: Telemetry, **how: Any) -> str | None:
    return asyncio.run(keep_answers(telemetry, ANSWERS, **{"version": 4, **how}))


def test_a_version_that_is_evaluated_again_has_a_second_file_and_the_log_says_so(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = keep(telemetry)
    assert caplog.text == ""
    second = keep(telemetry)
    assert (first, second) == ("evaluations/version_4.jsonl", "evaluations/version_4.2.jsonl")
    assert (
        "version 4 has been evaluated before; what was answered this time is in evaluations/version_4.2" in caplog.text
    )
    sizes = [len((telemetry.run_dir.path / name).read_text().splitlines()) for name in (first, second) if name]
    assert sizes == [5, 5]


def test_answers_are_not_kept_where_trajectories_are_not_recorded(telemetry: Telemetry) -> None:
    assert keep(replace(telemetry, recorder=None)) is None
    assert list(telemetry.run_dir.answers.iterdir()) == []


def test_there_is_no_file_without_answers(telemetry: Telemetry) -> None:
    assert asyncio.run(keep_answers(telemetry, [], version=4, failed="time was up")) is None
    assert list(telemetry.run_dir.answers.iterdir()) == []


def test_a_file_that_cannot_be_made_is_counted_and_has_no_name(telemetry: Telemetry) -> None:
    telemetry.run_dir.answers.rmdir()
    assert keep(telemetry) is None
    assert telemetry.recorder is not None and telemetry.recorder.num_errors == 1
