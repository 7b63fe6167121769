"""What a rollout worker opens when it starts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import AsyncMock

import pytest

from rollout.engine.interface import EngineSpec, EngineStatus
from rollout.errors import DataError
from rollout.types import SamplingParams
from rollout.worker.actor import RolloutWorkerActor
from rollout.worker.worker import WorkerSpec
from tests.fakes.own_tokenizer import save_own_tokenizer
from tests.fakes.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from pathlib import Path


def worker(tokenizer: Path, *, trust_remote_code: bool) -> RolloutWorkerActor:
    spec = WorkerSpec(
        group_size=1,
        sampling=SamplingParams(max_tokens=1),
        request_timeout_s=1.0,
        seed=0,
        tokenizer_path=str(tokenizer),
        trust_remote_code=trust_remote_code,
        reward="arithmetic",
    )
    engine = ScriptedEngine(EngineSpec(model="scripted"))

    async def load() -> EngineStatus:
        return engine.load()

    return RolloutWorkerActor(spec, {"replica_0": SimpleNamespace(load=SimpleNamespace(remote=load))})


async def test_a_worker_starts_with_a_tokenizer_that_brings_its_own_code_where_it_is_trusted(tmp_path: Path) -> None:
    tokenizer = save_own_tokenizer(tmp_path / "own")
    trusting, wary = worker(tokenizer, trust_remote_code=True), worker(tokenizer, trust_remote_code=False)
    try:
        await trusting.start()
        with pytest.raises(ValueError, match="contains custom code"):
            await wary.start()
    finally:
        await trusting.close()
        await wary.close()


async def test_a_worker_whose_loop_cannot_close_ends_its_reward_processes_all_the_same(tmp_path: Path) -> None:
    actor = worker(save_own_tokenizer(tmp_path / "own"), trust_remote_code=True)
    await actor.start()
    actor._rewards.close = ended = AsyncMock(wraps=actor._rewards.close)
    actor._worker._loop = SimpleNamespace(close=AsyncMock(side_effect=OSError("no such socket")))
    with pytest.raises(OSError, match="no such socket"):
        await actor.close()
    ended.assert_awaited_once_with()


def test_a_relative_file_of_a_reward_is_one_of_the_directory_that_the_run_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir("/")
    spec = WorkerSpec(
        group_size=1, sampling=SamplingParams(max_tokens=1), request_timeout_s=1.0, seed=0, reward="mine.py:reward"
    )
    RolloutWorkerActor(replace(spec, reward_directory=str(tmp_path)), {})
    with pytest.raises(DataError, match=r"there is no file /mine\.py"):
        RolloutWorkerActor(spec, {})
