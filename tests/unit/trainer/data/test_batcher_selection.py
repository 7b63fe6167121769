"""Tokens held back for their covariance are chosen once per step, whatever the order and the split."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.trainer.data.conftest import make_group, make_trajectory, random_groups
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.build import BatchLimits, build_train_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Group, Trajectory
    from trainer.data.batch import MicroBatch

CLIP_COV = AlgorithmConfig(loss="clip_cov", cov_frac=0.1, cov_min=-0.5, cov_max=0.5)
KL_COV = AlgorithmConfig(loss="kl_cov", cov_frac=0.1)


def with_noise(groups: Sequence[Group], seed: int) -> list[Group]:
    """Log-probs that differ from token to token."""
    rng = np.random.default_rng(seed)

    def noisy(t: Trajectory) -> Trajectory:
        noise = -rng.exponential(1.0, len(t.logprobs)).astype(np.float32)
        return replace(t, logprobs=np.where(t.loss_mask, noise, t.logprobs))

    return [replace(g, trajectories=tuple(map(noisy, g.trajectories))) for g in groups]


def micro_batches(groups: Sequence[Group], config: AlgorithmConfig, *, ranks: int, tokens: int) -> list[MicroBatch]:
    limits = BatchLimits(num_ranks=ranks, max_tokens_per_micro_batch=tokens, max_response_tokens=100)
    batch = build_train_batch(groups, step=4, algorithm=config, limits=limits).batch
    return [micro for rank in batch.micro_batches for micro in rank]


def chosen(parts: Sequence[MicroBatch]) -> list[tuple[bytes, bytes, list[bool]]]:
    """Every sequence with its selection, in a canonical order."""
    found = []
    for part in parts:
        assert part.cov_selected is not None
        assert part.cov_selected.shape == part.loss_mask.shape and not part.cov_selected[~part.loss_mask].any()
        for a, b in zip(part.cu_seqlens[:-1], part.cu_seqlens[1:], strict=True):
            if part.loss_mask[a:b].any():
                key = part.token_ids[a:b].tobytes(), part.behaviour_logprobs[a:b].tobytes()
                found.append((*key, part.cov_selected[a:b].tolist()))
    return sorted(found)


@pytest.mark.parametrize("config", [CLIP_COV, KL_COV], ids=["clip_cov", "kl_cov"])
def test_selection_does_not_depend_on_split_or_order(config: AlgorithmConfig) -> None:
    for seed in range(5):
        groups = with_noise(random_groups(seed, num_groups=4, group_size=4, max_tokens=30), seed)
        whole = chosen(micro_batches(groups, config, ranks=1, tokens=10_000))
        assert chosen(micro_batches(groups, config, ranks=3, tokens=60)) == whole
        assert chosen(micro_batches(groups[::-1], config, ranks=2, tokens=80)) == whole
        num_tokens = sum(int(m.loss_mask.sum()) for m in micro_batches(groups, config, ranks=1, tokens=10_000))
        assert sum(sum(mask) for *_, mask in whole) == int(0.1 * num_tokens)


def test_kl_cov_holds_back_the_likeliest_token_of_the_best_answer() -> None:
    group = make_group([make_trajectory(0, num_tokens=5, reward=1.0), make_trajectory(1, num_tokens=5, reward=0.0)])
    (micro,) = micro_batches(with_noise([group], 0), KL_COV, ranks=1, tokens=1000)
    assert micro.cov_selected is not None
    (index,) = np.flatnonzero(micro.cov_selected)
    logprobs, advantages = micro.behaviour_logprobs, micro.advantages
    centred = logprobs - logprobs[micro.loss_mask].mean()
    assert centred[index] * advantages[index] == pytest.approx((centred * advantages)[micro.loss_mask].max())


def test_other_losses_select_nothing_and_fillers_carry_an_empty_selection() -> None:
    groups = random_groups(1, num_groups=2, group_size=4, max_tokens=20)
    assert all(m.cov_selected is None for m in micro_batches(groups, AlgorithmConfig(), ranks=1, tokens=1000))
    failed = [make_group([make_trajectory(i, status="failed") for i in range(2)])]
    (filler,) = micro_batches(failed, KL_COV, ranks=1, tokens=1000)
    assert filler.cov_selected is not None and not filler.cov_selected.any()
