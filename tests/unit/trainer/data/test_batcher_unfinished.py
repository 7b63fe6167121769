"""What the data side hands to the learner where the learner finishes the advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.trainer.data.conftest import make_group, make_trajectory, make_turn
from trainer.config.algorithm import AlgorithmConfig, KlConfig
from trainer.data.build import BatchLimits, build_train_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Group
    from trainer.data.batch import MicroBatch
    from trainer.data.build import BuiltBatch

GAE = AlgorithmConfig(advantage="gae")
IN_REWARD = KlConfig(coef=0.1, placement="reward")


def build(groups: Sequence[Group], algorithm: AlgorithmConfig = GAE, **limits: int) -> BuiltBatch:
    sizes = {"num_ranks": 1, "max_tokens_per_micro_batch": 1000, "max_response_tokens": 100, **limits}
    return build_train_batch(groups, step=3, algorithm=algorithm, limits=BatchLimits(**sizes))


def all_batches(built: BuiltBatch) -> list[MicroBatch]:
    return [batch for rank in built.batch.micro_batches for batch in rank]


def two_turns(sample_index: int, **changes: Any) -> Any:
    turns = (make_turn(3, [(0, 2)], reward=0.5), make_turn(2, [(1, 3)], reward=-0.25))
    return make_trajectory(sample_index, turns=turns, reward=2.0, **changes)


def test_turns_are_rewarded_at_their_last_token_and_the_outcome_at_the_last_of_all() -> None:
    (batch,) = all_batches(build([make_group([two_turns(0)])]))
    assert batch.unfinished is not None
    np.testing.assert_array_equal(batch.unfinished.rewards, [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 1.75])
    assert batch.unfinished.rewards.dtype == np.float32
    assert not batch.advantages.any()


def test_shaping_is_in_the_reward_of_the_outcome() -> None:
    algorithm = AlgorithmConfig(advantage="gae", overlong_buffer_tokens=4, overlong_penalty=1.0)
    long = make_trajectory(0, num_tokens=8, reward=1.0)
    (batch,) = all_batches(build([make_group([long])], algorithm, max_response_tokens=10))
    assert batch.unfinished is not None
    assert batch.unfinished.rewards[-1] == pytest.approx(0.5), "half of the buffer is used"


def test_every_sequence_knows_its_answer_among_the_judged_ones() -> None:
    """Failed trajectories have no number; empty ones have one, and are not trained."""
    empty = make_trajectory(1, turns=(make_turn(3, []),), reward=7.0)
    groups = [
        make_group([make_trajectory(0, status="failed", reward=float("nan")), empty, two_turns(2)], group_id=0),
        make_group([make_trajectory(i, reward=float(10 + i)) for i in range(3)], group_id=1),
    ]
    built = build(groups, AlgorithmConfig(advantage="grpo", kl=IN_REWARD), num_ranks=2, max_tokens_per_micro_batch=10)
    step_rewards = built.batch.rewards
    assert step_rewards is not None
    assert [group.rewards_G.tolist() for group in step_rewards.groups] == [[7.0, 2.25], [10.0, 11.0, 12.0]]
    assert step_rewards.num_loss_tokens == built.batch.num_loss_tokens == 5 + 3 * 4
    flat = np.concatenate([group.rewards_G for group in step_rewards.groups])
    seen = []
    for batch in all_batches(built):
        assert batch.unfinished is not None
        starts = batch.cu_seqlens[:-1]
        sums = np.add.reduceat(batch.unfinished.rewards, starts)
        for answer, total in zip(batch.unfinished.answers.tolist(), sums.tolist(), strict=True):
            assert answer == -1 or total == pytest.approx(flat[answer])
            seen.append(answer)
    assert sorted(answer for answer in seen if answer >= 0) == [1, 2, 3, 4]
    assert seen.count(-1) == built.num_fillers


@pytest.mark.parametrize("advantage", ["reinforce", "reinforce_pp", "remax"])
def test_groups_list_whole_answers_also_for_estimators_of_the_reward_to_go(advantage: Any) -> None:
    group = make_group([two_turns(0), two_turns(1)])
    built = build([group], AlgorithmConfig(advantage=advantage, kl=IN_REWARD))
    assert built.batch.rewards is not None
    assert [one.rewards_G.tolist() for one in built.batch.rewards.groups] == [[2.25, 2.25]]


def test_a_step_without_samples_has_fillers_that_know_so() -> None:
    built = build([make_group([make_trajectory(0, status="failed", reward=float("nan"))])], num_ranks=2)
    assert built.batch.rewards is not None and built.batch.rewards.groups == ()
    for batch in all_batches(built):
        assert batch.unfinished is not None and batch.unfinished.answers.tolist() == [-1]
        assert not batch.unfinished.rewards.any()


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), AlgorithmConfig(kl=KlConfig(coef=0.1))])
def test_final_advantages_come_without_rewards(algorithm: AlgorithmConfig) -> None:
    built = build([make_group([make_trajectory(i) for i in range(4)])], algorithm)
    assert built.batch.rewards is None
    assert all(batch.unfinished is None and batch.advantages.any() for batch in all_batches(built))
