"""From trajectories to GAE, and the metrics of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from rollout.types import Group, Prompt, Trajectory
from tests.fakes.rewarded import rewarded
from tests.fakes.trajectories import make_turn
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.build import build_train_batch
from trainer.learner.critic import ValueSums, ValueTargets, value_targets
from trainer.learner.prepare import kl_penalized_rewards

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("one_rank")
VALUES = [0.1, 0.2, 0.3, 0.4]
ADVANTAGES = [0.799675, 0.7365, 0.67, 0.6]


def trajectory(index: int, turns: Sequence[tuple[int, int]]) -> Trajectory:
    """`turns` are (context tokens, generated tokens); the outcome is worth 1."""
    made = []
    for num_context, num_generated in turns:
        made.append(make_turn(range(num_context), range(num_context, num_context + num_generated)))
    return Trajectory.of_turns(
        made,
        prompt_id="a",
        sample_index=index,
        reward=1.0,
        reward_parts={},
        status="completed",
        timings={},
    )


@pytest.mark.parametrize("context", [[(2, 4)], [(2, 1), (3, 3)], [(1, 2), (1, 1), (4, 1)]])
def test_gae_has_the_closed_form_whatever_context_stands_between_the_turns(context: list[tuple[int, int]]) -> None:
    prompt = Prompt(prompt_id="a", token_ids=np.zeros(2, np.int32), text="", answer="")
    group = Group(
        group_id=0, prompt_id=prompt.prompt_id, trajectories=[trajectory(i, context) for i in range(2)], start_version=0
    )
    algorithm = AlgorithmConfig(advantage_estimator="gae", gae_gamma=1.0, gae_lambda=0.95)
    limits = {"num_ranks": 1, "max_tokens_per_micro_batch": 100, "max_response_tokens": 50}
    ((batch,),) = build_train_batch([group], step=0, algorithm=algorithm, **limits).micro_batches
    values_T = np.full(len(batch.token_ids), 99.0, np.float32)
    values_T[batch.loss_mask] = VALUES * 2
    rewards_T = kl_penalized_rewards(batch, None, config=algorithm.kl)
    targets = value_targets(batch, rewards_T, values_T, config=algorithm)
    np.testing.assert_allclose(targets.advantages_T[batch.loss_mask], ADVANTAGES * 2, atol=1e-6)
    np.testing.assert_allclose(targets.returns_T[batch.loss_mask], np.add(ADVANTAGES, VALUES).tolist() * 2, atol=1e-6)
    assert not targets.advantages_T[~batch.loss_mask].any() and not targets.returns_T[~batch.loss_mask].any()


def targets_with(values: np.ndarray, returns: np.ndarray) -> ValueTargets:
    return ValueTargets(values_T=values.astype(np.float32), advantages_T=returns - values, returns_T=returns)


def test_the_loss_is_a_share_of_the_token_mean_over_the_step() -> None:
    (part, _), _ = rewarded(2)
    count = int(part.loss_mask.sum())
    totals = ValueSums(num_loss_tokens=10)
    returns_T = np.where(part.loss_mask, 1.0, 0.0)
    values_L = torch.full((count,), 0.5, requires_grad=True)
    loss = totals.loss(values_L, part, targets_with(returns_T * 0.2, returns_T), clip=0.2)
    assert loss.item() == pytest.approx(0.18 * count / 10), "as the closed form of one token"
    loss.backward()
    assert values_L.grad is not None and not values_L.grad.any(), "0.5 is beyond 0.2 + 0.2"
    totals.add(part, targets_with(returns_T * 0.2, returns_T))
    metrics = totals.reduce(torch.device("cpu"))
    assert metrics["value_clip_frac"].mean == 1.0
    assert metrics["value_loss"].mean == pytest.approx(0.5 * 0.8**2)
    assert "value_explained_variance" not in metrics, "equal returns leave nothing to explain"


def test_perfect_values_explain_all_and_a_constant_nothing() -> None:
    (part, _), _ = rewarded(2)
    returns_T = np.where(part.loss_mask, np.arange(len(part.token_ids)), 0.0)
    for values_T, expected in ((returns_T, 1.0), (np.full_like(returns_T, 5.0), 0.0), (-returns_T, -3.0)):
        totals = ValueSums(num_loss_tokens=1)
        totals.add(part, targets_with(values_T, returns_T))
        assert totals.reduce(torch.device("cpu"))["value_explained_variance"].mean == pytest.approx(expected)
