"""Kinds of models that are refused before anything starts, and what is changed in those that are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, GPT2Config, PreTrainedConfig

from tests.fakes.learner import KINDS, TINY, make_learner, pack, run_config, sequences
from trainer.config.schema import ModelConfig
from trainer.errors import ModelError
from trainer.learner import model as architecture
from trainer.learner.model import check_model

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig

pytestmark = pytest.mark.usefixtures("one_rank")

MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 8.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def config(kind: str, **fields: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**TINY, "pad_token_id": 0, **fields})


def saved(directory: Path, kind: str, **fields: Any) -> RunConfig:
    """A random model whose weights are large enough that a change anywhere shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind, **fields), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0, 0.2)
    model.save_pretrained(directory)
    return run_config(directory)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_tested_is_accepted(kind: str, tmp_path: Path) -> None:
    KINDS[kind]().save_pretrained(tmp_path)
    check_model(ModelConfig(), tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11), "no decoder blocks"),
        (Gemma2Config(**TINY, head_dim=8), "final_logit_softcapping=30.0"),
    ],
    ids=["gpt2", "gemma2"],
)
def test_models_that_do_more_than_we_compute_are_refused(config: object, words: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words):
        make_learner(run_config(tmp_path))


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (("lfm2", {"layer_types": ["conv", "full_attention"], "intermediate_size": 64}), "layers of type conv"),
        (("minimax", {"num_local_experts": 4}), "layers of type linear_attention"),
        (("recurrent_gemma", {}), r"logits_soft_cap=30\.0"),
        (("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}), "type dynamic"),
        (("gpt_oss", {"num_local_experts": 4}), "GptOssAttention uses attention with s_aux"),
        (("nemotron", {}), "NemotronAttention was not given packed=<layout>"),
        (("doge", {}), "attention_mask"),
        (("deepseek_v3", MLA), "values of size 8 and keys of size 16"),
        (("falcon", {}), "its own attention code"),
    ],
    ids=lambda case: case[0] if isinstance(case, tuple) else "",
)
def test_models_that_cannot_run_packed_are_refused_by_their_config_alone(
    described: tuple[str, dict[str, Any]], words: str, tmp_path: Path
) -> None:
    kind, fields = described
    config(kind, **fields).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{words}.*use Qwen2, Qwen3, Qwen3-MoE, Llama or Mistral"):
        check_model(ModelConfig(), tmp_path)


@pytest.mark.parametrize(
    ("method", "fields"),
    [("fp8", {"weight_block_size": [128, 128]}), ("bitsandbytes", {"load_in_4bit": True}), ("gptq", {"bits": 4})],
)
def test_quantized_weights_are_refused_by_their_config_alone(
    method: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Read without their scales they would train as other numbers, and an export would name a quantization it lacks."""
    config("qwen3", quantization_config={"quant_method": method, **fields}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"quantized weights \(quant_method '{method}'\).*give the model in bfloat16"):
        check_model(ModelConfig(), tmp_path)


def test_a_block_without_attention_is_refused_also_where_the_config_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "LAYER_TYPES", {"conv", "full_attention"})
    config("lfm2", layer_types=["full_attention", "conv"], intermediate_size=64).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"1 of 2 blocks without attention \(the first is 1\)"):
        check_model(ModelConfig(), tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("seed_oss", {"head_dim": 8}),
        ("starcoder2", {"residual_dropout": 0.1, "embedding_dropout": 0.1}),
        ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}),
        ("phimoe", {"num_local_experts": 4, "lm_head_bias": False, "input_jitter_noise": 0.1}),
    ],
)
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_same_weights_give_the_same_logprobs(
    kind: str, fields: dict[str, Any], recomputes: bool, tmp_path: Path
) -> None:
    saved(tmp_path, kind, **fields)
    learner, batch = make_learner(run_config(tmp_path, activation_checkpointing=recomputes)), pack(sequences(4))
    first = learner.logprobs(batch)
    np.testing.assert_array_equal(learner.logprobs(batch), first)


def test_dropout_of_a_block_that_recomputes_is_off(tmp_path: Path) -> None:
    """Such a block has to stay in training mode, in which its own dropout would be on."""
    saved(tmp_path, "seed_oss", head_dim=8)
    learner = make_learner(run_config(tmp_path, activation_checkpointing=True))
    block = learner.model.base_model.layers[0]
    assert block.training and not block.mlp.training


@pytest.mark.parametrize(("max_model_len", "factor"), [(16, 1.0), (17, 2.0)])
def test_longrope_takes_the_factors_that_an_engine_of_this_context_takes(
    max_model_len: int, factor: float, tmp_path: Path
) -> None:
    """vLLM: the long ones if max_model_len > original_max_position_embeddings, for short sequences too."""
    cfg = saved(tmp_path, "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16)
    cfg = replace(cfg, rollout=replace(cfg.rollout, max_model_len=max_model_len))
    learner, parts = make_learner(cfg), sequences(4)
    assert min(len(part.token_ids) for part in parts) <= 16 < max(len(part.token_ids) for part in parts)
    alone = np.concatenate([learner.logprobs(part) for part in parts])
    np.testing.assert_allclose(learner.logprobs(pack(parts)), alone, atol=1e-5)
    expected = 1 / (factor * 10000.0 ** (torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(learner.model.model.rotary_emb.inv_freq, expected)


def test_the_context_of_the_engine_is_prompt_plus_answer_unless_it_is_given(tmp_path: Path) -> None:
    cfg = saved(tmp_path, "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16)
    for tokens, factor in ((8, 1.0), (9, 2.0)):
        limits = {"task": replace(cfg.task, max_prompt_tokens=8)}
        learner = make_learner(replace(cfg, **limits, rollout=replace(cfg.rollout, max_response_tokens=tokens)))
        assert learner.model.model.rotary_emb.inv_freq[0] == 1 / factor
