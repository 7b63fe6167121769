from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from trainer.config.algorithm import ClampConfig, CorrectionConfig, MaskConfig, RejectConfig
from trainer.errors import TrainingDiverged
from trainer.learner.packed_inputs import loss_inputs
from trainer.learner.policy import largest_micro_batch

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig
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
        loss_T, _ = ppo_clip_loss(loss_inputs(part, logp), clip_ratio_low=0.2, clip_ratio_high=0.2)
        loss = loss + (loss_T * torch.from_numpy(part.loss_weights[part.loss_mask])).sum()
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
    batch = replace(batch, behavior_logprobs=before)
    first = learner.train_step([batch], step=0).metrics
    mask = batch.loss_mask
    assert first["ratio_mean"].mean == pytest.approx(1.0, abs=1e-5)
    assert first["ratio_max"].mean == pytest.approx(1.0, abs=1e-5)
    assert first["kl_behavior"].mean == pytest.approx(0.0, abs=1e-6)
    assert first["clip_low_frac"].mean == first["clip_high_frac"].mean == 0
    assert first["loss"].mean == pytest.approx(-batch.advantages[mask].mean(), abs=1e-5)
    assert first["num_loss_tokens"].mean == mask.sum() and first["num_tokens"].mean == len(mask)
    assert 0 < first["entropy"].mean < math.log(61)
    for step in range(1, 6):
        result = learner.train_step([batch], step=step)
    after = learner.logprobs(batch)
    assert ((after - before) * batch.advantages)[mask].sum() > 0
    assert result.metrics["ratio_max"].mean > 1.01 and result.metrics["kl_behavior"].mean > 0
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
    moments = [t for n, t in clipped._optimizers[""].state().items() if n.startswith("exp_avg.")]
    applied = math.sqrt(sum(t.full_tensor().square().sum().item() for t in moments))
    assert applied == pytest.approx(norm / 4, rel=1e-4)


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_one_too_many_raises(tiny_dir: Path) -> None:
    learner, batch = make_learner(run_config(tiny_dir, max_skipped_steps=2)), pack(sequences(3))
    learner.train_step([batch], step=0)  # there are moments that could move the weights
    poisoned = replace(batch, advantages=np.where(batch.loss_mask, np.inf, 0).astype(np.float32))

    def state() -> dict[str, torch.Tensor]:
        optimizer = {name: tensor.full_tensor().clone() for name, tensor in learner._optimizers[""].state().items()}
        return {**weights(learner), **optimizer, "num_updates": torch.tensor(learner._optimizers[""].num_updates)}

    for row in range(2):  # a step that goes well forgives those before it
        before = state()
        for step in range(2):
            result = learner.train_step([poisoned], step=step)
            assert result.metrics["skipped_steps"].sum == 1 and not math.isfinite(result.metrics["grad_norm"].mean)
            assert all(tensor.equal(before[name]) for name, tensor in state().items())
        if row == 0:
            assert learner.train_step([batch], step=2).metrics["skipped_steps"].sum == 0
            assert state()["num_updates"] == 2
    with pytest.raises(TrainingDiverged, match=r"gradient norm of step 5 is .* after 2 skipped steps"):
        learner.train_step([poisoned], step=5)
    assert all(tensor.equal(before[name]) for name, tensor in state().items())
    assert all(torch.isfinite(tensor).all() for tensor in weights(learner).values())


def test_malformed_batches_are_refused(tiny_dir: Path) -> None:
    learner, batch = make_learner(run_config(tiny_dir)), pack(sequences(2))
    with pytest.raises(ValueError, match="at least one micro-batch"):
        learner.train_step([], step=0)
    with pytest.raises(ValueError, match="first token of a sequence"):
        learner.train_step([replace(batch, loss_mask=np.ones_like(batch.loss_mask))], step=0)
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        learner.train_step([replace(batch, cu_seqlens=batch.cu_seqlens[:-1])], step=0)


