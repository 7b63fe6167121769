"""The fallback with vLLM's own layer-wise reload: weights quantised to fp8 while loading, or packed for the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2Config

from tests.fakes import vllm_models
from tests.fakes.patience import PATIENT_TEST_S

pytest.importorskip("vllm", reason="the engine is an optional dependency")
Reports = dict[tuple[str, str], dict[str, Any]]

CONFIG = Qwen2Config(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    home = tmp_path_factory.mktemp("fallback")
    vllm_models.write_checkpoints(home, CONFIG)
    found = vllm_models.reports("fallback", home, ["fp8", "packed"])
    return {(report["case"], report["commit"]): report for report in found}


CASES = [(case, commit) for case in ("fp8", "packed") for commit in ("staged", "inplace")]


@pytest.mark.timeout(PATIENT_TEST_S)
@pytest.mark.parametrize("case", CASES)
def test_synced_engine_equals_one_that_loaded_the_checkpoint(reports: Reports, case: tuple[str, str]) -> None:
    report = reports[case]
    assert report["untouched"], "recording changed the engine"
    assert report["differing"] == []
    assert report["outputs_differing"] == [], "state that is no parameter was not derived again"
    assert report["verified"] == []
    assert report["moved"] == []
    assert "the line went dead" in report["failure"]
    assert report["back"], "after a reload that failed, the next one does not set everything right"


def test_bytes_alone_could_not_do_it(reports: Reports) -> None:
    assert "must be contiguous" in reports["fp8", "staged"]["refused_without"]
    assert "repacked its own after loading" in reports["packed", "staged"]["refused_without"]


def test_buffer_reused_before_a_layer_is_complete_corrupts_vllm_without_an_error(
    reports: Reports,
) -> None:
    """vLLM keeps views until a layer is complete; this is why buckets hold whole modules."""
    for report in reports.values():
        corrupted = set(report["corrupted"])
        assert {"model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"} <= corrupted


def test_decisions_name_module_way_and_reason(reports: Reports) -> None:
    fp8, packed = (set(reports[case, "staged"]["decisions"]) for case in ("fp8", "packed"))
    assert (
        "model.layers.*.self_attn.qkv_proj x2: fallback (weight is float8_e4m3fn (128, 256) with strides (1, 128), "
        "its loader fills bfloat16 (256, 128))"
    ) in fp8
    assert "lm_head x1: direct (its loader's copies cover it exactly once)" in fp8
    assert "lm_head x1: fallback (post-processing keeps something of the weights in cpu_linear)" in packed
    assert "model.norm x1: direct (its loader's copies cover it exactly once)" in packed
