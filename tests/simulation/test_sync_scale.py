"""The messages of one version between a driver, learners and engine workers that are real ends of the control line."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import zmq

from tests.fakes.processes import Child
from tests.simulation.sync_scale import table
from weight_sync import deadlines
from weight_sync.channel import ControlClient, ControlServer, Switchboard, make_run_keys
from weight_sync.messages import (
    Available,
    AwaitRequest,
    LinkRequest,
    Ok,
    PeerAddress,
    PrefetchRequest,
    RelayHandle,
    RunKeys,
    decode,
    encode,
)
from weight_sync.plan.routes import RING_SIZE, Peer, plan_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weight_sync.messages import Request, Response

pytestmark = pytest.mark.timing

EPOCH = 5
DEADLINE_S = 120.0
"""Nothing takes long; the machine may be busy."""


class FakeWorker:
    """Brings a version by waiting for its predecessor to have it, or by asking a learner whether it is there."""

    def __init__(self, name: str, keys: RunKeys) -> None:
        self.name, self._keys = name, keys
        self.learner: PeerAddress | None = None
        self._lock = threading.Lock()
        self._version = -1
        self._waiting: list[tuple[AwaitRequest, Future[Response]]] = []
        self._giver: ControlClient | None = None
        self._is_head = False
        self.server = ControlServer(self._handle, keys, epoch=EPOCH)

    def _handle(self, sender: str, request: Request) -> Response | Future[Response]:
        match request:
            case LinkRequest():
                self._is_head = not request.stages[0].via
                giver = self.learner if self._is_head else request.predecessors[request.stages[0].via[0]].address
                assert giver is not None
                if self._giver is None:  # the request is repeated while the machine is busy
                    self._giver = ControlClient(
                        zmq.Context.instance(), giver, self._keys, epoch=EPOCH, sender=self.name
                    )
                return Ok()
            case PrefetchRequest():
                reply: Future[Response] = Future()
                threading.Thread(target=self._bring, args=(request.version, reply), daemon=True).start()
                return reply
            case AwaitRequest():
                with self._lock:
                    if self._version == request.version:
                        return Available(position=1)
                    answer: Future[Response] = Future()
                    self._waiting.append((request, answer))
                    return answer
            case _:
                raise ValueError(f"unexpected {request} from {sender}")

    def _bring(self, version: int, reply: Future[Response]) -> None:
        giver = self._giver
        assert giver is not None
        if self._is_head:
            giver.ping(deadline_s=DEADLINE_S)
        else:
            giver.ask(AwaitRequest(version=version, rank=0, position=0), Available, deadline_s=DEADLINE_S)
        with self._lock:
            self._version, waiting, self._waiting = version, self._waiting, []
        for _, answer in waiting:
            answer.set_result(Available(position=1))
        reply.set_result(Ok())


class Host:
    """A process with many parties."""

    def __init__(self, keys: bytes, names: Sequence[str], *, are_learners: bool) -> None:
        deadlines.RESEND_S = DEADLINE_S
        self._keys = decode(keys, RunKeys)
        self._workers = [] if are_learners else [FakeWorker(name, self._keys) for name in names]
        self._learners = [ControlServer(_refuse, self._keys, epoch=EPOCH) for _ in names] if are_learners else []

    @property
    def _servers(self) -> list[ControlServer]:
        return [*self._learners, *(worker.server for worker in self._workers)]

    def see_addresses(self) -> list[bytes]:
        return [encode(server.address) for server in self._servers]

    def meet(self, learners: Sequence[bytes]) -> None:
        for number, worker in enumerate(self._workers):
            worker.learner = decode(learners[number % len(learners)], PeerAddress)

    def see_counts(self) -> dict[str, int]:
        return dict(sum((Counter(server.counters()) for server in self._servers), Counter[str]()))

    def close(self) -> None:
        """Its process ends."""


def _refuse(sender: str, request: Request) -> Response:
    raise ValueError(f"unexpected {request} from {sender}")


@pytest.mark.full
@pytest.mark.parametrize(("num_workers", "num_learners"), [(1504, 64)])
async def test_a_version_costs_the_driver_one_socket_and_two_messages_per_worker(
    num_workers: int, num_learners: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "RESEND_S", DEADLINE_S)  # a busy machine would repeat itself
    keys = make_run_keys("scale")
    names = [f"r{replica}/{worker}" for replica in range(num_workers // 8) for worker in range(8)]
    num_hosts = -(-num_workers // 400)
    parts = [names[i * len(names) // num_hosts : (i + 1) * len(names) // num_hosts] for i in range(num_hosts)]
    hosts = [Child(f"host {i}", _make_workers, encode(keys), part) for i, part in enumerate(parts)]
    learners = Child("learners", _make_learners, encode(keys), num_learners)
    lines = Switchboard(keys, epoch=EPOCH)
    try:
        at_learners = learners.ask("see_addresses", timeout_s=DEADLINE_S)
        for host in hosts:
            host.ask("meet", at_learners, timeout_s=DEADLINE_S)
        found = [
            decode(each, PeerAddress) for host in hosts for each in host.ask("see_addresses", timeout_s=DEADLINE_S)
        ]
        addresses = dict(zip(names, found, strict=True))
        parties = [Peer(name=n, worker=int(n.rpartition("/")[2]), node=n.rpartition("/")[0]) for n in names]
        routes = plan_routes(
            {rank: f"l{rank // 8}" for rank in range(num_learners)},
            parties,
            dict.fromkeys(range(8), range(num_learners)),
            relay="auto",
        )
        began, cpu = time.monotonic(), time.process_time()
        dialled = {name: lines.dial(name, address) for name, address in addresses.items()}

        async def ask_all(requests: dict[str, Any], kind: type) -> None:
            await asyncio.gather(
                *(lines.ask(dialled[name], requests[name], kind, deadline_s=DEADLINE_S) for name in names)
            )

        def link(name: str) -> LinkRequest:
            told = tuple(
                RelayHandle(owner=other, node="", address=addresses[other], arenas=(), layout="")
                for other in routes[name].predecessors
            )
            return LinkRequest(stages=routes[name].stages, predecessors=told, readers=())

        await ask_all({name: link(name) for name in names}, Ok)
        linked = time.monotonic()
        before = _counts([*hosts, learners])
        await ask_all(dict.fromkeys(names, prefetch(1)), Ok)
        synced = time.monotonic()
        spent = _counts([*hosts, learners]) - before
        num_heads = sum(not routes[name].stages[0].via for name in names)
        del spent["control_connections"]  # made again where a busy machine took too long for a handshake
        assert spent == {"control_answered": 2 * num_workers}, "one asked by the driver, one by a successor"
        num_rings = 8 * -(-num_workers // 8 // RING_SIZE)
        assert num_heads == num_rings * num_learners // 8, "who waits for nobody"
        to_workers = {int(address.endpoint.rpartition(":")[2]) for address in found}
        connected = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port in to_workers]
        assert len(connected) == num_workers, "of one socket of zmq"
        print(f"{num_workers} workers, {num_learners} learners: linked in {linked - began:.1f} s, synced in "
              f"{synced - linked:.1f} s, {time.process_time() - cpu:.1f} s of the driver's processor")  # fmt: skip
    finally:
        lines.close()
        for child in (*hosts, learners):
            child.close()


def prefetch(version: int) -> PrefetchRequest:
    """Where the version lies matters to nobody here."""
    places = set(PrefetchRequest.__struct_fields__) - {"version", "deadline_s"}
    return PrefetchRequest(version=version, deadline_s=DEADLINE_S, **dict.fromkeys(places, ()))


def _make_workers(keys: bytes, names: Sequence[str]) -> Host:
    return Host(keys, names, are_learners=False)


def _make_learners(keys: bytes, number: int) -> Host:
    return Host(keys, [str(rank) for rank in range(number)], are_learners=True)


def _counts(children: Sequence[Child]) -> Counter[str]:
    return sum((Counter(child.ask("see_counts", timeout_s=DEADLINE_S)) for child in children), Counter[str]())


@pytest.mark.full
def test_the_table_of_the_docs_is_what_the_routes_give() -> None:
    docs = (Path(__file__).parents[2] / "docs/weight_sync.md").read_text()
    assert "\n".join(table()) in docs
