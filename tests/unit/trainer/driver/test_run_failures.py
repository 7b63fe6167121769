"""A run that fails, or loses engines or workers: what was learned is saved, and the first cause ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import (
    InlineExecutor,
    Script,
    ScriptedDriver,
    ScriptedRun,
    drive,
    lines,
    watch_batches,
)
from tests.fakes.virtual_time import run_virtual
from trainer.driver.checkpointing import Checkpointer, find_resume_point
from trainer.driver.state import RunState
from trainer.driver.weight_updates import DedicatedDevices
from trainer.errors import CheckpointError, GradientsDiverged, LearnerError, TrainingDiverged
from trainer.learner import checkpoint
from trainer.telemetry.session import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Scripted = Callable[..., ScriptedRun]
    Make = Callable[..., ScriptedRun]


class Broken(RuntimeError):
    """What the driver's helper fails with."""


def fail(run: ScriptedRun, *, after_s: float, interrupt_s: float | None = None) -> BaseException:
    """What the run ends with, whose watch over the workers fails in mid-training."""

    async def watch_loads() -> None:
        await asyncio.sleep(after_s)
        raise Broken("no worker is left")

    driver = ScriptedDriver(run, watch_loads)
    if interrupt_s is not None:
        driver.interrupts = (interrupt_s,)
    error = drive(driver)
    assert isinstance(error, BaseException), "it ended as if all were well"
    assert run.state.stop_reason == "failed"
    return error


def saved(run: ScriptedRun) -> list[int]:
    """Steps of the complete checkpoints; each is what it says."""
    found = run.telemetry.run_dir.checkpoints.glob("step_*")
    paths = sorted(path for path in found if not path.suffix)
    steps = [checkpoint.read_state(path)["run"]["step"] for path in paths]
    assert [path.name for path in paths] == [f"step_{step}" for step in steps]
    return steps


def steps_of(run: ScriptedRun) -> list[int]:
    return [line["step"] for line in lines(run)]


def events(run: ScriptedRun, what: str) -> list[float]:
    return [at for at, name, _ in run.world.events if name == what]


def test_the_step_that_the_learner_is_in_ends_is_written_and_saved(scripted: Scripted) -> None:
    run = scripted(Script(train_s=100.0), checkpoint={"every_steps": 2})
    error = fail(run, after_s=350.0)
    assert isinstance(error, Broken)
    num_steps = len(events(run, "trained"))
    assert num_steps == 4
    assert events(run, "trained")[-1] > 350.0, "the failure came in the middle of it"
    assert run.state.step == num_steps
    assert saved(run) == [2, 4]
    assert steps_of(run) == [1, 2, 3, 4]


def test_a_step_whose_weights_no_engine_takes_is_written_and_saved(scripted: Scripted) -> None:
    run = scripted(Script(train_s=1.0))
    publish = run.world.publish

    async def hang_at_3(version: int) -> float:
        if version == 3:
            await asyncio.Event().wait()
        return await publish(version)

    run.world.publish = hang_at_3  # type: ignore[method-assign]
    assert isinstance(fail(run, after_s=1_000.0), Broken)
    assert (saved(run), steps_of(run)) == ([3], [1, 2, 3])


