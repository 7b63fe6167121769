"""The engine contract on a CUDA device: device graphs, bfloat16, asynchronous scheduling where vLLM has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import torch

from rollout.engine.vllm_engine import VllmEngine
from tests.integration import test_vllm_engine as on_cpu

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from rollout.engine.base import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
model_dir = on_cpu.model_dir


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir: Path) -> AsyncIterator[Engine]:
    on_cpu.ENDING.clear()
    changes = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.2}
    engine = VllmEngine(on_cpu.make_spec(model_dir, **changes))
    await engine.start()
    yield engine
    await engine.close()


class TestVllmEngineOnDevice(on_cpu.TestVllmEngine):
    """Every promise of the engine, labels of every token included."""
