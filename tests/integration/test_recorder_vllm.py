"""Recorder and plan against vLLM's real model classes and loaders, on CPU, with one and two tensor-parallel workers.

Weights that a plan writes into a live model must equal, bit for bit, those that vLLM's own `load_weights` writes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

pytest.importorskip("vllm", reason="the engine is an optional dependency")

_ROOT = Path(__file__).parents[2]
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,  # vLLM pads it to 128
    "max_position_embeddings": 64,
}
_CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2_tied_one_kv_head": Qwen2Config(**_TINY, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2_untied": Qwen2Config(**_TINY, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_TINY, num_key_value_heads=2, tie_word_embeddings=False),
    "llama": LlamaConfig(**_TINY, num_key_value_heads=4, tie_word_embeddings=False),
    "mistral": MistralConfig(**_TINY, num_key_value_heads=2, tie_word_embeddings=True),
}
_ENGINE_CLASS = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints, old and new, of each model."""
    root = tmp_path_factory.mktemp("models")
    for name, config in _CONFIGS.items():
        for seed, which in enumerate(("old", "new")):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            with torch.no_grad():
                for param in model.parameters():  # norms and biases start as constants, which would hide mistakes
                    param.normal_()
            model.save_pretrained(root / name / which)
    return [root / name for name in _CONFIGS]


def _run_workers(world: int, folders: list[Path], home: Path) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_DIST_IDENT": f"tandem-test-{os.getpid()}-{port}",  # names the shared memory of this group
    }
    logs = [home / f"worker{rank}_of_{world}.txt" for rank in range(world)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "tests.fakes.vllm_model_worker", str(rank), str(world), str(port)]
            with log.open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        [*command, *map(str, folders)], cwd=_ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for code, log in zip(codes, logs, strict=True):
        assert code == 0, log.read_text()[-12000:]
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.startswith('{"folder"')]


@pytest.mark.parametrize("world", [1, 2])
def test_plan_writes_what_vllms_loader_writes(world: int, checkpoints: list[Path], tmp_path: Path) -> None:
    reports = _run_workers(world, checkpoints, tmp_path)
    assert sorted((r["folder"], r["rank"]) for r in reports) == sorted(
        (folder.name, rank) for folder in checkpoints for rank in range(world)
    )
    for report in reports:
        assert report["untouched"], f"recording changed {report}"
        assert report["differing"] == [], report
        assert report["changed"] == report["num_params"], report
        assert report["packed_bytes"] == report["checkpoint_bytes"], report
        padding = 2 * 64 * (128 - 100 if world == 1 else 28 * report["rank"])
        padding *= 1 if report["folder"] in ("qwen2_tied_one_kv_head", "mistral") else 2
        assert report["pulled_bytes"] == report["engine_bytes"] - padding, report
    for folder in checkpoints:
        assert len({r["digest"] for r in reports if r["folder"] == folder.name}) == 1
    assert {r["model"] for r in reports} >= set(_ENGINE_CLASS.values())
