"""The critic, with its own backbone and on the policy's, against plain models and loops over tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.fakes.learner import TINY, make_learner, run_config, save_tiny, weights
from tests.fakes.rewarded import all_gradients, all_weights, config, filler, pack_rewarded, rewarded
from trainer.config.schema import LoraConfig
from trainer.errors import CheckpointError, ModelError, TrainingDiverged
from trainer.learner.checkpoint import begin
from trainer.learner.critic import SeparateCritic, SharedCritic, ValueSums
from trainer.learner.policy import largest_micro_batch

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.data.batch import MicroBatch
    from trainer.learner.critic import ValueTargets
    from trainer.learner.policy import PolicyTrainer

pytestmark = pytest.mark.usefixtures("one_rank")
GAMMA, LAMBDA = 0.9, 0.8
GAE = {"gae_gamma": GAMMA, "gae_lambda": LAMBDA}
KINDS: dict[str, dict[str, Any]] = {"own": {}, "shared": {"shared_backbone": True, "value_coef": 0.5}}


def train(learner: PolicyTrainer, num_steps: int, *, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        parts, step_rewards = rewarded(4, seed=step)
        learner.train_step([pack_rewarded(parts)], step=step, **step_rewards)


def targets_of(learner: PolicyTrainer, batches: list[MicroBatch], step_rewards: dict[str, Any]) -> list[ValueTargets]:
    assert learner._critic is not None
    rewards = [b.token_rewards.astype(np.float64) for b in batches if b.token_rewards is not None]
    found = learner._critic.targets(batches, rewards, ValueSums(num_loss_tokens=step_rewards["num_loss_tokens"]))
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
def test_values_start_at_zero_and_come_from_the_state_before_the_token(kind: str, tiny_dir: Path) -> None:
    learner = make_learner(config(tiny_dir, critic=KINDS[kind], **GAE))
    parts, step_rewards = rewarded(5, seed=9)
    for one in targets_of(learner, [pack_rewarded(parts)], step_rewards):
        assert not one.values_T.any(), "the head starts at 0"
    train(learner, 3)
    (one,) = targets_of(learner, [pack_rewarded(parts)], step_rewards)
    plain = PlainCritic(learner, tiny_dir)
    values = [plain.values(p).detach() for p in parts]
    mask = pack_rewarded(parts).loss_mask
    np.testing.assert_allclose(one.values_T[mask], torch.cat(values), rtol=1e-4, atol=1e-5)
    assert np.abs(one.values_T[mask]).max() > 0.01 and not one.values_T[~mask].any()


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_and_returns_equal_a_loop_and_skip_context_tokens(kind: str, tiny_dir: Path) -> None:
    learner = make_learner(config(tiny_dir, critic=KINDS[kind], **GAE))
    train(learner, 2)
    parts, step_rewards = rewarded(5, seed=9)
    (one,) = targets_of(learner, [pack_rewarded(parts)], step_rewards)
    mask = pack_rewarded(parts).loss_mask
    values = np.split(one.values_T[mask], np.cumsum([int(p.loss_mask.sum()) for p in parts])[:-1])
    slow = [slow_gae(p, v.astype(float).tolist()) for p, v in zip(parts, values, strict=True)]
    np.testing.assert_allclose(one.advantages_T[mask], [a for advantages, _ in slow for a in advantages], atol=1e-9)
    np.testing.assert_allclose(one.returns_T[mask], [r for _, returns in slow for r in returns], atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_critics_gradient_is_that_of_a_plain_model(kind: str, tiny_dir: Path) -> None:
    learner = make_learner(config(tiny_dir, critic=KINDS[kind], **GAE))
    train(learner, 3)
    parts, step_rewards = rewarded(6, seed=9)
    got = all_gradients(learner, [pack_rewarded(parts)], step_rewards)
    plain, loss = PlainCritic(learner, tiny_dir), torch.zeros(())
    for part in parts:
        values = plain.values(part)
        _, returns = slow_gae(part, values.tolist())
        loss = loss + 0.5 * (values - torch.tensor(returns)).square().sum()
    (loss / step_rewards["num_loss_tokens"]).backward()
    scale = KINDS[kind].get("value_coef", 1.0)
    for name in ("weight", "bias"):
        gradient = getattr(plain, name).grad
        torch.testing.assert_close(got[f"{plain.prefix}value_head.{name}"], scale * gradient, rtol=1e-4, atol=1e-6)
    if kind == "own":  # the shared backbone has the policy's gradient too
        for name, param in plain.model.named_parameters():
            assert param.grad is not None
            size = param.grad.abs().max()
            torch.testing.assert_close(got[f"critic.hf.{name}"] / size, param.grad / size, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whiten", [True, False])
def test_the_policy_has_the_gradient_of_those_advantages(kind: str, whiten: bool, tiny_dir: Path) -> None:
    cfg = config(tiny_dir, critic=KINDS[kind], whiten_advantages=whiten, **GAE)
    learner, (parts, step_rewards) = make_learner(cfg), rewarded(6, seed=9)
    train(learner, 2)
    (one,) = targets_of(learner, [pack_rewarded(parts)], step_rewards)
    batch = pack_rewarded(parts)
    advantages = one.advantages_T[batch.loss_mask]
    if whiten:
        advantages = (advantages - advantages.mean()) / advantages.std()
    ready = np.zeros(len(batch.token_ids), np.float32)
    ready[batch.loss_mask] = advantages
    plain = make_learner(run_config(tiny_dir))
    plain.model.load_state_dict(learner.model.state_dict())
    expected = all_gradients(
        plain, [replace(batch, advantages=ready, token_rewards=None, answer_index=None)], step_rewards
    )
    got = all_gradients(learner, [batch], step_rewards)
    if kind == "shared":  # less the part of the value loss, which the same step without a policy loss has alone
        values_only = replace(batch, loss_weights=np.zeros_like(batch.loss_weights))
        alone = all_gradients(learner, [values_only], step_rewards)
        got = {name: gradient - alone[name] for name, gradient in got.items()}
        assert not got["value_head.weight"].any()
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(got[name] / scale, gradient / scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_split_or_order_changes_a_gradient(kind: str, tiny_dir: Path) -> None:
    kl = {"coef": 0.2, "apply_to": "reward"}
    learner = make_learner(config(tiny_dir, critic=KINDS[kind], kl=kl, **GAE))
    train(learner, 2)
    parts, step_rewards = rewarded(8, seed=9)
    whole = all_gradients(learner, [pack_rewarded(parts)], step_rewards)
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    for splits in ([order], [order[:1], order[1:5], order[5:]], [[i] for i in order]):
        batches = [pack_rewarded([parts[i] for i in split]) for split in splits]
        got = all_gradients(learner, [*batches, filler()], step_rewards)
        for name, expected in whole.items():
            scale = expected.abs().max()
            torch.testing.assert_close(got[name] / scale, expected / scale, rtol=1e-4, atol=1e-5)


def test_the_critic_learns_to_explain_the_returns(tiny_dir: Path) -> None:
    learner = make_learner(config(tiny_dir, critic={"lr": 1e-2, "warmup_steps": 50}))
    parts, step_rewards = rewarded(8)
    found = [learner.train_step([pack_rewarded(parts)], step=step, **step_rewards).metrics for step in range(40)]
    assert found[0]["value_explained_variance"].mean == pytest.approx(0), "all values are equal"
    assert found[-1]["value_explained_variance"].mean > 0.8
    assert found[-1]["value_loss"].mean < 0.2 * found[0]["value_loss"].mean
    # gamma and lambda of 1: returns do not depend on the values
    assert found[0]["return_mean"].mean == pytest.approx(found[-1]["return_mean"].mean)


def test_value_metrics_equal_their_formulas(tiny_dir: Path) -> None:
    learner, (parts, step_rewards) = make_learner(config(tiny_dir, **GAE)), rewarded(6, seed=9)
    train(learner, 2)
    batches = [pack_rewarded(parts[:2]), pack_rewarded(parts[2:]), filler()]
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
    parts, step_rewards = rewarded(4)
    for step in (0, 1):
        result = learner.train_step([pack_rewarded(parts)], step=step, **step_rewards)
        assert result.seconds.keys() == {"critic", "optimizer", "step"}, "the policy is not computed"
        assert "loss" not in result.metrics and "lr" not in result.metrics and "value_loss" in result.metrics
    after = all_weights(learner)
    moved = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert moved == {name for name in after if name.startswith("critic.")}
    result = learner.train_step([pack_rewarded(parts)], step=2, **step_rewards)
    assert {"loss", "lr", "value_loss"} <= result.metrics.keys()
    assert not any(tensor.equal(before[name]) for name, tensor in weights(learner).items())


def test_the_head_is_no_part_of_the_policy_that_is_published_and_exported(tiny_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(config(tiny_dir, critic=KINDS["shared"]))
    assert isinstance(learner._critic, SharedCritic)
    train(learner, 2)
    assert not [name for name, _ in learner.model.named_parameters() if "value" in name]
    learner.export_hf(tmp_path / "export")
    with safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as reader:
        assert sorted(reader.keys()) == sorted(weights(learner))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_leaves_policy_and_critic_alone(kind: str, tiny_dir: Path) -> None:
    cfg = config(tiny_dir, critic=KINDS[kind])
    learner = make_learner(cfg)
    before = all_weights(learner)
    learner.warmup_compile(largest_micro_batch(cfg))
    assert all(tensor.equal(before[name]) for name, tensor in all_weights(learner).items())
    params = [slot.param for optimizer in learner._optimizers.values() for slot in optimizer._slots]
    assert not any(param.grad is not None for param in params)


@pytest.mark.parametrize("culprit", ["policy", "critic", "shared"])
def test_a_gradient_that_is_not_finite_changes_no_weight_of_either(culprit: str, tiny_dir: Path) -> None:
    learner = make_learner(config(tiny_dir, critic=KINDS["shared" if culprit == "shared" else "own"]))
    train(learner, 2)
    parts, step_rewards = rewarded(4)
    batch, before = pack_rewarded(parts), all_weights(learner)
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


def test_a_value_that_is_not_finite_stops_the_run(tiny_dir: Path) -> None:
    learner, (parts, step_rewards) = make_learner(config(tiny_dir)), rewarded(2)
    learner._optimizers["critic."].weights()["value_head.bias"].to_local().fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match=r"values of the critic are not finite; lower critic\.lr"):
        learner.train_step([pack_rewarded(parts)], step=0, **step_rewards)
    for optimizer in learner._optimizers.values():
        assert all(slot.param.grad is None for slot in optimizer._slots), "its gradients would be in the next step"


def test_later_updates_of_a_step_are_clipped_around_its_first_values(tiny_dir: Path) -> None:
    parts, step_rewards = rewarded(6)
    batch = pack_rewarded(parts)

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
    batch, step_rewards = pack_rewarded(rewarded(6)[0]), rewarded(6)[1]
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
    twice.train_step([pack_rewarded(parts)], step=0, **step_rewards)
    steps = make_learner(config(tiny_dir, critic={"warmup_steps": 5}))
    for step in (0, 1):
        steps.train_step([pack_rewarded(parts)], step=step, **step_rewards)
    expected = {name: tensor for name, tensor in all_weights(steps).items() if name.startswith("critic.")}
    for name, tensor in all_weights(twice).items():
        if name.startswith("critic."):
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_brings_back_every_bit_of_the_critic(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    cfg = config(tiny_dir, critic=KINDS[kind])
    learner = make_learner(cfg)
    train(learner, 2)
    learner.save(begin(tmp_path, 2), step=2)
    saved = all_weights(learner)
    train(learner, 2, first=2)
    resumed = make_learner(cfg)
    assert resumed.load(tmp_path / "step_2.tmp") == 2
    assert all(tensor.equal(saved[name]) for name, tensor in all_weights(resumed).items())
    train(resumed, 2, first=2)
    later = all_weights(learner)
    assert all(tensor.equal(later[name]) for name, tensor in all_weights(resumed).items())


def test_a_checkpoint_without_a_critic_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    make_learner(run_config(tiny_dir)).save(begin(tmp_path, 1), step=1)
    with pytest.raises(CheckpointError, match=r"critic\."):
        make_learner(config(tiny_dir)).load(tmp_path / "step_1.tmp")


def test_the_critic_may_start_from_another_model(tiny_dir: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama", seed=3)
    learner = make_learner(config(tiny_dir, critic={"path": str(tmp_path / "llama")}))
    found = {n.removeprefix("critic.hf."): t for n, t in all_weights(learner).items() if n.startswith("critic.hf.")}
    with safe_open(tmp_path / "llama" / "model.safetensors", framework="pt") as reader:
        assert sorted(found) == sorted(name for name in reader.keys() if name != "lm_head.weight")  # noqa: SIM118
        assert all(tensor.equal(reader.get_tensor(name)) for name, tensor in found.items())
    train(learner, 1)
    few = Qwen2Config(**{**TINY, "vocab_size": 20}, architectures=["Qwen2ForCausalLM"])
    few.save_pretrained(tmp_path / "few")
    with pytest.raises(ModelError, match=r"critic\.path .* has 20 tokens, the policy 61"):
        make_learner(config(tiny_dir, critic={"path": str(tmp_path / "few")}))


def test_the_critic_may_start_from_a_backbone_without_output_matrix(tiny_dir: Path, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "llama", "llama", seed=3))
    whole.base_model.save_pretrained(tmp_path / "backbone")
    learner = make_learner(config(tiny_dir, critic={"path": str(tmp_path / "backbone")}))
    found = {n.removeprefix("critic.hf."): t for n, t in all_weights(learner).items() if n.startswith("critic.hf.")}
    expected = {name: param for name, param in whole.named_parameters() if name != "lm_head.weight"}
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    with pytest.raises(ModelError, match=r"has no weights for lm_head\.weight"):
        make_learner(run_config(tmp_path / "backbone"))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_and_offload_leave_a_float32_head_close_to_the_exact_one(kind: str, tiny_dir: Path) -> None:
    exact = make_learner(config(tiny_dir, critic=KINDS[kind]))
    cfg = config(tiny_dir, critic=KINDS[kind] | ({"cpu_offload": True} if kind == "own" else {}))
    half = make_learner(replace(cfg, model=replace(cfg.model, compute_dtype="bfloat16")))
    parts, step_rewards = rewarded(6, seed=9)
    train(exact, 3)
    train(half, 3)
    assert {tensor.dtype for tensor in all_weights(half).values()} == {torch.float32}
    (one,), (other,) = (targets_of(x, [pack_rewarded(parts)], step_rewards) for x in (exact, half))
    np.testing.assert_allclose(other.values_T, one.values_T, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_and_inputs_give_the_same_bits(kind: str, tiny_dir: Path) -> None:
    runs = []
    for _ in range(2):
        learner = make_learner(config(tiny_dir, critic=KINDS[kind], kl={"coef": 0.1, "apply_to": "reward"}))
        train(learner, 3)
        runs.append(all_weights(learner))
    assert all(tensor.equal(runs[1][name]) for name, tensor in runs[0].items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_with_adapters_has_a_critic_too(kind: str, tiny_dir: Path) -> None:
    cfg = config(tiny_dir, critic=KINDS[kind], kl={"coef": 0.1, "apply_to": "reward"})
    lora = LoraConfig(rank=8, alpha=20.0, target_modules="q_proj+up_proj")
    learner = make_learner(replace(cfg, model=replace(cfg.model, lora=lora)))
    before = all_weights(learner)
    train(learner, 3)
    after = all_weights(learner)
    assert not any(tensor.equal(before[name]) for name, tensor in after.items())
    of_policy = [name for name in after if not name.startswith("critic.")]
    assert all("lora_" in name or name.startswith("value_head.") for name in of_policy), "the base is frozen"


@pytest.mark.parametrize("kind", ["mistral", "qwen3_moe"])
def test_other_architectures_make_critics(kind: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / kind, kind)
    learner = make_learner(config(tmp_path / kind, critic={"warmup_steps": 5}))
    of_policy = {name: t for name, t in weights(learner).items() if name != "lm_head.weight"}
    backbone = {n.removeprefix("critic.hf."): t for n, t in all_weights(learner).items() if n.startswith("critic.hf.")}
    assert backbone.keys() == of_policy.keys()
    assert all(tensor.equal(of_policy[name]) for name, tensor in backbone.items())
    train(learner, 2)


def test_the_critics_learning_rate_follows_the_schedule_at_its_own_height(tiny_dir: Path) -> None:
    cfg = config(tiny_dir, critic={"lr": None})
    learner = make_learner(replace(cfg, learner=replace(cfg.learner, lr=1e-3, warmup_steps=4)))
    parts, step_rewards = rewarded(2)
    rates = [
        learner.train_step([pack_rewarded(parts)], step=step, **step_rewards).metrics["critic_lr"].mean
        for step in range(5)
    ]
    assert rates == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])


def test_the_policys_schedule_starts_after_the_critics_warmup(tiny_dir: Path) -> None:
    cfg = config(tiny_dir, critic={"warmup_steps": 2})
    schedule = replace(cfg.learner, lr=1e-3, warmup_steps=2, lr_schedule="linear")
    learner = make_learner(replace(cfg, learner=schedule, trainer=replace(cfg.trainer, total_steps=8)))
    parts, step_rewards = rewarded(2)
    results = [learner.train_step([pack_rewarded(parts)], step=step, **step_rewards).metrics for step in range(8)]
    assert [m["lr"].mean for m in results if "lr" in m] == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    expected = [5e-3, 1e-2, *(1e-2 * (6 - i) / 6 for i in range(6))]
    assert [m["critic_lr"].mean for m in results] == pytest.approx(expected), "the critic learns in all of them"
