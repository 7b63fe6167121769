"""Configuration and room in the cache -> what `rollout.max_num_seqs=auto` becomes."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trainer.config.schema import RunConfig
from trainer.config.seats import GRAPH_SIZES, engine_seats

S1: dict[str, Any] = {"mode": {"max_staleness": 1}}


def config(**sections: dict[str, Any]) -> RunConfig:
    """32 groups of 16 responses of at most 64 tokens a step, on one engine, on policy."""
    given = {
        "mode": {"max_staleness": 0, **sections.pop("mode", {})},
        "trainer": {"groups_per_step": 32, **sections.pop("trainer", {})},
        "rollout": {"group_size": 16, "max_response_tokens": 64, **sections.pop("rollout", {})},
        **sections,
    }
    base = RunConfig()
    return replace(base, **{name: replace(getattr(base, name), **keys) for name, keys in given.items()})


@pytest.mark.parametrize(
    ("sections", "num_evaluated", "kv_tokens", "number", "why"),
    [
        ({}, 200, None, 512, "all 512 that may be in flight"),
        ({"rollout": {"max_num_seqs": 100}}, 200, 10, 100, ""),  # a number stays a number
        ({"rollout": {"max_num_seqs": 1000}}, 200, None, 1000, ""),
        ({"trainer": {"groups_per_step": 8}}, 0, None, 128, "all 128"),
        ({"trainer": {"groups_per_step": 8}}, 200, None, 200, "all 200"),  # an evaluation is a wave, too
        ({"trainer": {"groups_per_step": 3}, "rollout": {"group_size": 7}}, 0, None, 24, "all 21"),  # up to a graph
        ({"trainer": {"groups_per_step": 17}, **S1}, 0, None, 512, "largest captured graph; 544"),
        ({"rollout": {"num_replicas": 4}, **S1}, 0, None, 256, "all 256"),
        ({"rollout": {"num_replicas": 3}}, 0, None, 176, "all 171"),
        ({"rollout": {"max_concurrency": 20}}, 200, None, 24, "all 20"),
        ({"algorithm": {"advantage_estimator": "remax"}, "rollout": {"group_size": 1}}, 0, None, 64, "all 64"),
        # 100 / 16 tokens of prompt and a quarter of 64: 22.25 each.
        ({}, 200, 10_000, 448, "its cache of 10,000 tokens holds about 449 of 22; 512"),
        ({}, 200, 22 * 512 + 200, 512, "all 512"),
        ({}, 200, 22, 1, "its cache of 22 tokens"),
        ({}, 200, 0, 1, "its cache of 0 tokens"),
        ({"rollout": {"engine_args": {"max_num_batched_tokens": 300}}}, 0, None, 288, "largest captured graph; 512"),
        ({"rollout": {"max_response_tokens": 20480}, "trainer": {"groups_per_step": 512}}, 0, 900_000, 168, "900,000"),
    ],
)
def test_an_engine_has_seats_for_a_whole_wave_if_its_cache_has(
    sections: dict[str, Any], num_evaluated: int, kv_tokens: int | None, number: int, why: str
) -> None:
    seats = engine_seats(config(**sections), prompt_tokens=100.0, num_evaluated=num_evaluated, kv_tokens=kv_tokens)
    assert seats.number == number
    assert why in seats.why and bool(why) == bool(seats.why)
    assert str(seats).startswith(f"{number} sequences at once per engine")


def test_sizes_are_those_for_which_the_engine_captures_graphs() -> None:
    """Of vLLM's own default, for an engine with so many seats; its source is read, as an import takes seconds."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    rule = (Path(vllm.origin).parent / "config" / "vllm.py").read_text()
    assert "[1, 2, 4] + list(range(8, 256, 8))" in rule and "range(256, max_graph_size + 1, 16)" in rule
    assert GRAPH_SIZES[:5] == (1, 2, 4, 8, 16) and GRAPH_SIZES[-3:] == (480, 496, 512)
