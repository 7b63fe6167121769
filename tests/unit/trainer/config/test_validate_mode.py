"""Staleness that a mode fixes, and what goes together with devices that learners and engines share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.load import load_config
from trainer.config.validate_mode import pairing_problems

SHARED = {
    "mode__name": "colocated",
    "mode__max_staleness": 0,
    "mode__in_flight": "abort",
    "weight_sync__commit": "inplace",
    "weight_sync__num_slots": 1,
    "trainer__eval_blocking": True,
    "learner__num_ranks": 4,
    "rollout__num_replicas": 2,
    "rollout__tensor_parallel_size": 2,
    "task__eval_path": "eval.jsonl",
}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({}, []),
        ({"mode__max_staleness": 2}, []),
        ({"rollout__tensor_parallel_size": 1}, []),
        ({"mode__in_flight": "keep"}, ["mode.in_flight"]),
        (
            {"weight_sync__commit": "staged", "weight_sync__num_slots": 2},
            ["weight_sync.commit", "weight_sync.num_slots"],
        ),
        ({"trainer__eval_blocking": False}, ["trainer.eval_blocking"]),
        ({"trainer__eval_blocking": False, "trainer__eval_every": 0, "trainer__eval_at_start": False}, []),
        ({"trainer__eval_every": 0, "trainer__eval_at_start": False}, []),
        ({"task__eval_path": ""}, []),
        ({"weight_sync__transport": "nccl"}, ["weight_sync.transport"]),
        ({"weight_sync__transport": "ipc"}, []),
    ],
)
def test_what_shared_devices_refuse(keys: dict[str, Any], refused: list[str]) -> None:
    assert keys_refused(config_with(**{**SHARED, **keys})) == refused


def test_accelerators_have_one_rank_and_one_worker_each() -> None:
    assert not list(pairing_problems(config_with(**SHARED)))
    (problem,) = pairing_problems(config_with(**{**SHARED, "rollout__tensor_parallel_size": 1}))
    assert problem.key == "learner.num_ranks" and "2 * 1 = 2" in problem.allowed


def test_the_group_sets_what_it_needs_and_own_keys_still_win() -> None:
    config = load_config(["mode=colocated", "learner.num_ranks=1", "mode.max_staleness=1"])
    assert config.mode.shares_devices and config.mode.max_staleness == 1
    assert (config.weight_sync.commit, config.weight_sync.num_slots) == ("inplace", 1)
    assert config.trainer.eval_blocking


def test_other_modes_share_nothing() -> None:
    for mode in ("async", "one_step_off", "sync"):
        assert not load_config([f"mode={mode}"]).mode.shares_devices
