"""What goes through the pipes of a reward process: framed pickles in, JSON lines out."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

from rollout.errors import RewardError
from rollout.reward.call import RewardResult

if TYPE_CHECKING:
    from collections.abc import Mapping

_LENGTH = struct.Struct("<Q")


def frame(payload: bytes) -> bytes:
    """With its length in front."""
    return _LENGTH.pack(len(payload)) + payload


def read_frame(requests: BinaryIO) -> bytes | None:
    """The next payload; None at the end of the pipe. Blocks."""
    header = requests.read(_LENGTH.size)
    return requests.read(_LENGTH.unpack(header)[0]) if header else None


def answer(answers: BinaryIO, message: Mapping[str, object]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def outcome_message(outcome: RewardResult | RewardError) -> dict[str, object]:
    """As plain values, for `read_outcome` on the other side."""
    if isinstance(outcome, RewardError):
        return {"error": str(outcome)}
    return {"reward": outcome.reward, "parts": dict(outcome.parts)}


def read_outcome(message: Mapping[str, Any]) -> RewardResult | RewardError:
    """What `outcome_message` made into plain values. Raises KeyError, TypeError or ValueError for anything else."""
    if "error" in message:
        return RewardError(str(message["error"]))
    reward, parts = message["reward"], message["parts"]
    numbers = [reward, *parts.values()] if isinstance(parts, dict) else [None]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ValueError("no finite numbers")
    return RewardResult(reward=reward, parts=parts)
