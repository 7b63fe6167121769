"""Learner and engine on one device: the engine sleeps, the learner trains, a sync brings its weights and wakes it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_engine import VllmEngine
from rollout.types import SamplingParams
from tests.contract.engine.suite import collect
from tests.fakes.tiny_vllm import EngineHandle
from tests.fakes.vllm_models import write_checkpoints
from tests.integration.test_quantized_gpu import CONFIG, EXPERTS, PROMPT, Learner
from weight_sync.control.coordinator import SyncCoordinator
from weight_sync.control.epoch import SyncOptions
from weight_sync.vllm.compat import EXTENSION

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(300),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
GIB = 1 << 30


def make_spec(folder: Path, **changes: Any) -> EngineSpec:
    return EngineSpec(
        model=str(folder), device="cuda", dtype="bfloat16", max_model_len=256, max_num_seqs=8,
        gpu_memory_utilization=0.2, enforce_eager=False, stream_interval=8, extension=EXTENSION, **changes,
    )  # fmt: skip


async def respond(engine: VllmEngine, name: str) -> tuple[list[int], np.ndarray]:
    found = await asyncio.wait_for(collect(engine, name, GREEDY, np.array(PROMPT, np.int32)), 60)
    return list(found.tokens), found.logprobs


async def response_of_fresh(folder: Path, **changes: Any) -> tuple[list[int], np.ndarray]:
    engine = VllmEngine(make_spec(folder, **changes))
    await engine.start()
    try:
        return await respond(engine, "fresh")
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("config", "env"),
    [(CONFIG, {}), (CONFIG, {"VLLM_USE_V2_MODEL_RUNNER": "0"}), (EXPERTS, {})],
    ids=["dense", "first-runner", "experts"],
)
async def test_an_engine_wakes_with_the_weights_that_were_trained_while_it_slept(
    config: PretrainedConfig, env: dict[str, str], tmp_path: Path
) -> None:
    write_checkpoints(tmp_path, config, std=0.2)
    full = {which: load_file(tmp_path / which / "model.safetensors") for which in ("old", "new")}
    expected = {which: await response_of_fresh(tmp_path / which, env=env) for which in full}
    assert expected["old"][0] != expected["new"][0], "both checkpoints give the same responses; nothing would be tested"
    engine = VllmEngine(make_spec(tmp_path / "old", sleep_level=2, env=env))
    await engine.start()
    try:
        for commit in ("staged", "inplace"):
            learner = Learner(full["old"], "cuda")
            options = SyncOptions(timeout_s=60.0, commit=commit)
            coordinator = SyncCoordinator([learner], [EngineHandle(engine)], options=options)
            await coordinator.open()
            for version, which in enumerate(("new", "old", "new"), start=1):
                awake, _ = torch.cuda.mem_get_info()
                await engine.sleep()
                asleep, _ = torch.cuda.mem_get_info()
                assert asleep - awake > 10 * GIB, "the cache takes a fifth of the device and must be given back"
                learner.full = full[which]
                await coordinator.publish(version)
                await coordinator.sync(version)
                await coordinator.self_test()
                tokens, logprobs = await respond(engine, f"{commit}-{version}")
                assert tokens == expected[which][0]
                np.testing.assert_array_equal(logprobs, expected[which][1])
            await coordinator.close()
    finally:
        await engine.close()