def test_a_learner_that_waits_for_its_devices_is_saved_as_it_is(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colocated with engines that do not wake: its turn never comes."""
    run = scripted(Script(train_s=1.0))

    async def acquire_for_training(_devices: DedicatedDevices) -> None:
        if run.state.step == 2:
            await asyncio.Event().wait()

    monkeypatch.setattr(DedicatedDevices, "acquire_for_training", acquire_for_training)
    assert isinstance(fail(run, after_s=100.0), Broken)
    assert (saved(run), steps_of(run)) == ([2], [1, 2])


def test_a_checkpoint_that_is_being_written_is_finished_and_not_begun_again(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted(Script(train_s=1.0, save_s=500.0), checkpoint={"every_steps": 2})
    assert isinstance(fail(run, after_s=100.0), Broken)
    assert (saved(run), steps_of(run)) == ([2], [1, 2])
    assert "could not be saved" not in caplog.text


def test_after_a_failure_of_the_learner_nothing_is_saved(scripted: Scripted) -> None:
    run = scripted(Script(learner_error=lambda step: LearnerError("rank 1 died") if step == 3 else None))
    assert isinstance(fail(run, after_s=10_000.0), LearnerError)
    assert (saved(run), steps_of(run)) == ([], [1, 2, 3])


def test_a_save_that_fails_is_logged_and_the_failure_is_told(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted(Script(train_s=100.0))

    async def disk_full(*_: object, **_keys: object) -> None:
        raise CheckpointError("no space left on device")

    run.world.save = disk_full  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert isinstance(fail(run, after_s=350.0), Broken)
    assert "could not be saved: CheckpointError: no space left on device" in caplog.text


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scripted(Script(train_s=100.0), checkpoint={"every_steps": 1, "keep_last": 1})

    def busy(path: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(f"{path.name} is busy")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("trainer.learner.checkpoint.shutil.rmtree", busy)
        assert isinstance(fail(run, after_s=350.0), Broken)
    assert (saved(run), steps_of(run)) == ([4], [1, 2, 3, 4])
    assert "old checkpoints could not be deleted (OSError: step_1.deleted is busy); the next save tries again" in (
        caplog.text
    )


def test_a_save_that_fails_after_its_caller_is_gone_is_told_in_one_line(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """A second interrupt stops the learner while it writes."""
    run, is_killed, unhandled = scripted(), asyncio.Event(), list[dict[str, Any]]()

    async def save(*_: object, **_keys: object) -> None:
        await is_killed.wait()
        raise LearnerError("rank 0 died")

    run.world.save = save  # type: ignore[method-assign]
    learner: Any = run.world

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(InlineExecutor(1))
        loop.set_exception_handler(lambda _loop, context: unhandled.append(context))
        checkpointer = Checkpointer(
            run.cfg, run.telemetry, learner=learner, buffer=run.buffer, source=run.source, state=run.state
        )
        ending = asyncio.create_task(checkpointer.at_end(0, is_interrupted=True))
        await asyncio.sleep(1.0)
        ending.cancel()
        await asyncio.wait([ending])
        is_killed.set()
        await asyncio.sleep(1.0)

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    gc.collect()
    assert unhandled == []
    assert "save 0 failed: LearnerError: rank 0 died" in caplog.text


def test_an_interrupt_ends_the_rescue_and_the_failure_is_told(scripted: Scripted) -> None:
    run = scripted(Script(train_s=100.0, save_s=10_000.0))
    assert isinstance(fail(run, after_s=350.0, interrupt_s=500.0), Broken)
    assert saved(run) == []


def test_an_interrupt_before_the_rescue_does_not_hide_the_failure(scripted: Scripted) -> None:
    run = scripted(Script(train_s=100.0))
    assert isinstance(fail(run, after_s=350.0, interrupt_s=350.0), Broken)


def test_the_line_that_is_being_written_is_written_once(scripted: Scripted) -> None:
    run = scripted(Script(train_s=1.0))
    write = Telemetry.write_step

    async def slow(self: Any, record: Any) -> None:
        if record["step"] == 3:
            await asyncio.sleep(500.0)
        await write(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Telemetry, "write_step", slow)
        assert isinstance(fail(run, after_s=100.0), Broken)
    assert (saved(run), steps_of(run)) == ([3], [1, 2, 3])


@pytest.mark.parametrize("what", ["publish", "save"])
def test_a_learner_that_failed_beside_its_steps_is_not_asked_to_save(scripted: Scripted, what: str) -> None:
    run = scripted(Script(train_s=1.0), checkpoint={"every_steps": 2})
    num_saves = 0

    async def fails(*_: object, **_keys: object) -> None:
        nonlocal num_saves
        num_saves += 1
        run.world.is_broken = True
        raise LearnerError("rank 1 gave no answer")

    setattr(run.world, what, fails)
    assert isinstance(fail(run, after_s=10_000.0), LearnerError)
    assert num_saves == 1
    assert saved(run) == []


def test_a_learner_that_diverges_has_whole_weights_and_saves_them(scripted: Scripted) -> None:
    diverged = GradientsDiverged("gradient norm of step 3 is inf, after 3 skipped steps")
    run = scripted(Script(learner_error=lambda step: diverged if step == 3 else None))
    assert isinstance(fail(run, after_s=10_000.0), GradientsDiverged)
    assert (saved(run), steps_of(run)) == ([3], [1, 2, 3])


def test_values_that_are_not_finite_may_come_of_the_weights_which_are_not_saved(scripted: Scripted) -> None:
    diverged = TrainingDiverged("13 values of the critic are not finite")
    run = scripted(Script(learner_error=lambda step: diverged if step == 3 else None))
    assert isinstance(fail(run, after_s=10_000.0), TrainingDiverged)
    assert saved(run) == []


def test_a_run_goes_on_from_there_and_trains_every_prompt_once(scripted: Scripted) -> None:
    keys: dict[str, Any] = {"trainer": {"total_steps": 12}, "mode": {"max_staleness": 2}}
    first = scripted(Script(train_s=20.0, generate_s=(0.1, 5.0)), **keys)
    before = watch_batches(first)
    assert isinstance(fail(first, after_s=90.0), Broken)
    first.telemetry.run_dir.close()
    resumed = find_resume_point(first.cfg, first.telemetry.run_dir.checkpoints)
    assert resumed is not None
    assert 1 < resumed.step < len(before), "batches of later steps had been taken"
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    state.load_state_dict(resumed.state["run"])
    second = scripted(Script(seed=9), state=state, **keys)
    second.buffer.load_state_dict(resumed.state["buffer"], second.source.find)
    second.source.load_state_dict(resumed.state["source"])
    after = watch_batches(second)
    run_virtual(second.run())
    assert steps_of(second) == list(range(1, 13))
    prompts = [group.prompt_id for groups in (*before[: resumed.step], *after) for group in groups]
    assert len(prompts) == len(set(prompts)) == 12 * 3, "of the 40 prompts of the first epoch"


def test_what_the_checkpoint_has_is_not_saved_again(scripted: Scripted) -> None:
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0, step=4, live_version=4, resumed_from_step=4)
    run = scripted(Script(generate_s=(1e6, 2e6)), state=state)
    assert isinstance(fail(run, after_s=100.0), Broken)
    assert saved(run) == []


def test_a_run_that_learned_nothing_saves_nothing(scripted: Scripted) -> None:
    run = scripted(Script(generate_s=(1e6, 2e6)))
    assert isinstance(fail(run, after_s=100.0), Broken)
    assert saved(run) == []


async def after(seconds: float, error: Exception | None = None) -> None:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error


def ended_with(run: ScriptedRun, *watches: Any) -> tuple[BaseException | None, float]:
    """What the loops raised beside these watches, and when. No task is left by then."""

    async def main() -> tuple[BaseException | None, float]:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        (error,) = await asyncio.gather(run.training().run(*watches), return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return error, asyncio.get_running_loop().time()

    return run_virtual(main())


LONG = {"total_steps": 1000, "eval_every": 0}


def test_the_first_failure_ends_the_run_at_once(scripted: Scripted) -> None:
    async def fails_on_its_way_out() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            raise ValueError("second")

    run = scripted(trainer=LONG)
    error, at = ended_with(run, fails_on_its_way_out(), after(11.0, OSError("first")), fails_on_its_way_out())
    assert (repr(error), at) == ("OSError('first')", pytest.approx(11.0))


def test_what_a_failure_leads_to_is_not_the_cause(scripted: Scripted) -> None:
    run = scripted(trainer=LONG)
    failed = asyncio.Event()

    async def cause() -> None:
        await asyncio.sleep(10.0)
        failed.set()
        raise OSError("cause")

    async def consequence(*_: object) -> None:
        await failed.wait()
        raise ValueError("consequence")

    run.world.train_step = consequence  # type: ignore[assignment]
    error, at = ended_with(run, cause())
    assert (repr(error), at) == ("OSError('cause')", pytest.approx(10.0))


def test_a_run_waits_until_everything_beside_it_has_ended_after_a_failure(scripted: Scripted) -> None:
    ended: list[str] = []

    async def cleaning_up() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(5.0)
            ended.append("clean")

    error, at = ended_with(scripted(trainer=LONG), cleaning_up(), after(10.0, OSError("boom")))
    assert (repr(error), at, ended) == ("OSError('boom')", pytest.approx(15.0), ["clean"])


def test_a_watch_may_end_before_the_run_and_ends_with_it(scripted: Scripted) -> None:
    run = scripted()
    error, _ = ended_with(run, after(1.0), after(1e9, OSError("long after")))
    assert (error, run.state.step) == (None, 6)


def test_a_failure_of_a_watch_as_the_run_ends_is_logged_and_no_failure_of_the_run(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails_on_its_way_out() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            raise OSError("the node is gone")

    run = scripted()
    error, _ = ended_with(run, fails_on_its_way_out())
    assert (error, run.state.step) == (None, 6)
    assert "a task failed as the run ended: OSError: the node is gone" in caplog.text


def test_a_cancelled_run_cancels_everything_and_stays_cancelled_where_that_fails(scripted: Scripted) -> None:
    run = scripted(trainer=LONG)

    async def fails_on_its_way_out() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            raise OSError("the node is gone")

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        task = asyncio.create_task(run.training().run(after(1e6), fails_on_its_way_out()))
        await asyncio.sleep(10.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert {one.get_name() for one in left} <= {"step"}, "the step of the learner goes on: see emergency_save"
        await asyncio.sleep(10.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_an_engine_that_missed_the_first_version_is_excluded_before_the_first_request(scripted: Scripted) -> None:
    """It starts without weights, and would be taken for live until the second version comes."""
    run = scripted()
    num_requests: list[int] = []
    run.world.exclude_lost_engines = lambda: num_requests.append(len(run.world.numbers("generate")))  # type: ignore[method-assign]
    assert ended_with(run)[0] is None
    assert num_requests[0] == 0
