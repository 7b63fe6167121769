"""An estimator by dotted path inside the batch of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.trainer.data.conftest import make_group, make_trajectory, random_groups
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.build import BatchLimits, build_train_batch

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
from trainer.config.algorithm import EstimatorTraits, with_traits

def centred(groups, *, scale):
    return [scale * (group.rewards_G - group.rewards_G.mean()) for group in groups]

@with_traits(EstimatorTraits(needs_peers=False))
def alone(groups):
    return [group.rewards_G + 5.0 for group in groups]
"""
LIMITS = BatchLimits(num_ranks=1, max_tokens_per_micro_batch=10_000, max_response_tokens=100)


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_batch_estimators_for_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def own(name: str, **args: float) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=f"own_batch_estimators_for_test.{name}", advantage_args=args)


def test_every_token_gets_what_the_estimator_gave_its_answer() -> None:
    groups = random_groups(3, num_groups=5, group_size=4, max_tokens=9)
    named = AlgorithmConfig(normalize_by_std=False)
    built = [build_train_batch(groups, step=9, algorithm=a, limits=LIMITS) for a in (named, own("centred", scale=2.0))]
    ((expected,),), ((got,),) = (one.batch.micro_batches for one in built)
    np.testing.assert_allclose(got.advantages, 2.0 * expected.advantages, rtol=1e-6)
    assert np.abs(got.advantages).max() > 0


def test_a_lone_answer_is_left_out_unless_the_estimator_takes_it() -> None:
    groups = [make_group([make_trajectory(0), make_trajectory(1, status="failed", reward=float("nan"))])]
    careful = build_train_batch(groups, step=0, algorithm=own("centred", scale=1.0), limits=LIMITS)
    assert (careful.batch.num_samples, careful.excluded["no_peer_in_group"]) == (0, 1)
    alone = build_train_batch(groups, step=0, algorithm=own("alone"), limits=LIMITS)
    assert alone.batch.num_samples == 1
    assert alone.batch.micro_batches[0][0].advantages.max() == 5.0
