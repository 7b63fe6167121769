"""How a run ends: interrupts, failures and losses, what is saved then, summary, last words and exit code."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

import trainer.__main__ as main_module
from rollout.engine.interface import EngineStatus
from rollout.errors import DataError
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import FleetView, WorkerReport
from tests.fakes.full_disk import file_limit
from tests.fakes.local_actor import LocalActor
from tests.fakes.scripted_run import (
    REPLICA,
    InlineExecutor,
    Script,
    ScriptedDriver,
    ScriptedRun,
    all_evaluations,
    config,
    drive,
    lines,
    resumed_state,
    times,
    watch_batches,
)
from tests.fakes.virtual_time import in_virtual_time, run_virtual
from trainer.driver import fleet as fleet_module
from trainer.driver import loops, scratch
from trainer.driver import run as run_module
from trainer.driver.checkpointing import find_resume_point
from trainer.driver.fleet import AllEnginesLost, AllWorkersLost, Fleet
from trainer.driver.run import SAME_SIGNAL_S, _on_signals, _say_goodbye, _summary
from trainer.driver.scratch import Scratch
from trainer.driver.state import EvalMetrics, RunState
from trainer.driver.weight_updates import DedicatedDevices
from trainer.errors import (
    CheckpointError,
    GradientsDiverged,
    LearnerError,
    ModelError,
    TrainingDiverged,
    first_cause,
    one_line,
)
from trainer.learner import checkpoint
from trainer.telemetry import session
from trainer.telemetry.session import Telemetry
from trainer.tools import advise

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    Make = Callable[..., ScriptedRun]

NEVER_S = 1e9


def new_state(**fields: Any) -> RunState:
    return RunState(started_at=0.0, wall_clock=lambda: 108.0, **fields)


# Interrupts


class Work(run_module.Driver):
    """A driver that trains until it is interrupted, and 5 s more."""

    is_in_order = False

    async def _work(self) -> None:
        self._is_training = True
        await self._state.interrupted.wait()
        await asyncio.sleep(5)
        self.is_in_order = True


@pytest.mark.parametrize("reason", [None, "accuracy_reached"])
@pytest.mark.parametrize(
    ("after_s", "in_order"),
    [
        ((0.0,), True),
        ((0.0, 0.2), True),  # a terminal and a parent process pass the same one on
        ((0.0, SAME_SIGNAL_S), False),
        ((0.0, 0.4, 0.8, 1.2), False),
        ((0.0, 0.4, 0.8), True),
    ],
)
@in_virtual_time
async def test_the_first_interrupt_ends_in_order_and_the_second_at_once(
    reason: Any, after_s: tuple[float, ...], in_order: bool
) -> None:
    state, nothing = new_state(stop_reason=reason), SimpleNamespace()
    anything: Any = nothing
    work = Work(config(), state, anything, anything, anything)
    running = asyncio.create_task(work._work())
    for seconds in after_s:
        asyncio.get_running_loop().call_at(1.0 + seconds, work._interrupt, running)
    await asyncio.wait({running})
    assert work.is_in_order == in_order
    assert state.stop_reason == (reason if in_order and reason else "interrupted")


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


# Last words, summary and exit code


def last_words(run_dir: Any, state: RunState, *, max_staleness: int = 0) -> list[str]:
    screen = io.StringIO()
    _say_goodbye(Console(file=screen, width=40), state, run_dir, max_staleness=max_staleness)
    return screen.getvalue().splitlines()


@pytest.mark.parametrize(
    ("max_staleness", "num_steps", "resumed_from", "is_named"),
    [(0, 4, 0, False), (0, 5, 0, True), (1, 6, 0, False), (1, 7, 0, True), (2, 8, 0, False), (0, 9, 5, False)],
)
def test_advise_is_named_where_this_process_made_enough_steps_for_it(
    scripted: Make, max_staleness: int, num_steps: int, resumed_from: int, is_named: bool
) -> None:
    state = resumed_state(resumed_from) if resumed_from else None
    run = scripted(state=state, mode={"max_staleness": max_staleness}, trainer={"total_steps": num_steps}).play()
    state, run_dir = run.state, run.telemetry.run_dir
    state.stop("completed")
    since = run_dir.metrics.read_text()
    record = json.loads(since.splitlines()[0])
    earlier = ({**record, "step": step, "time_s": record["time_s"] + 60 + step} for step in range(1, resumed_from + 1))
    run_dir.metrics.write_text("".join([*(json.dumps(one) + "\n" for one in earlier), since]))
    run_dir.write_config(replace(run.cfg, run_dir=str(run_dir.path)))
    session.append(run_dir.environment, {"device": "cpu", "resumed_from_step": state.resumed_from_step})
    run_dir.summary.write_text(json.dumps({"exit_reason": state.stop_reason, "steps": state.step}))
    *before, last = last_words(run_dir, state, max_staleness=max_staleness)
    assert last.startswith(f"completed: {num_steps} steps") and last.endswith(f"see {run_dir.path}")
    assert before == ([f"which side waited: python -m trainer advise {run_dir.path}"] if is_named else [])
    assert advise.main([str(run_dir.path)]) == (advise.EXIT_DIAGNOSED if is_named else advise.EXIT_TOO_EARLY)


def evaluation(version: int, accuracy: float) -> EvalMetrics:
    return EvalMetrics(version=version, accuracy=accuracy, num_prompts=1, truncated_frac=0.0, time_s=0.0)


RESUMED = {
    "step": 142, "resumed_from_step": 78, "first_accuracy": 0.308,
    "reached": evaluation(140, 0.932), "last_evaluation": evaluation(142, 0.928),
}  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "fields", "words"),
    [
        (
            "accuracy_reached",
            RESUMED,
            "reached: 142 steps, 64 of them in this process, in 108 s; held-out accuracy 0.308 -> 0.932 (v140)",
        ),
        ("completed", {"step": 5, "resumed_from_step": 5}, "increase trainer.total_steps to continue"),
        ("completed", {"step": 6, "resumed_from_step": 5}, "6 steps, 1 of them in this process, in 108 s; see"),
        ("interrupted", {}, "no checkpoint was saved, so the same command starts from the beginning"),
        ("interrupted", {"step": 8}, "to resume from step_8: the same command with run_dir='{path}'"),
    ],
)
def test_the_last_words_are_how_it_ended_and_how_it_continues(
    tmp_path: Path, reason: Any, fields: dict[str, Any], words: str
) -> None:
    path = tmp_path / "[lr=1e-5]" / "[" / "x]"  # brackets are no markup: rich would fail at the second
    run_dir = SimpleNamespace(path=path, checkpoints=path / "checkpoints")
    if fields.get("step") == 8:
        (run_dir.checkpoints / "step_8").mkdir(parents=True)
    said = last_words(run_dir, new_state(stop_reason=reason, **fields))
    assert words.format(path=path) in "\n".join(said)
    assert said[-1].endswith(f"see {path}")


def test_a_full_disk_does_not_make_a_failure_of_a_run_that_is_done(
    scripted: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted()
    with file_limit(10), _summary(run.cfg, run.state, run.telemetry.run_dir):
        run.state.stop("completed")
    path = run.telemetry.run_dir.summary
    assert run.state.stop_reason == "completed"
    assert f"{path} is not written" in caplog.text
    assert not [entry for entry in path.parent.iterdir() if path.name in entry.name]


@pytest.mark.parametrize("kind", [CheckpointError, ModelError, DataError])
@pytest.mark.parametrize("is_training", [False, True])
def test_an_error_of_the_start_is_a_failure_once_training_has_begun(
    scripted: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: type[Exception],
    is_training: bool,
) -> None:
    run = scripted(Script(learner_error=lambda step: kind("shard is gone") if step == 2 else None))

    def train(*_: object, **_keys: object) -> int:
        error = drive(ScriptedDriver(run)) if is_training else kind("shard is gone")
        assert error is not None
        raise error

    monkeypatch.setattr(run_module, "run", train)
    if is_training:
        with pytest.raises(run_module.TrainingFailed, match="after 2 steps") as caught:
            main_module.main([])
        assert one_line(first_cause(caught.value)) == f"{kind.__name__}: shard is gone"
    else:
        assert main_module.main([]) == 2
        assert "cannot be used as configured: shard is gone" in capsys.readouterr().err


@pytest.mark.parametrize(("gib", "num_skipped"), [(1e-9, 1), (20.0, 0), (None, 0)])
def test_the_configured_limit_is_that_of_the_recorder(tmp_path: Path, gib: float | None, num_skipped: int) -> None:
    cfg = replace(config(telemetry={"max_trajectories_gib": gib}), run_dir=str(tmp_path / "run"))
    console = Console(file=io.StringIO())
    with session.claimed_run_dir(cfg, console) as run_dir, session.opened(cfg, run_dir, console) as sinks:
        (run_dir.answers / "version_0.jsonl").write_text("{}\n")
        assert sinks.recorder is not None
        sinks.recorder.begin_evaluation(run_dir.answers, 1)
        assert sinks.recorder.num_skipped == num_skipped


# What is written and saved after a failure


class Broken(RuntimeError):
    """What the watch over the workers fails with."""


def fail(run: ScriptedRun, *, after_s: float = NEVER_S, interrupt_s: float | None = None) -> BaseException:
    """What the run ends with, whose watch over the workers fails in mid-training."""

    async def watch_loads() -> None:
        await asyncio.sleep(after_s)
        raise Broken("no worker is left")

    driver = ScriptedDriver(run, watch_loads)
    driver.interrupts = () if interrupt_s is None else (interrupt_s,)
    error = drive(driver)
    assert run.state.stop_reason == "failed" and error is not None
    return error


def saved(run: ScriptedRun) -> list[int]:
    """Steps of the complete checkpoints; each has the step of its name."""
    found = run.telemetry.run_dir.checkpoints.glob("step_*")
    paths = sorted(path for path in found if not path.suffix)
    steps = [checkpoint.read_state(path)["run"]["step"] for path in paths]
    assert [path.name for path in paths] == [f"step_{step}" for step in steps]
    return steps


def steps_of(run: ScriptedRun) -> list[int]:
    return [line["step"] for line in lines(run)]


def nothing(_run: ScriptedRun, _patch: pytest.MonkeyPatch) -> None: ...


def learner_fails(run: ScriptedRun, _patch: Any, *, error: Exception) -> None:
    run.world.script.learner_error = lambda step: error if step == 3 else None


def metrics_fail(_run: ScriptedRun, patch: pytest.MonkeyPatch) -> None:
    """Of step 4."""
    count = loops.batch_record

    def failing(groups: Any, batch: Any, **of_step: int) -> Any:
        return count(groups, batch, **of_step) | {"of step 4": 1 / (batch.step - 3)}

    patch.setattr(loops, "batch_record", failing)


def publish_hangs(run: ScriptedRun, _patch: Any) -> None:
    """That of version 3."""
    publish = run.world.publish

    async def hanging(version: int) -> float:
        await asyncio.sleep(NEVER_S * (version == 3))
        return await publish(version)

    run.world.publish = hanging  # type: ignore[method-assign]


def devices_hang(run: ScriptedRun, patch: pytest.MonkeyPatch) -> None:
    """After step 2."""

    async def hanging(_devices: DedicatedDevices) -> None:
        await asyncio.sleep(NEVER_S * (run.state.step == 2))

    patch.setattr(DedicatedDevices, "acquire_for_training", hanging)


def disk_is_slow(_run: ScriptedRun, patch: pytest.MonkeyPatch) -> None:
    """At the record of step 3."""
    write = Telemetry.write_step

    async def slow(self: Any, record: Any) -> None:
        await asyncio.sleep(500.0 * (record["step"] == 3))
        await write(self, record)

    patch.setattr(Telemetry, "write_step", slow)


def saves_fail(run: ScriptedRun, _patch: Any) -> None:
    async def disk_full(*_: object, **_keys: object) -> None:
        raise CheckpointError("no space left on device")

    run.world.save = disk_full  # type: ignore[method-assign]


def learner_breaks(run: ScriptedRun, _patch: Any, *, at: str) -> None:
    """Between two steps; it is not asked to save after that."""

    async def fails(*_: object, **_keys: object) -> None:
        assert not run.world.is_broken
        run.world.is_broken = True
        raise LearnerError("rank 1 timed out")

    setattr(run.world, at, fails)


SLOW, FAST, IDLE = {"train_s": 100.0}, {"train_s": 1.0}, {"generate_s": (1e6, 2e6)}
TWO: dict[str, Any] = {"checkpoint": {"every_steps": 2}}
BLOCKING: dict[str, Any] = {"checkpoint": {"every_steps": 2, "asynchronous": False}}


@pytest.mark.parametrize(
    ("script", "sections", "prepare", "when", "error", "steps_saved", "steps_written"),
    [
        (SLOW, TWO, nothing, {"after_s": 350.0}, Broken, [2, 4], 4),
        ({"save_s": 500.0}, BLOCKING, nothing, {"after_s": 100.0}, Broken, [2], 2),
        ({"save_s": 500.0}, TWO, nothing, {"after_s": 100.0}, Broken, [2, 4], 4),
        (IDLE, {"state": 4}, nothing, {"after_s": 100.0}, Broken, [], 0),
        (IDLE, {}, nothing, {"after_s": 100.0}, Broken, [], 0),
        ({}, {}, partial(learner_fails, error=LearnerError("rank 1 died")), {}, LearnerError, [], 3),
        ({}, {}, partial(learner_fails, error=TrainingDiverged("13 values")), {}, TrainingDiverged, [], 3),
        ({}, {}, partial(learner_fails, error=GradientsDiverged("inf")), {}, GradientsDiverged, [3], 3),
        (FAST, {}, metrics_fail, {}, ZeroDivisionError, [4], 3),
        (FAST, {}, publish_hangs, {"after_s": 100.0}, Broken, [3], 3),
        (FAST, {}, devices_hang, {"after_s": 100.0}, Broken, [2], 2),
        (FAST, {}, disk_is_slow, {"after_s": 100.0}, Broken, [3], 3),
        (SLOW, {}, saves_fail, {"after_s": 350.0}, Broken, [], 4),
        (SLOW | {"save_s": 10_000.0}, {}, nothing, {"after_s": 350.0, "interrupt_s": 500.0}, Broken, [], 4),
        (SLOW, {}, nothing, {"after_s": 350.0, "interrupt_s": 350.0}, Broken, [4], 4),
        (FAST, TWO, partial(learner_breaks, at="publish"), {}, LearnerError, [], 1),
        (FAST, TWO, partial(learner_breaks, at="save"), {}, LearnerError, [], 2),
        (FAST, TWO, partial(learner_breaks, at="wait_saved"), {}, LearnerError, [], 2),
    ],
    ids=[
        "the step that the learner is in comes to its end",
        "a checkpoint that is being written is finished and not begun again",
        "a checkpoint that is being written in the background is finished before the last one begins",
        "what a checkpoint has is not saved again",
        "a run that learned nothing saves nothing",
        "weights are undefined after a failure of the learner",
        "weights are undefined after a divergence",
        "weights are whole after a refused step",
        "a step that was made and could not be counted",
        "a step that waits for engines",
        "a step that waits for devices",
        "a step that waits for the disk is written once",
        "a save that fails is logged",
        "an interrupt ends the rescue",
        "an interrupt does not hide the failure",
        "a learner that failed to publish",
        "a learner that failed to save",
        "a learner that failed to save in the background",
    ],
)
def test_what_is_written_and_saved_after_a_failure(
    scripted: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    script: dict[str, Any],
    sections: dict[str, Any],
    prepare: Callable[[ScriptedRun, pytest.MonkeyPatch], None],
    when: dict[str, float],
    error: type[Exception],
    steps_saved: list[int],
    steps_written: int,
) -> None:
    state = resumed_state(sections["state"]) if "state" in sections else None
    run = scripted(Script(**script), **(sections | {"state": state}))
    prepare(run, monkeypatch)
    assert isinstance(fail(run, **when), error)
    assert (saved(run), steps_of(run)) == (steps_saved, list(range(1, steps_written + 1)))
    failed = "could not be saved: CheckpointError: no space left on device"
    assert (failed in caplog.text) == ("could not be saved" in caplog.text) == (prepare is saves_fail)


def test_the_learner_trains_on_while_a_checkpoint_is_written_of_the_step_before(scripted: Make) -> None:
    """The next checkpoint falls due while a slow disk writes this one, and waits; so does the end of the run."""
    runs, states = {}, {}
    for asynchronous in (True, False):
        keys = {"every_steps": 2, "keep_last": 3, "asynchronous": asynchronous}
        run = scripted(Script(train_s=1.0, copy_s=0.5, save_s=30.0), checkpoint=keys, trainer={"eval_every": 0})
        assert drive(ScriptedDriver(run)) is None
        runs[asynchronous] = run
        path = run.telemetry.run_dir.checkpoints / "step_2"
        states[asynchronous] = checkpoint.read_state(path)
    assert states[True]["run"]["version"] == 2 and states[True]["source"] == states[False]["source"]
    owed = [{prompt["group_id"] for prompt in state["buffer"]["prompts"]} for state in states.values()]
    assert owed[0] == owed[1] >= {6, 7, 8}, "also what is trained by the time that it is written"
    trained, written = times(runs[True], "trained"), times(runs[True], "saved")
    assert written[2] - trained[1] > 30.0 > 5.0 > trained[3] - trained[1], "two more steps meanwhile"
    assert trained[4] > written[2] and trained[4] < written[4]
    assert saved(runs[True]) == saved(runs[False]) == [2, 4, 6]

    def recorded_s(run: ScriptedRun, name: str) -> dict[int, float]:
        return {line["step"]: round(line[name], 1) for line in lines(run) if name in line}

    stalls = recorded_s(runs[True], "checkpoint/stall_s")
    assert stalls[3] == 0.5 and 20.0 < stalls[5] < 30.5, "the next one waits for the first"
    assert recorded_s(runs[True], "checkpoint/background_s") == {5: 30.0, 6: 60.0}, "of two on the last line"
    assert recorded_s(runs[False], "checkpoint/stall_s") == {3: 30.0, 5: 30.0, 6: 30.0}
    assert recorded_s(runs[False], "checkpoint/background_s") == {}


@in_virtual_time
async def test_a_save_that_fails_after_its_caller_is_gone_is_logged_in_one_line(
    scripted: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A second interrupt stops the learner while it writes."""
    run, is_killed, unhandled = scripted(), asyncio.Event(), list[dict[str, Any]]()

    async def save(*_: object, **_keys: object) -> None:
        await is_killed.wait()
        raise LearnerError("rank 0 died")

    run.world.save = save  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    loop.set_default_executor(InlineExecutor(1))
    loop.set_exception_handler(lambda _loop, context: unhandled.append(context))
    ending = asyncio.create_task(run.training()._checkpointer.at_end(0, is_interrupted=True))
    await asyncio.sleep(1.0)
    ending.cancel()
    await asyncio.wait([ending])
    is_killed.set()
    await asyncio.sleep(1.0)
    gc.collect()
    assert unhandled == []
    assert "save 0 failed: LearnerError: rank 0 died" in caplog.text


