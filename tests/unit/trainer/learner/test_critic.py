"""Advantages that the learner finishes, with a critic and without, against plain models and loops over tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.fakes.learner import (
    TINY,
    assert_gradients,
    gradients,
    make_learner,
    pack,
    run_config,
    save_tiny,
    weights,
    with_lora,
)
from tests.fakes.rewarded import GROUP_SIZE, all_weights, config, filler, paid, rewarded
from trainer.algorithms.advantages import GroupRewards, step_advantages
from trainer.config.algorithm import AlgorithmConfig, KlConfig
from trainer.errors import CheckpointError, ModelError, TrainingDiverged
from trainer.learner.checkpoint import begin
from trainer.learner.critic import SeparateCritic, SharedCritic, ValueSums, ValueTargets
from trainer.learner.fit import largest_micro_batch
from trainer.learner.prepare import reward_advantages

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.data.batch import MicroBatch
    from trainer.learner.policy import PolicyTrainer

pytestmark = pytest.mark.usefixtures("one_rank")
GAMMA, LAMBDA = 0.9, 0.8
GAE = {"gae_gamma": GAMMA, "gae_lambda": LAMBDA}
KINDS: dict[str, dict[str, Any]] = {"own": {}, "shared": {"shared_backbone": True, "value_coef": 0.5}}


def train(learner: PolicyTrainer, num_steps: int, *, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        parts, step_rewards = rewarded(4, seed=step)
        learner.train_step([pack(parts)], step=step, **step_rewards)


def targets_of(learner: PolicyTrainer, batches: list[MicroBatch], step_rewards: dict[str, Any]) -> list[ValueTargets]:
    assert learner._critic is not None
    rewards = [b.token_rewards.astype(np.float64) for b in batches if b.token_rewards is not None]
    found = learner._critic.targets(batches, rewards, ValueSums(clip=None), token_weight=None)
    for optimizer in learner._optimizers.values():
        optimizer.zero_grad()
    return found


class PlainCritic:
    """A Hugging Face model of the critic's (or policy's) weights, and a linear layer: values by the textbook."""

    def __init__(self, learner: PolicyTrainer, directory: Path) -> None:
        state = all_weights(learner)
        prefix = "critic." if isinstance(learner._critic, SeparateCritic) else ""
        self.prefix = prefix
        self.model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        own = {n.removeprefix(prefix).removeprefix("hf."): t for n, t in state.items() if n.startswith(prefix)}
        self.model.load_state_dict({n: t for n, t in own.items() if "value_head" not in n}, strict=False)
        self.weight, self.bias = (own[f"value_head.{n}"].requires_grad_() for n in ("weight", "bias"))

    def values(self, part: MicroBatch) -> torch.Tensor:
        """Of the loss tokens: from the hidden state of the token before."""
        ids = torch.from_numpy(part.token_ids.astype(np.int64))
        hidden_TE = self.model.model(ids[None]).last_hidden_state[0]
        positions = torch.from_numpy(np.flatnonzero(part.loss_mask))
        return (hidden_TE[positions - 1] @ self.weight.T + self.bias).squeeze(1)


def slow_gae(part: MicroBatch, values: list[float]) -> tuple[list[float], list[float]]:
    """Sums of all later errors, over generated tokens alone."""
    assert part.token_rewards is not None
    rewards = part.token_rewards[part.loss_mask].tolist()
    following = [*values[1:], 0.0]
    errors = [r + GAMMA * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    advantages = [
        sum((GAMMA * LAMBDA) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_values_advantages_returns_and_gradients_are_those_of_a_plain_model(kind: str, tiny_dir: Path) -> None:
    learner = make_learner(config(tiny_dir, critic=KINDS[kind], **GAE))
    parts, step_rewards = rewarded(6, seed=9)
    batch = pack(parts)
    (first,) = targets_of(learner, [batch], step_rewards)
    assert not first.values_T.any(), "the head starts at 0"
    train(learner, 3)
    (one,), mask = targets_of(learner, [batch], step_rewards), batch.loss_mask
    plain = PlainCritic(learner, tiny_dir)
    values = [plain.values(part) for part in parts]
    np.testing.assert_allclose(one.values_T[mask], torch.cat(values).detach(), rtol=1e-4, atol=1e-5)
    assert np.abs(one.values_T[mask]).max() > 0.01 and not one.values_T[~mask].any()
    given = np.split(one.values_T[mask], np.cumsum([int(p.loss_mask.sum()) for p in parts])[:-1])
    slow = [slow_gae(p, v.astype(float).tolist()) for p, v in zip(parts, given, strict=True)]
    np.testing.assert_allclose(one.advantages_T[mask], [a for advantages, _ in slow for a in advantages], atol=1e-9)
    np.testing.assert_allclose(one.returns_T[mask], [r for _, returns in slow for r in returns], atol=1e-9)
    got = gradients(learner, [batch], **step_rewards)
    errors = [values_L - torch.tensor(returns) for values_L, (_, returns) in zip(values, slow, strict=True)]
    (0.5 * torch.cat(errors).square().mean()).backward()
    scale = KINDS[kind].get("value_coef", 1.0)
    for name in ("weight", "bias"):
        gradient = getattr(plain, name).grad
        torch.testing.assert_close(got[f"{plain.prefix}value_head.{name}"], scale * gradient, rtol=1e-4, atol=1e-6)
    if kind == "own":  # the shared backbone has the policy's gradient too
        whole = {f"critic.hf.{name}": param.grad for name, param in plain.model.named_parameters()}
        assert_gradients(got, whole, tolerance=3e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_are_computed_once_change_no_gradient_of_policy_or_critic(kind: str, tiny_dir: Path) -> None:
    learner, (parts, step_rewards) = make_learner(config(tiny_dir, critic=KINDS[kind], **GAE)), rewarded(6, seed=9)
    train(learner, 2)
    prompt_lens = [min(int(np.argmax(part.loss_mask)) for part in (parts[0], one)) for one in parts]
    for part, length in zip(parts, prompt_lens, strict=True):
        part.token_ids[:length] = parts[0].token_ids[:length]
    plain = pack(parts)
    shared = replace(plain, prefix_lens=np.array([0, *prompt_lens[1:]], np.int32))
    expected = gradients(learner, [plain], **step_rewards)
    assert_gradients(gradients(learner, [shared], **step_rewards), expected, tolerance=3e-5)
    assert learner.flops is not None
    again = learner.flops.of_batches([plain]) - learner.flops.of_batches([shared])
    assert again == pytest.approx(sum(learner.flops.of_sequence(length, 0) for length in prompt_lens[1:]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whiten", [True, False])
def test_the_policy_has_the_gradient_of_those_advantages(kind: str, whiten: bool, tiny_dir: Path) -> None:
    cfg = config(tiny_dir, critic=KINDS[kind], whiten_advantages=whiten, **GAE)
    learner, (parts, step_rewards) = make_learner(cfg), rewarded(6, seed=9)
    train(learner, 2)
    (one,) = targets_of(learner, [pack(parts)], step_rewards)
    batch = pack(parts)
    advantages = one.advantages_T[batch.loss_mask]
    if whiten:
        advantages = (advantages - advantages.mean()) / advantages.std()
    ready = np.zeros(len(batch.token_ids), np.float32)
    ready[batch.loss_mask] = advantages
    plain = make_learner(run_config(tiny_dir))
    plain.model.load_state_dict(learner.model.state_dict())
    final = replace(batch, advantages=ready, token_rewards=None, response_index=None)
    expected = gradients(plain, [final], **step_rewards)
    got = gradients(learner, [batch], **step_rewards)
    if kind == "shared":  # less the part of the value loss, which the same step without a policy loss has alone
        values_only = replace(batch, loss_weights=np.zeros_like(batch.loss_weights))
        alone = gradients(learner, [values_only], **step_rewards)
        got = {name: gradient - alone[name] for name, gradient in got.items()}
        assert not got["value_head.weight"].any()
    assert_gradients(got, expected, tolerance=5e-5)


def test_value_metrics_equal_their_formulas(tiny_dir: Path) -> None:
    learner, (parts, step_rewards) = make_learner(config(tiny_dir, **GAE)), rewarded(6, seed=9)
    train(learner, 2)
    batches = [pack(parts[:2]), pack(parts[2:]), filler()]
    targets = targets_of(learner, batches, step_rewards)
    values, returns = (
        np.concatenate([getattr(t, name)[b.loss_mask] for t, b in zip(targets, batches, strict=True)]).astype(float)
        for name in ("values_T", "returns_T")
    )
    metrics = learner.train_step(batches, step=2, **step_rewards).metrics
    assert metrics["value_loss"].mean == pytest.approx(0.5 * np.mean((returns - values) ** 2))
    assert metrics["value_mean"].mean == pytest.approx(values.mean())
    assert metrics["return_mean"].mean == pytest.approx(returns.mean())
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert metrics["value_explained_variance"].mean == pytest.approx(explained)
    assert metrics["critic_lr"].mean == 1e-2 and "value_clip_frac" not in metrics


def test_warmup_trains_the_critic_alone(tiny_dir: Path) -> None:
    kl = {"coef": 0.2, "apply_to": "loss"}
    learner = make_learner(config(tiny_dir, critic={"warmup_steps": 2}, kl=kl))
    before = all_weights(learner)
    learner.rehearse(largest_micro_batch(learner._cfg, 100))
    params = [slot.param for optimizer in learner._optimizers.values() for slot in optimizer._slots]
    assert not any(param.grad is not None for param in params)
    assert all(tensor.equal(before[name]) for name, tensor in all_weights(learner).items()), "only compiling remains"
    parts, step_rewards = rewarded(4)
    for step in (0, 1):
        result = learner.train_step([pack(parts)], step=step, **step_rewards)
        assert result.seconds.keys() == {"critic", "optimizer", "step"}, "the policy is not computed"
        assert not result.is_policy_changed and result.model_flops is None
        assert "loss" not in result.metrics and "lr" not in result.metrics and "value_loss" in result.metrics
    after = all_weights(learner)
    moved = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert moved == {name for name in after if name.startswith("critic.")}
    result = learner.train_step([pack(parts)], step=2, **step_rewards)
    assert {"loss", "lr", "value_loss"} <= result.metrics.keys() and result.is_policy_changed and result.model_flops
    assert not any(tensor.equal(before[name]) for name, tensor in weights(learner).items())


def test_the_head_is_no_part_of_the_policy_that_is_published_and_exported(tiny_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(config(tiny_dir, critic=KINDS["shared"]))
    assert isinstance(learner._critic, SharedCritic)
    train(learner, 2)
    assert not [name for name, _ in learner.model.named_parameters() if "value" in name]
    learner.export_hf(tmp_path / "export")
    with safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as reader:
        assert sorted(reader.keys()) == sorted(weights(learner))


@pytest.mark.parametrize("culprit", ["policy", "critic", "shared"])
def test_a_gradient_that_is_not_finite_changes_no_weight_of_either(culprit: str, tiny_dir: Path) -> None:
    learner = make_learner(config(tiny_dir, critic=KINDS["shared" if culprit == "shared" else "own"]))
    train(learner, 2)
    parts, step_rewards = rewarded(4)
    batch, before = pack(parts), all_weights(learner)
    if culprit == "policy":
        poisoned = replace(batch, loss_weights=np.where(batch.loss_mask, np.inf, 0).astype(np.float32))
    else:
        assert batch.token_rewards is not None
        poisoned = replace(batch, token_rewards=batch.token_rewards * np.float32(1e30))
    for _ in range(3):
        assert learner.train_step([poisoned], step=5, **step_rewards).metrics["skipped_steps"].sum == 1
    with pytest.raises(TrainingDiverged, match=("critic " if culprit == "critic" else "") + "gradient norm of step 5"):
        learner.train_step([poisoned], step=5, **step_rewards)
    assert all(tensor.equal(before[name]) for name, tensor in all_weights(learner).items())
    learner.train_step([batch], step=5, **step_rewards)
    assert all(torch.isfinite(tensor).all() for tensor in all_weights(learner).values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_any_response_moves_neither(kind: str, tiny_dir: Path) -> None:
    learner = make_learner(config(tiny_dir, critic=KINDS[kind]))
    train(learner, 2)
    before = all_weights(learner)
    result = learner.train_step([filler()], step=2, group_rewards=())
    assert not result.is_policy_changed
    assert all(tensor.equal(before[name]) for name, tensor in all_weights(learner).items())


def test_later_updates_of_a_step_are_clipped_around_its_first_values(tiny_dir: Path) -> None:
    parts, step_rewards = rewarded(6)
    batch = pack(parts)

    def after(**critic: Any) -> tuple[dict[str, torch.Tensor], float | None]:
        learner = make_learner(config(tiny_dir, critic=critic))
        metrics = learner.train_step([batch], step=0, **step_rewards).metrics
        clipped = metrics.get("value_clip_frac")
        return all_weights(learner), None if clipped is None else clipped.mean

    one, two = after()[0], after(updates_per_step=2)[0]
    assert not two["critic.value_head.weight"].equal(one["critic.value_head.weight"])
    assert two["model.norm.weight"].equal(one["model.norm.weight"]), "the policy makes one update"
    wide, none = after(updates_per_step=2, value_clip=1e6)
    assert all(wide[name].equal(tensor) for name, tensor in two.items()) and none == 0
    tight, some = after(updates_per_step=2, value_clip=1e-4)
    # Values moved towards their returns by the first update, beyond the bound: the second may not gain by that.
    assert some is not None and 0.25 < some <= 0.5, "of two updates only the second can be clipped"
    assert not tight["critic.value_head.weight"].equal(two["critic.value_head.weight"])


def test_a_later_update_that_is_not_finite_is_left_out_with_those_after_it(tiny_dir: Path) -> None:
    batch, step_rewards = pack(rewarded(6)[0]), rewarded(6)[1]
    one = make_learner(config(tiny_dir, critic={}))
    three = make_learner(config(tiny_dir, critic={"updates_per_step": 3}))
    assert isinstance(three._critic, SeparateCritic)
    norms = [math.inf, three._critic.grad_norm]  # the last one comes first

    def grad_norm() -> float:
        norm = norms.pop()
        return norm() if callable(norm) else norm

    three._critic.grad_norm = grad_norm
    one.train_step([batch], step=0, **step_rewards)
    metrics = three.train_step([batch], step=0, **step_rewards).metrics
    assert metrics["critic_skipped_updates"].sum == 2 and math.isfinite(metrics["critic_grad_norm"].mean)
    assert all(tensor.equal(all_weights(one)[name]) for name, tensor in all_weights(three).items())


def test_two_updates_of_a_step_are_those_of_two_steps_without_a_policy(tiny_dir: Path) -> None:
    """With gamma and lambda of 1 the returns are those of the rewards, so both learn the same."""
    parts, step_rewards = rewarded(6)
    twice = make_learner(config(tiny_dir, critic={"updates_per_step": 2}))
    steps = make_learner(config(tiny_dir, critic={"warmup_steps": 5}))
    for learner, num_steps in ((twice, 1), (steps, 2)):
        for step in range(num_steps):
            learner.train_step([pack(parts)], step=step, **step_rewards)
    found, expected = ({n: t for n, t in all_weights(one).items() if "critic." in n} for one in (twice, steps))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_the_critic_may_start_from_another_model_also_without_output_matrix(tiny_dir: Path, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "llama", "llama", seed=3))
    whole.base_model.save_pretrained(tmp_path / "backbone")
    expected = {name: param for name, param in whole.named_parameters() if name != "lm_head.weight"}
    for path in ("llama", "backbone"):
        learner = make_learner(config(tiny_dir, critic={"path": str(tmp_path / path)}))
        found = {n.removeprefix("critic.hf."): t for n, t in all_weights(learner).items() if n.startswith("critic.hf.")}
        assert found.keys() == expected.keys()
        assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    with pytest.raises(ModelError, match=r"has no weights for lm_head\.weight"):
        make_learner(run_config(tmp_path / "backbone"))


def test_a_critic_with_fewer_tokens_or_a_checkpoint_without_one_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    few = Qwen2Config(**{**TINY, "vocab_size": 20}, architectures=["Qwen2ForCausalLM"])
    few.save_pretrained(tmp_path / "few")
    with pytest.raises(ModelError, match=r"critic\.path .* has 20 tokens, the policy 61"):
        make_learner(config(tiny_dir, critic={"path": str(tmp_path / "few")}))
    make_learner(run_config(tiny_dir)).save(begin(tmp_path, 1), step=1)
    with pytest.raises(CheckpointError, match=r"critic\."):
        make_learner(config(tiny_dir)).load(tmp_path / "step_1.tmp")


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_with_adapters_has_a_critic_too(kind: str, tiny_dir: Path) -> None:
    cfg = config(tiny_dir, critic=KINDS[kind], kl={"coef": 0.1, "apply_to": "reward"})
    learner = make_learner(with_lora(cfg))
    before = all_weights(learner)
    train(learner, 3)
    after = all_weights(learner)
    assert not any(tensor.equal(before[name]) for name, tensor in after.items())
    of_policy = [name for name in after if not name.startswith("critic.")]
    assert all("lora_" in name or name.startswith("value_head.") for name in of_policy), "the base is frozen"


def test_the_policys_schedule_starts_after_the_critics_warmup(tiny_dir: Path) -> None:
    cfg = config(tiny_dir, critic={"warmup_steps": 2})
    schedule = replace(cfg.learner, lr=1e-3, warmup_steps=2, lr_schedule="linear")
    learner = make_learner(replace(cfg, learner=schedule, trainer=replace(cfg.trainer, total_steps=8)))
    parts, step_rewards = rewarded(2)
    results = [learner.train_step([pack(parts)], step=step, **step_rewards).metrics for step in range(8)]
    assert [m["lr"].mean for m in results if "lr" in m] == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    expected = [5e-3, 1e-2, *(1e-2 * (6 - i) / 6 for i in range(6))]
    assert [m["critic_lr"].mean for m in results] == pytest.approx(expected), "the critic learns in all of them"


CPU = torch.device("cpu")
COEF = 0.3
ESTIMATORS = ("grpo", "rloo", "opo", "pass_at_k", "remax", "reinforce_pp_baseline", "reinforce", "reinforce_pp")


def reference_logprobs(batch: MicroBatch, seed: int = 7) -> np.ndarray:
    """The same for a token wherever it is packed."""
    noise = np.sin(batch.token_ids * 12.9898 + batch.behavior_logprobs * 78.233 + seed)
    return np.where(batch.loss_mask, batch.behavior_logprobs + noise, 0).astype(np.float32)


def finished(batches: list[MicroBatch], step_rewards: dict[str, Any], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    rewards = [paid(b, reference_logprobs(b), algorithm.kl) for b in batches]
    return reward_advantages(batches, rewards, step_rewards["group_rewards"], config=algorithm)


def slow_penalized(part: MicroBatch) -> list[float]:
    kl_T = COEF * (part.behavior_logprobs - reference_logprobs(part)).astype(float)
    assert part.token_rewards is not None
    tokens = zip(part.token_rewards, kl_T, part.loss_mask, strict=True)
    return [float(reward) - float(kl) if generated else 0.0 for reward, kl, generated in tokens]


def slow_returns(parts: list[MicroBatch], rewards: list[list[float]], *, is_normalized: bool) -> list[list[float]]:
    found = [
        [sum(r[t:]) if part.loss_mask[t] else 0.0 for t in range(len(r))]
        for part, r in zip(parts, rewards, strict=True)
    ]
    flat = [g for part, one in zip(parts, found, strict=True) for g, m in zip(one, part.loss_mask, strict=True) if m]
    mean, std = (fmean(flat), pstdev(flat)) if is_normalized else (0.0, 1.0)
    return [((np.array(g) - mean) / std * part.loss_mask).tolist() for part, g in zip(parts, found, strict=True)]


def with_kl(advantage: Any, estimator: Any = "k1") -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage_estimator=advantage, kl=KlConfig(coef=COEF, apply_to="reward", estimator=estimator)
    )


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_advantages_equal_a_loop_over_responses_and_tokens_in_any_order_and_split(advantage: str) -> None:
    parts, step_rewards = rewarded(6)
    algorithm = with_kl(advantage)
    got = finished(parts, step_rewards, algorithm)
    rewards = [slow_penalized(part) for part in parts]
    if advantage in {"reinforce", "reinforce_pp"}:
        expected = slow_returns(parts, rewards, is_normalized=advantage == "reinforce_pp")
    else:
        groups = [
            GroupRewards(
                rewards_G=np.array([sum(r) for r in rewards[i : i + GROUP_SIZE]]),
                lengths_G=np.array([int(p.loss_mask.sum()) for p in parts[i : i + GROUP_SIZE]]),
                baseline=0.25,
            )
            for i in range(0, len(parts), GROUP_SIZE)
        ]
        flat = [float(a) for of_group in step_advantages(groups, config=algorithm) for a in of_group]
        expected = [(part.loss_mask * a).tolist() for part, a in zip(parts, flat, strict=True)]
    for one, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-6)
    assert any(np.abs(one).max() > 0.01 for one in got)
    for splits in ([[5, 0, 2, 1, 3, 4]], [[5], [0, 2, 1], [3, 4]], [[i] for i in range(6)]):
        batches = [*(pack([parts[i] for i in split]) for split in splits), filler()]
        again = np.concatenate(finished(batches, step_rewards, algorithm)[:-1])
        same = np.concatenate([got[i] for split in splits for i in split])
        np.testing.assert_allclose(again, same, rtol=1e-12, atol=1e-12)
    assert not finished([filler()], {"group_rewards": ()}, algorithm)[0].any()


def test_all_sequences_of_a_response_are_charged_to_it() -> None:
    parts = [replace(p, response_index=np.array([i], np.int32)) for p, i in zip(rewarded(3)[0], (0, 0, 1), strict=True)]

    def group(rewards: list[float]) -> GroupRewards:
        return GroupRewards(rewards_G=np.array([rewards[0] + rewards[1], rewards[2]]), lengths_G=np.array([2, 1]))

    sums = [float(np.sum(p.token_rewards)) for p in parts if p.token_rewards is not None]
    (wanted,) = step_advantages([group([sum(slow_penalized(part)) for part in parts])], config=with_kl("rloo"))
    got = finished(parts, {"group_rewards": (group(sums),)}, with_kl("rloo"))
    for part, found, value in zip(parts, got, (wanted[0], wanted[0], wanted[1]), strict=True):
        np.testing.assert_allclose(found[part.loss_mask], value, atol=1e-6)


def test_rewards_must_come_with_the_step_and_the_tokens(tiny_dir: Path) -> None:
    kl = {"coef": COEF, "apply_to": "reward"}
    learner = make_learner(config(tiny_dir, advantage_estimator="grpo", kl=kl))
    parts, step_rewards = rewarded(2)
    with pytest.raises(ValueError, match="came without rewards"):
        learner.train_step([pack(parts)], step=0)
    with pytest.raises(ValueError, match="no token rewards"):
        learner.train_step([replace(parts[0], token_rewards=None, response_index=None)], step=0, **step_rewards)
