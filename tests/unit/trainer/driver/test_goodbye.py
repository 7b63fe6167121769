"""The last words of a run name `trainer.advise` exactly where that has something to say."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from tests.fakes.scripted_run import Script, ScriptedRun
from trainer.driver.checkpointing import Evaluation, RunState
from trainer.driver.run import _say_goodbye
from trainer.telemetry.session import append
from trainer.tools import advise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.driver import loops

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., loops.Parts]


def last_words(run: ScriptedRun) -> list[str]:
    """What `run` says at its end, with the files that the driver has written by then."""
    state, run_dir = run.state, run.telemetry.run_dir
    state.stop("completed")
    run_dir.write_config(replace(run.cfg, run_dir=str(run_dir.path)))
    append(run_dir.environment, {"device": "cpu", "resumed_from_step": state.resumed_from_step})
    run_dir.summary.write_text(json.dumps({"exit_reason": state.stop_reason, "steps": state.step}))
    screen = io.StringIO()
    _say_goodbye(Console(file=screen, width=40), state, run_dir, max_staleness=run.cfg.mode.max_staleness)
    return screen.getvalue().splitlines()


@pytest.mark.parametrize(
    ("max_staleness", "num_steps", "says"),
    [(0, 4, False), (0, 5, True), (1, 6, False), (1, 7, True), (2, 8, False), (2, 9, True)],
)
def test_advise_is_named_where_it_has_enough_steps(
    scripted: Make, play: Play, max_staleness: int, num_steps: int, says: bool
) -> None:
    run = scripted(Script(), mode={"max_staleness": max_staleness}, trainer={"total_steps": num_steps})
    play(run)
    *before, last = last_words(run)
    path = run.telemetry.run_dir.path
    assert last.startswith(f"completed: {num_steps} steps in ") and last.endswith(f"see {path}")
    assert before == ([f"who waited for whom: python -m trainer.advise {path}"] if says else [])
    assert advise.main([str(path)]) == (advise.EXIT_TOLD if says else advise.EXIT_TOO_EARLY)


def test_steps_before_a_resume_do_not_count(scripted: Make, play: Play) -> None:
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0, step=5, live_version=5, resumed_from_step=5)
    run = scripted(Script(), state=state, mode={"max_staleness": 0}, trainer={"total_steps": 9})
    play(run)
    metrics = run.telemetry.run_dir.metrics
    since = metrics.read_text().splitlines(keepends=True)
    line = json.loads(since[0])
    before = [json.dumps({**line, "step": step, "time_s": line["time_s"] + 60 + step}) + "\n" for step in range(1, 6)]
    metrics.write_text("".join([*before, *since]))
    assert len(last_words(run)) == 1
    assert advise.main([str(run.telemetry.run_dir.path)]) == advise.EXIT_TOO_EARLY


def test_a_resume_with_nothing_to_do_says_what_to_raise(tmp_path: Path) -> None:
    run_dir: Any = SimpleNamespace(path=tmp_path)
    for step, says in ((5, True), (6, False)):
        state = RunState(started_at=0.0, wall_clock=lambda: 0.0, step=step, resumed_from_step=5)
        state.stop("completed")
        screen = io.StringIO()
        _say_goodbye(Console(file=screen, width=40), state, run_dir, max_staleness=0)
        assert ("raise trainer.total_steps to go on" in screen.getvalue()) == says


def evaluation(version: int, accuracy: float) -> Evaluation:
    return Evaluation(version=version, accuracy=accuracy, num_prompts=1, truncated_frac=0.0, time_s=0.0)


def said(tmp_path: Path, reason: Any, **state: Any) -> list[str]:
    run_state = RunState(started_at=0.0, wall_clock=lambda: 108.0, **state)
    run_state.stop(reason)
    run_dir: Any = SimpleNamespace(path=tmp_path, checkpoints=tmp_path / "checkpoints")
    screen = io.StringIO()
    _say_goodbye(Console(file=screen, width=40), run_state, run_dir, max_staleness=0)
    return screen.getvalue().splitlines()


def test_the_accuracy_that_is_said_is_the_one_that_reached_the_goal(tmp_path: Path) -> None:
    *_, line = said(
        tmp_path,
        "accuracy_reached",
        step=142,
        resumed_from_step=78,
        first_accuracy=0.308,
        reached=evaluation(140, 0.932),
        last_evaluation=evaluation(142, 0.928),
    )
    accuracy = "held-out accuracy 0.308 -> 0.932 (v140)"
    assert line == (f"accuracy reached: 142 steps, 64 of them in this process, in 108 s; {accuracy}; see {tmp_path}")


def test_an_interrupted_run_says_how_it_goes_on(tmp_path: Path) -> None:
    assert said(tmp_path, "interrupted")[0] == "no checkpoint was saved, so the same command begins anew"
    (tmp_path / "checkpoints" / "step_8").mkdir(parents=True)
    assert said(tmp_path, "interrupted", step=8)[0] == (
        f"to go on from step_8: the same command with run_dir={tmp_path}"
    )


def test_brackets_in_a_path_are_no_markup(tmp_path: Path) -> None:
    """Rich would leave the first out, and fail at the second."""
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0, step=5)
    screen = io.StringIO()
    run_dir: Any = SimpleNamespace(path=tmp_path / "[lr=1e-5]" / "[" / "x]")
    _say_goodbye(Console(file=screen, width=40), state, run_dir, max_staleness=0)
    assert screen.getvalue().strip().endswith(f"see {run_dir.path}")
