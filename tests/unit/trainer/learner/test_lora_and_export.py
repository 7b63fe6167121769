"""LoRA against the chain rule, PEFT's own model and plain arithmetic; exports as a Hugging Face directory."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.learner import (
    gradients,
    logprobs,
    make_learner,
    pack,
    run_config,
    save_tiny,
    sequences,
    weights,
    whole,
)
from tests.fakes.own_tokenizer import CODE_FILE, VOCABULARY_FILE, save_own_tokenizer
from trainer.config.schema import LoraConfig
from trainer.errors import ModelError
from trainer.learner.checkpoint import begin
from trainer.learner.lora import PublishedShards, adapters_of, is_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.learner.policy import PolicyTrainer

pytestmark = pytest.mark.usefixtures("one_rank")
TARGETS = "q_proj+o_proj+up_proj"
RANK, ALPHA = 8, 20.0


def lora_config(directory: Path, *, compute_dtype: str = "float32", **lora: Any) -> RunConfig:
    cfg = run_config(directory)
    values = {"rank": RANK, "alpha": ALPHA, "target_modules": TARGETS, **lora}
    return replace(cfg, model=replace(cfg.model, compute_dtype=compute_dtype, lora=LoraConfig(**values)))


def train(learner: PolicyTrainer, *steps: int) -> None:
    for step in steps:
        learner.train_step([pack(sequences(4, seed=step))], step=step)


def base_of(learner: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights(learner).items() if not is_adapter(name)}


def test_the_policy_starts_as_the_base_model(tiny_dir: Path) -> None:
    batch = pack(sequences(5))
    plain, adapted = make_learner(run_config(tiny_dir)), make_learner(lora_config(tiny_dir))
    np.testing.assert_array_equal(logprobs(adapted, batch), logprobs(plain, batch))
    matrices = [whole(adapter.a) for adapter in adapters_of(adapted.model)]
    bounds = [(float(a.abs().max()), 1 / math.sqrt(a.shape[1])) for a in matrices]
    assert len(bounds) == 2 * 3
    assert all(0.8 * bound < largest <= bound for largest, bound in bounds), "A is drawn as PEFT draws it"


def test_training_moves_adapters_and_never_the_base(tiny_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"\['wq'\]; Qwen2ForCausalLM has \['down_proj', 'gate_proj', 'k_proj'"):
        make_learner(lora_config(tiny_dir, target_modules="q_proj+wq"))
    learner = make_learner(lora_config(tiny_dir, compute_dtype="bfloat16"))
    before, moved = base_of(learner), weights(learner)
    train(learner, 0, 1)
    after = weights(learner)
    assert {n for n in after if not after[n].equal(moved[n])} == {n for n in after if is_adapter(n)}
    assert {t.dtype for t in before.values()} == {torch.bfloat16}, "the frozen base needs no float32 master"
    assert {t.dtype for n, t in after.items() if is_adapter(n)} == {torch.float32}


def test_gradients_follow_the_chain_rule_on_the_merged_model(tiny_dir: Path, tmp_path: Path) -> None:
    """W' = W + s B A, so dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW'; dL/dW' comes from a learner without LoRA."""
    learner, batch = make_learner(lora_config(tiny_dir)), pack(sequences(6, seed=9))
    train(learner, 0)  # else B is zero and so is dL/dA
    learner.export_hf(tmp_path / "merged")
    of_merged = gradients(make_learner(run_config(tmp_path / "merged")), [batch])
    got = gradients(learner, [batch], step=1)
    assert got.keys() == {name for name in weights(learner) if is_adapter(name)}
    scaling = ALPHA / RANK
    for adapter in adapters_of(learner.model):
        dw = of_merged[f"{adapter.module}.weight"]
        a, b = whole(adapter.a), whole(adapter.b)
        for matrix, expected in (("A", scaling * b.T @ dw), ("B", scaling * dw @ a.T)):
            grad = got[f"{adapter.module}.lora_{matrix}.default.weight"]
            assert (grad - expected).norm() <= 2e-4 * expected.norm(), f"{adapter.module} {matrix}"


def test_export_merges_and_the_adapter_alone_loads_in_peft(tiny_dir: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    learner = make_learner(lora_config(tiny_dir))
    train(learner, 0, 1)
    learner.export_hf(tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        plain = base(ids).logits
        theirs = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))(ids).logits
        ours = merged(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - plain).abs().max() > 1e-2, "the adapter does something"


