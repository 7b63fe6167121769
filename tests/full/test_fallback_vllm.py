"""The fallback with vLLM's own layer-wise reload: weights quantised to fp8 while loading, or packed for the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from tests.fakes.patience import PATIENT_TEST_S

pytest.importorskip("vllm", reason="the engine is an optional dependency")

_ROOT = Path(__file__).parents[2]
_CONFIG = Qwen2Config(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip


def write_checkpoints(folder: Path, config: PretrainedConfig = _CONFIG, *, std: float = 1.0) -> None:
    """`old` and `new`: two sets of random weights of one model."""
    for seed, which in enumerate(("old", "new")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for param in model.parameters():  # norms and biases start as constants, which would hide mistakes
                param.normal_(std=std)
        model.save_pretrained(folder / which)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    home = tmp_path_factory.mktemp("fallback")
    write_checkpoints(home)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "tests.fakes.vllm_fallback_worker", str(home), "fp8", "packed"]
    result = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=PATIENT_TEST_S - 60.0, check=False
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-12000:]
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"case"')]
    return {(report["case"], report["commit"]): report for report in found}


CASES = [(case, commit) for case in ("fp8", "packed") for commit in ("staged", "inplace")]


@pytest.mark.timeout(PATIENT_TEST_S)
@pytest.mark.parametrize("case", CASES)
def test_synced_engine_equals_one_that_loaded_the_checkpoint(
    reports: dict[tuple[str, str], dict[str, Any]], case: tuple[str, str]
) -> None:
    report = reports[case]
    assert report["untouched"], "recording changed the engine"
    assert report["differing"] == []
    assert report["outputs_differing"] == [], "state that is no parameter was not derived again"
    assert report["verified"] == []
    assert report["moved"] == []
    assert "the line went dead" in report["failure"]
    assert report["back"], "after a reload that failed, the next one does not set everything right"


def test_bytes_alone_could_not_do_it(reports: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert "must be contiguous" in reports["fp8", "staged"]["refused_without"]
    assert "repacked its own after loading" in reports["packed", "staged"]["refused_without"]


def test_buffer_reused_before_a_layer_is_complete_corrupts_vllm_without_an_error(
    reports: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """vLLM keeps views until a layer is complete; this is why buckets hold whole modules."""
    for report in reports.values():
        corrupted = set(report["corrupted"])
        assert {"model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"} <= corrupted


def test_decisions_name_module_way_and_reason(reports: dict[tuple[str, str], dict[str, Any]]) -> None:
    fp8, packed = (set(reports[case, "staged"]["decisions"]) for case in ("fp8", "packed"))
    assert (
        "model.layers.*.self_attn.qkv_proj x2: fallback (weight is float8_e4m3fn (128, 256) with strides (1, 128), "
        "its loader fills bfloat16 (256, 128))"
    ) in fp8
    assert "lm_head x1: direct (its loader's copies cover it exactly once)" in fp8
    assert "lm_head x1: fallback (post-processing keeps something of the weights in cpu_linear)" in packed
    assert "model.norm x1: direct (its loader's copies cover it exactly once)" in packed
