"""Advantages that the learner finishes without a critic, against loops over single answers and tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.fakes.learner import gradients, make_learner
from tests.fakes.rewarded import GROUP_SIZE, all_gradients, config, filler, pack_rewarded, rewarded
from trainer.algorithms.advantages import GroupRewards, normalized_over_tokens, step_advantages
from trainer.config.algorithm import AlgorithmConfig, KlConfig
from trainer.learner.prepare import kl_penalized_rewards, normalized_over_ranks, reward_advantages

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.data.batch import MicroBatch

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")
COEF = 0.3
ESTIMATORS = ("grpo", "rloo", "opo", "pass_at_k", "remax", "reinforce_pp_baseline", "reinforce", "reinforce_pp")


def reference_logprobs(batch: MicroBatch, seed: int = 7) -> np.ndarray:
    """The same for a token wherever it is packed."""
    noise = np.sin(batch.token_ids * 12.9898 + batch.behavior_logprobs * 78.233 + seed)
    return np.where(batch.loss_mask, batch.behavior_logprobs + noise, 0).astype(np.float32)


def finished(batches: list[MicroBatch], step_rewards: dict[str, Any], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    rewards = [kl_penalized_rewards(b, reference_logprobs(b), config=algorithm.kl) for b in batches]
    return reward_advantages(batches, rewards, step_rewards["group_rewards"], config=algorithm, device=CPU)


def penalty(estimator: str, sampled: float, ours: float) -> float:
    d = sampled - ours
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def slow_penalized(part: MicroBatch, estimator: str) -> list[float]:
    ours = reference_logprobs(part)
    assert part.token_rewards is not None
    return [
        float(part.token_rewards[t]) - COEF * penalty(estimator, float(part.behavior_logprobs[t]), float(ours[t]))
        if part.loss_mask[t]
        else 0.0
        for t in range(len(part.token_ids))
    ]


def slow_rewards_to_go(
    parts: list[MicroBatch], rewards: list[list[float]], *, is_normalized: bool
) -> list[list[float]]:
    found, flat = [], []
    for part, r in zip(parts, rewards, strict=True):
        found.append([sum(r[t:]) if part.loss_mask[t] else 0.0 for t in range(len(r))])
        flat += [found[-1][t] for t in range(len(r)) if part.loss_mask[t]]
    if not is_normalized:
        return found
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((g - mean) ** 2 for g in flat) / len(flat))
    return [
        [(one[t] - mean) / std if part.loss_mask[t] else 0.0 for t in range(len(one))]
        for part, one in zip(parts, found, strict=True)
    ]


def with_kl(advantage: Any, estimator: Any = "k1") -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage_estimator=advantage, kl=KlConfig(coef=COEF, apply_to="reward", estimator=estimator)
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_token_pays_for_its_distance_from_the_reference(estimator: str) -> None:
    parts, _ = rewarded(3)
    for part in parts:
        got = kl_penalized_rewards(part, reference_logprobs(part), config=with_kl("grpo", estimator).kl)
        np.testing.assert_allclose(got, slow_penalized(part, estimator), atol=1e-9)


def test_a_token_that_the_policy_made_likelier_than_the_reference_is_worth_less() -> None:
    (part, _), _ = rewarded(2)
    likelier = (part.behavior_logprobs - 0.5 * part.loss_mask).astype(np.float32)
    assert part.token_rewards is not None
    lost = kl_penalized_rewards(part, likelier, config=with_kl("grpo").kl) - part.token_rewards
    np.testing.assert_allclose(lost[part.loss_mask], -0.5 * COEF, atol=1e-6)


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_advantages_equal_a_loop_over_answers_and_tokens(advantage: str) -> None:
    parts, step_rewards = rewarded(6)
    algorithm = with_kl(advantage)
    got = finished(parts, step_rewards, algorithm)
    rewards = [slow_penalized(part, "k1") for part in parts]
    if advantage in {"reinforce", "reinforce_pp"}:
        expected = slow_rewards_to_go(parts, rewards, is_normalized=advantage == "reinforce_pp")
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


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_order_and_split_of_the_samples_change_no_advantage(advantage: str) -> None:
    parts, step_rewards = rewarded(8)
    algorithm = with_kl(advantage)
    expected = finished(parts, step_rewards, algorithm)
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    for splits in ([order], [order[:1], order[1:5], order[5:]], [[i] for i in order]):
        batches = [pack_rewarded([parts[i] for i in split]) for split in splits]
        got = np.concatenate(finished([*batches, filler()], step_rewards, algorithm)[:-1])
        np.testing.assert_allclose(got, np.concatenate([expected[i] for i in order]), rtol=1e-12, atol=1e-12)


def test_answers_that_are_not_trained_still_take_part_as_peers() -> None:
    """As an answer without a generated token does: its reward counts, and it has no KL."""
    parts, step_rewards = rewarded(4)
    algorithm = with_kl("rloo")
    got = finished(parts[:3], step_rewards, algorithm)[2]
    rewards = [sum(slow_penalized(part, "k1")) for part in parts]
    assert got[parts[2].loss_mask] == pytest.approx(
        rewards[2] - step_rewards["group_rewards"][1].rewards_G[1], abs=1e-6
    )


def test_normalisation_has_mean_zero_and_variance_one_over_loss_tokens_alone() -> None:
    parts, _ = rewarded(5)
    rng = np.random.default_rng(0)
    values = [np.where(p.loss_mask, rng.normal(3.0, 2.0, len(p.loss_mask)), 99.0) for p in parts]
    got = normalized_over_ranks(values, parts, device=CPU)
    flat = np.concatenate([v[p.loss_mask] for v, p in zip(got, parts, strict=True)])
    assert flat.mean() == pytest.approx(0, abs=1e-12) and flat.std() == pytest.approx(1, abs=1e-12)
    assert all(not v[~p.loss_mask].any() for v, p in zip(got, parts, strict=True))
    equal = normalized_over_ranks([np.full(2, 5.0)], [replace(filler(), loss_mask=np.ones(2, bool))], device=CPU)
    assert not equal[0].any()
    assert not normalized_over_ranks([np.zeros(2)], [filler()], device=CPU)[0].any()


def test_the_driver_and_the_learner_normalise_alike() -> None:
    """Values per answer and its number of tokens on one side, per token over micro-batches on the other."""
    parts, _ = rewarded(7)
    rng = np.random.default_rng(3)
    values_N = rng.normal(2.0, 3.0, len(parts))
    lengths_N = np.array([int(p.loss_mask.sum()) for p in parts])
    split = [slice(0, 1), slice(1, 4), slice(4, 7)]
    driver = normalized_over_tokens([values_N[s] for s in split], [lengths_N[s] for s in split])
    per_token = [np.where(p.loss_mask, value, 0.0) for p, value in zip(parts, values_N, strict=True)]
    learner = normalized_over_ranks(per_token, parts, device=CPU)
    for value, got_T, part in zip(np.concatenate(driver), learner, parts, strict=True):
        np.testing.assert_allclose(got_T[part.loss_mask], value, rtol=1e-12)


def test_the_sequences_of_an_answer_pay_for_all_of_them() -> None:
    parts, _ = rewarded(3)
    first, second, other = parts
    assert second.token_rewards is not None and other.token_rewards is not None
    second = replace(second, answer_index=np.array([0], np.int32))
    other = replace(other, answer_index=np.array([1], np.int32))
    sums = [float(np.sum(p.token_rewards)) for p in parts if p.token_rewards is not None]
    paid = [sum(slow_penalized(part, "k1")) for part in parts]
    algorithm = with_kl("rloo")

    def group(rewards: list[float]) -> GroupRewards:
        return GroupRewards(rewards_G=np.array([rewards[0] + rewards[1], rewards[2]]), lengths_G=np.array([2, 1]))

    step_rewards = {"group_rewards": (group(sums),), "num_loss_tokens": 1}
    wanted = step_advantages([group(paid)], config=algorithm)[0]
    got = finished([first, second, other], step_rewards, algorithm)
    for part, found, value in zip((first, second, other), got, (wanted[0], wanted[0], wanted[1]), strict=True):
        np.testing.assert_allclose(found[part.loss_mask], value, atol=1e-6)


def test_a_step_without_answers_has_no_advantage() -> None:
    empty = {"group_rewards": (), "num_loss_tokens": 0}
    for advantage in ("grpo", "reinforce_pp"):
        assert not finished([filler()], empty, with_kl(advantage))[0].any()


@pytest.mark.parametrize("advantage", ["grpo", "reinforce_pp"])
def test_a_step_with_the_kl_in_the_reward_has_the_gradient_of_those_advantages(advantage: str, tiny_dir: Path) -> None:
    """Train apart from the initial policy, then compare with a learner that gets the advantages ready made."""
    kl = {"coef": COEF, "apply_to": "reward", "estimator": "k1"}
    learner = make_learner(config(tiny_dir, advantage_estimator=advantage, kl=kl))
    parts, step_rewards = rewarded(6)
    reference = learner._reference
    assert reference is not None
    batch = pack_rewarded(parts)
    rewards = kl_penalized_rewards(batch, reference.logprobs([batch])[0], config=with_kl(advantage).kl)
    ready = reward_advantages([batch], [rewards], step_rewards["group_rewards"], config=with_kl(advantage), device=CPU)[
        0
    ].astype(np.float32)
    got = all_gradients(learner, [batch], step_rewards)
    plain = make_learner(config(tiny_dir, advantage_estimator=advantage))
    for name, expected in gradients(
        plain, [replace(batch, advantages=ready, token_rewards=None, answer_index=None)]
    ).items():
        assert got[name].equal(expected)
    result = learner.train_step([batch], step=0, **step_rewards)
    assert result.seconds["advantages"] > 0 and result.metrics["kl_reference"].mean == 0


def test_rewards_must_come_with_the_step_and_the_tokens(tiny_dir: Path) -> None:
    kl = {"coef": COEF, "apply_to": "reward"}
    learner = make_learner(config(tiny_dir, advantage_estimator="grpo", kl=kl))
    parts, step_rewards = rewarded(2)
    with pytest.raises(ValueError, match="came without rewards"):
        learner.train_step([pack_rewarded(parts)], step=0)
    with pytest.raises(ValueError, match="no token rewards"):
        learner.train_step([replace(parts[0], token_rewards=None, answer_index=None)], step=0, **step_rewards)
