"""What both ends of a pair must agree on: how a pull is cut into orders, messages and batches. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MESSAGE_BYTES = 64 * 2**20
BATCH_BYTES = 256 * 2**20
BATCH_MESSAGES = 256
BATCHES_IN_FLIGHT = 2
STAGED_BYTES = 16 * 2**20
"""A batch that is received into host memory and copied to the device from there."""
ORDER_MESSAGES = 2048
"""An order must fit into a control frame (1 MiB), and a range takes up to 15 bytes of it."""
T = TypeVar("T")


class Timing(NamedTuple):
    """How long the ends of a pair wait for each other, in seconds."""

    connect_s: float = 20.0
    """For a group to come about."""
    stall_s: float = 30.0
    """For one batch to move. A thread that sends or receives lives no longer than this after its peer died."""
    silence_s: float = 10.0
    """For the publisher's control thread to answer."""


def cut(offset: int, nbytes: int, *, limit_bytes: int = MESSAGE_BYTES) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the messages that carry one piece."""
    for start in range(0, nbytes, limit_bytes):
        yield offset + start, min(limit_bytes, nbytes - start)


def orders(messages: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(messages), ORDER_MESSAGES):
        yield messages[start : start + ORDER_MESSAGES]


def batches(messages: Sequence[T], size: Callable[[T], int], *, limit_bytes: int = BATCH_BYTES) -> Iterator[list[T]]:
    """Messages that are started together. Grouped libraries need the same batches on both ends."""
    batch: list[T] = []
    batch_bytes = 0
    for message in messages:
        if batch and (batch_bytes + size(message) > limit_bytes or len(batch) == BATCH_MESSAGES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(message)
        batch_bytes += size(message)
    if batch:
        yield batch
