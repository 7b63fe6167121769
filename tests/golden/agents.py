"""Conversations of agents, token by token: what engines are asked, and the turns that come of it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.golden import seams
from tests.golden.net import Part

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NUM_EACH = 25


def cases() -> Mapping[str, Any]:
    kinds = {"loop": conversation, "ledger": operations}
    return {
        f"{kind} {seed}": (kind, make(random.Random(seed))) for kind, make in kinds.items() for seed in range(NUM_EACH)
    }


def conversation(rng: random.Random) -> dict[str, Any]:
    """Answers of the policy and replies of an environment, in turn, until one of them or a budget ends it."""
    num_turns = rng.randint(1, 4)
    return {
        "prompt": _tokens(rng),
        "answers": [{**answer(rng), "finish": "stop"} for _ in range(num_turns)]
        + [{**answer(rng), "finish": rng.choice(["stop", "length"])}],
        "replies": [{"tokens": _tokens(rng), "reward": rng.choice([0.0, 0.5])} for _ in range(num_turns)],
        "max_turns": rng.randint(1, 5),
        "max_tokens": rng.choice([8, 16, 40]),
    }


def operations(rng: random.Random) -> dict[str, Any]:
    """What an agent with its own idea of history does to the ledger of its tokens."""
    steps: list[tuple[str, Any]] = [("generated", answer(rng))]
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(["generated", "generated", "context", "anew", "reward"])
        given = answer(rng) if kind == "generated" else rng.choice([0.5, -1.0]) if kind == "reward" else _tokens(rng)
        steps.append((kind, given))
    return {"prompt": _tokens(rng), "steps": steps}


def answer(rng: random.Random) -> dict[str, Any]:
    """Sampled tokens, of one version or of two."""
    segments = [[1, rng.randint(1, 4)], [2, rng.randint(1, 3)]][: rng.randint(1, 2)]
    count = sum(number for _, number in segments)
    return {
        "tokens": [rng.randint(3, 60) for _ in range(count)],
        "logprobs": [-rng.randint(1, 64) / 16 for _ in range(count)],
        "segments": segments,
    }


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randint(3, 60) for _ in range(rng.randint(1, 4))]


def play(given: tuple[str, Any], _folder: Path) -> Any:
    kind, script = given
    return seams.conversed(**script) if kind == "loop" else seams.kept_by_builder(**script)


AGENTS = Part(name="agents", cases=cases, play=play)
