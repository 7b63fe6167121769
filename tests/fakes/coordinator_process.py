"""A `SyncCoordinator` in a process of its own: the parties it brings together do not need it to survive."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from tests.fakes.party_process import Line, PartyProcess
from tests.fakes.publisher_process import PublisherLine
from tests.fakes.replica_process import ReplicaLine
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from tests.fakes.protocol_traps import Traps
    from tests.fakes.publisher_process import PublisherProcess
    from tests.fakes.replica_process import ReplicaProcess


class CoordinatorParty:
    def __init__(
        self,
        publishers: Sequence[tuple[int, Connection]],
        replicas: Sequence[tuple[str, Connection]],
        options: SyncOptions,
        traps: Traps,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="trainer-loop", daemon=True).start()
        self._coordinator = SyncCoordinator(
            [PublisherLine(rank, Line(f"learner {rank}", connection)) for rank, connection in publishers],
            [ReplicaLine(name, Line(name, connection)) for name, connection in replicas],
            options=options,
        )

    def call(self, method: str, *args: object) -> Any:
        """One of the coordinator's coroutines."""
        coroutine = getattr(self._coordinator, method)(*args)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def hurry(self, timeout_s: float) -> None:
        """From here on, this long for everything."""
        self._coordinator._options = msgspec.structs.replace(self._coordinator._options, timeout_s=timeout_s)

    def see_members(self) -> dict[str, str]:
        return dict(self._coordinator.members)

    def close(self) -> None:
        """The parties are the test's."""


class CoordinatorProcess(PartyProcess):
    """Takes the last line of every party."""

    def __init__(
        self, publishers: Sequence[PublisherProcess], replicas: Sequence[ReplicaProcess], options: SyncOptions
    ) -> None:
        super().__init__(
            "coordinator",
            CoordinatorParty,
            [(publisher.rank, publisher.lines[-1].connection) for publisher in publishers],
            [(replica.name, replica.lines[-1].connection) for replica in replicas],
            options,
        )
        # Wait until it has them, then let go of ours: a party then sees when its coordinator is gone.
        self.ask("see_members")
        for party in (*publishers, *replicas):
            party.lines[-1].close()

    def call(self, method: str, *args: object, timeout_s: float = 60.0) -> Any:
        return self.ask("call", method, *args, timeout_s=timeout_s)
