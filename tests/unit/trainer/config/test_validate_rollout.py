"""How many requests an engine gets, and evaluation: what goes together, and what is printed at the start."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.fleet.adaptive_limit import Bounds
from rollout.fleet.consolidation import Repacking
from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.compose import load_config
from trainer.config.describe import describe_rollout
from trainer.driver.actors import concurrency_of, most_at_once, repacking_of
from trainer.errors import ConfigurationError

ADAPTIVE = {"rollout__concurrency": "adaptive"}
REPACKED = {"rollout__repack_below": 8, "rollout__num_replicas": 2}
SAMPLED = {"trainer__eval_samples": 4, "trainer__eval_temperature": 0.7}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"rollout__min_concurrency": 4}, ["rollout.min_concurrency"]),
        (ADAPTIVE | {"rollout__min_concurrency": 4}, []),
        (ADAPTIVE | {"rollout__min_concurrency": 256}, ["rollout.min_concurrency"]),
        (ADAPTIVE | {"rollout__min_concurrency": 9, "rollout__max_concurrency": 8}, ["rollout.min_concurrency"]),
        ({"rollout__max_concurrency": 64}, []),
        (ADAPTIVE | {"rollout__max_concurrency": 256}, []),
        (ADAPTIVE | {"rollout__max_concurrency": 257}, ["rollout.max_concurrency"]),
        ({"rollout__max_concurrency": 257}, []),
        ({"rollout__max_concurrency": 1, "rollout__num_workers": 2}, ["rollout.max_concurrency"]),
        ({"rollout__repack_below": 8}, ["rollout.repack_below"]),
        (REPACKED, []),
        (REPACKED | {"mode__max_staleness": 0, "mode__name": "sync"}, ["rollout.repack_below"]),
        (REPACKED | {"mode__max_staleness": 0, "mode__name": "sync", "rollout__seed_requests": False}, []),
        (REPACKED | {"rollout__seed_requests": True}, ["rollout.repack_below"]),
        ({"rollout__stop": ["</s>", "```"], "rollout__stop_token_ids": [0, 7]}, []),
        ({"rollout__stop": ["</s>", ""]}, ["rollout.stop"]),
        ({"rollout__stop_token_ids": [7, -1]}, ["rollout.stop_token_ids"]),
        (SAMPLED, []),
        (SAMPLED | {"trainer__eval_pass_k": 4}, []),
        (SAMPLED | {"trainer__eval_pass_k": 5}, ["trainer.eval_pass_k"]),
        ({"trainer__eval_samples": 4}, ["trainer.eval_samples"]),
        ({"trainer__eval_temperature": 0.7}, []),
        ({"trainer__eval_temperature": 0.005}, ["trainer.eval_temperature"]),
        ({"trainer__eval_temperature": 0.7, "trainer__eval_top_p": 0.9}, []),
        ({"trainer__eval_top_p": 0.9}, ["trainer.eval_top_p"]),
        (SAMPLED | {"task__eval_path": ""}, ["trainer.eval_samples", "trainer.eval_temperature"]),
        (
            {"trainer__eval_every": 0, "trainer__eval_at_start": False, "trainer__eval_blocking": True},
            ["trainer.eval_blocking"],
        ),
        ({"trainer__eval_blocking": True}, []),
        ({"trainer__eval_timeout_s": 599.0}, ["trainer.eval_timeout_s"]),
        ({"trainer__eval_timeout_s": 600.0}, []),
        ({"trainer__eval_timeout_s": 600.0, "task__eval_path": ""}, ["trainer.eval_timeout_s"]),
        ({"trainer__eval_timeout_s": 599.0, "task__agent": "some.agent", "task__agent_timeout_s": 60.0}, []),
        ({"algorithm__max_refills_per_step": 3}, []),
    ],
)
def test_what_is_refused(keys: dict[str, Any], refused: list[str]) -> None:
    keys = {"task__eval_path": "eval.jsonl", **keys}
    assert keys_refused(config_with(**keys)) == refused


def test_the_mode_that_shares_devices_moves_no_requests() -> None:
    with pytest.raises(ConfigurationError, match="all engines leave their devices at the same moment"):
        load_config(["mode=colocated", "rollout.num_replicas=2", "learner.num_ranks=2", "rollout.repack_below=8"])


def test_moves_fill_no_engine_beyond_what_it_runs_at_once() -> None:
    config = config_with(rollout__repack_below=8, rollout__max_num_seqs=100)
    assert repacking_of(config.rollout) == Repacking(below=8, most=100)
    assert repacking_of(config_with().rollout) is None


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        ({}, None),
        ({"max_concurrency": 64}, Bounds(lowest=64, highest=64)),
        ({"max_concurrency": 64, "num_workers": 3}, Bounds(lowest=21, highest=21)),
        ({"concurrency": "adaptive"}, Bounds(lowest=1, highest=256)),
        ({"concurrency": "adaptive", "min_concurrency": 16, "num_workers": 2}, Bounds(lowest=8, highest=128)),
        ({"concurrency": "adaptive", "max_concurrency": 100}, Bounds(lowest=1, highest=100)),
    ],
)
def test_each_worker_gets_its_share(keys: dict[str, Any], bounds: Bounds | None) -> None:
    config = config_with(**{f"rollout__{name}": value for name, value in keys.items()})
    assert concurrency_of(config.rollout) == bounds


def test_an_evaluation_sends_an_engine_no_more_than_it_takes() -> None:
    assert most_at_once(config_with(rollout__max_num_seqs=100).rollout) == 100
    assert most_at_once(config_with(rollout__max_num_seqs=100, rollout__max_concurrency=64).rollout) == 64
    assert most_at_once(config_with(rollout__max_num_seqs=100, rollout__max_concurrency=640).rollout) == 100


@pytest.mark.parametrize(
    "option", ["rollout.temperature=0.005", "rollout.temperature=2.5", "trainer.eval_temperature=3"]
)
def test_a_temperature_that_vllm_refuses_or_changes_is_refused_at_the_start(option: str) -> None:
    with pytest.raises(ConfigurationError, match=option.partition("=")[0].replace(".", r"\.")):
        load_config([option])


def test_the_line_at_the_start_says_what_is_in_force() -> None:
    config = load_config(
        [
            "rollout.concurrency=adaptive",
            "rollout.max_num_seqs=128",
            "trainer.eval_samples=4",
            "trainer.eval_temperature=0.7",
            "trainer.eval_top_p=0.95",
        ]
    )
    assert describe_rollout(config) == (
        "adaptive, 1 to 128 requests per engine; evaluation on builtin:arithmetic: 4 answers per prompt at temperature "
        "0.7 and top_p 0.95, pass@4"
    )
    config = load_config(["rollout.max_concurrency=32", "trainer.eval_blocking=true"])
    assert describe_rollout(config) == (
        "at most 32 requests per engine; evaluation on builtin:arithmetic: one greedy answer per prompt, pass@1, the "
        "learner waits for it"
    )
    assert describe_rollout(config_with(task__eval_path="")) == "all requests at once; no evaluation"
