"""Scripted runs in virtual time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import Script, ScriptedRun, World, config, telemetry_in
from tests.fakes.virtual_time import run_virtual
from trainer.driver.state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.driver.loops import TrainingRun


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., ScriptedRun]]:
    """`scripted(script, mode={...}, ...)` makes a run in `tmp_path/run`; `state` and `num_held_out` are optional."""
    with contextlib.ExitStack() as stack:

        def make(
            script: Script | None = None, *, state: RunState | None = None, num_held_out: int = 4, **sections: Any
        ) -> ScriptedRun:
            cfg: RunConfig = config(**sections)
            if state is None:
                state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
            resume_step = state.resumed_from_step
            telemetry = stack.enter_context(telemetry_in(cfg, tmp_path / "run", resume_step=resume_step))
            world = World(Script() if script is None else script)
            return ScriptedRun(cfg, world, telemetry, state, num_held_out=num_held_out)

        yield make


@pytest.fixture
def play() -> Callable[..., TrainingRun]:
    """Runs one to its end in virtual time."""

    def run(scripted_run: ScriptedRun, **how: Any) -> TrainingRun:
        return run_virtual(scripted_run.run(**how))

    return run