def test_a_checkpoint_holds_adapters_only_and_training_continues_from_it(tiny_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(lora_config(tiny_dir))
    train(learner, 0, 1)
    learner.save(begin(tmp_path, 2), step=2)
    stored = FileSystemReader(tmp_path / "step_2.tmp" / "learner").read_metadata().state_dict_metadata
    assert {key for key in stored if key.startswith("model.")} == {
        f"model.{name}" for name in weights(learner) if is_adapter(name)
    }
    train(learner, 2)
    resumed = make_learner(lora_config(tiny_dir))
    assert resumed.load(tmp_path / "step_2.tmp") == 2
    train(resumed, 2)
    expected = weights(learner)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(resumed).items())


@pytest.mark.parametrize("alpha", [ALPHA, float(RANK)], ids=["scaled", "unscaled"])
def test_published_b_holds_the_scaling_of_the_current_weights(tiny_dir: Path, alpha: float) -> None:
    learner = make_learner(lora_config(tiny_dir, alpha=alpha))
    source = PublishedShards(learner.model, rollout_dtype="bfloat16")
    addresses = {name: tensor.data_ptr() for name, tensor in source.tensors.items()}
    for step in range(2):
        train(learner, step)
        source.refresh()
        for adapter in adapters_of(learner.model):
            name = f"base_model.model.{adapter.module}.lora_"
            assert source.tensors[f"{name}A.weight"].equal(whole(adapter.a))
            assert source.tensors[f"{name}B.weight"].equal(whole(adapter.b) * (alpha / RANK))
    assert {name: tensor.data_ptr() for name, tensor in source.tensors.items()} == addresses
    assert [meta.name for meta in source.params] == list(source.tensors)
    assert not any("embed" in name or "base_layer" in name for name in source.tensors)


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
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "who may read the config may read the weights"


def test_files_next_to_the_weights_come_from_the_model_and_its_tokenizer(tmp_path: Path) -> None:
    source, tokenizer = save_tiny(tmp_path / "source"), tmp_path / "tokenizer"
    tokenizer.mkdir()
    # End tokens beyond that of config.json, without which an engine would not stop.
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    for directory in (source, tokenizer):
        (directory / "tokenizer.json").write_text(f'"{directory.name}"')
    cfg = run_config(source)
    model = replace(cfg.model, tokenizer_path=str(tokenizer), rollout_dtype="bfloat16")
    learner = make_learner(replace(cfg, model=model))
    for _ in range(2):  # a second export replaces the first
        learner.export_hf(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.dtype == torch.bfloat16, "what the engines generated with"
    assert all(weights(learner)[name].bfloat16().equal(param) for name, param in loaded.named_parameters())
    assert (tmp_path / "export" / "tokenizer.json").read_text() == '"tokenizer"'
    assert (tmp_path / "export" / "generation_config.json").read_text() == '{"eos_token_id": [2, 7]}'


def test_a_tokenizer_with_code_and_files_of_its_own_opens_from_the_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, own = save_tiny(tmp_path / "source"), save_own_tokenizer(tmp_path / "own")
    (own / "additional_chat_templates").mkdir()
    (own / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    for name in ("optimizer.pt", "config.json", "adapter_config.json", "model.safetensors.index.json", ".hidden.json"):
        (own / name).write_text("{}")
    cfg, out = run_config(source), tmp_path / "export"
    cfg = replace(cfg, model=replace(cfg.model, tokenizer_path=str(own), trust_remote_code=True))
    make_learner(cfg).export_hf(out)
    assert caplog.text == ""
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert tokenizer.decode(tokenizer.encode("12 + 7")) == "12 + 7"
    assert tokenizer.get_chat_template("tool_use") == "tools"
    assert json.loads((out / "config.json").read_text())["architectures"]
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json", CODE_FILE,
        VOCABULARY_FILE, "additional_chat_templates",
    }  # fmt: skip


def test_a_tokenizer_that_does_not_open_is_reported_and_costs_no_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = save_own_tokenizer(save_tiny(tmp_path / "source"))
    (source / VOCABULARY_FILE).rename(source / "letters.bin")
    cfg = run_config(source)
    for given, words in (
        ({"trust_remote_code": True}, f"exported model does not open.* copy what is missing from {source}"),
        (
            {"tokenizer_path": "own/none"},
            "tokenizer_path 'own/none' cannot be downloaded.* exported model has none",
        ),
    ):
        make_learner(replace(cfg, model=replace(cfg.model, **given))).export_hf(tmp_path / "export")
        assert re.search(words, caplog.text, re.DOTALL)
        assert (tmp_path / "export" / "model.safetensors").is_file()
