"""What goes through the pipes of a reward process: one message per line, JSON of a struct.

Into it: a `Call` for every response, or with no request to import the function only; `Cancel` ends a call of an `async
def` function. Out of it, for every call by its number: `Begun` once the function is imported, then `Scored` or
`Failed`; or `NotImported` alone. Requests are pickles, since metadata may be anything; answers never are, since code of
users can write to the pipe.
"""

from __future__ import annotations

import msgspec


class Call(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    target: str
    """See `RewardEntry.target`."""
    request: bytes | None = None
    """Pickle of a `RewardRequest`."""
    timeout_s: float = 0.0
    """Wall-clock time until an `async def` call is cancelled. Any other is timed by the parent."""
    cpu_limit_s: float | None = None
    """See `RewardEntry.cpu_limit_s`."""


class Cancel(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int


class Begun(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    is_async: bool


class NotImported(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    error: str


class Scored(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    reward: float
    parts: dict[str, float]


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    error: str
    num_stuck: int = 0
    """Threads that are busy for no call that still runs, if each running call has one."""


Answer = Begun | NotImported | Scored | Failed
decode_call = msgspec.json.Decoder(Call | Cancel).decode
decode_answer = msgspec.json.Decoder(Answer).decode
"""Raises msgspec.DecodeError or UnicodeDecodeError for anything else. JSON has no NaN, so numbers are finite."""


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
