"""Every party of a sync is killed and stopped at every state of the protocol, in processes that really die.

The promise: a replica holds the old version whole or the new one whole, or it is dirty and paused; and whoever is left
takes the next version.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from tests.golden import sync_seams
from tests.golden.net import Part

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PULLING = ("granted", "pulling", "pulled", "attested")
MATRIX = [
    *product(["learner"], ["opened", "packing", "sealed", *PULLING, "committing"], ["staged"]),
    *product(["learner"], PULLING[1:], ["inplace"]),
    *product(["replica"], ["opened", *PULLING, "committing"], ["staged"]),
    *product(["replica"], ["pulling", "committing"], ["inplace"]),
    *product(["coordinator"], ["opened", "packing", "sealed", "pulling", "committing"], ["staged"]),
    *product(["coordinator"], ["pulling"], ["inplace"]),
]


def cases() -> Mapping[str, Any]:
    return {
        f"{victim} {how}, {state}, {commit}": {"victim": victim, "state": state, "how": how, "commit": commit}
        for victim, state, commit in MATRIX
        for how in ("killed", "stopped")
    }


def play(given: Mapping[str, Any], _folder: Path) -> Any:
    return sync_seams.lost(**given)


SYNC_KILLS = Part(name="sync_kills", cases=cases, play=play)
