"""What a reward call gives back, and the check that turns any returned object into it or refuses it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout.errors import RewardError

_MAX_PARTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The reward of one response, and named parts of it for the metrics (empty if the function returned a number)."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


def to_result(value: object) -> RewardResult:
    """Accepts a finite number, or a mapping of finite numbers with the key "reward".

    Raises:
        RewardError: anything else, saying what was returned.
    """
    if not isinstance(value, Mapping):
        return RewardResult(reward=_finite(value, "it"))
    if "reward" not in value:
        raise RewardError(f'returned a dict without the key "reward" (keys: {sorted(map(str, value))}); add it')
    if len(value) > _MAX_PARTS:
        raise RewardError(f"returned a dict of {len(value)} entries; at most {_MAX_PARTS} parts are recorded")
    parts = {str(name): _finite(part, f"entry {str(name)!r}") for name, part in value.items()}
    return RewardResult(reward=parts.pop("reward"), parts=parts)


def _finite(value: object, what: str) -> float:
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:  # a boolean of NumPy, a tensor of one number
        value = item()
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"returned {type(value).__name__} {value!r:.80} ({what}); a reward is a finite number, or a dict of them "
            'with the key "reward"'
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"returned {number} ({what}); a reward must be finite, so guard the division or the log")
    return number