def test_a_run_resumes_from_there_and_trains_every_prompt_once(scripted: Make) -> None:
    keys: dict[str, Any] = {"trainer": {"total_steps": 12}, "mode": {"max_staleness": 2}}
    first = scripted(Script(train_s=20.0, generate_s=(0.1, 5.0)), **keys)
    before = watch_batches(first)
    assert isinstance(fail(first, after_s=90.0), Broken)
    resumed = find_resume_point(first.cfg, first.telemetry.run_dir.checkpoints)
    assert resumed is not None
    assert 1 < resumed.step < len(before), "batches of later steps had been taken"
    state = new_state()
    state.load_state_dict(resumed.state["run"])
    second = scripted(Script(seed=9), state=state, **keys)
    second.buffer.load_state_dict(resumed.state["buffer"], second.source.find)
    second.source.load_state_dict(resumed.state["source"])
    after = watch_batches(second)
    run_virtual(second.run())
    assert steps_of(second) == list(range(1, 13))
    prompts = [group.prompt_id for groups in (*before[: resumed.step], *after) for group in groups]
    assert len(prompts) == len(set(prompts)) == 12 * 3, "of the 40 prompts of the first epoch"


# Tasks that end together


async def after(seconds: float, *, error: str = "", at_end: str = "", cleans_up: list[str] | None = None) -> None:
    """Fails after so many seconds, or on its way out where it is cancelled before; or takes 5 s to clean up."""
    try:
        await asyncio.sleep(seconds)
    finally:
        if cleans_up is not None:
            await asyncio.sleep(5.0)
            cleans_up.append("clean")
        if at_end:
            raise OSError(at_end)
    if error:
        raise OSError(error)


