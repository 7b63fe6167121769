"""Operations of a model, counted by torch itself where it can, and what devices can do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3Config, Qwen2Config

from tests.fakes.learner import KINDS, TINY, make_learner, pack, run_config, sequences, without_loss
from trainer.config.schema import LoraConfig
from trainer.learner.flops import ModelFlops, head_dim, model_flops, peak_flops

if TYPE_CHECKING:
    from pathlib import Path


def _model(kind: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(KINDS[kind](), attn_implementation="eager")


def _counted(model: Any, num_tokens: int) -> float:
    """What torch counts in forward and backward of one sequence, whose attention it takes to look at all pairs."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long, device="meta")).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    model, num_tokens = _model(kind), 40
    flops = model_flops(model)
    assert flops is not None
    causal = flops.of(num_tokens=num_tokens, num_loss_tokens=num_tokens, squared_lengths=num_tokens**2)
    assert _counted(model, num_tokens) == causal + flops.per_squared_length * num_tokens**2


def test_of_the_experts_those_count_that_a_token_visits() -> None:
    dense, experts = model_flops(_model("qwen3")), model_flops(_model("qwen3_moe"))
    assert dense is not None and experts is not None
    attention = 2 * (32 * 4 * 8 + 2 * 32 * 2 * 8 + 4 * 8 * 32)  # q, k and v, o of two blocks
    visited = 2 * 3 * 32 * 32 + 5 * 32  # two of five experts, and the router
    assert experts.per_token == 6 * (attention + visited + 3 * 32 * 48)  # the second block has none
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(
            DeepseekV3Config(**{**TINY, "num_key_value_heads": 4}, n_routed_experts=4, n_group=2, topk_group=1)
        )
    assert model_flops(other) is None


def test_packed_sequences_count_by_their_lengths_and_fillers_count_nothing() -> None:
    batch = pack(sequences(3))
    lengths = np.diff(batch.cu_seqlens)
    flops = ModelFlops(per_token=1e6, per_loss_token=1e3, per_squared_length=1.0)
    expected = 1e6 * lengths.sum() + 1e3 * batch.loss_mask.sum() + (lengths.astype(float) ** 2).sum()
    assert flops.of_batches([batch, without_loss()]) == expected
    assert flops.of_batches([without_loss()]) == 0.0


@pytest.mark.usefixtures("one_rank")
def test_a_learner_counts_its_own_batches_and_what_is_frozen_less(tiny_dir: Path) -> None:
    cfg, batches = run_config(tiny_dir), [pack(sequences(4)), without_loss()]
    full = make_learner(replace(cfg, device=replace(cfg.device, peak_tflops=2.0)))
    result = full.train_step(batches, step=0)
    expected = model_flops(_model("qwen2"))
    assert expected is not None
    assert result.model_flops == expected.of_batches(batches)
    assert result.peak_flops == 2e12
    lora = LoraConfig(rank=8, target_modules="q_proj+o_proj")
    adapted = make_learner(replace(cfg, model=replace(cfg.model, lora=lora)))
    found = model_flops(adapted.model)
    adapters = 2 * 2 * 8 * (32 + 32)
    assert found == ModelFlops(
        per_token=expected.per_token * 4 / 6 + 6 * adapters,
        per_loss_token=expected.per_loss_token * 4 / 6,
        per_squared_length=expected.per_squared_length,
    )
    assert adapted.train_step(batches, step=0).peak_flops is None, "nobody said what this CPU can do"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H20", 148.0),
        ("AMD Instinct MI300X", 1307.0),
        ("NVIDIA A10", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(name: str, tflops: float | None) -> None:
    expected = None if tflops is None else tflops * 1e12
    assert peak_flops(name, compute_dtype="bfloat16", given_tflops=None) == expected
    assert peak_flops(name, compute_dtype="float32", given_tflops=None) is None
    assert peak_flops(name, compute_dtype="float32", given_tflops=0.5) == 0.5e12


def test_the_head_size_of_a_composite_model_is_that_of_its_language_model() -> None:
    assert head_dim(Gemma3Config(text_config={"head_dim": 24, "hidden_size": 64, "num_attention_heads": 4})) == 24
    assert head_dim(Qwen2Config(**TINY)) == 8
