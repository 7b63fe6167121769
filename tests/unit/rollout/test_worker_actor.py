"""The Ray shell of a rollout worker: what it opens and closes, how groups return, and the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch

from rollout.errors import DataError
from rollout.types import Group, SamplingParams, Trajectory
from rollout.worker.actor import RolloutWorkerActor
from rollout.worker.group_server import GroupServer
from rollout.worker.worker import WorkerSpec
from tests.fakes.own_tokenizer import save_own_tokenizer
from tests.fakes.rollout_worker import item
from tests.fakes.trajectories import make_turn

if TYPE_CHECKING:
    from pathlib import Path

SPEC = WorkerSpec(
    group_size=1, sampling=SamplingParams(max_tokens=1), request_timeout_s=1.0, seed=0, reward="arithmetic"
)


async def test_a_worker_starts_with_a_tokenizer_that_brings_its_own_code_where_it_is_trusted(tmp_path: Path) -> None:
    spec = replace(SPEC, tokenizer_path=str(save_own_tokenizer(tmp_path / "own")))
    trusting = RolloutWorkerActor(replace(spec, trust_remote_code=True), {"replica_0": SimpleNamespace()})
    wary = RolloutWorkerActor(spec, {})
    try:
        await trusting.start()
        with pytest.raises(ValueError, match="contains custom code"):
            await wary.start()
    finally:
        await wary.close()
        trusting._rewards.close = ended = AsyncMock(wraps=trusting._rewards.close)
        trusting._worker.close = AsyncMock(side_effect=OSError("no such socket"))
        with pytest.raises(OSError, match="no such socket"):
            await trusting.close()
        ended.assert_awaited_once_with()


def test_a_relative_file_of_a_reward_is_one_of_the_directory_that_the_run_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir("/")
    spec = replace(SPEC, reward="mine.py:reward")
    RolloutWorkerActor(replace(spec, reward_directory=str(tmp_path)), {})
    with pytest.raises(DataError, match=r"there is no file /mine\.py"):
        RolloutWorkerActor(spec, {})


@pytest.mark.parametrize("num_tokens", [4, 5000])
async def test_a_group_is_sized_by_its_arrays_and_not_pickled_for_it(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trajectory() -> Trajectory:
        turn = make_turn([1, 2], np.arange(num_tokens), [(0, num_tokens)])
        return Trajectory.of_turns([turn], status="completed", prompt_id="p", text="x" * num_tokens)

    group = Group(group_id=0, prompt_id="p", trajectories=[trajectory() for _ in range(4)], start_version=0)
    assert group.nbytes == pytest.approx(len(pickle.dumps(group)), rel=0.4)
    monkeypatch.setattr(pickle, "dumps", None)
    server = GroupServer(AsyncMock(return_value=group))
    server.submit({7: item()}, ())
    assert await asyncio.wait_for(server.ended(), 10) == {7: group}


async def test_a_worker_takes_the_threads_that_its_environment_has_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets the variable after a forked worker has torch."""
    before, worker = torch.get_num_threads(), RolloutWorkerActor(SPEC, {})
    monkeypatch.setenv("OMP_NUM_THREADS", str(before + 1))
    try:
        with contextlib.suppress(OSError):  # there is no tokenizer
            await worker.start()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
        await worker.close()
