"""summary.json is written however a run ends, and an interrupt ends it in order."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING, Any

import pytest

from rollout.types import Group
from tests.fakes.full_disk import file_limit
from tests.fakes.scripted_run import Script, ScriptedRun, config, prompt_set, telemetry_in, trajectory
from tests.fakes.virtual_time import run_virtual
from trainer.driver import run as run_module
from trainer.driver.checkpointing import FailedResponses, RunState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.telemetry.session import Telemetry


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
        await self._state.stop_requested.wait()
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


def test_a_signal_that_arrives_twice_at_once_counts_once(telemetry: Telemetry) -> None:
    state = new_state()
    work = driver(telemetry, state)

    async def main() -> None:
        running = asyncio.create_task(work._work())
        await asyncio.sleep(1)
        work._interrupt(running)
        work._interrupt(running)
        await asyncio.wait({running})

    run_virtual(main())
    assert work.is_in_order


def test_every_way_to_end_has_an_exit_code() -> None:
    assert run_module.EXIT_CODES == {"completed": 0, "accuracy_reached": 0, "failed": 1, "interrupted": 130}


def test_what_failed_is_told_by_its_first_line_and_kept_whole() -> None:
    failed = FailedResponses()
    error = "reward 'mine.py:reward': raised ValueError: no number\n  File \"mine.py\", line 3, in reward"
    prompt = prompt_set(1).prompts[0]
    lost = replace(trajectory(prompt, 0, [(0, 3)], reward=nan), status="failed", error=error)
    failed.count(Group(group_id=0, prompt=prompt, trajectories=[lost], start_version=0))
    assert str(failed).endswith("First failure: reward 'mine.py:reward': raised ValueError: no number")
    assert failed.first_error == error
