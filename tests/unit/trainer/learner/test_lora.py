"""LoRA in the learner, against the chain rule on the merged model, PEFT's own model, and plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from tests.fakes.learner import gradients, make_learner, pack, run_config, save_tiny, sequences, weights
from trainer.config.schema import LoraConfig
from trainer.errors import ModelError
from trainer.learner.checkpoint import begin
from trainer.learner.lora import AdapterSource, adapters_of, is_adapter

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


def whole(param: Any) -> torch.Tensor:
    return param.full_tensor().detach()


def base_of(learner: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights(learner).items() if not is_adapter(name)}


def test_the_policy_starts_as_the_base_model(tiny_dir: Path) -> None:
    batch = pack(sequences(5))
    plain, adapted = make_learner(run_config(tiny_dir)), make_learner(lora_config(tiny_dir))
    np.testing.assert_array_equal(adapted.logprobs(batch), plain.logprobs(batch))
    matrices = [whole(adapter.a) for adapter in adapters_of(adapted.model)]
    bounds = [(float(a.abs().max()), 1 / math.sqrt(a.shape[1])) for a in matrices]
    assert len(bounds) == 2 * 3
    assert all(0.8 * bound < largest <= bound for largest, bound in bounds), "A is drawn as PEFT draws it"


def test_training_moves_adapters_and_never_the_base(tiny_dir: Path) -> None:
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
    got: dict[str, torch.Tensor] = {}
    optimizer = learner._optimizers[""]

    def capture(**_: float) -> None:
        named = learner.model.named_parameters()
        got.update({n: p.grad.full_tensor().clone() for n, p in named if p.grad is not None})

    optimizer.step = capture  # type: ignore[method-assign]
    learner.train_step([batch], step=1)
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


def test_a_checkpoint_holds_adapters_only_and_training_goes_on_from_it(tiny_dir: Path, tmp_path: Path) -> None:
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
    source = AdapterSource(learner.model, rollout_dtype="bfloat16")
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


def test_unknown_target_names_the_layers_there_are(tiny_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"\['wq'\]; Qwen2ForCausalLM has \['down_proj', 'gate_proj', 'k_proj'"):
        make_learner(lora_config(tiny_dir, target_modules="q_proj+wq"))


def test_seeded_adapters_do_not_depend_on_the_layers_around_them(tmp_path: Path) -> None:
    """Same seed, another architecture's directory: the draw is a function of seed and place alone."""
    first = make_learner(lora_config(save_tiny(tmp_path / "a", "llama")))
    again = make_learner(lora_config(save_tiny(tmp_path / "b", "llama", seed=5)))
    for left, right in zip(adapters_of(first.model), adapters_of(again.model), strict=True):
        assert whole(left.a).equal(whole(right.a))
