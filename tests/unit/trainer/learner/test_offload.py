from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from tests.fakes.learner import make_learner, pack, run_config, save_tiny, sequences, weights
from trainer.config.algorithm import KlConfig
from trainer.errors import LearnerError
from trainer.learner.fsdp import sharded_like
from trainer.learner.offload import ALIGNMENT, CpuOffload, host_memory
from weight_sync.device.select import get_backend
from weight_sync.publish.shards import local_shards

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig


def test_storages_fill_blocks_in_order_and_a_large_one_has_its_own() -> None:
    first, second, large, last = host_memory([100, 64, 1000, 128], block_bytes=320, is_pinned=False)
    assert [one.storage_offset() for one in (first, second, large, last)] == [0, 2 * ALIGNMENT, 0, 3 * ALIGNMENT]
    assert [one.untyped_storage().nbytes() for one in (first, large)] == [5 * ALIGNMENT, 1024]
    assert (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    )


def test_memory_is_given_back_and_every_holder_of_a_tensor_gets_its_bytes_back() -> None:
    whole = torch.arange(12.0)
    view, tied, other = whole[4:8], whole, torch.arange(5, dtype=torch.int16)
    offload = CpuOffload([other, whole, tied, torch.empty(0)], backend=get_backend("cpu"), block_bytes=128)
    assert offload.nbytes == 12 * 4 + 5 * 2
    for _ in range(2):
        before = [tensor.clone() for tensor in (whole, view, other)]
        offload.to_host()
        offload.to_host()
        assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        torch.testing.assert_close(offload.host_view(view), before[1], rtol=0, atol=0)
        with pytest.raises(LearnerError, match="train_step needs"):
            offload.require_onloaded("train_step")
        offload.to_device()
        offload.to_device()
        offload.require_onloaded("train_step")
        for tensor, expected in zip((whole, view, other), before, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
        assert offload.host_view(view) is view
        view.add_(100)


def with_reference(cfg: RunConfig) -> RunConfig:
    return replace(cfg, algorithm=replace(cfg.algorithm, kl=KlConfig(coef=0.1, apply_to="loss")))


@pytest.mark.usefixtures("one_rank")
def test_a_learner_that_leaves_its_device_between_steps_learns_the_same_bits(tiny_dir: Path, tmp_path: Path) -> None:
    cfg = with_reference(run_config(tiny_dir))
    stays, leaves = make_learner(cfg), make_learner(cfg)
    model_bytes = sum(p.numel() * 4 for p in stays.model.parameters())
    # Weights, two moments, and the reference in float32.
    assert leaves.offload.nbytes == 4 * model_bytes
    for step in range(3):
        batch = pack(sequences(4, seed=step))
        results = [learner.train_step([batch], step=step).metrics for learner in (stays, leaves)]
        assert results[0] == results[1]
        leaves.offload.to_host()
        with pytest.raises(LearnerError, match="call onload first"):
            leaves.train_step([batch], step=step + 1)
        if step == 1:
            for name, learner in (("stays", stays), ("leaves", leaves)):
                (tmp_path / name).mkdir()
                learner.save(tmp_path / name, step=2)
        leaves.offload.to_device()
    for name, tensor in weights(stays).items():
        torch.testing.assert_close(weights(leaves)[name], tensor, rtol=0, atol=0)
    # What was saved from the host is what was saved from the device.
    for name in ("stays", "leaves"):
        fresh = make_learner(cfg)
        assert fresh.load(tmp_path / name) == 2
        fresh.train_step([pack(sequences(4, seed=2))], step=2)
        for key, tensor in weights(stays).items():
            torch.testing.assert_close(weights(fresh)[key], tensor, rtol=0, atol=0)


@pytest.mark.usefixtures("one_rank")
def test_host_memory_below_an_accelerators_mesh_is_shared_not_copied() -> None:
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    meta = TensorMeta(shape=torch.Size([4]), stride=(1,), dtype=torch.float32)
    param = DTensor(torch.zeros(4), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
    moment = torch.arange(4.0)
    found = sharded_like(param, moment)
    assert isinstance(found, DTensor) and found.placements == (Shard(0),)
    assert found.to_local().data_ptr() == moment.data_ptr()


@pytest.mark.usefixtures("one_rank")
def test_views_for_weight_sync_survive_the_way_to_the_host(tmp_path: Path) -> None:
    """Experts are published as slices of fused tensors, and no slice can be made of an empty storage."""
    learner = make_learner(run_config(save_tiny(tmp_path, "qwen3_moe")))
    _, _, tensors = local_shards(learner.model, rollout_dtype="float32")
    assert any("experts" in name for name in tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    learner.offload.to_host()
    learner.offload.to_device()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_memory_that_stays_taken_is_an_error_with_what_is_needed_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = CpuOffload([torch.arange(8.0)], backend=get_backend("cpu"))
    offload.to_host()
    tries: list[int] = []
    monkeypatch.setattr(CpuOffload, "_take", lambda *_: tries.append(1))
    with pytest.raises(LearnerError, match=r"needs 0.00 GiB of its device and finds"):
        offload.to_device(patience_s=0.6)
    assert len(tries) >= 2
    monkeypatch.undo()
    offload.to_device()
    offload.require_onloaded("anything")
