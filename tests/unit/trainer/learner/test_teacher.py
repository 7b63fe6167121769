"""A teacher of another architecture, padded to more tokens: what it scores, and what is learned from it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.fakes.learner import (
    TINY,
    VOCAB,
    gradients,
    make_learner,
    pack,
    reference_logprobs,
    run_config,
    save_tiny,
    sequences,
    weights,
)
from trainer.config.algorithm import AlgorithmConfig, CriticConfig, KlConfig
from trainer.config.schema import LoraConfig
from trainer.data.batch import MicroBatch
from trainer.errors import ModelError, TrainingDiverged
from trainer.learner.lora import adapters_of
from trainer.learner.prepare import kl_penalized_advantages

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig

pytestmark = pytest.mark.usefixtures("one_rank")

TEMPERATURE = 0.8
PADDING = 7
"""Rows that the teacher has beyond the policy's."""


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


def plain_logprobs(model: torch.nn.Module, token_ids: np.ndarray) -> torch.Tensor:
    """[T, VOCAB], of the next token, among those that the policy has."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    return torch.log_softmax(model(ids[None]).logits[0, :, :VOCAB] / TEMPERATURE, -1)


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def every_next_token(prompt: np.ndarray, logprobs_V: np.ndarray) -> list[MicroBatch]:
    """One answer of one token for each token there is, weighted by how often the policy samples it: a sum over them is
    a mean over what it samples, without noise."""
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
    for name, param in student.named_parameters():
        assert param.grad is not None
        scale = param.grad.abs().max()
        torch.testing.assert_close(got[name] / scale, param.grad / scale, rtol=1e-3, atol=1e-3)


def test_the_teacher_scores_with_its_own_shape_among_the_policys_tokens(tiny_dir: Path, teacher_dir: Path) -> None:
    batch, teacher = sequences(1, seed=3)[0], load(teacher_dir)
    got = reference_logprobs(make_learner(taught(tiny_dir, teacher_dir)), batch)
    positions = np.flatnonzero(batch.loss_mask)
    expected_TV = plain_logprobs(teacher, batch.token_ids).detach().numpy()
    np.testing.assert_allclose(got[positions], expected_TV[positions - 1, batch.token_ids[positions]], atol=1e-4)
    assert not got[~batch.loss_mask].any()


def test_a_token_has_its_own_kl_taken_off_and_no_later_one() -> None:
    batch = sequences(1, seed=1)[0]
    batch = replace(batch, advantages=np.where(batch.loss_mask, 0.5, 0).astype(np.float32))
    reference_T = np.random.default_rng(0).normal(-3, 1, len(batch.token_ids)).astype(np.float32)
    config = KlConfig(coef=0.25, apply_to="advantage", estimator="k1")
    got = kl_penalized_advantages(batch, reference_T, config=config)
    expected = 0.5 - 0.25 * (batch.behavior_logprobs - reference_T)
    np.testing.assert_allclose(got[batch.loss_mask], expected[batch.loss_mask], rtol=1e-6)
    assert not got[~batch.loss_mask].any()
    assert got.dtype == np.float32


def test_what_the_estimator_gives_is_mixed_with_the_kl(tiny_dir: Path, teacher_dir: Path) -> None:
    """Both parts are in the gradient of one step, each as it is alone."""
    batch = pack(sequences(5, seed=2))
    still = replace(batch, advantages=np.zeros_like(batch.advantages))
    cfg = taught(tiny_dir, teacher_dir, advantage_estimator="grpo", kl={"coef": 0.3})
    both = gradients(make_learner(cfg), [batch])
    kl_alone = gradients(make_learner(cfg), [still])
    off = replace(cfg, algorithm=replace(cfg.algorithm, kl=KlConfig()))
    reward_alone = gradients(make_learner(off), [batch])
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, kl_alone[name] + reward_alone[name], rtol=1e-4, atol=1e-6)
        assert kl_alone[name].abs().max() > 0 and reward_alone[name].abs().max() > 0


def test_a_critic_takes_its_advantages_first_and_alone_none_at_all(tiny_dir: Path, teacher_dir: Path) -> None:
    cfg = taught(tiny_dir, teacher_dir, advantage_estimator="gae", lr=1e-2)
    cfg = replace(cfg, critic=CriticConfig(warmup_steps=1, lr=1e-9))
    batch = pack(sequences(4, seed=2))
    batch = replace(
        batch,
        token_rewards=np.zeros(len(batch.token_ids), np.float32),
        answer_index=np.arange(4, dtype=np.int32),
        advantages=np.zeros_like(batch.advantages),
    )
    learner = make_learner(cfg)
    before = weights(learner)
    rewards: dict[str, Any] = {"group_rewards": (), "num_loss_tokens": int(batch.loss_mask.sum())}
    learner.train_step([batch], step=0, **rewards)
    assert all(tensor.equal(before[name]) for name, tensor in weights(learner).items()), "the critic's step"
    expected = kl_penalized_advantages(batch, reference_logprobs(learner, batch), config=cfg.algorithm.kl)
    alone = replace(cfg.algorithm, advantage_estimator="grpo", kl=KlConfig())
    plain = make_learner(replace(cfg, algorithm=alone))
    got, wanted = (
        gradients(one, [given], **how)
        for one, given, how in (
            (learner, batch, {"step": 1, **rewards}),
            (plain, replace(batch, advantages=expected), {}),
        )
    )
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", ["advantage", "loss"])
def test_a_student_without_any_reward_comes_near_its_teacher(placement: Any, tiny_dir: Path, teacher_dir: Path) -> None:
    """It sees what it sampled under its own weights, and the KL over all tokens falls."""
    estimator = "k1" if placement == "advantage" else "k2"
    learner = make_learner(taught(tiny_dir, teacher_dir, lr=1e-2, kl={"apply_to": placement, "estimator": estimator}))
    student, teacher, rng = load(tiny_dir), load(teacher_dir), np.random.default_rng(0)
    prompts = [np.array([4, 17, 30, 2]), np.array([9, 1, 1])]
    theirs = [plain_logprobs(teacher, prompt)[-1].detach() for prompt in prompts]
    distances: list[float] = []
    for step in range(40):
        student.load_state_dict(weights(learner), strict=False)
        with torch.no_grad():
            ours = [plain_logprobs(student, prompt)[-1] for prompt in prompts]
        distances.append(float(sum((p.exp() * (p - q)).sum() for p, q in zip(ours, theirs, strict=True))))
        parts: list[MicroBatch] = []
        for prompt, ours_V in zip(prompts, ours, strict=True):
            p_V = ours_V.double().exp().numpy()
            every = every_next_token(prompt, ours_V.numpy())
            for token in rng.choice(VOCAB, size=48, p=p_V / p_V.sum()):
                mask = every[token].loss_mask
                weight, version = np.where(mask, 1 / 96, 0), np.where(mask, step, -1)
                parts.append(
                    replace(every[token], loss_weights=weight.astype(np.float32), versions=version.astype(np.int32))
                )
        metrics = learner.train_step([pack(parts)], step=step).metrics
        assert metrics["kl_reference"].mean >= 0
    assert distances[-1] < 0.35 * distances[0], distances


def test_adapters_learn_from_a_teacher_of_its_own_weights(tiny_dir: Path, teacher_dir: Path) -> None:
    """With LoRA, too, the teacher is a model beside the policy, and has no adapters."""
    cfg = taught(tiny_dir, teacher_dir)
    lora = replace(cfg.model, lora=LoraConfig(rank=8, alpha=20.0, target_modules="q_proj+up_proj"))
    learner, whole = make_learner(replace(cfg, model=lora)), make_learner(cfg)
    batch = pack(sequences(4))
    np.testing.assert_array_equal(reference_logprobs(learner, batch), reference_logprobs(whole, batch))
    for step in range(2):
        learner.train_step([batch], step=step)
    assert all(adapter.b.full_tensor().abs().max() > 0 for adapter in adapters_of(learner.model))
    np.testing.assert_array_equal(reference_logprobs(learner, batch), reference_logprobs(whole, batch))


def test_a_teacher_with_fewer_tokens_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    cfg = taught(tiny_dir, save_teacher(tmp_path / "small", vocab_size=VOCAB - 1))
    with pytest.raises(
        ModelError, match=rf"algorithm.kl.reference_model .*small' has {VOCAB - 1} tokens, the policy {VOCAB}"
    ):
        make_learner(cfg)


def test_a_teacher_that_is_missing_is_named_by_its_key(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"algorithm.kl.reference_model .*nowhere' is not a directory"):
        make_learner(taught(tiny_dir, tmp_path / "nowhere"))


def test_a_teacher_whose_numbers_are_none_ends_the_step_before_a_weight_moves(tiny_dir: Path, tmp_path: Path) -> None:
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
