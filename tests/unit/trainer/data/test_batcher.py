"""The batch of a step: nothing is lost, the loss does not depend on the split, and the metrics are what they say."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainer.data.conftest import make_group, make_trajectory, make_turn, random_groups
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.build import BatchLimits, batch_stats, build_train_batch

if TYPE_CHECKING:
    from trainer.data.batch import MicroBatch, TrainBatch

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def limits(num_ranks: int = 1, max_tokens: int = 1000) -> BatchLimits:
    return BatchLimits(num_ranks=num_ranks, max_tokens_per_micro_batch=max_tokens, max_response_tokens=100)


def micro_batches(batch: TrainBatch) -> list[MicroBatch]:
    return [micro for rank in batch.micro_batches for micro in rank]


def token_losses(micro: MicroBatch) -> np.ndarray:
    """Any function of a token's own fields will do."""
    return np.cos(micro.token_ids) * micro.advantages + micro.behaviour_logprobs


def sequences(batch: TrainBatch) -> list[tuple[bytes, ...]]:
    """Every sequence that is not a filler, all fields, in a canonical order."""
    names = ("token_ids", "loss_mask", "behaviour_logprobs", "versions", "advantages", "loss_weights")
    return sorted(
        tuple(getattr(micro, name)[a:b].tobytes() for name in names)
        for micro in micro_batches(batch)
        for a, b in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True)
        if micro.loss_mask.any()
    )


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(1, 80),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_the_loss_of_a_step_does_not_depend_on_the_split(
    seed: int, num_ranks: int, max_tokens: int, aggregation: str
) -> None:
    groups = random_groups(seed, num_groups=4, group_size=4, max_tokens=30)
    algorithm = AlgorithmConfig(aggregation=aggregation)  # type: ignore[arg-type]
    whole = build_train_batch(groups, step=0, algorithm=algorithm, limits=limits())
    split = build_train_batch(groups, step=0, algorithm=algorithm, limits=limits(num_ranks, max_tokens))
    assert sequences(split.batch) == sequences(whole.batch)
    assert len({len(rank) for rank in split.batch.micro_batches}) == 1
    loss = [
        sum(float(np.sum(m.loss_weights.astype(np.float64) * token_losses(m))) for m in micro_batches(built.batch))
        for built in (whole, split)
    ]
    assert loss[1] == pytest.approx(loss[0], rel=1e-9, abs=1e-12)
    num_trajectories = sum(len(g.trajectories) for g in groups)
    assert split.batch.num_samples + sum(split.excluded.values()) == num_trajectories


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), aggregation=st.sampled_from(AGGREGATIONS))
def test_weights_are_the_mean_that_the_aggregation_names(seed: int, aggregation: str) -> None:
    """Against a direct computation over the trajectories."""
    groups = random_groups(seed, num_groups=3, group_size=4, max_tokens=12)
    algorithm = AlgorithmConfig(aggregation=aggregation, advantage="reinforce")  # type: ignore[arg-type]
    batch = build_train_batch(groups, step=0, algorithm=algorithm, limits=limits(2, 40)).batch
    per_sequence = [[t.reward] * t.num_generated_tokens for g in groups for t in g.trajectories if t.status != "failed"]
    means = {
        "token_mean": lambda: np.mean(np.concatenate(per_sequence)),
        "seq_mean_token_mean": lambda: np.mean([np.mean(s) for s in per_sequence]),
        "seq_mean_token_sum": lambda: np.mean([np.sum(s) for s in per_sequence]),
        "token_sum": lambda: np.sum(np.concatenate(per_sequence)),
        "seq_mean_token_sum_norm": lambda: np.mean([np.sum(s) / 100 for s in per_sequence]),
    }
    weighted = sum(float(np.sum(m.loss_weights.astype(np.float64) * m.advantages)) for m in micro_batches(batch))
    assert weighted == pytest.approx(means[aggregation](), rel=1e-5, abs=1e-6)
    if aggregation in {"token_mean", "seq_mean_token_mean"}:
        assert sum(float(m.loss_weights.sum(dtype=np.float64)) for m in micro_batches(batch)) == pytest.approx(
            1, rel=1e-5
        )
    assert all((m.loss_weights[~m.loss_mask] == 0).all() for m in micro_batches(batch))


def test_packed_sequences_keep_their_boundaries() -> None:
    groups = [make_group([make_trajectory(0, num_tokens=2), make_trajectory(1, num_tokens=5)])]
    built = build_train_batch(groups, step=7, algorithm=AlgorithmConfig(), limits=limits())
    (micro,) = micro_batches(built.batch)
    assert micro.cu_seqlens.tolist() == [0, 5, 13]
    assert micro.cu_seqlens.dtype == np.int32
    assert micro.token_ids.tolist() == [*range(10, 15), *range(110, 118)]
    assert np.flatnonzero(micro.loss_mask).tolist() == [3, 4, 8, 9, 10, 11, 12]
    assert (built.batch.step, built.batch.num_samples) == (7, 2)
    assert (built.batch.num_tokens, built.batch.num_loss_tokens) == (13, 7)
    assert built.num_fillers == 0


def test_a_step_without_a_single_usable_trajectory_is_all_fillers() -> None:
    failed = [make_trajectory(i, status="failed", reward=float("nan")) for i in range(2)]
    built = build_train_batch([make_group(failed)], step=0, algorithm=AlgorithmConfig(), limits=limits(num_ranks=2))
    assert (built.batch.num_samples, built.batch.num_loss_tokens, built.num_fillers) == (0, 0, 2)
    assert built.excluded == {"failed": 2}
    for micro in micro_batches(built.batch):
        assert micro.cu_seqlens.tolist() == [0, len(micro.token_ids)]
        assert not micro.loss_mask.any()
        assert not micro.loss_weights.any()


def test_metrics_are_weighted_by_token_where_they_say_so() -> None:
    mixed = make_trajectory(0, turns=(make_turn(3, [(4, 3), (6, 1)]),), reward=0.0, reward_parts={"format": 1.0})
    cut = make_trajectory(1, num_tokens=8, version=6, reward=1.0, status="truncated", reward_parts={"format": 0.0})
    failed = make_trajectory(2, num_tokens=0, reward=float("nan"), status="failed")
    same = [make_trajectory(i, num_tokens=2, version=7, reward=0.5) for i in range(2)]
    stats = batch_stats([make_group([mixed, cut, failed], start_version=4), make_group(same, start_version=7)], 7)
    assert stats == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(np.std([0, 1, 0.5, 0.5])),
        "reward/part/format": 0.5,
        "reward/zero_variance_frac": 0.5,
        "response/tokens_mean": pytest.approx((4 + 8 + 0 + 2 + 2) / 5),
        "response/tokens_max": 8.0,
        "response/truncated_frac": 0.2,
        "staleness/group_mean": 1.5,
        "staleness/group_max": 3.0,
    }
    assert all(type(value) is float for value in stats.values())


def test_undefined_metrics_are_absent() -> None:
    failed = make_group([make_trajectory(0, num_tokens=0, status="failed", reward=float("nan"))])
    stats = batch_stats([failed], 0)
    assert not {"reward/mean", "reward/std"} & stats.keys()
    assert batch_stats([], 0) == {}


def test_a_step_of_256_short_samples_is_built_in_milliseconds() -> None:
    groups = random_groups(0, num_groups=32, group_size=8, max_tokens=10)
    elapsed = []
    for _ in range(7):
        start = time.perf_counter()
        build_train_batch(groups, step=0, algorithm=AlgorithmConfig(), limits=limits(2, 16384))
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
