"""Trajectories of several token sequences: what is cut where changes nothing but the context of what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.data.conftest import make_group, make_trajectory, make_turn
from trainer.algorithms.advantages import step_advantages
from trainer.config.algorithm import AlgorithmConfig, KlConfig
from trainer.data.build import BatchLimits, build_samples, build_train_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Trajectory, Turn
    from trainer.data.batch import MicroBatch

LINEAR = tuple(
    make_turn(context, segments, first_token=100 * number, reward=reward)
    for number, (context, segments, reward) in enumerate(
        [(3, [(0, 2)], 0.5), (1, [(0, 1), (1, 2)], 0.0), (2, [(1, 1)], -1.0), (1, [(2, 4)], 0.25)]
    )
)
"""Four turns of one sequence."""


def cut(turns: Sequence[Turn], places: set[int]) -> tuple[Turn, ...]:
    """The same, where every turn in `places` begins anew with all that was said so far as its context."""
    found = list(turns)
    for place in places:
        said = np.concatenate([turn.token_ids for turn in turns[:place]])
        turn = turns[place]
        found[place] = replace(
            turn,
            token_ids=np.concatenate([said, turn.token_ids]),
            is_generated=np.concatenate([np.zeros(len(said), np.bool_), turn.is_generated]),
            logprobs=np.concatenate([np.zeros(len(said), np.float32), turn.logprobs]),
            versions=np.concatenate([np.full(len(said), -1, np.int32), turn.versions]),
            begins_anew=True,
        )
    return tuple(found)


def trajectories(places: set[int]) -> list[Trajectory]:
    return [make_trajectory(0, turns=cut(LINEAR, places), reward=2.0), make_trajectory(1, num_tokens=5, reward=0.0)]


def micro_batches(places: set[int], *, ranks: int = 1, **algorithm: Any) -> list[MicroBatch]:
    limits = BatchLimits(num_ranks=ranks, max_tokens_per_micro_batch=60, max_response_tokens=20)
    config = AlgorithmConfig(**algorithm)
    built = build_train_batch([make_group(trajectories(places))], step=3, algorithm=config, limits=limits)
    assert (built.batch.num_samples, built.num_sequences) == (2, 2 + len(places))
    return [batch for rank in built.batch.micro_batches for batch in rank]


def trained(batches: Sequence[MicroBatch], *names: str) -> list[tuple[Any, ...]]:
    """What every trained token comes with, in an order that does not depend on packing."""
    columns = [np.concatenate([getattr(b, name)[b.loss_mask] for b in batches]).tolist() for name in names]
    tokens = np.concatenate([b.token_ids[b.loss_mask] for b in batches]).tolist()
    return sorted(zip(tokens, *columns, strict=True))


PLACES = st.sets(st.integers(1, len(LINEAR) - 1))


@given(PLACES, st.sampled_from(["grpo", "rloo", "reinforce", "reinforce_pp", "opo", "pass_at_k"]), st.integers(1, 3))
def test_cuts_change_neither_advantages_nor_versions_nor_log_probs(places: set[int], name: str, ranks: int) -> None:
    columns = ("advantages", "versions", "behaviour_logprobs", "loss_weights")
    whole = trained(micro_batches(set(), advantage=name), *columns)
    assert trained(micro_batches(places, advantage=name, ranks=ranks), *columns) == whole


@given(
    PLACES, st.sampled_from(["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"])
)  # fmt: skip
def test_an_answer_has_one_voice_however_many_sequences_it_is(places: set[int], aggregation: str) -> None:
    whole = trained(micro_batches(set(), aggregation=aggregation), "loss_weights")
    assert trained(micro_batches(places, aggregation=aggregation), "loss_weights") == whole


@given(PLACES)
def test_the_lottery_of_an_answer_goes_on_through_its_sequences(places: set[int]) -> None:
    config = {"loss": "clip_cov", "cov_frac": 0.3, "cov_min": -9.0, "cov_max": 9.0}
    whole = trained(micro_batches(set(), **config), "cov_selected")
    assert trained(micro_batches(places, **config), "cov_selected") == whole
    assert any(selected for _, selected in whole)


def test_every_sequence_knows_its_answer_and_the_outcome_comes_last() -> None:
    in_reward = KlConfig(coef=0.1, placement="reward")
    (batch,) = micro_batches({2}, advantage="grpo", kl=in_reward)
    assert batch.unfinished is not None
    assert sorted(batch.unfinished.answers.tolist()) == [0, 0, 1]
    by_sequence = [
        rewards[rewards != 0].tolist() for rewards in np.split(batch.unfinished.rewards, batch.cu_seqlens[1:-1])
    ]
    assert sorted(by_sequence) == [[], [-1.0, 2.25], [0.5]]


def test_a_later_sequence_that_begins_with_a_generated_token_is_refused() -> None:
    turns = (LINEAR[0], replace(make_turn(0, [(0, 2)]), begins_anew=True))
    group = make_group([make_trajectory(0, turns=turns), make_trajectory(1)])
    with pytest.raises(ValueError, match="begins with a generated token"):
        build_samples([group], algorithm=AlgorithmConfig(), max_response_tokens=20, advantage_fn=step_advantages)
