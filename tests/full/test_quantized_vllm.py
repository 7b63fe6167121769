"""Derived weights of real vLLM models: quantised to fp8 while loading, packed for the CPU, or MLA's matrices."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV2Config, Qwen2Config

from tests.fakes import vllm_models
from tests.fakes.patience import PATIENT_TEST_S

pytest.importorskip("vllm", reason="the engine is an optional dependency")
Reports = dict[tuple[str, str, int], dict[str, Any]]

DENSE = Qwen2Config(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
MLA = DeepseekV2Config(
    hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=128, max_position_embeddings=64, kv_lora_rank=32, q_lora_rank=None,
    qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=4, n_shared_experts=1,
    num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, tie_word_embeddings=False,
)  # fmt: skip
WORKERS = {"fp8:1": 1, "fp8:2": 2, "packed:2": 2, "mla:2": 2}
CASES = [(c, commit, rank) for c, size in WORKERS.items() for commit in ("staged", "inplace") for rank in range(size)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    home = tmp_path_factory.mktemp("derived")
    for kind, config in {"fp8": DENSE, "packed": DENSE, "mla": MLA}.items():
        vllm_models.write_checkpoints(home / kind, config, std=0.2)
    found = vllm_models.reports("derived", home, [*WORKERS])
    return {(report["case"], report["commit"], report["worker"]): report for report in found}


@pytest.mark.timeout(PATIENT_TEST_S)
@pytest.mark.parametrize("case", CASES)
def test_synced_worker_equals_one_that_loaded_the_checkpoint(reports: Reports, case: tuple[str, str, int]) -> None:
    report = reports[case]
    assert report["untouched"], "recording changed the engine"
    assert report["differing"] == []
    assert report["outputs_differing"] == [], "state that is no parameter was not derived again"
    assert report["verified"] == []
    assert report["moved"] == []
    assert report["back"]


@pytest.mark.timeout(PATIENT_TEST_S)
@pytest.mark.parametrize("case", CASES)
def test_worker_pulls_its_shard_and_no_more(reports: Reports, case: tuple[str, str, int]) -> None:
    report = reports[case]
    assert 0.9 < report["pulled_bytes"] / report["shard_bytes"] <= 1.01


def test_bytes_alone_could_not_do_it(reports: Reports) -> None:
    assert "must be contiguous" in reports["fp8:1", "staged", 0]["refused_without"]
    assert "repacked its own after loading" in reports["packed:2", "staged", 0]["refused_without"]
    assert "W_U" in reports["mla:2", "staged", 0]["refused_without"]


def test_decisions_name_module_way_and_reason(reports: Reports) -> None:
    fp8, packed, mla = (set(reports[case, "staged", 0]["decisions"]) for case in ("fp8:1", "packed:2", "mla:2"))
    assert (
        "model.layers.*.self_attn.qkv_proj x2: reload of its shard (weight is float8_e4m3fn (128, 256) with strides "
        "(1, 128), its loader fills bfloat16 (256, 128))"
    ) in fp8
    assert "lm_head x1: direct (its loader's copies cover it exactly once)" in fp8
    assert "lm_head x1: reload of its shard (post-processing keeps something of the weights in cpu_linear)" in packed
    assert "model.norm x1: direct (its loader's copies cover it exactly once)" in packed
    assert "model.layers.*.self_attn.mla_attn.mla_attn x2: derived again from other modules' weights" in mla
    assert not any("whole tensors" in line for line in fp8 | packed | mla)
