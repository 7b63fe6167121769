from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.learner import make_learner, pack, run_config, save_tiny, sequences, weights

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_exported_model_loads_with_equal_weights_and_logits(kind: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", kind)
    (source / "tokenizer_config.json").write_text('{"x": 1}')
    learner = make_learner(run_config(source))
    batch = pack(sequences(3))
    learner.train_step([batch], step=0)
    out = tmp_path / "export"
    learner.export_hf(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    loaded, trained = dict(model.named_parameters()), weights(learner)
    assert loaded.keys() == trained.keys()
    assert all(tensor.equal(loaded[name]) for name, tensor in trained.items())
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert (out / "tokenizer_config.json").read_text() == '{"x": 1}'
    assert not torch.equal(
        loaded["model.norm.weight"],
        dict(AutoModelForCausalLM.from_pretrained(source).named_parameters())["model.norm.weight"],
    )
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("export")] == ["export"]


def test_export_is_in_the_dtype_the_engines_served(tmp_path: Path, tiny_dir: Path) -> None:
    cfg = run_config(tiny_dir)
    learner = make_learner(replace(cfg, model=replace(cfg.model, rollout_dtype="bfloat16")))
    for _ in range(2):  # a second export replaces the first
        learner.export_hf(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.dtype == torch.bfloat16
    trained = weights(learner)
    assert all(trained[name].bfloat16().equal(param) for name, param in model.named_parameters())
