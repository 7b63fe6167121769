"""The reference policy, and its KL in the loss, against a plain model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from tests.fakes.learner import gradients, make_learner, pack, reference_logprobs, run_config, sequences, weights
from trainer.config.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig, MaskConfig
from trainer.config.schema import LoraConfig
from trainer.learner.checkpoint import begin
from trainer.learner.lora import adapters_of

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.policy import PolicyTrainer

pytestmark = pytest.mark.usefixtures("one_rank")


def with_kl(cfg: RunConfig, coef: float = 0.7, **kl: Any) -> RunConfig:
    return replace(cfg, algorithm=AlgorithmConfig(kl=KlConfig(coef=coef, **kl)))


def with_lora(cfg: RunConfig) -> RunConfig:
    return replace(cfg, model=replace(cfg.model, lora=LoraConfig(rank=8, alpha=20.0, target_modules="q_proj+up_proj")))


def train(learner: PolicyTrainer, num_steps: int, *, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        learner.train_step([pack(sequences(4, seed=step))], step=step)


def plain_logprobs(model: torch.nn.Module, part: MicroBatch) -> torch.Tensor:
    ids = torch.from_numpy(part.token_ids.astype(np.int64))
    logp_TV = torch.log_softmax(model(ids[None]).logits[0] / 0.8, -1)
    positions = torch.from_numpy(np.flatnonzero(part.loss_mask))
    return logp_TV[positions - 1, ids[positions]]


@pytest.mark.parametrize("lora", [False, True])
def test_the_reference_is_the_initial_policy_whatever_the_steps_and_resumes(
    lora: bool, tiny_dir: Path, tmp_path: Path
) -> None:
    cfg = with_kl(replace(run_config(tiny_dir), learner=replace(run_config(tiny_dir).learner, lr=3e-2)))
    cfg, batch = with_lora(cfg) if lora else cfg, pack(sequences(5))
    learner = make_learner(cfg)
    initial = make_learner(run_config(tiny_dir)).logprobs(batch)
    np.testing.assert_array_equal(reference_logprobs(learner, batch), initial)
    train(learner, 3)
    assert np.abs(learner.logprobs(batch) - initial).max() > 0.01, "the policy has moved"
    np.testing.assert_array_equal(reference_logprobs(learner, batch), initial)
    learner.save(begin(tmp_path, 3), step=3)
    resumed = make_learner(cfg)
    resumed.load(tmp_path / "step_3.tmp")
    np.testing.assert_array_equal(resumed.logprobs(batch), learner.logprobs(batch))
    np.testing.assert_array_equal(reference_logprobs(resumed, batch), initial)


def test_with_lora_the_reference_is_no_second_model_and_the_adapters_still_learn(tiny_dir: Path) -> None:
    learner = make_learner(with_lora(with_kl(run_config(tiny_dir))))
    assert learner._reference._built.policy is learner._built.policy
    train(learner, 2)
    assert all(adapter.b.full_tensor().abs().max() > 0 for adapter in adapters_of(learner.model))


def test_a_reference_costs_no_gradient_and_no_optimizer(tiny_dir: Path) -> None:
    model = make_learner(with_kl(run_config(tiny_dir)))._reference._built.policy
    assert not [name for name, param in model.named_parameters() if param.requires_grad]
    half = run_config(tiny_dir)
    half = with_kl(replace(half, model=replace(half.model, compute_dtype="bfloat16")))
    learner = make_learner(half)
    assert {param.dtype for param in learner._reference.parameters()} == {torch.bfloat16}
    batch = pack(sequences(5))
    np.testing.assert_array_equal(reference_logprobs(learner, batch), learner.logprobs(batch))
    assert make_learner(run_config(tiny_dir))._reference is None


def test_passes_without_gradient_leave_no_notes_behind(tiny_dir: Path) -> None:
    """FSDP2 notes every forward until a backward, and a reference never has one."""
    learner, batch = make_learner(with_kl(run_config(tiny_dir))), pack(sequences(2))
    for model, score in (
        (learner._reference._built.policy, partial(reference_logprobs, learner)),
        (learner._built.policy, learner.logprobs),
    ):
        score(batch)
        score(batch)
        states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        assert len(states) == 3, "two blocks and the root"
        for state in states:
            assert state._comm_ctx.post_forward_order == []
            assert [group._post_forward_indices for group in state._fsdp_param_groups] == [[]]


def test_a_reference_on_the_host_gives_the_same_bits(tiny_dir: Path) -> None:
    cfg, batch = with_kl(run_config(tiny_dir)), pack(sequences(5))
    offloaded = replace(cfg, learner=replace(cfg.learner, reference_cpu_offload=True))
    got, expected = (reference_logprobs(make_learner(one), batch) for one in (offloaded, cfg))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1_straight_through", "k3_straight_through"])
def test_the_gradient_is_that_of_a_plain_model_with_the_penalty(estimator: Any, tiny_dir: Path) -> None:
    """Against autograd on a full softmax, with gradients of the penalty written out by hand."""
    base = replace(run_config(tiny_dir), learner=replace(run_config(tiny_dir).learner, lr=1e-2))
    learner, parts = make_learner(with_kl(base, 0.7, estimator=estimator)), sequences(6, seed=3)
    train(learner, 2)
    without = make_learner(base)
    without.model.load_state_dict(learner.model.state_dict())
    got, plain = gradients(learner, [pack(parts)]), gradients(without, [pack(parts)])
    initial, current = (AutoModelForCausalLM.from_pretrained(tiny_dir, attn_implementation="eager") for _ in range(2))
    current.load_state_dict(weights(learner), strict=False)
    penalty, value = torch.zeros(()), 0.0
    for part in parts:
        logp, ref = plain_logprobs(current, part), plain_logprobs(initial, part).detach()
        difference = logp.detach() - ref
        slope = 1 - torch.exp(-difference) if estimator == "k3" else difference
        weight = torch.from_numpy(part.loss_weights[part.loss_mask])
        penalty = penalty + 0.7 * (weight * slope * logp).sum()
        value += float((weight * (torch.exp(-difference) - 1 + difference)).sum())
    penalty.backward()
    for name, param in current.named_parameters():
        assert param.grad is not None
        scale = param.grad.abs().max()
        torch.testing.assert_close((got[name] - plain[name]) / scale, param.grad / scale, rtol=1e-3, atol=1e-3)
    metric = learner.train_step([pack(parts)], step=2).metrics["kl_reference"]
    assert metric.mean == pytest.approx(value, rel=1e-3), "weights are those of a token mean here"


def test_the_penalty_pulls_the_policy_back(tiny_dir: Path) -> None:
    base = replace(run_config(tiny_dir), learner=replace(run_config(tiny_dir).learner, lr=1e-2))
    learner, batch = make_learner(with_kl(base, 5.0, estimator="k2")), pack(sequences(6))
    train(learner, 2)
    still = replace(batch, advantages=np.zeros_like(batch.advantages))
    distances = [learner.train_step([still], step=step).metrics["kl_reference"].mean for step in range(2, 12)]
    assert distances[-1] < 0.3 * distances[0]


def test_masked_tokens_carry_no_penalty(tiny_dir: Path) -> None:
    cfg = with_kl(run_config(tiny_dir), 3.0, estimator="k2")
    moved = make_learner(cfg)
    train(moved, 3)
    correction = CorrectionConfig(mask=MaskConfig(upper=1e-9, metric="tv"))
    learner = make_learner(replace(cfg, algorithm=replace(cfg.algorithm, correction=correction)))
    learner.model.load_state_dict(moved.model.state_dict())
    batch = pack(sequences(4))
    assert all(gradient.any() for gradient in gradients(moved, [batch]).values())
    assert all(not gradient.any() for gradient in gradients(learner, [batch]).values())
    assert learner.train_step([batch], step=3).metrics["kl_reference"].mean > 1e-4, "there is something to penalise"


def test_metric_and_time_stand_only_where_there_is_a_reference(tiny_dir: Path) -> None:
    batch = pack(sequences(3))
    plain = make_learner(run_config(tiny_dir)).train_step([batch], step=0)
    assert "kl_reference" not in plain.metrics and "reference" not in plain.seconds
    held = make_learner(with_kl(run_config(tiny_dir))).train_step([batch], step=0)
    assert held.metrics["kl_reference"].mean == 0 and held.seconds["reference"] > 0