def ended_with(run: ScriptedRun, *watches: Any) -> tuple[str, float]:
    """What the loops raised next to these watches, and when. No task is left by then."""

    async def main() -> tuple[str, float]:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        (error,) = await asyncio.gather(run.training().run(*watches), return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return repr(error), asyncio.get_running_loop().time()

    return run_virtual(main())


LONG = {"total_steps": 1000, "eval_every": 0}


def test_the_first_failure_ends_the_run_whatever_follows_from_it_once_all_tasks_have_ended(scripted: Make) -> None:
    run, failed, ended = scripted(trainer=LONG), asyncio.Event(), list[str]()

    async def cause() -> None:
        await asyncio.sleep(11.0)
        failed.set()
        raise OSError("first")

    async def consequence(*_: object, **_keys: object) -> None:
        await failed.wait()
        raise ValueError("consequence")

    run.world.train_step = consequence  # type: ignore[assignment]
    watches = after(NEVER_S, at_end="second"), cause(), after(NEVER_S, cleans_up=ended), after(NEVER_S, at_end="third")
    assert ended_with(run, *watches) == ("OSError('first')", pytest.approx(11.0 + 5.0))
    assert ended == ["clean"]


def test_a_watch_may_end_before_the_run_and_its_failure_as_the_run_ends_is_only_logged(
    scripted: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted()
    late = after(NEVER_S, error="long after"), after(NEVER_S, at_end="the node is gone")
    assert ended_with(run, after(1.0), *late)[0] == "None"
    assert run.state.step == 6
    assert "a task failed as the run ended: OSError: the node is gone" in caplog.text


@in_virtual_time
async def test_a_cancelled_run_cancels_everything_and_stays_cancelled_where_that_fails(scripted: Make) -> None:
    asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
    watches = after(NEVER_S), after(NEVER_S, at_end="the node is gone")
    task = asyncio.create_task(scripted(trainer=LONG).training().run(*watches))
    await asyncio.sleep(10.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert {one.get_name() for one in left} <= {"step"}, "the step of the learner continues: see emergency_save"
    await asyncio.sleep(10.0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# Engines and workers that are lost when all steps are trained: the result is there, so the run ends in order


OTHER, LAST = "replica_1", 6
A_WHILE_S = 30.0
"""The fleet looks several times at engines and workers."""


class Idle:
    """An engine or a rollout worker without work."""

    async def load(self) -> EngineStatus:
        return EngineStatus(running=0, waiting=0, kv_usage_frac=None, num_preemptions=None)

    async def update(self, _view: FleetView) -> WorkerReport:
        return WorkerReport(limits={}, in_flight={}, num_queued=0, lost_engines={})


class Losing(ScriptedDriver):
    """With a real fleet: one or two replicas, whose restarts take longer than what is left of a run, and one rollout
    worker. `during(what, version)` something is lost."""

    def __init__(self, run: ScriptedRun, *replicas: str) -> None:
        super().__init__(run)
        self.members |= dict.fromkeys(replicas, "live")
        self.restarts: list[str] = []

    def _training_run(self, *_: Any) -> Any:
        world: Any = self._scripted.world
        self.fleet = Fleet(
            {name: LocalActor(Idle()) for name in self.members},
            [LocalActor(Idle())],
            group_timeout_s=1e6,
            heartbeat_timeout_s=120.0,
            max_engine_restarts=self._cfg.rollout.max_engine_restarts,
            restart_engine=self._restart,
            sync_states=lambda: self.members,
        )
        world.watch, world.engine_states = self.fleet.watch, self.fleet.engine_states
        return super()._training_run()

    async def _restart(self, name: str, _number: int) -> None:
        self.restarts.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            self.restarts.append(f"{name} given up")

    def during(self, what: str, happens: Callable[[], Awaitable[None]], *, version: int | None = None) -> None:
        """While the run does `what`, of this version or any."""
        world = self._scripted.world
        does = getattr(world, what)

        async def meddled(*args: Any, **keys: Any) -> Any:
            if version is None or version in (world.live, *args):
                await happens()
            return await does(*args, **keys)

        setattr(world, what, meddled)

    async def lose_engine(self) -> None:
        """And the fleet looks at it several times."""
        self.members[REPLICA] = "dead"
        self.fleet.exclude_lost_engines()
        await asyncio.sleep(A_WHILE_S)

    async def lose_worker(self) -> None:
        self.fleet._workers[0].actor.die()
        await asyncio.sleep(A_WHILE_S)

    def ends_in_order(self) -> bool:
        """With everything that a run leaves behind."""
        run, error = self._scripted, drive(self)
        assert error is None
        assert run.world.numbers("saved") == [LAST]
        assert steps_of(run) == list(range(1, LAST + 1))
        return run.state.stop_reason == "completed" and (run.telemetry.run_dir.export / "model").exists()


@pytest.fixture
def losing(scripted: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The run and its driver."""
    monkeypatch.setattr(fleet_module, "kill_actor", lambda actor: actor.die())

    def make(
        script: Script | None = None, *replicas: str, max_restarts: int = 3, every_steps: int = 0
    ) -> tuple[ScriptedRun, Losing]:
        saving = {"save_at_end": True, "export_hf": True, "every_steps": every_steps}
        run = scripted(script, rollout={"max_engine_restarts": max_restarts}, checkpoint=saving)
        return run, Losing(run, *replicas)

    return make


@pytest.mark.parametrize("max_restarts", [0, 3])
@pytest.mark.parametrize("others", [(), (OTHER,)])
def test_engines_lost_in_the_last_evaluation_cost_it_at_most(
    losing: Any, caplog: pytest.LogCaptureFixture, others: tuple[str, ...], max_restarts: int
) -> None:
    run, driver = losing(None, *others, max_restarts=max_restarts)
    generate, asked = run.world.evaluate, list[str]()

    async def evaluate(prompts: Any, params: Any, engine: str, numbers: Any) -> Any:
        if run.world.live == LAST:
            asked.append(engine)
            if engine == REPLICA:
                await driver.lose_engine()
                raise NoReplica(f"{REPLICA} died")
        return await generate(prompts, params, engine, numbers)

    run.world.evaluate = evaluate
    assert driver.ends_in_order()
    assert driver.restarts == [], "it would be of no use"
    last = all_evaluations(run)[-1]
    assert last["version"] == LAST
    assert lines(run)[-1]["eval/failed_runs"] == run.state.num_failed_evaluations == (not others)
    if others:
        assert asked[-1] == OTHER and lines(run)[-1]["eval/version"] == LAST
    else:
        assert "replica_0 died" in last["failed"]
        message = "replica_0 is lost (weight sync: dead); training is over, so it is not started again"
        assert [record.message for record in caplog.records].count(message) == 1


@pytest.mark.parametrize("every_steps", [0, LAST])
@pytest.mark.parametrize(
    ("lost", "what"),
    [
        *(("engine", what) for what in ("save", "export_hf")),
        *(("worker", what) for what in ("train_step", "save", "evaluate", "export_hf")),
    ],
)
def test_what_is_lost_once_it_is_not_needed_any_more_is_logged_and_ends_nothing(
    losing: Any, caplog: pytest.LogCaptureFixture, lost: str, what: str, every_steps: int
) -> None:
    """Engines once the last version is live; the last worker from the last step on, whose groups are in the batch."""
    run, driver = losing(Script(pull_s=20.0 if lost == "worker" else 0.5), every_steps=every_steps)

    async def lose() -> None:
        if lost == "engine":
            while run.world.live < LAST:
                await asyncio.sleep(0.1)
            await asyncio.sleep(3.0)  # it has been seen alive
            await driver.lose_engine()
        elif run.state.step == LAST - (what == "train_step"):
            await driver.lose_worker()
            assert driver.fleet._is_closed, "an evaluation would wait for a worker"

    driver.during(what, lose)
    assert driver.ends_in_order()
    words = (
        "no rollout worker is left" if lost == "worker" else "replica_0 is lost (weight sync: dead); training is over"
    )
    assert words in caplog.text
    assert driver.restarts == []


@pytest.mark.parametrize(
    ("what", "version", "error"),
    [
        ("engine", 2, AllEnginesLost),
        ("engine", LAST, AllEnginesLost),
        ("worker", 2, AllWorkersLost),
        ("learner", None, LearnerError),
    ],
)
def test_what_is_lost_before_the_last_version_is_live_or_a_learner_at_any_time_ends_the_run(
    losing: Any, what: str, version: int | None, error: type[Exception]
) -> None:
    run, driver = losing(max_restarts=0)

    async def lose_learner() -> None:
        raise LearnerError("rank 1 died")

    if what == "learner":
        driver.during("export_hf", lose_learner)
    else:
        driver.during("sync", driver.lose_engine if what == "engine" else driver.lose_worker, version=version)
    assert isinstance(drive(driver), error)
    assert (run.state.stop_reason, driver.restarts) == ("failed", [])


def test_what_begins_to_import_before_the_checks_ends_with_a_run_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    class Begun(Scratch):
        def begin(self, cfg: Any) -> None:
            self._end.callback(seen.append, f"the end, in {cfg.trainer.total_steps} steps")

    def refuse(*_: Any, **__: Any) -> Any:
        seen.append("checks")
        raise DataError("no prompts")

    monkeypatch.setattr(scratch, "Scratch", Begun)
    monkeypatch.setattr(run_module, "preflight", refuse)
    assert main_module.main(["trainer.total_steps=7"]) == 2
    assert seen == ["checks", "the end, in 7 steps"] and "no prompts" in capsys.readouterr().err


BEGINS = """
import sys
from trainer.driver.scratch import Scratch
Scratch.begin = lambda *_: sys.exit(str({"torch", "ray", "transformers", "vllm"} & {*sys.modules}))
from trainer.__main__ import main
main(["device=cpu"])
"""


def test_it_begins_before_this_process_imports_the_same() -> None:
    assert subprocess.run([sys.executable, "-c", BEGINS], capture_output=True, text=True).stderr.splitlines()[-1:] == [
        "set()"
    ]
