from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.learner import (
    gradients,
    make_learner,
    pack,
    run_config,
    save_tiny,
    sequences,
    weights,
    without_loss,
)
from trainer.algorithms.losses import ppo_clip_loss
from trainer.learner.errors import TrainingDiverged

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.data.batch import MicroBatch

pytestmark = pytest.mark.usefixtures("one_rank")


def _slow_logprobs(model: torch.nn.Module, part: MicroBatch, temperature: float) -> torch.Tensor:
    ids = torch.from_numpy(part.token_ids.astype(np.int64))
    logp = torch.log_softmax(model(ids[None]).logits[0] / temperature, -1)
    positions = torch.from_numpy(np.flatnonzero(part.loss_mask))
    return logp[positions - 1, ids[positions]]


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_loss_and_gradients_equal_a_plain_model_with_full_softmax(kind: str, tmp_path: Path) -> None:
    cfg = run_config(save_tiny(tmp_path, kind))
    parts = sequences(8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    loss = torch.zeros(())
    for part in parts:
        logp = _slow_logprobs(model, part, cfg.rollout.temperature)
        old, adv, w = (
            torch.from_numpy(x[part.loss_mask]) for x in (part.behaviour_logprobs, part.advantages, part.loss_weights)
        )
        loss_T, _ = ppo_clip_loss(logp, old, adv, clip_low=0.2, clip_high=0.2, clip_dual=None)
        loss = loss + (loss_T * w).sum()
    loss.backward()
    learner = make_learner(cfg)
    got = gradients(learner, [pack(parts)])
    for name, param in model.named_parameters():
        torch.testing.assert_close(got[name], param.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert learner.train_step([pack(parts)], step=0).metrics["loss"].mean == pytest.approx(loss.item(), rel=1e-5)


def test_gradients_do_not_depend_on_the_micro_batch_split(tiny_dir: Path) -> None:
    learner, parts = make_learner(run_config(tiny_dir)), sequences(12)
    whole = gradients(learner, [pack(parts)])
    for split in ([parts[:1], parts[1:]], [parts[6:], parts[:3], parts[3:6]], [[p] for p in parts]):
        got = gradients(learner, [*(pack(s) for s in split), without_loss()])
        for name, expected in whole.items():
            scale = expected.abs().max()
            torch.testing.assert_close(got[name] / scale, expected / scale, rtol=1e-5, atol=1e-6)


def test_logprobs_equal_a_plain_model_and_are_zero_elsewhere(tiny_dir: Path) -> None:
    learner, parts = make_learner(run_config(tiny_dir)), sequences(5)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, attn_implementation="eager")
    batch = pack(parts)
    got = learner.logprobs(batch)
    expected = torch.cat([_slow_logprobs(model, p, 0.8) for p in parts]).detach().numpy()
    assert got.dtype == np.float32 and got.shape == batch.token_ids.shape
    np.testing.assert_allclose(got[batch.loss_mask], expected, rtol=1e-4, atol=1e-5)
    assert not got[~batch.loss_mask].any()


def test_training_on_policy_reports_ratio_one_and_learns_the_rewarded_tokens(tiny_dir: Path) -> None:
    learner, batch = make_learner(run_config(tiny_dir, lr=3e-3)), pack(sequences(6))
    before = learner.logprobs(batch)
    batch = replace(batch, behaviour_logprobs=before)
    first = learner.train_step([batch], step=0).metrics
    mask = batch.loss_mask
    assert first["ratio_mean"].mean == pytest.approx(1.0, abs=1e-5)
    assert first["ratio_max"].mean == pytest.approx(1.0, abs=1e-5)
    assert first["kl_behaviour"].mean == pytest.approx(0.0, abs=1e-6)
    assert first["clip_low_frac"].mean == first["clip_high_frac"].mean == 0
    assert first["loss"].mean == pytest.approx(-batch.advantages[mask].mean(), abs=1e-5)
    assert first["num_loss_tokens"].mean == mask.sum() and first["num_tokens"].mean == len(mask)
    assert 0 < first["entropy"].mean < math.log(61)
    for step in range(1, 6):
        result = learner.train_step([batch], step=step)
    after = learner.logprobs(batch)
    assert ((after - before) * batch.advantages)[mask].sum() > 0
    assert result.metrics["ratio_max"].mean > 1.01 and result.metrics["kl_behaviour"].mean > 0
    assert result.seconds.keys() == {"forward", "backward", "optimizer", "step"}


def test_same_seed_and_inputs_give_the_same_bits(tiny_dir: Path) -> None:
    runs = []
    for _ in range(2):
        learner = make_learner(run_config(tiny_dir))
        for step in range(3):
            learner.train_step([pack(sequences(4, seed=step))], step=step)
        runs.append(weights(learner))
    assert all(tensor.equal(runs[1][name]) for name, tensor in runs[0].items())


def test_learning_rate_follows_the_schedule(tiny_dir: Path) -> None:
    learner = make_learner(run_config(tiny_dir, warmup_steps=4, lr=1.0e-3))
    rates = [learner.train_step([pack(sequences(2))], step=step).metrics["lr"].mean for step in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("flag", ["activation_checkpointing", "cpu_offload"])
def test_memory_savers_do_not_change_gradients(flag: str, tiny_dir: Path) -> None:
    batch = pack(sequences(6))
    plain = gradients(make_learner(run_config(tiny_dir)), [batch])
    saved = gradients(make_learner(run_config(tiny_dir, **{flag: True})), [batch])
    assert all(tensor.equal(saved[name]) for name, tensor in plain.items())


def test_activation_checkpointing_really_recomputes_the_blocks(tiny_dir: Path) -> None:
    calls = {}
    for flag in (False, True):
        learner, count = make_learner(run_config(tiny_dir, activation_checkpointing=flag)), [0]
        mlp = learner.model.model.layers[0].mlp
        mlp.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        learner.train_step([pack(sequences(2))], step=0)
        calls[flag] = count[0]
    assert calls == {False: 1, True: 2}


def test_bfloat16_compute_keeps_float32_masters_and_stays_close(tiny_dir: Path) -> None:
    cfg, batch = run_config(tiny_dir), pack(sequences(6))
    half = make_learner(replace(cfg, model=replace(cfg.model, compute_dtype="bfloat16")))
    np.testing.assert_allclose(half.logprobs(batch), make_learner(cfg).logprobs(batch), atol=0.25)
    half.train_step([batch], step=0)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


def test_gradient_is_clipped_by_the_norm_that_is_reported(tiny_dir: Path) -> None:
    batch = pack(sequences(6))
    norm = math.sqrt(
        sum(g.square().sum().item() for g in gradients(make_learner(run_config(tiny_dir)), [batch]).values())
    )
    clipped = make_learner(run_config(tiny_dir, max_grad_norm=norm / 4, beta1=0.0))
    assert clipped.train_step([batch], step=0).metrics["grad_norm"].mean == pytest.approx(norm, rel=1e-5)
    moments = [t for n, t in clipped._optimizer.state().items() if n.startswith("exp_avg.")]
    applied = math.sqrt(sum(t.full_tensor().square().sum().item() for t in moments))
    assert applied == pytest.approx(norm / 4, rel=1e-4)


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(tiny_dir: Path) -> None:
    learner, batch = make_learner(run_config(tiny_dir)), pack(sequences(3))
    before = weights(learner)
    poisoned = replace(batch, advantages=np.where(batch.loss_mask, np.inf, 0).astype(np.float32))
    with pytest.raises(TrainingDiverged, match="gradient norm of step 5 is"):
        learner.train_step([poisoned], step=5)
    assert all(tensor.equal(before[name]) for name, tensor in weights(learner).items())
    learner.train_step([batch], step=5)
    assert all(torch.isfinite(tensor).all() for tensor in weights(learner).values())


def test_malformed_batches_are_refused(tiny_dir: Path) -> None:
    learner, batch = make_learner(run_config(tiny_dir)), pack(sequences(2))
    with pytest.raises(ValueError, match="at least one micro-batch"):
        learner.train_step([], step=0)
    with pytest.raises(ValueError, match="first token of a sequence"):
        learner.train_step([replace(batch, loss_mask=np.ones_like(batch.loss_mask))], step=0)
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        learner.train_step([replace(batch, cu_seqlens=batch.cu_seqlens[:-1])], step=0)
