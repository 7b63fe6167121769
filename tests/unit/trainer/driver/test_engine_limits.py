"""How many requests an engine gets from each rollout worker, and from an evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.consolidation import ConsolidationRule
from trainer.config.schema import RolloutConfig
from trainer.driver.actors import concurrency_of, consolidation_of, most_at_once


def test_moves_fill_no_engine_beyond_what_it_runs_at_once() -> None:
    config = RolloutConfig(repack_below=8, max_num_seqs=100)
    assert consolidation_of(config) == ConsolidationRule(below=8, most=100)
    assert consolidation_of(RolloutConfig()) is None


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        ({}, None),
        ({"max_concurrency": 64}, LimitRange(lowest=64, highest=64)),
        ({"max_concurrency": 64, "num_workers": 3}, LimitRange(lowest=21, highest=21)),
        ({"concurrency": "adaptive"}, LimitRange(lowest=1, highest=256)),
        ({"concurrency": "adaptive", "min_concurrency": 16, "num_workers": 2}, LimitRange(lowest=8, highest=128)),
        ({"concurrency": "adaptive", "max_concurrency": 100}, LimitRange(lowest=1, highest=100)),
    ],
)
def test_each_worker_gets_its_share(keys: dict[str, Any], bounds: LimitRange | None) -> None:
    assert concurrency_of(RolloutConfig(**keys)) == bounds


def test_an_evaluation_sends_an_engine_no_more_than_it_takes() -> None:
    assert most_at_once(RolloutConfig(max_num_seqs=100)) == 100
    assert most_at_once(RolloutConfig(max_num_seqs=100, max_concurrency=64)) == 64
    assert most_at_once(RolloutConfig(max_num_seqs=100, max_concurrency=640)) == 100
