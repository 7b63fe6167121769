"""A learner on an accelerator that leaves it between two steps: the memory is really free, and nothing is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config

from tests.fakes.learner import TINY, drawn_config, pack, sequences, weights
from trainer.learner.policy import PolicyTrainer
from weight_sync.device.select import get_backend
from weight_sync.publish.packer import Packer, PackStep
from weight_sync.publish.shards import local_shards
from weight_sync.transports.base import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainer.config.schema import RunConfig

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20
STATE_BYTES_PER_PARAM = 12
"""Master and two moments."""


@pytest.fixture
def one_device(tmp_path: Path) -> Iterator[torch.device]:
    device = get_backend("cuda").set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


def num_large_blocks() -> int:
    """How often torch has asked the driver for more than the 2 MiB that its small tensors share."""
    return torch.cuda.memory_stats()["segment.large_pool.allocated"]


def learner_on(device: torch.device, cfg: RunConfig) -> PolicyTrainer:
    return PolicyTrainer(cfg, device=device, backend=get_backend("cuda"))


def test_the_memory_of_a_learner_that_is_away_is_free_and_it_learns_the_same_bits(
    one_device: torch.device, tmp_path: Path
) -> None:
    # Large enough that its state is far more than what the runtime keeps: 100 million parameters.
    Qwen2Config(**{**TINY, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}).save_pretrained(
        tmp_path / "model"
    )
    cfg = drawn_config(tmp_path / "model")
    cfg = replace(cfg, model=replace(cfg.model, compute_dtype="bfloat16", rollout_dtype="bfloat16"))
    stays, leaves = learner_on(one_device, cfg), learner_on(one_device, cfg)
    num_params = sum(param.numel() for param in stays.model.parameters())
    assert leaves.offload.nbytes == STATE_BYTES_PER_PARAM * num_params > 500 * MIB
    num_before = 0
    for step in range(3):
        batch = pack(sequences(4, seed=step))
        results = [learner.train_step([batch], step=step).metrics for learner in (stays, leaves)]
        assert results[0] == results[1]
        if step == 2:
            assert num_large_blocks() - num_before < 8, "one block holds a whole turn"
        torch.cuda.empty_cache()
        here, _ = torch.cuda.mem_get_info()
        leaves.offload.to_host()
        away, _ = torch.cuda.mem_get_info()
        assert away - here > 0.95 * leaves.offload.nbytes
        (tmp_path / f"step_{step}").mkdir()
        leaves.save(tmp_path / f"step_{step}", step=step + 1)
        saved, _ = torch.cuda.mem_get_info()
        assert away - saved < 32 * MIB, "a checkpoint of what is on the host takes nothing on the device"
        num_before = num_large_blocks()
        leaves.offload.to_device()
    for name, tensor in weights(stays).items():
        torch.testing.assert_close(weights(leaves)[name], tensor, rtol=0, atol=0)
    fresh = learner_on(one_device, cfg)
    assert fresh.load(tmp_path / "step_2") == 3
    for name, tensor in weights(stays).items():
        torch.testing.assert_close(weights(fresh)[name], tensor, rtol=0, atol=0)


def test_shards_that_stay_on_the_host_are_packed_without_a_copy_of_them_on_the_device(
    one_device: torch.device, tmp_path: Path
) -> None:
    Qwen2Config(**{**TINY, "hidden_size": 1024, "intermediate_size": 20000, "num_hidden_layers": 2}).save_pretrained(
        tmp_path / "model"
    )
    cfg = drawn_config(tmp_path / "model", cpu_offload=True)
    learner = learner_on(one_device, cfg)
    _, _, tensors = local_shards(learner.model, rollout_dtype="bfloat16")
    assert max(tensor.nbytes for tensor in tensors.values()) > PIECE_BYTES
    slot = {
        name: torch.empty(tensor.shape, dtype=torch.bfloat16, device=one_device) for name, tensor in tensors.items()
    }
    steps = [PackStep(name, tuple(slice(0, n) for n in view.shape), (view,)) for name, view in slot.items()]
    packer = Packer(get_backend("cuda"), steps, num_slots=1)
    for step in range(2):
        learner.train_step([pack(sequences(4, seed=step))], step=step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        packer.pack(0, tensors)
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() - before <= PIECE_BYTES
        for name, tensor in weights(learner).items():
            assert torch.equal(slot[name].cpu(), tensor.cpu().to(torch.bfloat16)), f"{name} after step {step}"
