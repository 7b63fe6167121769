"""Trajectories become samples: token by token, and with a reason for each one that does not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.trainer.data.conftest import make_group, make_trajectory, make_turn
from trainer.algorithms.advantages import step_advantages
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.library import groups as groups_of_options
from trainer.config.library import packaged_configs
from trainer.config.load import load_config
from trainer.data.build import BuiltSamples, build_samples

if TYPE_CHECKING:
    from rollout.types import Group

CENTRED = AlgorithmConfig(normalize_by_std=False)
"""Advantage = reward - mean of the group."""


def build(*groups: Group, algorithm: AlgorithmConfig = CENTRED, max_response_tokens: int = 100) -> BuiltSamples:
    return build_samples(
        groups, algorithm=algorithm, max_response_tokens=max_response_tokens, advantage_fn=step_advantages
    )


def test_turns_are_flattened_and_only_generated_tokens_carry_loss() -> None:
    turns = (make_turn(2, [(4, 1), (5, 2)], first_token=10), make_turn(3, [(6, 1)], first_token=20), make_turn(1, []))
    two = [make_trajectory(0, turns=turns, reward=3.0), make_trajectory(1, reward=1.0)]
    sample = build(make_group(two, group_id=8)).samples[0]
    assert sample.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 23, 10]
    assert sample.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 3 + [True] + [False]
    assert sample.versions.tolist() == [-1, -1, 4, 5, 5, -1, -1, -1, 6, -1]
    expected = np.array([0, 0, 2, 3, 4, 0, 0, 0, 3, 0]) / -64
    np.testing.assert_array_equal(sample.behaviour_logprobs, expected.astype(np.float32))
    assert sample.advantages.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 0]
    assert (sample.group_id, sample.sample_index, sample.reward) == (8, 0, 3.0)
    assert [a.dtype.name for a in (sample.token_ids, sample.loss_mask, sample.behaviour_logprobs)] == [
        "int32", "bool", "float32",
    ]  # fmt: skip
    assert [a.dtype.name for a in (sample.advantages, sample.versions)] == ["float32", "int32"]


def test_advantages_compare_within_a_group_only() -> None:
    groups = [
        make_group([make_trajectory(i, reward=r) for i, r in enumerate(rewards)], group_id=g)
        for g, rewards in enumerate([(0.0, 1.0), (10.0, 14.0, 12.0)])
    ]
    assert [float(s.advantages[-1]) for s in build(*groups).samples] == [-0.5, 0.5, -2.0, 2.0, 0.0]


def test_failed_trajectories_take_no_part_in_the_baseline() -> None:
    failed = make_trajectory(2, status="failed", reward=float("nan"))
    built = build(make_group([make_trajectory(0), make_trajectory(1), failed]))
    assert [float(s.advantages[-1]) for s in built.samples] == [-0.5, 0.5]
    assert built.excluded == {"failed": 1}


@pytest.mark.parametrize(("mask", "indices", "excluded"), [(False, [0, 1, 2], {}), (True, [0, 1], {"truncated": 1})])
def test_truncated_trajectories_count_in_the_baseline_and_are_masked_on_request(
    mask: bool, indices: list[int], excluded: dict[str, int]
) -> None:
    cut = make_trajectory(2, status="truncated", reward=-1.0)
    built = build(
        make_group([make_trajectory(0), make_trajectory(1), cut]), algorithm=replace(CENTRED, mask_truncated=mask)
    )
    assert [s.sample_index for s in built.samples] == indices
    assert float(built.samples[1].advantages[-1]) == 1.0
    assert built.excluded == excluded


def test_a_trajectory_without_peers_or_tokens_is_counted() -> None:
    lonely = make_group([make_trajectory(0), make_trajectory(1, status="failed", reward=float("nan"))])
    empty = make_group([make_trajectory(0), make_trajectory(1), make_trajectory(2, num_tokens=0)])
    dead = make_group([make_trajectory(0, status="failed", reward=float("nan"))])
    built = build(lonely, empty, dead)
    assert len(built.samples) == 2
    assert built.excluded == {"failed": 2, "no_generated_tokens": 1, "no_peer_in_group": 1}
    alone = build(lonely, algorithm=replace(CENTRED, advantage="reinforce"))
    assert len(alone.samples) == 1


def test_overlong_shaping_moves_the_advantage_but_not_the_recorded_reward() -> None:
    shaped = replace(CENTRED, overlong_buffer_tokens=10, overlong_penalty=0.5)
    group = make_group([make_trajectory(i, num_tokens=n, reward=1.0) for i, n in enumerate([10, 15, 20])])
    built = build(group, algorithm=shaped, max_response_tokens=20)
    assert [float(s.advantages[-1]) for s in built.samples] == [0.25, 0.0, -0.25]
    assert {s.reward for s in built.samples} == {1.0}


def last_advantages(built: BuiltSamples) -> list[float]:
    return [float(s.advantages[-1]) for s in built.samples]


def test_lengths_reach_the_estimator() -> None:
    sizes = [(2, 1.0), (4, 0.0), (6, 0.0), (4, 1.0)]
    answers = [make_trajectory(i, num_tokens=n, reward=r) for i, (n, r) in enumerate(sizes)]
    built = build(make_group(answers), algorithm=AlgorithmConfig(advantage="opo"))
    assert last_advantages(built) == [0.625, -0.375, -0.375, 0.625]


def test_rewards_are_normalised_over_all_groups_of_the_step_and_failures_take_no_part() -> None:
    groups = [
        make_group([make_trajectory(0, reward=1.0)], group_id=0),
        make_group([make_trajectory(0, reward=0.0), make_trajectory(1, reward=0.0, status="truncated")], group_id=1),
        make_group([make_trajectory(0, reward=1.0), make_trajectory(1, status="failed", reward=float("nan"))]),
    ]
    algorithm = AlgorithmConfig(advantage="reinforce_pp", mask_truncated=True)
    built = build(*groups, algorithm=algorithm)
    np.testing.assert_allclose(last_advantages(built), [1.0, -1.0, 1.0], atol=1e-6)
    assert built.excluded == {"failed": 1, "truncated": 1}


def test_a_lonely_answer_does_not_count_in_the_normalisation_of_an_estimator_with_peers() -> None:
    pair = make_group([make_trajectory(0), make_trajectory(1)])
    lonely = make_group([make_trajectory(0, reward=50.0)])
    for name in ("reinforce_pp_baseline", "gpg"):
        algorithm = AlgorithmConfig(advantage=name)
        built = build(lonely, pair, algorithm=algorithm)
        assert built.excluded == {"no_peer_in_group": 1}
        assert last_advantages(built) == last_advantages(build(pair, algorithm=algorithm))


def test_overlong_shaping_reaches_an_estimator_of_the_whole_step() -> None:
    algorithm = AlgorithmConfig(advantage="reinforce_pp", overlong_buffer_tokens=10)
    answers = [make_trajectory(i, num_tokens=n, reward=1.0) for i, n in enumerate([10, 20])]
    first, second = last_advantages(build(make_group(answers), algorithm=algorithm, max_response_tokens=20))
    assert 10 * first == pytest.approx(-20 * second), "the mean over tokens is 0"
    assert first > 0.7


def test_reward_parts_reach_the_estimator() -> None:
    values = [{"correct": 1.0, "format": 0.0}, {"correct": 0.0, "format": 0.0}, {"correct": 0.0, "format": 1.0}]
    answers = [make_trajectory(i, reward=0.0, reward_parts=parts) for i, parts in enumerate(values)]
    algorithm = AlgorithmConfig(advantage="gdpo", gdpo_weights={"correct": 2.0, "format": 1.0})
    best, worst, middle = last_advantages(build(make_group(answers), algorithm=algorithm))
    assert best > middle > worst
    assert best + middle + worst == pytest.approx(0, abs=1e-6)
    odd = [make_trajectory(0, reward_parts={"a": 1.0}), make_trajectory(1)]
    with pytest.raises(ValueError, match=r"trajectory 1 of prompt 'train/0' has the reward parts \[\]"):
        build(make_group(odd), algorithm=AlgorithmConfig(advantage="gdpo"))
    # Other estimators do not look at parts, so they may differ.
    assert last_advantages(build(make_group(odd))) == [-0.5, 0.5]


@pytest.mark.parametrize("option", groups_of_options([packaged_configs()])["algorithm"])
def test_every_shipped_algorithm_reaches_the_samples(option: str) -> None:
    needed = {
        "reinforce": "mode=sync",  # it is blind to the age of a sample
        "opd": "algorithm.kl.path=builtin:tiny",  # nobody else teaches
    }.get(option, "seed=0")
    algorithm = load_config([f"algorithm={option}", needed, "learner.max_tokens_per_micro_batch=65536"]).algorithm
    answers = [
        make_trajectory(i, num_tokens=i + 2, reward=r, reward_parts={"correct": r, "format": 1 - r / 2})
        for i, r in enumerate([1.0, 0.0, 0.0])
    ]
    group = replace(make_group(answers), baseline=make_trajectory(3, reward=0.5))
    built = build(group, algorithm=algorithm)
    if algorithm.finishes_on_ranks:
        assert [float(s.rewards.sum()) for s in built.samples] == [1.0, 0.0, 0.0]
        return
    best, *others = last_advantages(built)
    if option == "opd":
        assert [best, *others] == [0.0, 0.0, 0.0], "the learner takes the KL off"
        return
    assert best > max(others)
    assert best > 0 >= others[0] == others[1]


def test_trajectories_that_break_the_contract_are_refused() -> None:
    headless = make_trajectory(0, turns=(make_turn(0, [(0, 2)]),))
    with pytest.raises(ValueError, match="must begin with the prompt's tokens"):
        build(make_group([headless, make_trajectory(1)]))
    turn = make_turn(2, [(0, 2)])
    silent = make_trajectory(0, turns=(replace(turn, logprobs=np.full(4, np.nan, np.float32)),))
    with pytest.raises(ValueError, match="generated token 2 has log-probability nan"):
        build(make_group([silent, make_trajectory(1)]))
