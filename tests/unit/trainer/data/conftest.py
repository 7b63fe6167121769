"""Groups of trajectories, small and exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import Group, Trajectory, Turn
from tests.fakes import trajectories as fakes

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_PROMPT_TOKENS = 3


def make_turn(
    num_context: int, segments: Sequence[tuple[int, int]], *, first_token: int = 10, reward: float = 0.0
) -> Turn:
    """Context tokens, then generated ones; `segments` are (version, num_tokens). Token i has logprob -i / 64."""
    num_generated = sum(n for _, n in segments)
    num_tokens = num_context + num_generated
    tokens, logprobs = np.arange(first_token, first_token + num_tokens), -np.arange(num_tokens) / 64
    return fakes.make_turn(
        tokens[:num_context], tokens[num_context:], segments, logprobs=logprobs[num_context:].tolist(), reward=reward
    )


def make_trajectory(sample_index: int, *, num_tokens: int = 4, version: int = 0, **changes: Any) -> Trajectory:
    """One turn: the prompt, and `num_tokens` generated under one version."""
    values: dict[str, Any] = {
        "prompt_id": "train/0",
        "sample_index": sample_index,
        "turns": (make_turn(NUM_PROMPT_TOKENS, [(version, num_tokens)], first_token=10 + 100 * sample_index),),
        "reward": float(sample_index % 2),
        "reward_parts": {},
        "status": "completed",
        "timings": {},
    }
    return Trajectory.of_turns(**(values | changes))


def make_group(trajectories: Sequence[Trajectory], *, group_id: int = 0, start_version: int = 0) -> Group:
    return Group(group_id=group_id, prompt_id="train/0", trajectories=tuple(trajectories), start_version=start_version)


def random_groups(seed: int, *, num_groups: int, group_size: int, max_tokens: int) -> list[Group]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return [
        make_group(
            [
                make_trajectory(
                    i,
                    num_tokens=int(rng.integers(1, max_tokens + 1)),
                    version=int(rng.integers(0, 3)),
                    reward=float(rng.normal()),
                    status=("completed", "truncated", "failed")[int(rng.choice(3, p=[0.7, 0.2, 0.1]))],
                )
                for i in range(group_size)
            ],
            group_id=g,
        )
        for g in range(num_groups)
    ]
