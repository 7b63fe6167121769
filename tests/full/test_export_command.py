"""`python -m trainer export` on checkpoints of two real ranks (gloo), against what their learners export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.fakes.learner import make_learner, pack, run_config, run_ranks, save_tiny, sequences
from trainer.config.algorithm import AlgorithmConfig, CriticConfig
from trainer.config.plain import dump_yaml
from trainer.config.schema import LoraConfig
from trainer.driver.checkpointing import origin
from trainer.learner.checkpoint import begin, commit
from trainer.tools.export import main

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig

pytestmark = pytest.mark.timing

STEP = 2
LORA = LoraConfig(rank=8, alpha=20.0, target_modules="q_proj+o_proj+up_proj")


def _configs(directory: Path) -> dict[str, RunConfig]:
    """By name of the run."""
    full = run_config(directory / "qwen2")
    half = replace(full.model, rollout_dtype="bfloat16")
    lora = replace(half, path=str(directory / "llama"), compute_dtype="bfloat16", lora=LORA)
    critic = replace(full, algorithm=AlgorithmConfig(advantage_estimator="gae"))
    return {
        "float32": full,
        "tied, bfloat16": replace(full, model=half),
        "experts": replace(full, model=replace(half, path=str(directory / "qwen3_moe"))),
        "lora": replace(full, model=lora),
        "critic on the backbone": replace(critic, critic=CriticConfig(shared_backbone=True)),
    }


def _job(directory: Path) -> None:
    """Train, save and export each of them, and leave run directories."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, cfg in _configs(directory).items():
        run_dir = directory / name
        learner = make_learner(cfg)
        if not cfg.algorithm.uses_critic:
            for step in range(STEP):
                learner.train_step([pack(sequences(8, seed=step)[rank::world_size])], step=step)
        if rank == 0:
            begin(run_dir / "checkpoints", STEP)
        dist.barrier()
        tmp = run_dir / "checkpoints" / f"step_{STEP}.tmp"
        learner.save(tmp, step=STEP)
        dist.barrier()
        if rank == 0:
            commit(tmp, {"origin": origin(cfg)})
            (run_dir / "config.yaml").write_text(dump_yaml(cfg))
        learner.export_hf(run_dir / "export")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    for kind in ("qwen2", "llama", "qwen3_moe"):
        source = save_tiny(path / kind, kind)
        (source / "tokenizer_config.json").write_text('{"x": 1}')
    (path / "qwen2" / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    run_ranks(_job, path, world_size=2)
    return path


def files_in(directory: Path) -> dict[str, Any]:
    """Bytes by name. PEFT writes the target modules, a set, in any order."""
    files: dict[str, Any] = {
        p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }
    if text := files.get("adapter/adapter_config.json"):
        values = json.loads(text)
        files["adapter/adapter_config.json"] = {**values, "target_modules": sorted(values["target_modules"])}
    return files


@pytest.mark.parametrize("name", ["float32", "tied, bfloat16", "experts", "lora", "critic on the backbone"])
def test_the_command_writes_the_files_that_the_learner_exports(directory: Path, tmp_path: Path, name: str) -> None:
    run_dir = directory / name
    assert main([str(run_dir / "checkpoints" / f"step_{STEP}"), str(tmp_path / "out")]) == 0
    expected = files_in(run_dir / "export")
    assert {"model.safetensors", "config.json", "tokenizer_config.json", "generation_config.json"} <= expected.keys()
    assert ("adapter/adapter_model.safetensors" in expected) == (name == "lora")
    got = files_in(tmp_path / "out")
    assert got.keys() == expected.keys()
    assert [file for file in expected if got[file] != expected[file]] == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_directory_is_its_newest_checkpoint_and_needs_no_ray(directory: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from trainer.tools.export import main; code = main(); "
        "print(sorted({'ray', 'vllm'} & set(sys.modules)), torch.cuda.is_initialized()) "
        "if (torch := sys.modules['torch']) else 0; sys.exit(code)"
    )
    out = tmp_path / "new" / "out"
    command = [sys.executable, "-c", code, str(directory / "lora"), str(out)]
    done = subprocess.run(command, env=dict(os.environ), cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    wrote, modules = done.stdout.splitlines()[-2:]
    assert wrote == f"wrote {out} from {directory / 'lora' / 'checkpoints' / f'step_{STEP}'}, in bfloat16"
    assert modules == "[] False"
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["r"] == LORA.rank
