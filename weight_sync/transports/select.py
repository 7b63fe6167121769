"""Finds the fastest transport that works from a worker to a learner.

A learner on the same host is mapped; one elsewhere sends. If the probe pattern does not arrive, the same transport is
tried once more, then the next that the learner offers, and the reason is logged and kept. Connections are made on first
use: what worked for one learner of a node is tried first for the others there.
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
_ONE_NODE = (
    "memory can be mapped on one node only; containers of one machine are one node if they share its namespaces "
    "(--ipc=host --pid=host) and run as the same user"
)


def usable(handles: Sequence[ArenaHandle], *, same_node: bool) -> tuple[ArenaHandle, ...]:
    """The handles that can work at all, best first. Memory cannot be mapped from another node."""
    return tuple(handle for handle in handles if same_node or handle.transport not in MAPPED)


def open_reader(
    backend: Backend, handle: ArenaHandle, *, line: Line, host: str | None, timing: Timing | None = None
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
        host: str | None,
        node: NodeTransport,
        probe: Callable[[SourceReader, Check], None],
    ) -> None:
        """
        Args:
            probe: reads a known pattern through a reader; raises if it does not arrive as it was written.
        """
        self._backend = backend
        self._rank = rank
        self._handles = tuple(handles)
        self._line = line
        self._same_node = same_node
        self._host = host
        self._node = node
        self._probe = probe
        self._transport = ""
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
        handles = sorted(
            usable(self._handles, same_node=self._same_node), key=lambda one: one.transport != self._node.transport
        )
        tried: list[str] = []
        for handle in handles:
            reader = self._try(handle, check, tried) or self._try(handle, check, tried, is_last_attempt=True)
            if reader is not None:
                self._reader, self._transport = reader, handle.transport
                self._reasons = tuple(tried) if tried else self._node.reasons
                self._node.transport, self._node.reasons = self._transport, self._reasons
                return
        offers = ", ".join(handle.transport for handle in self._handles)
        raise TransportUnusable(
            f"learner {self._rank} (on {'this' if self._same_node else 'another'} node) offers {offers}, none of which "
            f"works from here: {'; '.join(tried) if tried else _ONE_NODE}"
        )

    def pull(self, slot: int, pieces: Sequence[Piece], *, check: Check, on_arrived: OnArrived = ignore) -> None:
        self.connect(check)
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

    def _try(
        self, handle: ArenaHandle, check: Check, tried: list[str], *, is_last_attempt: bool = False
    ) -> SourceReader | None:
        """The reader, if it works; else the reason is logged and, after the last attempt, added to `tried`."""
        try:
            return self._probed(handle, check)
        except PullTimeout as error:
            raise PullTimeout(f"learner {self._rank} by {handle.transport}: {error}") from error
        except (TransportUnusable, DeviceError) as error:
            if is_last_attempt:
                tried.append(f"{handle.transport}: {error}")
                log.warning("learner %d cannot be reached by %s: %s", self._rank, handle.transport, error)
            else:
                # For one lost connection, the whole epoch would take a slower transport.
                log.warning(
                    "learner %d was not reached by %s, which is tried once more: %s",
                    self._rank, handle.transport, error,
                )  # fmt: skip
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
