"""The parties of a sync as processes: learner ranks and replicas of engine workers, with a coordinator's handles.

this process:  SyncCoordinator ─ LearnerProcess ─pipe─> LearnerHost   (one per learner rank)
                               ─ WorkerGroup ───pipe─> WorkerHost    (one per worker of each synthetic replica)
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weight_sync.bench.children import Answer, Child, all_of
from weight_sync.bench.hosts import LearnerHost, WorkerHost
from weight_sync.errors import WeightSyncError
from weight_sync.messages import CommitResult, PullReport, ReceiverInfo, open_reply, reply_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weight_sync.bench.case import Case, Devices


class Span(NamedTuple):
    """One phase of one party, on the host's monotonic clock."""

    party: str
    phase: str
    started: float
    stopped: float


class Journal:
    """What the handles saw of one sync. Cleared before each."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.pulls: dict[str, PullReport] = {}
        """Worker ("r0/1") -> what bringing the version cost it."""
        self.receivers: dict[str, ReceiverInfo] = {}
        """Worker -> how it opened; kept over syncs."""

    def clear(self) -> None:
        self.spans.clear()
        self.pulls.clear()

    def note_opened(self, replica: str, replies: Sequence[bytes]) -> None:
        with contextlib.suppress(WeightSyncError):  # a refusal is the coordinator's to report
            for worker, reply in enumerate(replies):
                self.receivers[f"{replica}/{worker}"] = open_reply(reply, ReceiverInfo, party=replica)

    def note_commit(self, replica: str, replies: Sequence[bytes], started: float) -> None:
        self.spans.append(Span(replica, "commit", started, time.monotonic()))
        with contextlib.suppress(WeightSyncError):
            for worker, reply in enumerate(replies):
                self.pulls[f"{replica}/{worker}"] = open_reply(reply, PullReport, party=replica)


class LearnerProcess:
    """A `PublisherHandle`."""

    def __init__(self, case: Case, rank: int, device_index: int, journal: Journal) -> None:
        self.rank = rank
        self.child = Child(f"learner {rank}", LearnerHost, case, rank, device_index)
        self._journal = journal

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        answer = await self.child.ask(method, *args, timeout_s=timeout_s)
        if method == "ws_publish":
            self._journal.spans.append(Span(f"learner {self.rank}", "publish", answer.started, answer.stopped))
        return answer.value


class Replica(Protocol):
    """A `ReplicaHandle` of processes."""

    name: str

    @property
    def children(self) -> tuple[Child, ...]: ...

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]: ...

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult: ...


class WorkerGroup:
    """A `ReplicaHandle`: the workers of one synthetic replica. Nothing generates, so a pause is the commit itself."""

    def __init__(self, case: Case, name: str, devices: Sequence[int], journal: Journal) -> None:
        self.name = name
        self.children = tuple(
            Child(f"{name}/{worker}", WorkerHost, case, worker, device) for worker, device in enumerate(devices)
        )
        self._journal = journal

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        answers = await all_of(child.ask(method, *args, timeout_s=timeout_s) for child in self.children)
        values = [answer.value for answer in answers]
        if method == "ws_open":
            self._journal.note_opened(self.name, values)
        return values

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        started = time.monotonic()
        results = await self.call(method, *args, timeout_s=timeout_s)
        if reply_state(results) == "ok":
            self._journal.note_commit(self.name, results, started)
        return CommitResult(results=results, pause_s=time.monotonic() - started)


class Fleet:
    """All processes of one case. A context manager: on the way out every process has ended."""

    def __init__(
        self, case: Case, devices: Devices, make_replica: Callable[[int, Sequence[int], Journal], Replica]
    ) -> None:
        """Starts everything and returns at once; `ready` waits."""
        self.journal = Journal()
        self.learners: list[LearnerProcess] = []
        self.replicas: list[Replica] = []
        try:
            for rank, device in enumerate(devices.learners):
                self.learners.append(LearnerProcess(case, rank, device, self.journal))
            for number, own in enumerate(devices.replicas):
                self.replicas.append(make_replica(number, own, self.journal))
        except BaseException:
            self.close()
            raise

    async def ready(self, timeout_s: float) -> None:
        """Wait until every process has its tensors.

        Raises:
            WeightSyncError, TimeoutError: one failed or did not answer.
        """
        await all_of(child.ask("start", timeout_s=timeout_s) for child in self.children())

    async def on_learners(self, method: str, *args: object, timeout_s: float) -> list[Answer]:
        return await all_of(learner.child.ask(method, *args, timeout_s=timeout_s) for learner in self.learners)

    async def on_workers(self, method: str, *args: object, timeout_s: float) -> list[Answer]:
        return await all_of(child.ask(method, *args, timeout_s=timeout_s) for child in self.workers())

    def workers(self) -> Iterator[Child]:
        return (child for replica in self.replicas for child in replica.children)

    def children(self) -> Iterator[Child]:
        yield from (learner.child for learner in self.learners)
        yield from self.workers()

    def close(self) -> None:
        children = list(self.children())
        for child in children:
            child.end()
        for child in children:
            child.join()


def synthetic_replica(case: Case) -> Callable[[int, Sequence[int], Journal], Replica]:
    return lambda number, devices, journal: WorkerGroup(case, f"r{number}", devices, journal)