def _corrected(cfg: RunConfig, **correction: Any) -> RunConfig:
    return replace(cfg, algorithm=replace(cfg.algorithm, correction=CorrectionConfig(**correction)))


def _close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        scale = tensor.abs().max()
        torch.testing.assert_close(got[name] / scale, tensor / scale, rtol=1e-5, atol=1e-5)


def _sampled_by_the_learner(tiny_dir: Path, num: int = 8) -> list[MicroBatch]:
    """Sequences whose engine had the learner's weights and kernels."""
    learner, parts = make_learner(run_config(tiny_dir)), sequences(num)
    return [replace(p, behavior_logprobs=learner.logprobs(p)) for p in parts]


def test_decoupled_on_samples_of_the_same_policy_equals_the_plain_loss(tiny_dir: Path) -> None:
    cfg, batch = run_config(tiny_dir), pack(_sampled_by_the_learner(tiny_dir))
    learner = make_learner(_corrected(cfg, objective="decoupled"))
    _close(gradients(learner, [batch]), gradients(make_learner(cfg), [batch]))
    metrics = learner.train_step([batch], step=0).metrics
    assert metrics["correction_weight_mean"].mean == pytest.approx(1, abs=1e-5)
    assert metrics["correction_ess_frac"].mean == pytest.approx(1, abs=1e-5)


def test_the_proximal_policy_is_the_one_that_the_step_starts_with(tiny_dir: Path) -> None:
    cfg, parts = run_config(tiny_dir, lr=1e-2), sequences(4)
    learner = make_learner(_corrected(cfg, objective="decoupled"))
    batch = pack(parts)
    learner.train_step([batch], step=0)
    before, mask = learner.logprobs(batch), batch.loss_mask
    result = learner.train_step([pack(parts[:2]), pack(parts[2:])], step=1)
    weight = np.exp(before - batch.behavior_logprobs)[mask]
    assert result.metrics["correction_weight_mean"].mean == pytest.approx(weight.mean(), rel=1e-5)
    assert result.metrics["correction_weight_max"].mean == pytest.approx(weight.max(), rel=1e-5)
    ess = weight.sum() ** 2 / (weight**2).sum() / mask.sum()
    assert result.metrics["correction_ess_frac"].mean == pytest.approx(ess, rel=1e-4)
    assert result.metrics["ratio_max"].mean == pytest.approx(1, abs=1e-5)
    assert result.seconds.keys() == {"forward", "backward", "optimizer", "step"}, "it costs no forward pass"


@pytest.mark.parametrize("objective", ["bypass", "decoupled", "loglinear"])
def test_corrected_gradients_do_not_depend_on_the_micro_batch_split(objective: Any, tiny_dir: Path) -> None:
    correction: dict[str, Any] = {
        "objective": objective, "level": "sequence_mean", "clamp": ClampConfig(upper=1.1),
        "mask": MaskConfig(lower=0.1), "reject": RejectConfig(metric="k2", upper=0.8),
    }  # fmt: skip
    learner, parts = make_learner(_corrected(run_config(tiny_dir), **correction)), sequences(12)
    whole = gradients(learner, [pack(parts)])
    for split in ([parts[:1], parts[1:]], [parts[6:], parts[:3], parts[3:6]], [[p] for p in parts]):
        _close(gradients(learner, [*(pack(s) for s in split), without_loss()]), whole)
    metrics = learner.train_step([pack(parts)], step=0).metrics
    assert 0 < metrics["correction_rejected_frac"].mean < 1


def test_a_rejected_answer_counts_as_zero_and_the_denominator_stays(tiny_dir: Path) -> None:
    parts = _sampled_by_the_learner(tiny_dir)
    shifted = parts[2].behavior_logprobs - np.float32(3) * parts[2].loss_mask
    parts[2] = replace(parts[2], behavior_logprobs=shifted)
    rejecting = _corrected(run_config(tiny_dir), reject=RejectConfig(upper=2.0))
    got = gradients(make_learner(rejecting), [pack(parts)])
    # The weights of the others are still shares of all tokens, the rejected ones included.
    _close(got, gradients(make_learner(run_config(tiny_dir)), [pack([p for i, p in enumerate(parts) if i != 2])]))


