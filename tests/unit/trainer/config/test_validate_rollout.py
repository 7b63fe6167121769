"""How many requests an engine gets, and evaluation: what goes together, and what is printed at the start."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.engine.concurrency import Bounds
from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.load import load_config
from trainer.config.objective import describe_rollout
from trainer.pipeline.compose import concurrency_of

ADAPTIVE = {"rollout__concurrency": "adaptive"}
SAMPLED = {"trainer__eval_samples": 4, "trainer__eval_temperature": 0.7}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"rollout__min_concurrency": 4}, ["rollout.min_concurrency"]),
        (ADAPTIVE | {"rollout__min_concurrency": 4}, []),
        (ADAPTIVE | {"rollout__min_concurrency": 256}, ["rollout.min_concurrency"]),
        (ADAPTIVE | {"rollout__min_concurrency": 9, "rollout__max_concurrency": 8}, ["rollout.min_concurrency"]),
        ({"rollout__max_concurrency": 64}, []),
        ({"rollout__max_concurrency": 1, "rollout__num_workers": 2}, ["rollout.max_concurrency"]),
        (SAMPLED, []),
        (SAMPLED | {"trainer__eval_pass_k": 4}, []),
        (SAMPLED | {"trainer__eval_pass_k": 5}, ["trainer.eval_pass_k"]),
        ({"trainer__eval_samples": 4}, ["trainer.eval_samples"]),
        ({"trainer__eval_temperature": 0.7}, []),
        (SAMPLED | {"task__eval_path": ""}, ["trainer.eval_samples", "trainer.eval_temperature"]),
        (
            {"trainer__eval_every": 0, "trainer__eval_at_start": False, "trainer__eval_blocking": True},
            ["trainer.eval_blocking"],
        ),
        ({"trainer__eval_blocking": True}, []),
    ],
)
def test_what_is_refused(keys: dict[str, Any], refused: list[str]) -> None:
    keys = {"task__eval_path": "eval.jsonl", **keys}
    assert keys_refused(config_with(**keys)) == refused


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


def test_the_line_at_the_start_says_what_is_in_force() -> None:
    config = load_config(
        [
            "rollout.concurrency=adaptive",
            "rollout.max_num_seqs=128",
            "trainer.eval_samples=4",
            "trainer.eval_temperature=0.7",
        ]
    )
    assert describe_rollout(config) == (
        "adaptive, 1 to 128 requests per engine; evaluation: 4 answers per prompt at temperature 0.7, pass@4"
    )
    config = load_config(["rollout.max_concurrency=32", "trainer.eval_blocking=true"])
    assert describe_rollout(config) == (
        "at most 32 requests per engine; evaluation: one greedy answer per prompt, pass@1, the learner waits for it"
    )
    assert describe_rollout(config_with(task__eval_path="")) == "all requests at once; no evaluation"
