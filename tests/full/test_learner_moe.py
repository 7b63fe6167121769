"""A model of experts in the learner, on one and two real ranks: of 5 experts one rank holds 3 and the other 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.fakes.learner import (
    assert_close,
    gradients,
    make_learner,
    pack,
    process_group,
    run_config,
    run_ranks,
    save_tiny,
    sequences,
    weights,
)
from weight_sync.publish.shards import local_shards

if TYPE_CHECKING:
    from pathlib import Path


def _step(learner: Any, step: int) -> Any:
    parts = sequences(8, seed=step)
    return learner.train_step([pack(parts[dist.get_rank() :: dist.get_world_size()])], step=step)


def _job(directory: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    cfg = run_config(directory / "model", activation_checkpointing=True)
    learner, out = make_learner(cfg), {}
    out["loaded"] = weights(learner)
    out["gradients"] = gradients(learner, [pack(sequences(12)[rank::2])])
    _step(learner, 0)
    learner.save(directory / "checkpoint", step=1)
    dist.barrier()
    _step(learner, 1)
    out["uninterrupted"] = weights(learner)
    resumed = make_learner(cfg)
    resumed.load(directory / "checkpoint")
    _step(resumed, 1)
    out["resumed"] = weights(resumed)
    _, shards, tensors = local_shards(resumed.model, rollout_dtype="float32")
    out["shards"], out["tensors"] = shards, {name: tensor.clone() for name, tensor in tensors.items()}
    resumed.export_hf(directory / "export")
    return out


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    save_tiny(path / "model", "qwen3_moe")
    (path / "checkpoint").mkdir()
    return path


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> list[dict[str, Any]]:
    return run_ranks(_job, directory, world_size=2)


def test_every_rank_reads_its_own_experts_from_the_checkpoint(
    directory: Path, two_ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused tensors equal those that transformers builds; it was not asked to."""
    expected = dict(AutoModelForCausalLM.from_pretrained(directory / "model").named_parameters())
    assert any("experts.gate_up_proj" in name for name in expected)
    for result in two_ranks:
        assert result["loaded"].keys() == expected.keys()
        assert all(tensor.equal(expected[name]) for name, tensor in result["loaded"].items())
    with process_group(directory / "store_of_one"):
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        alone = make_learner(run_config(directory / "model"))
        assert all(tensor.equal(expected[name]) for name, tensor in weights(alone).items())
        whole = gradients(alone, [pack(sequences(12))])
    for result in two_ranks:
        assert_close(result["gradients"], whole, rtol=1e-5)


def test_resumed_run_gives_the_same_bits_as_an_uninterrupted_one(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert all(tensor.equal(result["resumed"][name]) for name, tensor in result["uninterrupted"].items())
        moved = [name for name, tensor in result["uninterrupted"].items() if not tensor.equal(result["loaded"][name])]
        assert moved == list(result["loaded"])


def test_ranks_serve_what_they_export(directory: Path, two_ranks: list[dict[str, Any]]) -> None:
    """Names, shapes and bits: the shards of both ranks rebuild the exported checkpoint, expert by expert."""
    exported = load_file(directory / "export" / "model.safetensors")
    assert any(".experts.4.down_proj.weight" in name for name in exported)
    rebuilt: dict[str, list[torch.Tensor]] = {name: [] for name in exported}
    for result in two_ranks:
        for name, tensor in result["tensors"].items():
            rebuilt[name].append(tensor)
            if ".experts." in name:
                assert tensor.shape == exported[name].shape
    assert all(torch.cat(parts).equal(exported[name]) for name, parts in rebuilt.items())
    loaded = dict(AutoModelForCausalLM.from_pretrained(directory / "export").named_parameters())
    assert all(tensor.equal(loaded[name]) for name, tensor in two_ranks[0]["resumed"].items())
