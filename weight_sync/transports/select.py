"""Finds the fastest transport that works from a worker to a learner.

A learner on the same host is mapped; one elsewhere sends. If the probe pattern does not arrive, the same way is tried
once more, then the next that the learner offers, and the reason is logged and kept. Every source has an end of its own,
so that a source that is lost takes no other with it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from weight_sync.errors import DeviceError, PullTimeout, TransportUnusable
from weight_sync.transports import mapped, pair
from weight_sync.transports.base import Check, OnArrived, ignore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.messages import ArenaHandle
    from weight_sync.transports.base import Line, Piece, ReceiverEnd


log = logging.getLogger(__name__)

RETRY_S = 0.1
"""Before the second attempt."""
_ONE_NODE = (
    "memory can be mapped on one node only; containers of one machine are one node if they share its namespaces "
    "(--ipc=host --pid=host) and run as the same user"
)


def ways(handles: Sequence[ArenaHandle], *, same_node: bool) -> tuple[ArenaHandle, ...]:
    """The offers that can work at all, best first. Memory cannot be mapped from another node."""
    return tuple(handle for handle in handles if same_node or handle.transport not in mapped.MAPPED)


def open_end(
    backend: Backend,
    rank: int,
    handle: ArenaHandle,
    *,
    line: Line,
    host: str | None,
    timing: pair.Timing | None = None,
) -> ReceiverEnd:
    """One way to one learner rank.

    Raises:
        TransportUnusable, DeviceError: it cannot be reached like that from here.
    """
    if handle.transport in mapped.MAPPED:
        return mapped.open_mapped(handle.transport, backend, {rank: handle})
    return pair.PairReceiverEnd(backend, {rank: handle}, {rank: line}, host=host, timing=timing)


class Reach:
    """One source: the end in use, and why earlier ones are not."""

    def __init__(
        self,
        backend: Backend,
        rank: int,
        handles: Sequence[ArenaHandle],
        *,
        line: Line,
        same_node: bool,
        host: str | None,
        probe: Callable[[ReceiverEnd], None],
    ) -> None:
        """
        Args:
            probe: reads a known pattern through an end; raises if it does not arrive as it was written.

        Raises:
            TransportUnusable: no way works; the message has the reason of each.
            PullTimeout: the probe's time is over.
            WeightSyncError: (other) the learner itself failed.
        """
        self.rank = rank
        self.reasons: tuple[str, ...] = ()
        for handle in ways(handles, same_node=same_node):
            for is_last_attempt in (False, True):
                try:
                    self._end = _probed(backend, rank, handle, line=line, host=host, probe=probe)
                except PullTimeout as error:
                    raise PullTimeout(f"learner {rank} by {handle.transport}: {error}") from error
                except (TransportUnusable, DeviceError) as error:
                    if not is_last_attempt:
                        # For one lost connection, the whole epoch would take a slower way.
                        log.warning(
                            "learner %d was not reached by %s, which is tried once more: %s",
                            rank, handle.transport, error,
                        )  # fmt: skip
                        time.sleep(RETRY_S)
                        continue
                    self.reasons = (*self.reasons, f"{handle.transport}: {error}")
                    log.warning("learner %d cannot be reached by %s: %s", rank, handle.transport, error)
                else:
                    self.transport = handle.transport
                    return
        offers = ", ".join(handle.transport for handle in handles)
        raise TransportUnusable(
            f"learner {rank} (on {'this' if same_node else 'another'} node) offers {offers}, none of which works from "
            f"here: {'; '.join(self.reasons) if self.reasons else _ONE_NODE}"
        )

    def pull(self, slot: int, pieces: Sequence[Piece], *, check: Check, on_arrived: OnArrived = ignore) -> None:
        """See `ReceiverEnd.pull`."""
        self._end.pull(self.rank, slot, pieces, check=check, on_arrived=on_arrived)

    def counters(self) -> dict[str, int]:
        return self._end.counters()

    def close(self) -> None:
        """Idempotent."""
        self._end.close()


def _probed(
    backend: Backend,
    rank: int,
    handle: ArenaHandle,
    *,
    line: Line,
    host: str | None,
    probe: Callable[[ReceiverEnd], None],
) -> ReceiverEnd:
    end = open_end(backend, rank, handle, line=line, host=host)
    try:
        probe(end)
    except BaseException:
        end.close()
        raise
    return end
