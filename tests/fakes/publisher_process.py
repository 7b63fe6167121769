"""A learner rank of `sync_world` in a process of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tests.fakes.party_process import Line, PartyProcess, settle
from tests.fakes.sync_world import LocalPublisher, full_weights

if TYPE_CHECKING:
    from tests.fakes.protocol_traps import Traps


class LearnerParty(LocalPublisher):
    """`train(seed)` stands for an optimizer step."""

    def __init__(self, rank: int, num_ranks: int, traps: Traps) -> None:
        super().__init__(rank, num_ranks, full_weights(0))
        self._traps = traps

    def train(self, seed: int) -> None:
        self.full = full_weights(seed)

    def settle(self, node: str, host: str) -> None:
        """From now on this process is on `node`, reached at `host`."""
        settle(node, host)

    def see_sent(self) -> dict[str, int]:
        """Receiver -> orders to send that were carried out, once none is under way: one counts after its transfer."""
        epoch = self.publisher._epoch
        pairs = {} if epoch is None else dict(epoch.end._peers._pairs)
        until = time.monotonic() + 10.0
        while any(not pair.state().error and pair.state().num_sent < pair._num_ordered for pair in pairs.values()):
            if time.monotonic() > until:
                raise TimeoutError("an order to send is under way for 10 s")
            time.sleep(0.001)
        return {peer: pair.state().num_sent for peer, pair in pairs.items()}

    def see_slot(self) -> tuple[float, int | None, dict[str, float]]:
        """A moment of the arena's clock, the version in slot 0 then (None while it is packed), and when whose leases
        end."""
        epoch = self.publisher._epoch
        assert epoch is not None
        arena = epoch.arena
        with arena._changed:
            slot = arena._table.slots[0]
            return arena._clock(), slot.version, {lease.holder: lease.expires_at for lease in slot.leases.values()}

    def ws_open(self, request: bytes) -> bytes:
        answer = super().ws_open(request)
        self._traps.reach("opened")
        return answer

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        answer = super().ws_publish(version, deadline_s)
        self._traps.reach("sealed")
        return answer

    def close(self) -> None:
        self.ws_close()


class PublisherLine:
    """A `PublisherHandle` over one line."""

    def __init__(self, rank: int, line: Line) -> None:
        self.rank, self._line = rank, line

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        return await self._line.ask_async(method, *args, timeout_s=timeout_s)


class PublisherProcess(PartyProcess):
    """A `PublisherHandle`."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(f"learner {rank}", LearnerParty, rank, num_ranks, num_lines=3)
        self.rank = rank
        # The test speaks over lines[0] while a call of the coordinator hangs on lines[1].
        self.handle = PublisherLine(rank, self.lines[1])

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        return await self.handle.call(method, *args, timeout_s=timeout_s)
