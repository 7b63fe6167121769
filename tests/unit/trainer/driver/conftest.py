"""Scripted runs in virtual time, and a directory in which inputs are checked."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import Script, ScriptedRun, World, config, telemetry_in
from trainer.driver.state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., ScriptedRun]]:
    """`scripted(script, mode={...}, ...)` makes a run; a world may take the place of its script. A run that resumes has
    the directory of the run before it, any other a new one."""
    numbers, path = itertools.count(), tmp_path / "run"
    with contextlib.ExitStack() as open_run:

        def make(
            script: Script | World | None = None,
            *,
            state: RunState | None = None,
            num_held_out: int = 4,
            **sections: Any,
        ) -> ScriptedRun:
            nonlocal path
            open_run.close()
            if state is None:
                state, path = RunState(started_at=0.0, wall_clock=lambda: 0.0), tmp_path / f"run_{next(numbers)}"
            cfg = config(**sections)
            telemetry = open_run.enter_context(telemetry_in(cfg, path, resume_step=state.resumed_from_step))
            world = script if isinstance(script, World) else World(Script() if script is None else script)
            return ScriptedRun(cfg, world, telemetry, state, num_held_out=num_held_out)

        yield make


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working directory, from which plug-ins are imported; offline."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path
