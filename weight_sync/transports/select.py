"""Finds the fastest transport that works from a worker to a learner.

A learner on the same host is mapped; one elsewhere sends. If the probe pattern does not arrive, the same transport is
tried once more, then the next that the learner offers, and the reason is logged and kept. Connections are made on first
use: what worked for one learner of a node is tried first for the others there. A faster transport that failed is tried
again after a while, with one learner of the node.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from weight_sync.errors import DeviceError, PullTimeout, TransportUnusable
from weight_sync.transports.base import Check, OnArrived, SourceReader, ignore
from weight_sync.transports.mapped import MAPPED, MappedReader
from weight_sync.transports.pair import PairReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.messages import ArenaHandle
    from weight_sync.transports.base import Line, Piece
    from weight_sync.transports.pair import Timing


log = logging.getLogger(__name__)

RETRY_S = 0.1
"""Before the second attempt."""
RETRY_FASTER_S = 60.0
"""Until a faster transport that failed is tried again; doubled by each failure."""
RETRY_LIMIT_S = 5.0
"""For that attempt, which a version waits for."""
_ONE_NODE = (
    "memory can be mapped on one node only; containers of one machine are one node if they share its namespaces "
    "(--ipc=host --pid=host) and run as the same user"
)


def usable(handles: Sequence[ArenaHandle], *, same_node: bool) -> tuple[ArenaHandle, ...]:
    """The handles that can work at all, best first. Memory cannot be mapped from another node."""
    return tuple(handle for handle in handles if same_node or handle.transport not in MAPPED)


def open_reader(
    backend: Backend, handle: ArenaHandle, *, line: Line, host: str, timing: Timing | None = None
) -> SourceReader:
    """
    Raises:
        TransportUnusable, DeviceError: the learner cannot be reached like that from here.
    """
    if handle.transport in MAPPED:
        return MappedReader(backend, handle)
    return PairReceiver(backend, handle, line, host=host, timing=timing)


class NodeTransport:
    """What is known of the learners of one node that offer the same transports."""

    def __init__(self) -> None:
        self.transport = ""
        """That worked last; empty before the first."""
        self.reasons: tuple[str, ...] = ()
        """Why faster ones did not."""
        self.retry_after_s = RETRY_FASTER_S
        self.retry_at = 0.0
        """When these are tried again, by one of its learners; others follow where that works."""


class SelectedReader(SourceReader):
    """One source, by the fastest transport that works; connected on first use."""

    def __init__(
        self,
        backend: Backend,
        rank: int,
        handles: Sequence[ArenaHandle],
        *,
        line: Line,
        same_node: bool,
        host: str,
        node: NodeTransport,
        probe: Callable[[SourceReader, Check], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            probe: reads a known pattern through a reader; raises if it does not arrive as it was written.
        """
        self._backend = backend
        self._rank = rank
        self._handles = tuple(handles)
        self._usable = usable(handles, same_node=same_node)
        self._line = line
        self._same_node = same_node
        self._host = host
        self._node = node
        self._probe = probe
        self._clock = clock
        self._transport = ""
        self._retry_at = 0.0
        self._reasons: tuple[str, ...] = ()
        self._reader: SourceReader | None = None

    @property
    def transport(self) -> str:
        """The one in use; before the first use, the one that it will be tried with."""
        return self._transport if self._transport else self._node.transport

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a faster one is not used."""
        return self._reasons if self._transport else self._node.reasons

    def connect(self, check: Check) -> None:
        """Select a transport now. Nothing if that was done.

        Raises:
            TransportUnusable: none works; the message has the reason of each.
            PullTimeout: the probe's time is over.
            WeightSyncError: (other) the learner itself failed.
        """
        if self._reader is not None:
            return
        # The one that worked for another learner first; the others stay in their order.
        handles = sorted(self._usable, key=lambda one: one.transport != self._node.transport)
        tried: list[str] = []
        for handle in handles:
            reader = self._try(handle, check, tried)
            if reader is not None:
                self._reader, self._transport = reader, handle.transport
                self._reasons = tuple(tried) if tried else self._node.reasons
                if self._node.transport in ("", self._transport):  # one of them that fails says nothing of the others
                    self._node.transport, self._node.reasons = self._transport, self._reasons
                if tried:
                    self._retry_at = self._node.retry_at = self._clock() + self._node.retry_after_s
                return
        offers = ", ".join(handle.transport for handle in self._handles)
        raise TransportUnusable(
            f"learner {self._rank} (on {'this' if self._same_node else 'another'} node) offers {offers}, none of which "
            f"works from here: {'; '.join(tried) if tried else _ONE_NODE}"
        )

    def pull(self, slot: int, pieces: Sequence[Piece], *, check: Check, on_arrived: OnArrived = ignore) -> None:
        self.connect(check)
        self._try_faster(check)
        assert self._reader is not None
        self._reader.pull(slot, pieces, check=check, on_arrived=on_arrived)

    def disconnect(self) -> None:
        if self._reader is not None:
            self._reader.disconnect()

    def counters(self) -> dict[str, int]:
        return {} if self._reader is None else self._reader.counters()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _try_faster(self, check: Check) -> None:
        """Change to a faster transport, if it is time to try one, or if one has begun to work for another learner of
        the node."""
        order = [handle.transport for handle in self._usable]
        faster = order[: order.index(self._transport)]
        if not faster:
            return
        now = self._clock()
        if now < self._retry_at or (self._node.transport not in faster and now < self._node.retry_at):
            return
        if self._node.transport in faster:
            faster = [self._node.transport]
        self._node.retry_after_s *= 2
        self._retry_at = self._node.retry_at = now + self._node.retry_after_s
        until = time.monotonic() + RETRY_LIMIT_S

        def check_in_time() -> None:
            check()
            if time.monotonic() >= until:
                raise TransportUnusable(f"it was not connected within {RETRY_LIMIT_S:.0f} s")

        for handle in self._handles:
            if handle.transport not in faster:
                continue
            try:
                reader = self._probed(handle, check_in_time)
            except (TransportUnusable, DeviceError) as error:
                log.info("learner %d still cannot be reached by %s: %s", self._rank, handle.transport, error)
                continue
            slower, self._reader = self._reader, reader
            log.warning(
                "learner %d is read by %s from now on, no longer by %s",
                self._rank, handle.transport, self._transport,
            )  # fmt: skip
            self._transport, self._reasons = handle.transport, ()
            self._node.transport, self._node.reasons = handle.transport, ()
            self._node.retry_after_s = RETRY_FASTER_S
            if slower is not None:
                slower.close()
            return

    def _try(self, handle: ArenaHandle, check: Check, tried: list[str]) -> SourceReader | None:
        """The reader, if it works in one of two attempts: for one lost connection, the whole epoch would take a slower
        transport. Else the reason is logged and added to `tried`."""
        for is_last in (False, True):
            try:
                return self._probed(handle, check)
            except PullTimeout as error:
                raise PullTimeout(f"learner {self._rank} by {handle.transport}: {error}") from error
            except (TransportUnusable, DeviceError) as error:
                what = "cannot be reached by %s" if is_last else "was not reached by %s, which is tried once more"
                log.warning(f"learner %d {what}: %s", self._rank, handle.transport, error)
                if is_last:
                    tried.append(f"{handle.transport}: {error}")
                else:
                    time.sleep(RETRY_S)
        return None

    def _probed(self, handle: ArenaHandle, check: Check) -> SourceReader:
        reader = open_reader(self._backend, handle, line=self._line, host=self._host)
        try:
            self._probe(reader, check)
        except BaseException:
            reader.close()
            raise
        return reader
