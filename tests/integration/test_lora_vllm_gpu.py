"""LoRA on a CUDA device: captured graphs read what a sync has written into the slot."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
import torch

from rollout.engine.vllm_engine import VllmEngine
from tests.integration import test_lora_vllm as on_cpu
from weight_sync.control.coordinator import SyncCoordinator
from weight_sync.control.epoch import SyncOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.asyncio(loop_scope="module"),
]
folder = on_cpu.folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(folder: Path) -> AsyncIterator[on_cpu.Rig]:
    changes = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.2}
    engine = VllmEngine(on_cpu.lora_spec(folder, **changes))
    async with on_cpu.learner_ranks(folder, rollout_dtype="bfloat16") as (ranks, ready):
        try:
            await asyncio.gather(engine.start(), ready)
            yield on_cpu.Rig(ranks, engine, 1, folder)
        finally:
            await engine.close()


@pytest.mark.parametrize("commit", ["staged", "inplace"])
async def test_graphs_compute_with_the_adapter_of_the_last_commit(rig: on_cpu.Rig, commit: str) -> None:
    options = SyncOptions(timeout_s=60.0, transport="shm", commit=commit)
    coordinator = SyncCoordinator(rig.ranks, [on_cpu.EngineHandle(rig.engine)], options=options)
    await coordinator.open()
    first = {"staged": 1, "inplace": 11}[commit]
    try:
        for version in range(first, first + 3):
            report = await rig.next_version(coordinator, version)
            assert report.nbytes == on_cpu.ADAPTER_BYTES // 2
            await rig.assert_slot_holds_the_adapter(torch.bfloat16)
            await coordinator.self_test()
            prompt = on_cpu.random_prompt(version)
            response = await on_cpu.ask(rig, f"{commit}-{version}", prompt, max_tokens=48)
            assert set(response.labels) == {version}
            errors = {
                other: np.abs(response.logprobs - on_cpu.reference(rig, prompt, response, [other] * 48)).mean()
                for other in rig.models
            }
            assert errors.pop(version) < 0.1, "bfloat16 rounding"
            assert all(error > 0.3 for error in errors.values()), "another adapter would be noticed"
    finally:
        await coordinator.close()