@pytest.mark.parametrize(("age", "cause", "other"), [(0, "engine", "stale"), (2, "stale", "engine")])
def test_perturbed_logprobs_are_attributed_to_their_cause(age: int, cause: str, other: str, tiny_dir: Path) -> None:
    parts, rng = _sampled_by_the_learner(tiny_dir), np.random.default_rng(0)
    for i in range(0, len(parts), 2):
        mask = parts[i].loss_mask
        noise = np.where(mask, rng.choice([-0.2, 0.2], len(mask)), 0).astype(np.float32)
        versions = np.where(mask, 3 - age, -1).astype(np.int32)
        parts[i] = replace(parts[i], behavior_logprobs=parts[i].behavior_logprobs + noise, versions=versions)
    for i in range(1, len(parts), 2):
        versions = np.where(parts[i].loss_mask, 3 if age else 1, -1).astype(np.int32)
        parts[i] = replace(parts[i], versions=versions)
    metrics = make_learner(run_config(tiny_dir)).train_step([pack(parts)], step=3).metrics
    assert metrics[f"mismatch/{cause}"].mean == pytest.approx(0.2, abs=1e-5)
    assert metrics[f"mismatch/{cause}_kl"].mean == pytest.approx(0.02, abs=3e-3)
    assert metrics[f"mismatch/{other}"].mean == pytest.approx(0, abs=1e-5)
    assert metrics[f"mismatch/{other}_kl"].mean == pytest.approx(0, abs=1e-8)


def test_metrics_of_a_correction_stand_only_where_it_is_active(tiny_dir: Path) -> None:
    batch = pack(sequences(3))
    plain = make_learner(run_config(tiny_dir)).train_step([batch], step=0).metrics
    assert not [name for name in plain if name.startswith("correction_") or "stale" in name]
    masking = make_learner(_corrected(run_config(tiny_dir), mask=MaskConfig(lower=0.5, upper=2.0)))
    masked = masking.train_step([batch], step=0).metrics
    assert {name for name in masked if name.startswith("correction_")} == {
        "correction_weight_mean", "correction_weight_max", "correction_ess_frac", "correction_masked_frac",
    }  # fmt: skip
    nothing = masking.train_step([without_loss()], step=1).metrics
    assert nothing["correction_ess_frac"].mean == nothing["correction_masked_frac"].mean == 0


def test_a_token_from_the_future_is_refused(tiny_dir: Path) -> None:
    batch = pack(sequences(2))
    with pytest.raises(ValueError, match="sampled by version 4, but step 3 trains version 3"):
        make_learner(run_config(tiny_dir)).train_step(
            [replace(batch, versions=np.where(batch.loss_mask, 4, -1))], step=3
        )


def test_a_rehearsal_changes_no_number_of_a_later_step(tiny_dir: Path) -> None:
    cfg = run_config(tiny_dir, max_tokens_per_micro_batch=100)
    cfg = replace(
        cfg, task=replace(cfg.task, max_prompt_tokens=5), rollout=replace(cfg.rollout, max_response_tokens=30)
    )
    rehearsed, plain = make_learner(cfg), make_learner(cfg)
    before = weights(rehearsed)
    rehearsed.warmup_compile(largest_micro_batch(cfg))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(rehearsed).items())
    assert all(param.grad is None for param in rehearsed.model.parameters())
    for step in range(2):
        batch = [pack(sequences(4, seed=step))]
        assert rehearsed.train_step(batch, step=step).metrics == plain.train_step(batch, step=step).metrics
    expected = weights(plain)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(rehearsed).items())
