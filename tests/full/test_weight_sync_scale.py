"""64 learners and 512 engine workers open, sync and close on one host: real ends and lines, and a tiny model."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import psutil
import pytest

from tests.fakes.processes import Child, Vitals
from weight_sync import deadlines
from weight_sync.bench.case import Case
from weight_sync.bench.hosts import LearnerHost, WorkerHost
from weight_sync.bench.shapes import MODELS, Architecture
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.messages import CommitResult

NUM_LEARNERS, NUM_REPLICAS, TP = 64, 64, 8
PER_PROCESS = {"learners": 16, "replicas": 8}
SMALL = Architecture(
    name="small", model_type="qwen2", hidden=64, layers=1, heads=8, kv_heads=8, head_dim=8, intermediate=128, vocab=512
)
LIMIT_S = 800.0
PATIENT = ("HANDSHAKE_S", "HEARTBEAT_S", "HEARTBEAT_TIMEOUT_S", "PEER_TIMEOUT_S", "LINK_S", "CLOSE_S", "UNLINK_S")
"""Deadlines that are `LIMIT_S` here, where the processors of one host stand for those of 72."""
MEMORY_LIMIT = 12 << 30
"""Of all processes, pages that they share counted once."""
pytestmark = [pytest.mark.timing, pytest.mark.timeout(900)]


class Hosts:
    """Learners or replicas in one process. They sync side by side, as each waits for others; what a replica does alone
    takes turns, since hundreds of threads of one interpreter would mostly wait for it."""

    def __init__(self, kind: str, first: int) -> None:
        for name in PATIENT:
            setattr(deadlines, name, LIMIT_S)
        MODELS[SMALL.name] = SMALL
        case = Case(model=SMALL.name, device="cpu", learners=NUM_LEARNERS, replicas=NUM_REPLICAS, tp=TP)
        numbers = range(first, first + PER_PROCESS[kind])
        self.hosts: dict[int, list[Any]] = {
            number: [LearnerHost(case, number, 0)]
            if kind == "learners"
            else [WorkerHost(case, worker, 0) for worker in range(TP)]
            for number in numbers
        }
        self._pool, self._turn = ThreadPoolExecutor(PER_PROCESS[kind] * TP), threading.Lock()

    def see_learner(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self.hosts[rank][0], method)(*args)

    def see_replica(self, number: int, method: str, args: tuple[Any, ...]) -> list[bytes]:
        with self._turn if method in ("ws_record", "ws_describe", "ws_open") else nullcontext():
            calls = [self._pool.submit(worker.call, method, args, LIMIT_S) for worker in self.hosts[number]]
            return [reply for call in calls for reply in call.result()]

    def see_vitals(self) -> Vitals:
        return Vitals.of_this()

    def close(self) -> None:
        for host in (host for hosts in self.hosts.values() for host in hosts):
            host.close()


class Party:
    """A `PublisherHandle` or a `ReplicaHandle`."""

    def __init__(self, child: Child, kind: str, number: int, line: int) -> None:
        self.rank, self.name = number, f"r{number}"
        self._line, self._method = child.lines[line], "see_learner" if kind == "learners" else "see_replica"

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        return await self._line.ask_async(self._method, self.rank, method, args, timeout_s=timeout_s)

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        return CommitResult(results=await self.call(method, *args, timeout_s=timeout_s), pause_s=0.0)


def used(pids: list[int]) -> tuple[float, int]:
    """Seconds of processors and bytes of memory, by all processes together."""
    processes = [psutil.Process(pid) for pid in pids]
    times = [process.cpu_times() for process in processes]
    return sum(time.user + time.system for time in times), sum(one.memory_full_info().pss for one in processes)


async def test_64_learners_and_512_workers_open_sync_and_close_on_one_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PATIENT:
        monkeypatch.setattr(deadlines, name, LIMIT_S)
    children: list[Child] = []
    parties: dict[str, list[Any]] = {"learners": [], "replicas": []}
    for kind, total in (("learners", NUM_LEARNERS), ("replicas", NUM_REPLICAS)):
        size = PER_PROCESS[kind]
        for first in range(0, total, size):
            children.append(Child(f"{kind} {first}", Hosts, kind, first, num_lines=1 + size))
            parties[kind] += [Party(children[-1], kind, first + place, 1 + place) for place in range(size)]
    try:
        for child in children:
            child.ask("see_vitals", timeout_s=LIMIT_S)  # built
        pids = [*(child.pid for child in children), os.getpid()]
        steps = {"built": used(pids)}
        options = SyncOptions(timeout_s=LIMIT_S)
        coordinator = SyncCoordinator(parties["learners"], parties["replicas"], options=options)
        await coordinator.open()
        steps["open"] = used(pids)
        await coordinator.publish(1)
        report = await coordinator.sync(1)
        await coordinator.self_test()
        steps["synced"] = used(pids)
        vitals = [child.ask("see_vitals", timeout_s=LIMIT_S) for child in children]
        await coordinator.close()
    finally:
        for child in children:
            child.close()
    with capsys.disabled():
        told = "; ".join(
            f"{name}: {seconds:.0f} s of processors, {size >> 20} MiB" for name, (seconds, size) in steps.items()
        )
        files, threads = max(one.num_files for one in vitals), max(one.num_threads for one in vitals)
        print(f"\n{told}; at most {files} files and {threads} threads in a process; {report.counters}")
    # Bytes may come the long way round: a ring gives up whoever has no processor for some seconds.
    assert (report.replicas_live, report.replicas_skipped, report.num_retries) == (NUM_REPLICAS, 0, 0)
    assert report.counters["control_connections"] >= NUM_LEARNERS * NUM_REPLICAS * TP
    assert steps["synced"][1] < MEMORY_LIMIT
