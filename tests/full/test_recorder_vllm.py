"""Recorder and plan against vLLM's real model classes and loaders, on CPU: dense and expert models, TP 1-8, PP 2.

The learner is a real transformers model of the same config, sharded by FSDP2 over 1, 2 and 3 ranks. Weights that a plan
writes into a live engine model must equal, bit for bit, those that vLLM's own `load_weights` writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import (
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.fakes import vllm_models
from tests.fakes.patience import PATIENT_TEST_S

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("vllm", reason="the engine is an optional dependency")
pytestmark = pytest.mark.timeout(PATIENT_TEST_S)

_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,  # vLLM pads it to 128
    "max_position_embeddings": 64,
}
_EXPERTS: dict[str, Any] = {**_TINY, "num_key_value_heads": 2, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
_CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2_tied": Qwen2Config(**_TINY, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2_untied": Qwen2Config(**_TINY, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**{**_TINY, "num_attention_heads": 8}, num_key_value_heads=4, tie_word_embeddings=False),
    "llama": LlamaConfig(**_TINY, num_key_value_heads=4, tie_word_embeddings=False),
    "mistral": MistralConfig(**_TINY, num_key_value_heads=2, tie_word_embeddings=True),
    # 5 experts over 3 learner ranks: 2, 2, 1; over 2: 3, 2. The layer between is dense.
    "qwen3_moe": Qwen3MoeConfig(
        **{**_EXPERTS, "num_hidden_layers": 3}, num_experts=5, mlp_only_layers=[1], tie_word_embeddings=False
    ),
    # 2 experts over 3 learner ranks: 1, 1, 0. One expert is shared and plain.
    "qwen2_moe": Qwen2MoeConfig(**_EXPERTS, num_experts=2, shared_expert_intermediate_size=32),
    # A correction bias of the router, which is a buffer of the learner and float32 in the engine.
    "glm4_moe": Glm4MoeConfig(
        **_EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "mixtral": MixtralConfig(**_TINY, num_key_value_heads=2, num_local_experts=4, tie_word_embeddings=False),
}
_CASES = {
    "qwen2_tied": ["1x1", "2x1", "2x2"],
    "qwen2_untied": ["2x1", "1x2"],
    "qwen3": ["1x1", "8x1"],
    "llama": ["4x1"],
    "mistral": ["1x2"],
    "qwen3_moe": ["1x1", "2x1", "2x2"],
    "qwen2_moe": ["2x1"],
    "glm4_moe": ["1x1", "2x1"],
    "mixtral": ["2x1"],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One per worker of every case."""
    root: Path = tmp_path_factory.mktemp("models")
    for name, config in _CONFIGS.items():
        vllm_models.write_checkpoints(root / name, config)
    cases = [f"{name}:{split}" for name, splits in _CASES.items() for split in splits]
    return vllm_models.reports("recorder", root, cases)


def test_every_worker_of_every_case_reported(reports: list[dict[str, Any]]) -> None:
    expected = [
        (f"{name}:{split}", worker)
        for name, splits in _CASES.items()
        for split in splits
        for worker in range(int(split[0]) * int(split[2]))
    ]
    assert [(r["case"], r["worker"]) for r in reports] == expected
    assert {r["model"] for r in reports} >= {
        "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM",
        "MixtralForCausalLM",
    }  # fmt: skip


def test_recording_writes_nothing(reports: list[dict[str, Any]]) -> None:
    assert [r["case"] for r in reports if not r["untouched"]] == []


def _vocabulary(report: dict[str, Any]) -> tuple[int, int, int]:
    """Vocabulary matrices of a worker, its rows of each, and how many of those pad the vocabulary of 100 to 128."""
    tp = int(report["case"].split(":")[1][0])
    rows = 128 // tp
    return len(report["vocabulary"]), rows, min(rows, max(0, (report["worker"] % tp + 1) * rows - 100))


def test_tied_embedding_is_on_the_first_and_on_the_last_stage(reports: list[dict[str, Any]]) -> None:
    """Two copies of one checkpoint tensor, of which each worker needs its rows."""
    found = {(r["case"], r["worker"]): r["vocabulary"] for r in reports}
    for case, num_workers in {"mistral:1x2": 2, "qwen2_tied:2x2": 4}.items():
        assert [found[case, w] for w in range(num_workers)] == [["model.embed_tokens.weight"]] * num_workers
    assert found["qwen2_untied:1x2", 0] == ["model.embed_tokens.weight"]
    assert found["qwen2_untied:1x2", 1] == ["lm_head.weight"]
    assert found["qwen2_untied:2x1", 0] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_plan_writes_what_vllms_loader_writes(reports: list[dict[str, Any]]) -> None:
    """Everything that comes from the checkpoint is set to a constant before, so what is not written shows."""
    for report in reports:
        assert report["differing"] == {"1": [], "2": [], "3": []}, report
        num_matrices, rows, padded = _vocabulary(report)
        assert report["changed"] == report["num_params"] - (num_matrices if padded == rows else 0), report


def test_each_checkpoint_byte_is_packed_once(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert set(report["packed_bytes"].values()) == {report["wire_bytes"]}, report


def test_a_worker_pulls_its_parameters_and_no_padding(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        num_matrices, _, padded = _vocabulary(report)
        wanted = report["param_bytes"] - num_matrices * padded * _TINY["hidden_size"] * 2
        assert set(report["pulled_bytes"].values()) == {wanted}, report


def test_only_what_the_engine_keeps_in_float32_travels_in_float32(reports: list[dict[str, Any]]) -> None:
    router = ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"]
    for report in reports:
        assert report["float32"] == (router if report["case"].startswith("glm4_moe") else []), report


def test_replica_without_its_last_worker_is_refused(reports: list[dict[str, Any]]) -> None:
    """Layers of a missing pipeline stage, slices of a missing tensor-parallel rank: nothing may keep old values."""
    for report in reports:
        assert "engine worker" in report["without_last_worker"], report
        split = report["case"].split(":")[1]
        if int(split[2]) == 2 and int(split[0]) == 1:
            assert "model.layers.1.mlp.down_proj.weight (64, 96) is trained but no" in report["without_last_worker"]
        elif int(split[0]) > 1:
            assert "elements of model.layers." in report["without_last_worker"], report


def test_experts_on_plain_weights_compute_what_transformers_computes(reports: list[dict[str, Any]]) -> None:
    """On CPU our extension replaces vLLM's grouped kernel, which needs permuted weights; bfloat16 accuracy."""
    errors = {r["case"]: r["expert_error"] for r in reports if r["expert_error"] is not None}
    assert errors.keys() == {"qwen3_moe:1x1", "glm4_moe:1x1"}
    assert all(error < 0.02 for error in errors.values()), errors
