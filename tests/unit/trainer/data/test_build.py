"""Groups become the batch of a step: nothing is lost, every token gets what its response earned, and neither the split
over ranks and micro-batches nor the cut of a response into sequences changes anything."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainer.data.conftest import make_group, make_trajectory, make_turn, random_groups
from trainer.config.algorithm import ESTIMATORS, AlgorithmConfig, KlConfig
from trainer.data.build import build_train_batch
from trainer.learner.attention import packed_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Group, Trajectory, Turn
    from trainer.data.batch import MicroBatch, TrainBatch

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
CENTRED = {"normalize_by_std": False}
"""Advantage = reward - mean of the group."""
CLIP_COV = {"loss": "clip_cov", "cov_frac": 0.1, "cov_min": -0.5, "cov_max": 0.5}
KL_COV = {"loss": "kl_cov", "cov_frac": 0.1}
IN_REWARD = KlConfig(coef=0.1, apply_to="reward")
COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "advantages", "loss_weights", "cov_selected")


def build(
    *groups: Group, num_ranks: int = 1, max_tokens: int = 10_000, max_response_tokens: int = 100, **algorithm: Any
) -> TrainBatch:
    config = algorithm.pop("config", None)
    return build_train_batch(
        groups,
        step=7,
        algorithm=AlgorithmConfig(**algorithm) if config is None else config,
        num_ranks=num_ranks,
        max_tokens_per_micro_batch=max_tokens,
        max_response_tokens=max_response_tokens,
    )


def micro_batches(batch: TrainBatch) -> list[MicroBatch]:
    return [micro for rank in batch.micro_batches for micro in rank]


def sequences(batch: TrainBatch, *names: str) -> list[tuple[np.ndarray, ...]]:
    """Those arrays of every sequence with a loss token; in the order of the groups if there is one micro-batch."""
    return [
        tuple(getattr(micro, name)[a:b] for name in names)
        for micro in micro_batches(batch)
        for a, b in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True)
        if micro.loss_mask[a:b].any()
    ]


def content(batch: TrainBatch) -> list[tuple[bytes, ...]]:
    """Every sequence with all its arrays, in a canonical order."""
    names = [name for name in COLUMNS if getattr(batch.micro_batches[0][0], name) is not None]
    return sorted(tuple(array.tobytes() for array in one) for one in sequences(batch, *names))


def advantages(batch: TrainBatch) -> list[list[float]]:
    """Of the generated tokens of every sequence."""
    return [values[mask].tolist() for values, mask in sequences(batch, "advantages", "loss_mask")]


def last_advantages(batch: TrainBatch) -> list[float]:
    return [one[-1] for one in advantages(batch)]


def failed(index: int) -> Trajectory:
    return make_trajectory(index, status="failed", reward=float("nan"))


def in_turns(sample_index: int, *rewards: float, outcome: float, num_tokens: int = 2) -> Trajectory:
    """One context token and `num_tokens` generated ones per turn."""
    turns = tuple(make_turn(1, [(0, num_tokens)], reward=reward) for reward in rewards)
    return make_trajectory(sample_index, turns=turns, reward=outcome)


# Prompts that are computed once


@pytest.mark.parametrize("max_tokens", [10, 25, 1000])
def test_samples_of_a_group_share_their_prompt_and_keep_their_content(max_tokens: int) -> None:
    def answer(index: int, prompt: int) -> Trajectory:
        turns = make_turn(5, [(0, 2 + index)], first_token=prompt), make_turn(1, [(0, 2)])
        return make_trajectory(index, turns=turns)

    groups = [
        make_group([answer(0, 20), answer(1, 20), answer(2, 30), answer(3, 20)], group_id=0),
        make_group([answer(0, 20), answer(1, 20)], group_id=1),
    ]
    shared, plain = (
        build_train_batch(
            groups,
            step=7,
            algorithm=AlgorithmConfig(),
            num_ranks=1,
            max_tokens_per_micro_batch=max_tokens,
            max_response_tokens=100,
            share_prefix=share,
        )
        for share in (True, False)
    )
    assert content(shared) == content(plain) and plain.num_shared_tokens == 0
    if max_tokens == 1000:
        assert shared.num_shared_tokens == 3 * 5
    for micro in micro_batches(shared):
        assert micro.prefix_lens is not None
        rows = packed_rows(micro.cu_seqlens, micro.prefix_lens)
        row_tokens = np.zeros(rows.max() + 1, np.int32)
        row_tokens[rows] = micro.token_ids
        assert row_tokens[rows].tolist() == micro.token_ids.tolist(), "one row, one token"
        assert len(row_tokens) <= max_tokens or len(micro.cu_seqlens) == 2
    assert shared.num_shared_tokens == sum(int(micro.prefix_lens.sum()) for micro in micro_batches(shared))


# The split over ranks and micro-batches


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(1, 80),
    aggregation=st.sampled_from(AGGREGATIONS),
    selection=st.sampled_from([{}, CLIP_COV, KL_COV]),
)
def test_a_step_has_the_same_content_on_every_split(
    seed: int, num_ranks: int, max_tokens: int, aggregation: str, selection: dict[str, Any]
) -> None:
    groups = with_noise(random_groups(seed, num_groups=4, group_size=4, max_tokens=30), seed)
    whole = build(*groups, loss_aggregation=aggregation, **selection)
    split = build(*groups[::-1], loss_aggregation=aggregation, num_ranks=num_ranks, max_tokens=max_tokens, **selection)
    assert content(split) == content(whole)
    assert len({len(rank) for rank in split.micro_batches}) == 1
    assert split.num_samples + sum(split.excluded.values()) == sum(len(g.trajectories) for g in groups)
    tokens = [[len(m.token_ids) if m.loss_mask.any() else 0 for m in rank] for rank in split.micro_batches]
    slowest = sum(map(max, zip(*tokens, strict=True)))
    assert split.balance_frac == pytest.approx(split.num_tokens / num_ranks / slowest if slowest else 1)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(1, 3), num_mini_batches=st.integers(1, 5))
def test_mini_batches_are_whole_groups_each_visited_once_per_pass(
    seed: int, num_ranks: int, num_mini_batches: int
) -> None:
    groups = with_noise(random_groups(seed, num_groups=5, group_size=4, max_tokens=30), seed)

    def split(num_ranks: int, step: int = 7) -> TrainBatch:
        return build_train_batch(
            groups,
            step=step,
            algorithm=AlgorithmConfig(loss_aggregation="token_mean"),
            num_ranks=num_ranks,
            max_tokens_per_micro_batch=60,
            max_response_tokens=100,
            num_mini_batches=num_mini_batches,
            updates_per_batch=3,
            seed=seed,
        )

    def groups_of(batch: TrainBatch, update: tuple[int, int]) -> frozenset[int]:
        parts = [micro for rank in batch.micro_batches for micro in rank[slice(*update)]]
        # What `with_noise` made different in every group.
        seen = {value for micro in parts for value in micro.behavior_logprobs[micro.loss_mask].tolist()}
        weights = sum(float(micro.loss_weights.astype(np.float64).sum()) for micro in parts)
        assert weights == pytest.approx(1), "a token mean of the mini-batch"
        own = [
            {v for t in g.trajectories if t.status != "failed" for v in t.logprobs[t.loss_mask].tolist()}
            for g in groups
        ]
        found = {number for number, values in enumerate(own) if values & seen}
        assert seen == set().union(*(own[number] for number in found)), "whole groups"
        return frozenset(found)

    batch = split(num_ranks)
    trained = {number for update in batch.updates for number in groups_of(batch, update)}
    number = min(num_mini_batches, len(trained))
    assert len(batch.updates) == 3 * number and len({len(rank) for rank in batch.micro_batches}) == 1
    visits = [groups_of(batch, update) for update in batch.updates]
    for start in range(0, len(visits), number):
        one_pass = visits[start : start + number]
        assert sorted(group for part in one_pass for group in part) == sorted(trained)
        assert max(map(len, one_pass)) - min(map(len, one_pass)) <= 1
    again = split(3)
    assert [groups_of(again, update) for update in again.updates] == visits, "on any number of ranks"
    if number == 5:
        others = [split(1, step) for step in range(8, 12)]
        assert any([groups_of(one, update) for update in one.updates] != visits for one in others), "drawn per step"


def test_packed_sequences_keep_their_boundaries() -> None:
    batch = build(make_group([make_trajectory(0, num_tokens=2), make_trajectory(1, num_tokens=5)]))
    (micro,) = micro_batches(batch)
    assert (micro.cu_seqlens.tolist(), micro.cu_seqlens.dtype) == ([0, 5, 13], np.int32)
    assert micro.token_ids.tolist() == [*range(10, 15), *range(110, 118)]
    assert np.flatnonzero(micro.loss_mask).tolist() == [3, 4, 8, 9, 10, 11, 12]
    assert (batch.step, batch.num_samples, batch.num_sequences) == (7, 2, 2)
    assert (batch.num_tokens, batch.num_loss_tokens) == (13, 7)


@pytest.mark.parametrize("algorithm", [{}, KL_COV, {"kl": IN_REWARD}])
def test_a_step_without_a_usable_trajectory_has_one_empty_micro_batch_per_rank(algorithm: dict[str, Any]) -> None:
    batch = build(make_group([failed(0), failed(1)]), num_ranks=2, **algorithm)
    assert (batch.num_samples, batch.num_loss_tokens, batch.excluded) == (0, 0, {"failed": 2})
    assert [len(rank) for rank in batch.micro_batches] == [1, 1]
    for micro in micro_batches(batch):
        assert micro.cu_seqlens.tolist() == [0, 2]
        assert not micro.loss_mask.any() and not micro.loss_weights.any()
        assert (micro.cov_selected is not None) == (algorithm is KL_COV)
        assert micro.cov_selected is None or not micro.cov_selected.any()
        if "kl" in algorithm:
            assert micro.token_rewards is not None and not micro.token_rewards.any()
            assert micro.response_index is not None and micro.response_index.tolist() == [-1]


def test_a_step_of_256_short_samples_is_built_in_milliseconds() -> None:
    groups = random_groups(0, num_groups=32, group_size=8, max_tokens=10)
    elapsed = []
    for _ in range(7):
        start = time.perf_counter()
        build(*groups, num_ranks=2, max_tokens=16384)
        elapsed.append(time.perf_counter() - start)
    assert min(elapsed) < 0.1, f"{min(elapsed) * 1e3:.1f} ms; about 5 ms on a quiet machine"


def test_the_data_path_imports_without_torch() -> None:
    code = (
        "import sys, trainer.data.build, rollout.prompts.prompt_source, rollout.reward.pool\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'datasets', 'sympy', 'hydra') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4]
    )
    assert done.stdout.strip() == "[]"


# From trajectories to tokens


def test_turns_are_flattened_and_only_generated_tokens_carry_loss() -> None:
    turns = (make_turn(2, [(4, 1), (5, 2)], first_token=10), make_turn(3, [(6, 1)], first_token=20), make_turn(1, []))
    batch = build(make_group([make_trajectory(0, turns=turns, reward=3.0), make_trajectory(1, reward=1.0)]), **CENTRED)
    token_ids, mask, logprobs, versions, values = sequences(batch, *COLUMNS[:5])[0]
    assert token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 23, 10]
    assert mask.tolist() == [False] * 2 + [True] * 3 + [False] * 3 + [True] + [False]
    assert versions.tolist() == [-1, -1, 4, 5, 5, -1, -1, -1, 6, -1]
    np.testing.assert_array_equal(logprobs, (np.array([0, 0, 2, 3, 4, 0, 0, 0, 3, 0]) / -64).astype(np.float32))
    assert values.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 0]
    kinds = [a.dtype.name for a in (token_ids, mask, logprobs, versions, values)]
    assert kinds == ["int32", "bool", "float32", "int32", "float32"]


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ((make_turn(0, [(0, 2)]),), "must begin with the prompt's tokens"),
        ((make_turn(3, [(0, 2)]), replace(make_turn(0, [(0, 2)]), begins_anew=True)), "begins with a generated token"),
        (
            (replace(make_turn(2, [(0, 2)]), logprobs=np.full(4, np.nan, np.float32)),),
            "generated token 2 has log-probability nan",
        ),
    ],
)
def test_trajectories_that_break_the_contract_are_refused(turns: tuple[Turn, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(make_group([make_trajectory(0, turns=turns), make_trajectory(1)]))


# What a response earns


def test_advantages_compare_within_a_group_and_failed_trajectories_take_no_part() -> None:
    groups = [
        make_group([*(make_trajectory(i, reward=r) for i, r in enumerate(rewards)), failed(9)], group_id=g)
        for g, rewards in enumerate([(0.0, 1.0), (10.0, 14.0, 12.0)])
    ]
    batch = build(*groups, **CENTRED)
    assert last_advantages(batch) == [-0.5, 0.5, -2.0, 2.0, 0.0]
    assert batch.excluded == {"failed": 2}


@pytest.mark.parametrize(("mask", "values", "excluded"), [(False, [0, 1, -1], {}), (True, [0, 1], {"truncated": 1})])
def test_truncated_trajectories_count_in_the_baseline_and_are_masked_on_request(
    mask: bool, values: list[float], excluded: dict[str, int]
) -> None:
    cut = make_trajectory(2, status="truncated", reward=-1.0)
    batch = build(make_group([make_trajectory(0), make_trajectory(1), cut]), mask_truncated=mask, **CENTRED)
    assert (last_advantages(batch), batch.excluded) == (values, excluded)


def test_a_trajectory_without_peers_or_tokens_is_counted() -> None:
    single = make_group([make_trajectory(0), failed(1)])
    empty = make_group([make_trajectory(0), make_trajectory(1), make_trajectory(2, num_tokens=0)])
    batch = build(single, empty, make_group([failed(0)]))
    assert batch.num_samples == 2
    assert batch.excluded == {"failed": 2, "no_generated_tokens": 1, "no_peer_in_group": 1}
    assert build(single, advantage_estimator="reinforce").num_samples == 1, "an estimator without peers takes it"


def test_overlong_shaping_is_part_of_the_reward_also_of_the_whole_step_and_of_a_baseline() -> None:
    shaped = {"overlong_buffer_tokens": 10, "max_response_tokens": 20}
    group = make_group([make_trajectory(i, num_tokens=n, reward=1.0) for i, n in enumerate([10, 15, 20])])
    assert last_advantages(build(group, overlong_penalty=0.5, **shaped, **CENTRED)) == [0.25, 0.0, -0.25]
    pair = make_group([make_trajectory(i, num_tokens=n, reward=1.0) for i, n in enumerate([10, 20])])
    first, second = last_advantages(build(pair, advantage_estimator="reinforce_pp", **shaped))
    assert 10 * first == pytest.approx(-20 * second) and first > 0.7, "the mean over tokens is 0"
    long = replace(make_group([make_trajectory(1, num_tokens=10)]), baseline=make_trajectory(2, num_tokens=20))
    assert last_advantages(build(replace(long), advantage_estimator="remax", **shaped)) == [1.0 - (0.0 - 1.0)]


def test_a_reward_part_that_a_response_lacks_counts_as_zero() -> None:
    def advantages_of(*parts: dict[str, float]) -> list[float]:
        groups = [
            make_group([make_trajectory(i, reward_parts=one) for i, one in enumerate(parts[at : at + 2])], group_id=at)
            for at in (0, 2)
        ]
        return last_advantages(build(*groups, advantage_estimator="gdpo"))

    written_out = advantages_of({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 2.0}, {"a": 0.0, "b": 0.0})
    assert advantages_of({"a": 1.0}, {}, {"b": 2.0}, {"a": 0.0}) == written_out
    assert written_out[0] > 0 > written_out[1]
    with pytest.raises(ValueError, match="named parts of the reward, got none"):
        advantages_of({}, {}, {}, {})


# Rewards of turns, and greedy baselines


def test_reinforce_pp_normalises_what_is_still_to_come_over_the_tokens_of_the_step() -> None:
    groups = [
        make_group([in_turns(0, 1.0, 0.0, outcome=1.0, num_tokens=3)], group_id=0),
        make_group([in_turns(0, 0.0, outcome=0.0, num_tokens=5), make_trajectory(1, num_tokens=0, reward=9.0)]),
    ]
    batch = build(*groups, advantage_estimator="reinforce_pp")
    tokens = np.array([2.0] * 3 + [1.0] * 3 + [0.0] * 5)
    np.testing.assert_allclose(np.concatenate(advantages(batch)), (tokens - tokens.mean()) / tokens.std(), atol=1e-6)
    assert batch.excluded == {"no_generated_tokens": 1}


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp"])
def test_context_after_the_last_turn_changes_no_advantage(name: str) -> None:
    plain = in_turns(0, 1.0, 0.5, outcome=1.0)
    longer = make_trajectory(0, turns=(*plain.turns(), make_turn(4, [])), reward=plain.reward)
    first, second = (build(make_group([t, make_trajectory(1)]), advantage_estimator=name) for t in (plain, longer))
    assert advantages(first) == advantages(second)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "pass_at_k", "remax"])
def test_an_outcome_estimator_sees_the_sum_wherever_the_reward_was_given(name: Any) -> None:
    assert not ESTIMATORS[name].reward_to_go

    def of(first: Trajectory) -> list[list[float]]:
        group = make_group([first, in_turns(1, 0.0, 0.0, outcome=0.5)])
        return advantages(
            build(replace(group, baseline=in_turns(2, 0.25, 0.25, outcome=0.0)), advantage_estimator=name)
        )

    early = of(in_turns(0, 2.0, 0.0, outcome=1.0))
    assert early == of(in_turns(0, 0, 0, outcome=3))
    assert early[0][0] == early[0][-1] > early[1][0]


def test_remax_compares_with_the_baseline_which_is_never_trained_and_others_ignore() -> None:
    pair, baseline = make_group([make_trajectory(0), make_trajectory(1)]), make_trajectory(2, reward=0.75)
    assert advantages(build(replace(pair, baseline=baseline), advantage_estimator="remax")) == [[-0.75] * 4, [0.25] * 4]
    assert last_advantages(
        build(replace(make_group([make_trajectory(1)]), baseline=baseline), advantage_estimator="remax")
    ) == [0.25]
    assert content(build(pair)) == content(build(replace(pair, baseline=baseline)))


# Responses of several token sequences

LINEAR = tuple(
    make_turn(context, segments, first_token=100 * number, reward=reward)
    for number, (context, segments, reward) in enumerate(
        [(3, [(0, 2)], 0.5), (1, [(0, 1), (1, 2)], 0.0), (2, [(1, 1)], -1.0), (1, [(2, 4)], 0.25)]
    )
)
"""Four turns of one sequence."""
PLACES = st.sets(st.integers(1, len(LINEAR) - 1))


def cut(turns: Sequence[Turn], places: set[int]) -> tuple[Turn, ...]:
    """The same, where every turn in `places` begins a sequence with all that was said so far as its context."""
    found = list(turns)
    for place in places:
        said, turn = np.concatenate([turn.token_ids for turn in turns[:place]]), turns[place]
        found[place] = replace(
            turn,
            token_ids=np.concatenate([said, turn.token_ids]),
            is_generated=np.concatenate([np.zeros(len(said), np.bool_), turn.is_generated]),
            logprobs=np.concatenate([np.zeros(len(said), np.float32), turn.logprobs]),
            versions=np.concatenate([np.full(len(said), -1, np.int32), turn.versions]),
            begins_anew=True,
        )
    return tuple(found)


def cut_batch(places: set[int], *, num_ranks: int = 1, **algorithm: Any) -> TrainBatch:
    responses = [
        make_trajectory(0, turns=cut(LINEAR, places), reward=2.0),
        make_trajectory(1, num_tokens=5, reward=0.0),
    ]
    batch = build(make_group(responses), num_ranks=num_ranks, max_tokens=60, max_response_tokens=20, **algorithm)
    assert (batch.num_samples, batch.num_sequences) == (2, 2 + len(places))
    return batch


def trained(batch: TrainBatch, *names: str) -> list[tuple[Any, ...]]:
    """Every trained token with those columns, in an order that does not depend on packing."""
    columns = (
        np.concatenate([getattr(b, n)[b.loss_mask] for b in micro_batches(batch)]) for n in ("token_ids", *names)
    )
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


@given(
    PLACES,
    st.sampled_from(["grpo", "rloo", "reinforce", "reinforce_pp", "opo", "pass_at_k"]),
    st.sampled_from(AGGREGATIONS),
    st.integers(1, 3),
)
def test_where_a_response_is_cut_changes_nothing_for_its_tokens(
    places: set[int], name: str, aggregation: str, ranks: int
) -> None:
    how = {
        "advantage_estimator": name, "loss_aggregation": aggregation,
        "loss": "clip_cov", "cov_frac": 0.3, "cov_min": -9.0, "cov_max": 9.0,
    }  # fmt: skip
    columns = ("advantages", "versions", "behavior_logprobs", "loss_weights", "cov_selected")
    whole = trained(cut_batch(set(), **how), *columns)
    assert trained(cut_batch(places, num_ranks=ranks, **how), *columns) == whole
    assert any(selected for *_, selected in whole)


# What the learner gets to finish advantages


def test_turns_are_rewarded_at_their_last_token_and_the_outcome_at_the_last_of_all() -> None:
    turns = (make_turn(3, [(0, 2)], reward=0.5), make_turn(2, [(1, 3)], reward=-0.25))
    group = make_group([make_trajectory(0, turns=turns, reward=2.0)])
    (micro,) = micro_batches(build(group, advantage_estimator="gae", overlong_buffer_tokens=4, max_response_tokens=7))
    assert micro.token_rewards is not None and micro.token_rewards.dtype == np.float32
    np.testing.assert_array_equal(micro.token_rewards, [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 1.25], "half is shaping")
    assert not micro.advantages.any()


def test_every_sequence_knows_its_response_among_the_scored_ones() -> None:
    """Failed trajectories have no number; empty ones have one, and are not trained."""
    (batch,) = [cut_batch({2}, kl=IN_REWARD)]
    found = [(int(m.response_index[i]), r) for m in micro_batches(batch) if m.response_index is not None
             for i, r in enumerate(np.split(m.token_rewards, m.cu_seqlens[1:-1]))]  # fmt: skip
    assert sorted((response, rewards[rewards != 0].tolist()) for response, rewards in found) == [
        (0, [-1.0, 2.25]), (0, [0.5]), (1, []),
    ]  # fmt: skip
    empty = make_trajectory(1, turns=(make_turn(3, []),), reward=7.0)
    groups = [
        make_group([failed(0), empty, make_trajectory(2, reward=2.25)], group_id=0),
        make_group([make_trajectory(i, reward=float(10 + i)) for i in range(3)], group_id=1),
    ]
    batch = build(*groups, kl=IN_REWARD, num_ranks=2, max_tokens=8)
    final = build(*groups, kl=KlConfig(coef=0.1))
    assert final.group_rewards is None and all(m.token_rewards is None for m in micro_batches(final))
    assert batch.group_rewards is not None
    assert [group.rewards_G.tolist() for group in batch.group_rewards] == [[7.0, 2.25], [10.0, 11.0, 12.0]]
    flat = np.concatenate([group.rewards_G for group in batch.group_rewards])
    seen = np.concatenate([m.response_index for m in micro_batches(batch) if m.response_index is not None])
    sums = np.concatenate([np.add.reduceat(m.token_rewards, m.cu_seqlens[:-1]) for m in micro_batches(batch)])
    assert sorted(seen[seen >= 0].tolist()) == [1, 2, 3, 4]
    np.testing.assert_allclose(sums[seen >= 0], flat[seen[seen >= 0]])


# Tokens selected for their covariance


def with_noise(groups: Sequence[Group], seed: int) -> list[Group]:
    """Log-probs that differ from token to token."""
    rng = np.random.default_rng(seed)

    def noisy(t: Trajectory) -> Trajectory:
        noise = -rng.exponential(1.0, len(t.logprobs)).astype(np.float32)
        return replace(t, logprobs=np.where(t.loss_mask, noise, t.logprobs))

    return [replace(g, trajectories=tuple(map(noisy, g.trajectories))) for g in groups]


@pytest.mark.parametrize("loss", [CLIP_COV, KL_COV])
def test_a_fraction_of_the_tokens_of_the_whole_step_is_selected(loss: dict[str, Any]) -> None:
    groups = with_noise(random_groups(2, num_groups=4, group_size=4, max_tokens=30), 2)
    batch = build(*groups, num_ranks=3, max_tokens=60, **loss)
    selected = sum(int(m.cov_selected.sum()) for m in micro_batches(batch) if m.cov_selected is not None)
    assert selected == int(0.1 * batch.num_loss_tokens) > 0
    assert all(m.cov_selected is None for m in micro_batches(build(*groups)))


# Responses that timed out

TIME_LIMIT = 2500


def what_timeouts_do(on_timeout: str, *, long_is_right: float) -> tuple[float, float]:
    """Of a policy whose responses are long half of the time: a lognormal number of tokens with a median of 2,000, of
    which 39% come too late, where short ones have 200 and are right in 30% of all cases. (Share of long ones among the
    trained, mean push of their advantages towards long ones.)"""
    rng, size = np.random.default_rng(0), (2000, 8)
    is_long = rng.random(size) < 0.5
    is_right = rng.random(size) < np.where(is_long, long_is_right, 0.3)
    is_late = is_long & (rng.lognormal(np.log(2000), 0.8, size) > TIME_LIMIT) & (on_timeout != "no limit")
    is_kept = ~(is_late & (on_timeout == "drop"))
    rewards = np.where(is_late, 0.0, is_right)  # one that was cut has no answer yet, so scoring it gives 0, too
    groups = [
        make_group(
            [
                make_trajectory(i, num_tokens=1, reward=float(reward), status="completed" if kept else "failed")
                for i, (reward, kept) in enumerate(zip(*of_group, strict=True))
            ],
            group_id=group,
        )
        for group, of_group in enumerate(zip(rewards, is_kept, strict=True))
    ]
    is_trained = is_kept & (is_kept.sum(axis=1, keepdims=True) > 1)
    long_ones = is_long[is_trained]
    pushes = (long_ones - 0.5) * np.array(last_advantages(build(*groups, max_tokens=10**6, **CENTRED)))
    return float(long_ones.mean()), float(pushes.mean())


@pytest.mark.full
@pytest.mark.parametrize(
    ("on_timeout", "share", "if_better", "if_equal"),
    [("no limit", 0.50, 0.066, 0.0), ("drop", 0.38, 0.060, 0.0), ("zero", 0.50, 0.014, -0.025)],
)
def test_dropped_timeouts_hide_long_responses_and_scored_ones_teach_to_be_short(
    on_timeout: str, share: float, if_better: float, if_equal: float
) -> None:
    """The figures of docs/agents.md, for long responses that are right in 60% of all cases, or in 30% as short ones."""
    found = [what_timeouts_do(on_timeout, long_is_right=right) for right in (0.6, 0.3)]
    assert [one[0] for one in found] == pytest.approx([share] * 2, abs=0.01)
    assert [one[1] for one in found] == pytest.approx([if_better, if_equal], abs=0.006)  # of noise
