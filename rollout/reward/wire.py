"""What goes through the pipes of a reward process: framed pickles in, JSON lines out."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

from rollout.errors import RewardError
from rollout.reward.result import RewardResult

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
    if "error" in message:
        return RewardError(message["error"])
    return RewardResult(reward=message["reward"], parts=message["parts"])
