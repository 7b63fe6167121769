"""Rewards of turns and greedy baselines on their way to the advantages of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.trainer.data.conftest import make_group, make_trajectory, make_turn
from trainer.algorithms.advantages import step_advantages
from trainer.config.algorithm import ESTIMATORS, AlgorithmConfig
from trainer.data.build import BuiltSamples, build_samples

if TYPE_CHECKING:
    from rollout.types import Group, Trajectory

OUTCOME_ESTIMATORS = [
    "grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "pass_at_k", "remax"
]  # fmt: skip


def build(*groups: Group, max_response_tokens: int = 100, **algorithm: object) -> BuiltSamples:
    config = AlgorithmConfig(**algorithm)  # type: ignore[arg-type]
    return build_samples(
        groups, algorithm=config, max_response_tokens=max_response_tokens, advantage_fn=step_advantages
    )


def in_turns(sample_index: int, *rewards: float, outcome: float, num_tokens: int = 2) -> Trajectory:
    """A trajectory of one context token and `num_tokens` generated ones per turn."""
    turns = tuple(make_turn(1, [(0, num_tokens)], reward=reward) for reward in rewards)
    return make_trajectory(sample_index, turns=turns, reward=outcome)


def generated_advantages(built: BuiltSamples) -> list[list[float]]:
    return [s.advantages[s.loss_mask].tolist() for s in built.samples]


def test_reinforce_gives_each_token_what_is_still_to_come() -> None:
    built = build(make_group([in_turns(0, 0.5, 0.0, -2.0, outcome=1.0)]), advantage="reinforce")
    assert built.samples[0].advantages.tolist() == [0, -0.5, -0.5, 0, -1.0, -1.0, 0, -1.0, -1.0]
    assert built.samples[0].reward == -0.5


def test_reinforce_pp_normalises_what_is_still_to_come_over_the_tokens_of_the_step() -> None:
    groups = [
        make_group([in_turns(0, 1.0, 0.0, outcome=1.0, num_tokens=3)], group_id=0),
        make_group([in_turns(0, 0.0, outcome=0.0, num_tokens=5), make_trajectory(1, num_tokens=0, reward=9.0)]),
    ]
    built = build(*groups, advantage="reinforce_pp")
    tokens = np.array([2.0] * 3 + [1.0] * 3 + [0.0] * 5)
    wanted = (tokens - tokens.mean()) / tokens.std()
    np.testing.assert_allclose(np.concatenate(generated_advantages(built)), wanted, atol=1e-6)
    assert built.excluded == {"no_generated_tokens": 1}


def test_context_after_the_last_turn_changes_no_advantage() -> None:
    plain = in_turns(0, 1.0, 0.5, outcome=1.0)
    longer = make_trajectory(0, turns=(*plain.turns(), make_turn(4, [])), reward=plain.reward)
    for name in ("reinforce", "reinforce_pp"):
        both = [build(make_group([t, make_trajectory(1)]), advantage=name) for t in (plain, longer)]
        assert generated_advantages(both[0]) == generated_advantages(both[1])


@pytest.mark.parametrize("name", OUTCOME_ESTIMATORS)
def test_an_outcome_estimator_sees_the_sum_wherever_the_reward_was_given(name: str) -> None:
    assert not ESTIMATORS[name].reward_to_go  # type: ignore[index]

    def advantages(*trajectories: Trajectory) -> list[list[float]]:
        group = replace(make_group(trajectories), baseline=in_turns(2, 0.25, 0.25, outcome=0.0))
        return generated_advantages(build(group, advantage=name))

    other = in_turns(1, 0.0, 0.0, outcome=0.5)
    early, late = advantages(in_turns(0, 2.0, 0.0, outcome=1.0), other), advantages(in_turns(0, 0, 0, outcome=3), other)
    assert early == late
    assert early[0][0] == early[0][-1] > early[1][0]


def test_remax_compares_with_the_baseline_and_trains_only_the_samples() -> None:
    baseline = make_trajectory(2, reward=0.75, num_tokens=4)
    group = replace(make_group([make_trajectory(0), make_trajectory(1)]), baseline=baseline)
    built = build(group, advantage="remax")
    assert [sample.sample_index for sample in built.samples] == [0, 1]
    assert generated_advantages(built) == [[-0.75] * 4, [0.25] * 4]
    alone = replace(make_group([make_trajectory(1)]), baseline=baseline)
    assert generated_advantages(build(alone, advantage="remax")) == [[0.25] * 4]


def test_a_baseline_is_shaped_like_the_answers() -> None:
    long = replace(
        make_group([make_trajectory(1, num_tokens=10)]), baseline=make_trajectory(2, num_tokens=20, reward=1)
    )
    built = build(long, advantage="remax", overlong_buffer_tokens=10, max_response_tokens=20)
    assert generated_advantages(built) == [[1.0] * 10], "equal outcomes, and a penalty of 1 on the baseline alone"


def test_other_estimators_do_not_look_at_a_baseline() -> None:
    pair = make_group([make_trajectory(0), make_trajectory(1)])
    with_baseline = replace(pair, baseline=make_trajectory(2, reward=99.0))
    assert generated_advantages(build(pair)) == generated_advantages(build(with_baseline))
