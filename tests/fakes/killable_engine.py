"""A scripted engine behind the real Ray shell, in a process that a test can find and kill."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rollout.engine.actor import EngineActor
from rollout.engine.interface import EngineSpec
from tests.fakes.scripted_engine import ScriptedEngine
from weight_sync.device.select import build

if TYPE_CHECKING:
    import numpy as np


def position_script(prompt: np.ndarray, position: int, version: int) -> tuple[int, float]:
    """The token is its place in the sequence, so a resubmission that loses or repeats one is seen."""
    return len(prompt) + position, -0.25


class KillableEngine(EngineActor):
    """A token takes `token_s` seconds."""

    def __init__(self, version: int, token_s: float) -> None:
        env = {variable.name: variable.value for variable in build("cpu").process_env("engine")}
        spec = EngineSpec(model="", stream_interval=4, initial_version=version, env=env)
        super().__init__(spec, build=lambda one: ScriptedEngine(one, script=position_script, token_s=token_s))

    async def pid(self) -> int:
        return os.getpid()

    async def set_token_s(self, token_s: float) -> None:
        self._engine._token_s = token_s  # type: ignore[attr-defined]
