"""How a run starts and ends as a process: interrupts, summary, last words, exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from dataclasses import replace
from math import nan
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from rich.console import Console

import trainer.__main__ as main_module
from rollout.errors import DataError
from rollout.types import Group
from tests.fakes.full_disk import file_limit
from tests.fakes.scripted_run import (
    InlineExecutor,
    Script,
    ScriptedDriver,
    ScriptedRun,
    config,
    prompt_set,
    telemetry_in,
    trajectory,
)
from tests.fakes.virtual_time import run_virtual
from trainer.driver import run as run_module
from trainer.driver.run import SAME_SIGNAL_S, Driver, _on_signals, _say_goodbye
from trainer.driver.state import EvalMetrics, FailedResponses, RunState
from trainer.errors import CheckpointError, ModelError, first_cause, one_line
from trainer.telemetry.session import append, claimed_run_dir, opened
from trainer.telemetry.trajectories import TrajectoryRecorder
from trainer.tools import advise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.driver.training_run import TrainingRun
    from trainer.telemetry.session import Telemetry

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., TrainingRun]


class State:
    """What an interrupt changes."""

    def __init__(self) -> None:
        self.interrupted = asyncio.Event()
        self.stop_reason: str | None = None

    def stop(self, reason: str) -> None:
        self.stop_reason = reason
        self.interrupted.set()


@pytest.mark.parametrize(
    ("after_s", "stops_at_once"),
    [((0.0, 0.2), False), ((0.0, SAME_SIGNAL_S), True), ((0.0, 0.4, 0.8, 1.2), True), ((0.0, 0.4, 0.8), False)],
)
async def test_a_second_ctrl_c_stops_at_once_however_many_come_in_between(
    monkeypatch: pytest.MonkeyPatch, after_s: tuple[float, ...], stops_at_once: bool
) -> None:
    loop, nothing = asyncio.get_running_loop(), cast("Any", None)
    state, work = State(), loop.create_future()
    driver = Driver(nothing, cast("Any", state), nothing, nothing)
    driver._is_training = True
    with monkeypatch.context() as patch:
        for seconds in after_s:
            patch.setattr(loop, "time", lambda seconds=seconds: 1000.0 + seconds)
            driver._interrupt(cast("Any", work))
    assert state.stop_reason == "interrupted"
    assert work.cancelled() is stops_at_once


@pytest.mark.parametrize(
    ("number", "is_ignored", "counts"),
    [
        (signal.SIGINT, False, True),
        (signal.SIGINT, True, True),  # as shells start what runs in the background
        (signal.SIGTERM, False, True),
        (signal.SIGHUP, False, True),
        (signal.SIGHUP, True, False),  # nohup
    ],
)
def test_a_closed_terminal_interrupts_as_ctrl_c_does_unless_under_nohup(
    number: int, is_ignored: bool, counts: bool
) -> None:
    calls: list[int] = []

    async def main() -> None:
        with _on_signals(lambda: calls.append(number)) as listen:
            listen()
            os.kill(os.getpid(), number)
            for _ in range(3):  # the loop reads its wakeup pipe
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)

    before = signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        asyncio.run(main())
        if not counts:
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert calls == [number] * counts


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
    assert advise.main([str(path)]) == (advise.EXIT_DIAGNOSED if says else advise.EXIT_TOO_EARLY)


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


def evaluation(version: int, accuracy: float) -> EvalMetrics:
    return EvalMetrics(version=version, accuracy=accuracy, num_prompts=1, truncated_frac=0.0, time_s=0.0)


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


@pytest.fixture
def telemetry(tmp_path: Path) -> Any:
    with telemetry_in(config(), tmp_path / "run") as sinks:
        yield sinks


def summary(sinks: Telemetry) -> dict[str, Any]:
    return json.loads(sinks.run_dir.summary.read_text())


def new_state() -> RunState:
    return RunState(started_at=0.0, wall_clock=lambda: 9.0)


def test_a_failed_run_says_so_with_its_first_cause(scripted: Callable[..., ScriptedRun], caplog: Any) -> None:
    """All groups fail: the error arrives inside an exception group, from inside a task."""
    run = scripted(Script(fails=lambda item: ValueError(f"engine lost group {item.group_id}")))
    with pytest.raises(BaseException), run_module._summary(run.cfg, run.state, run.telemetry.run_dir):  # noqa: B017
        run_virtual(run.run())
    told = summary(run.telemetry)
    assert told["exit_reason"] == "failed"
    assert told["error"].startswith("ValueError: engine lost group")
    assert told["steps"] == 0
    assert any(record.message == "the run failed" for record in caplog.records)


def test_a_completed_run_tells_both_accuracies(scripted: Callable[..., ScriptedRun]) -> None:
    run = scripted()
    with run_module._summary(run.cfg, run.state, run.telemetry.run_dir):
        run_virtual(run.run())
        run.state.stop("completed")
    told = summary(run.telemetry)
    assert (told["exit_reason"], told["error"], told["steps"], told["version"]) == ("completed", "", 6, 6)
    assert (told["first_accuracy"], told["last_accuracy"]) == (0.0, 0.6)


def test_a_full_disk_does_not_make_a_failure_of_a_run_that_is_done(
    scripted: Callable[..., ScriptedRun], caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted()
    with file_limit(10), run_module._summary(run.cfg, run.state, run.telemetry.run_dir):
        run.state.stop("completed")
    path = run.telemetry.run_dir.summary
    assert run.state.stop_reason == "completed"
    assert f"{path} is not written" in caplog.text
    assert not [entry for entry in path.parent.iterdir() if path.name in entry.name]


class Work(run_module.Driver):
    """A driver whose work is to wait; `seen` is the state at its end."""

    is_in_order = False

    async def _work(self) -> None:
        self._is_training = True
        await self._state.interrupted.wait()
        await asyncio.sleep(5)
        self.is_in_order = True


def driver(sinks: Telemetry, state: RunState) -> Work:
    nothing: Any = None
    return Work(replace(config(), name="x"), state, sinks, nothing)


@pytest.mark.parametrize(
    ("reason", "num_interrupts", "in_order"),
    [(None, 1, True), (None, 2, False), ("accuracy_reached", 1, True), ("accuracy_reached", 2, False)],
)
def test_the_first_interrupt_ends_in_order_and_the_second_at_once(
    telemetry: Telemetry, reason: Any, num_interrupts: int, in_order: bool
) -> None:
    state = new_state()
    if reason:
        state.stop(reason)
    work = driver(telemetry, state)

    async def main() -> None:
        running = asyncio.create_task(work._work())
        for _ in range(num_interrupts):
            await asyncio.sleep(1)
            work._interrupt(running)
        await asyncio.wait({running})

    run_virtual(main())
    assert work.is_in_order == in_order
    assert state.stop_reason == (reason if in_order and reason else "interrupted")


def test_every_way_to_end_has_an_exit_code() -> None:
    assert run_module.EXIT_CODES == {"completed": 0, "accuracy_reached": 0, "failed": 1, "interrupted": 130}


def test_what_failed_is_told_by_its_first_line_and_kept_whole() -> None:
    failed = FailedResponses()
    error = "reward 'mine.py:reward': raised ValueError: no number\n  File \"mine.py\", line 3, in reward"
    prompt = prompt_set(1).prompts[0]
    lost = replace(trajectory(prompt, 0, [(0, 3)], reward=nan), status="failed", error=error)
    failed.count(Group(group_id=0, prompt_id=prompt.prompt_id, trajectories=[lost], start_version=0))
    assert str(failed).endswith("First failure: reward 'mine.py:reward': raised ValueError: no number")
    assert failed.first_error == error


@pytest.mark.parametrize("kind", [CheckpointError, ModelError, DataError])
def test_an_error_of_the_start_is_a_failure_once_training_has_begun(
    scripted: Callable[..., ScriptedRun], monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    run = scripted(Script(learner_error=lambda step: kind("shard is gone") if step == 2 else None))

    async def body() -> None:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        await ScriptedDriver(run)._work()

    def train(*_: object, **_keys: object) -> int:
        run_virtual(body())
        return 0

    monkeypatch.setattr(run_module, "run", train)
    with pytest.raises(run_module.TrainingFailed, match="after 2 steps") as caught:
        main_module.main([])
    assert one_line(first_cause(caught.value)) == f"{kind.__name__}: shard is gone"


@pytest.mark.parametrize("kind", [CheckpointError, ModelError, DataError])
def test_the_same_error_before_it_is_one_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def refuse(*_: object, **_keys: object) -> int:
        raise kind("shard is gone")

    monkeypatch.setattr(run_module, "run", refuse)
    assert main_module.main([]) == 2
    assert "cannot be used as configured: shard is gone" in capsys.readouterr().err


@pytest.mark.parametrize(("gib", "num_skipped"), [(1e-9, 1), (20.0, 0), (None, 0)])
def test_the_configured_limit_is_that_of_the_recorder(tmp_path: Path, gib: float | None, num_skipped: int) -> None:
    cfg = replace(config(telemetry={"max_trajectories_gib": gib}), run_dir=str(tmp_path / "run"))
    console = Console(file=io.StringIO())
    with claimed_run_dir(cfg, console) as run_dir, opened(cfg, run_dir, console) as sinks:
        (run_dir.answers / "version_0.jsonl").write_text("{}\n")
        assert sinks.recorder is not None
        sinks.recorder.begin_evaluation(run_dir.answers, 1)
        assert sinks.recorder.num_skipped == num_skipped


def test_every_group_that_is_left_out_is_counted(
    scripted: Callable[..., ScriptedRun], play: Callable[..., TrainingRun]
) -> None:
    run = scripted(num_held_out=0)
    folder = run.telemetry.run_dir.trajectories
    run.telemetry = replace(run.telemetry, recorder=TrajectoryRecorder(folder, max_bytes=0))
    play(run)
    last = json.loads(run.telemetry.run_dir.metrics.read_text().splitlines()[-1])
    assert last["telemetry/trajectories_skipped"] == last["buffer/finished"] > 0
    assert list(folder.iterdir()) == []
