"""The reference policy and teachers: their log-probs, and the KL in loss and advantage, against plain models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.fakes.learner import (
    TINY,
    VOCAB,
    assert_gradients,
    gradients,
    logprobs,
    make_learner,
    pack,
    reference_logprobs,
    run_config,
    save_tiny,
    sequences,
    weights,
    with_lora,
)
from trainer.config.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig, MaskConfig
from trainer.data.batch import MicroBatch
from trainer.errors import ModelError, TrainingDiverged
from trainer.learner.checkpoint import begin
from trainer.learner.lora import adapters_of

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.learner.policy import PolicyTrainer

pytestmark = pytest.mark.usefixtures("one_rank")
TEMPERATURE = 0.8
PADDING = 7
"""Rows that the teacher has beyond the policy's."""


def with_kl(cfg: RunConfig, coef: float = 0.7, **kl: Any) -> RunConfig:
    return replace(cfg, algorithm=AlgorithmConfig(kl=KlConfig(coef=coef, **kl)))


def train(learner: PolicyTrainer, num_steps: int, *, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        learner.train_step([pack(sequences(4, seed=step))], step=step)


def plain_logprobs(model: torch.nn.Module, token_ids: np.ndarray) -> torch.Tensor:
    """[T, VOCAB], of the next token, among those that the policy has."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    return torch.log_softmax(model(ids[None]).logits[0, :, :VOCAB] / TEMPERATURE, -1)


def chosen_logprobs(model: torch.nn.Module, part: MicroBatch) -> torch.Tensor:
    positions = np.flatnonzero(part.loss_mask)
    return plain_logprobs(model, part.token_ids)[positions - 1, part.token_ids[positions]]


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def test_the_reference_of_adapters_is_the_initial_policy_whatever_the_steps_and_resumes(
    tiny_dir: Path, tmp_path: Path
) -> None:
    cfg = with_kl(replace(run_config(tiny_dir), learner=replace(run_config(tiny_dir).learner, lr=3e-2)))
    cfg, batch = with_lora(cfg), pack(sequences(5))
    learner = make_learner(cfg)
    initial = logprobs(make_learner(run_config(tiny_dir)), batch)
    np.testing.assert_array_equal(reference_logprobs(learner, batch), initial)
    assert learner._reference._built.policy is learner._built.policy, "no second model"
    train(learner, 3)
    assert np.abs(logprobs(learner, batch) - initial).max() > 0.01, "the policy has moved"
    np.testing.assert_array_equal(reference_logprobs(learner, batch), initial)
    learner.save(begin(tmp_path, 3), step=3)
    resumed = make_learner(cfg)
    resumed.load(tmp_path / "step_3.tmp")
    np.testing.assert_array_equal(logprobs(resumed, batch), logprobs(learner, batch))
    np.testing.assert_array_equal(reference_logprobs(resumed, batch), initial)


def test_a_reference_costs_no_gradient_and_no_optimizer(tiny_dir: Path) -> None:
    model = make_learner(with_kl(run_config(tiny_dir)))._reference._built.policy
    assert not [name for name, param in model.named_parameters() if param.requires_grad]
    half = run_config(tiny_dir)
    half = with_kl(replace(half, model=replace(half.model, compute_dtype="bfloat16")))
    learner = make_learner(half)
    assert {param.dtype for param in learner._reference.parameters()} == {torch.bfloat16}
    batch = pack(sequences(5))
    np.testing.assert_array_equal(reference_logprobs(learner, batch), logprobs(learner, batch))
    on_host = make_learner(replace(half, learner=replace(half.learner, reference_cpu_offload=True)))
    np.testing.assert_array_equal(reference_logprobs(on_host, batch), logprobs(learner, batch))
    assert make_learner(run_config(tiny_dir))._reference is None


def test_passes_without_gradient_leave_no_notes_behind(tiny_dir: Path) -> None:
    """FSDP2 notes every forward until a backward, and a reference never has one."""
    sharded = run_config(tiny_dir, cpu_offload=True, reference_cpu_offload=True)
    learner, batch = make_learner(with_kl(sharded)), pack(sequences(2))
    for model, score in (
        (learner._reference._built.policy, partial(reference_logprobs, learner)),
        (learner._built.policy, partial(logprobs, learner)),
    ):
        score(batch)
        score(batch)
        states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        assert len(states) == 3, "two blocks and the root"
        for state in states:
            assert state._comm_ctx.post_forward_order == []
            assert [group._post_forward_indices for group in state._fsdp_param_groups] == [[]]


@pytest.mark.parametrize("estimator", ["k3", "k1_straight_through"])
def test_the_gradient_is_that_of_a_plain_model_with_the_penalty(estimator: Any, tiny_dir: Path) -> None:
    """Against autograd on a full softmax, with gradients of the penalty written out by hand."""
    base = replace(run_config(tiny_dir), learner=replace(run_config(tiny_dir).learner, lr=1e-2))
    learner, parts = make_learner(with_kl(base, 0.7, estimator=estimator)), sequences(6, seed=3)
    train(learner, 2)
    without = make_learner(base)
    without.model.load_state_dict(learner.model.state_dict())
    got, plain = gradients(learner, [pack(parts)]), gradients(without, [pack(parts)])
    initial, current = load(tiny_dir), load(tiny_dir)
    current.load_state_dict(weights(learner), strict=False)
    penalty, value = torch.zeros(()), 0.0
    for part in parts:
        logp, ref = chosen_logprobs(current, part), chosen_logprobs(initial, part).detach()
        difference = logp.detach() - ref
        slope = 1 - torch.exp(-difference) if estimator == "k3" else difference
        weight = torch.from_numpy(part.loss_weights[part.loss_mask])
        penalty = penalty + 0.7 * (weight * slope * logp).sum()
        value += float((weight * (torch.exp(-difference) - 1 + difference)).sum())
    penalty.backward()
    of_penalty = {name: gradient - plain[name] for name, gradient in got.items()}
    assert_gradients(of_penalty, {name: param.grad for name, param in current.named_parameters()}, tolerance=1e-3)
    metric = learner.train_step([pack(parts)], step=2).metrics["kl_reference"]
    assert metric.mean == pytest.approx(value, rel=1e-3), "weights are those of a token mean here"


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


def save_teacher(directory: Path, *, vocab_size: int = VOCAB + PADDING) -> Path:
    """Wider, deeper and with an output matrix of its own. Its padding is likely, so that it shows where it counts."""
    torch.manual_seed(5)
    shape = {**TINY, "vocab_size": vocab_size, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 80}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, tie_word_embeddings=False), dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.randn(param.shape) * 0.2 + (1.0 if "norm" in name else 0.0))
        model.lm_head.weight[VOCAB:] *= 3
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("teacher"))


def taught(model_dir: Path, teacher_dir: Path, *, lr: float = 1e-3, **algorithm: Any) -> RunConfig:
    """On-policy distillation unless `algorithm` says otherwise."""
    kl = {
        "coef": 1.0,
        "reference_model": str(teacher_dir),
        "apply_to": "advantage",
        "estimator": "k1",
        **algorithm.pop("kl", {}),
    }
    keys = {"advantage_estimator": "zero", "loss": "importance_sampling", **algorithm}
    base = run_config(model_dir, lr=lr)
    return replace(base, algorithm=AlgorithmConfig(**keys, kl=KlConfig(**kl)))


def every_next_token(prompt: np.ndarray, logprobs_V: np.ndarray) -> list[MicroBatch]:
    """One response of one token for each token there is, weighted by its probability: a sum over them is the mean over
    what the policy samples."""
    length = len(prompt) + 1
    mask = np.arange(length) == length - 1
    return [
        MicroBatch(
            cu_seqlens=np.array([0, length], np.int32),
            token_ids=np.append(prompt, token).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, logprob, 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.zeros(length, np.float32),
            loss_weights=np.where(mask, np.exp(logprob), 0).astype(np.float32),
        )
        for token, logprob in enumerate(logprobs_V)
    ]


def test_the_gradient_is_that_of_the_reverse_kl(tiny_dir: Path, teacher_dir: Path) -> None:
    """Of KL(policy || teacher) over all tokens, by autograd on two plain models."""
    learner = make_learner(taught(tiny_dir, teacher_dir))
    student, teacher = load(tiny_dir), load(teacher_dir)
    prompt = np.array([4, 17, 30, 2])
    ours_V, theirs_V = plain_logprobs(student, prompt)[-1], plain_logprobs(teacher, prompt)[-1].detach()
    (ours_V.exp() * (ours_V - theirs_V)).sum().backward()
    got = gradients(learner, [pack(every_next_token(prompt, ours_V.detach().numpy()))])
    assert_gradients(got, {name: param.grad for name, param in student.named_parameters()}, tolerance=1e-3)


def test_the_teacher_scores_with_its_own_shape_among_the_policys_tokens(tiny_dir: Path, teacher_dir: Path) -> None:
    batch, teacher = sequences(1, seed=3)[0], load(teacher_dir)
    got = reference_logprobs(make_learner(taught(tiny_dir, teacher_dir)), batch)
    np.testing.assert_allclose(got[batch.loss_mask], chosen_logprobs(teacher, batch).detach(), atol=1e-4)
    assert not got[~batch.loss_mask].any()


def test_adapters_learn_from_a_teacher_of_its_own_weights(tiny_dir: Path, teacher_dir: Path) -> None:
    """With LoRA, too, the teacher is a second model, without adapters."""
    cfg = taught(tiny_dir, teacher_dir)
    learner, whole = make_learner(with_lora(cfg)), make_learner(cfg)
    batch = pack(sequences(4))
    np.testing.assert_array_equal(reference_logprobs(learner, batch), reference_logprobs(whole, batch))
    for step in range(2):
        learner.train_step([batch], step=step)
    assert all(adapter.b.abs().max() > 0 for adapter in adapters_of(learner.model))
    np.testing.assert_array_equal(reference_logprobs(learner, batch), reference_logprobs(whole, batch))


def test_a_teacher_with_fewer_tokens_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    cfg = taught(tiny_dir, save_teacher(tmp_path / "small", vocab_size=VOCAB - 1))
    with pytest.raises(
        ModelError, match=rf"algorithm.kl.reference_model .*small' has {VOCAB - 1} tokens, the policy {VOCAB}"
    ):
        make_learner(cfg)


def test_a_teacher_that_is_not_finite_ends_the_step_before_a_weight_moves(tiny_dir: Path, tmp_path: Path) -> None:
    broken = load(save_tiny(tmp_path / "teacher", seed=3))
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    broken.save_pretrained(tmp_path / "teacher")
    learner = make_learner(taught(tiny_dir, tmp_path / "teacher"))
    before = weights(learner)
    with pytest.raises(
        TrainingDiverged, match=r"\d+ log-probs of the reference .* look at those of algorithm.kl.reference_model"
    ):
        learner.train_step([pack(sequences(3))], step=0)
    assert all(tensor.equal(before[name]) for name, tensor in weights(learner).items())
