"""A run that fails for no fault of its learner loses nothing that was learned."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING

from tests.fakes.scripted_run import InlineExecutor, Script, ScriptedRun
from tests.fakes.virtual_time import run_virtual
from tests.unit.trainer.pipeline.test_start_errors import ScriptedDriver
from trainer.learner import checkpoint
from trainer.learner.errors import CheckpointError, LearnerError
from trainer.pipeline.state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    Scripted = Callable[..., ScriptedRun]


class Broken(RuntimeError):
    """What the driver's helper fails with."""


def fail(run: ScriptedRun, *, after_s: float, interrupt_s: float | None = None) -> BaseException:
    """What the run ends with, whose watch over the workers fails in mid-training."""

    async def watch_loads() -> None:
        await asyncio.sleep(after_s)
        raise Broken("no worker is left")

    async def main() -> BaseException:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        training = asyncio.create_task(ScriptedDriver(run, watch_loads)._train(*[None] * 4))  # type: ignore[arg-type]
        if interrupt_s is not None:
            asyncio.get_running_loop().call_later(interrupt_s, training.cancel)
        (error,) = await asyncio.gather(training, return_exceptions=True)
        assert isinstance(error, BaseException)
        return error

    return run_virtual(main())


def saved(run: ScriptedRun) -> list[int]:
    """Steps of the complete checkpoints; each is what it says."""
    found = run.telemetry.run_dir.checkpoints.glob("step_*")
    paths = sorted(path for path in found if path.suffix != ".tmp")
    steps = [checkpoint.read_state(path)["run"]["step"] for path in paths]
    assert [path.name for path in paths] == [f"step_{step}" for step in steps]
    return steps


def written(run: ScriptedRun) -> list[int]:
    return [json.loads(line)["step"] for line in run.telemetry.run_dir.metrics.read_text().splitlines()]


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
    assert written(run) == [1, 2, 3, 4]


def test_a_step_whose_weights_no_engine_takes_is_written_and_saved(scripted: Scripted) -> None:
    run = scripted(Script(train_s=1.0))
    publish = run.world.publish

    async def hang_at_3(version: int) -> float:
        if version == 3:
            await asyncio.Event().wait()
        return await publish(version)

    run.world.publish = hang_at_3  # type: ignore[method-assign]
    assert isinstance(fail(run, after_s=1_000.0), Broken)
    assert (saved(run), written(run)) == ([3], [1, 2, 3])


def test_a_checkpoint_that_is_being_written_is_finished_and_not_begun_again(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted(Script(train_s=1.0, save_s=500.0), checkpoint={"every_steps": 2})
    assert isinstance(fail(run, after_s=100.0), Broken)
    assert (saved(run), written(run)) == ([2], [1, 2])
    assert "could not be saved" not in caplog.text


def test_after_a_failure_of_the_learner_nothing_is_saved(scripted: Scripted) -> None:
    run = scripted(Script(learner_error=lambda step: LearnerError("rank 1 died") if step == 3 else None))
    assert isinstance(fail(run, after_s=10_000.0), LearnerError)
    assert (saved(run), written(run)) == ([], [1, 2, 3])


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


def test_an_interrupt_ends_the_rescue_and_the_failure_is_told(scripted: Scripted) -> None:
    run = scripted(Script(train_s=100.0, save_s=10_000.0))
    assert isinstance(fail(run, after_s=350.0, interrupt_s=500.0), Broken)
    assert saved(run) == []


def test_what_the_checkpoint_has_is_not_saved_again(scripted: Scripted) -> None:
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0, step=4, live_version=4, resumed_from_step=4)
    run = scripted(Script(generate_s=(1e6, 2e6)), state=state)
    assert isinstance(fail(run, after_s=100.0), Broken)
    assert saved(run) == []


def test_a_run_that_learned_nothing_saves_nothing(scripted: Scripted) -> None:
    run = scripted(Script(generate_s=(1e6, 2e6)))
    assert isinstance(fail(run, after_s=100.0), Broken)
    assert saved(run) == []
