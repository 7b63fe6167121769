"""Staleness that a mode fixes, and what goes together with devices that learners and engines share."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.compose import load_config
from trainer.config.describe import describe_rollout
from trainer.config.presets import config_names, groups, packaged_configs
from trainer.config.rules import pairing_problems
from trainer.errors import ConfigurationError

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

OWN_STALENESS = {"cispo_7b": 4, "dapo_7b": 4, "gspo_7b": 3, "reinforce_pp_7b": 2}
"""Shipped files that write S down themselves; it wins over that of a mode."""


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


@pytest.mark.parametrize("mode", groups([packaged_configs()])["mode"])
@pytest.mark.parametrize("name", config_names(packaged_configs()))
def test_every_shipped_configuration_takes_every_mode_or_says_which_key_makes_it(name: str, mode: str) -> None:
    asked = [f"--config-name={name}", "device=cuda", f"mode={mode}"]
    is_refused = name in OWN_STALENESS and mode in ("sync", "one_step_off")
    if is_refused:
        with pytest.raises(ConfigurationError) as caught:
            load_config(asked)
        (problem,) = caught.value.problems
        assert problem.key == "mode.max_staleness" and "--config-name" in problem.allowed
        asked += re.findall(r"mode\.max_staleness=\d", problem.do)
    config = load_config(asked)
    of_mode = {"async": 1, "one_step_off": 1, "sync": 0, "colocated": 0}[mode]
    staleness = of_mode if is_refused else OWN_STALENESS.get(name, of_mode)
    assert (config.mode.name, config.mode.max_staleness) == (mode, staleness)
    warned = f"colocated, S = {staleness}: answers may span steps (mode.max_staleness=0 is on policy); "
    assert describe_rollout(config).startswith(warned) == (mode == "colocated" and staleness > 0)


def test_a_colocated_run_on_policy_is_told_nothing_of_it() -> None:
    told = describe_rollout(load_config(["mode=colocated", "learner.num_ranks=1"]))
    evaluation = "evaluation on builtin:arithmetic: one greedy answer per prompt, pass@1, the learner waits for it"
    assert told == f"all requests at once; {evaluation}"
