"""Publisher and receiver processes for the transport contract, and the vendor's group that CI machines lack."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import zmq

from tests.fakes.drivers.build import make_backend
from tests.fakes.forks import forks
from weight_sync.channel import ControlClient, ControlServer, Membership
from weight_sync.device import collectives as process_groups
from weight_sync.messages import ArenaHandle, decode, encode
from weight_sync.transports import mapped, pair
from weight_sync.transports import pair_sender as outbound
from weight_sync.transports.base import Piece
from weight_sync.transports.exporter import Offer
from weight_sync.transports.pair import Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from weight_sync.device.base import Backend
    from weight_sync.transports.base import ReceiverEnd

SLOT_BYTES, NUM_SLOTS = 10_007, 3
REAL_NCCL = getattr(dist, "ProcessGroupNCCL", None)
SECRET = b"of the contract suite"
MEMBERSHIP = Membership(run_id="contract", epoch=1, secret=SECRET)
QUICK = Timing(connect_s=20.0, stall_s=5.0, silence_s=2.0)
"""For publishers and receivers whose peers are killed: their deadlines are what a test waits for. As in `Timing()`, a
silent publisher is noticed long before a transfer that does not move."""
SLOW_MESSAGE_BYTES, SLOW_MESSAGES = 64 * 1024, 64
SLOW_PAUSE_S = 0.05
"""A slow publisher sends one message at a time, for three seconds in all: time enough to be killed in the middle."""


@dataclass(frozen=True)
class Kind:
    """A transport, and the devices to run it on. Plain values: it travels to child processes."""

    transport: str
    backend: str = "cpu"
    library: str | None = None
    """Fake driver to run on; None for the real thing."""
    is_slow: bool = False
    timing: Timing | None = None
    host: str = "127.0.0.1"
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def is_pair(self) -> bool:
        return self.transport not in ("ipc", "shm")

    @property
    def slot_bytes(self) -> int:
        return SLOW_MESSAGE_BYTES * SLOW_MESSAGES if self.is_slow else SLOT_BYTES

    def make_backend(self, *, device: int) -> Backend:
        os.environ.update(self.environ)
        # Either way: kinds follow each other in one test process.
        dist.ProcessGroupNCCL = REAL_NCCL if self.library is None else HostNccl  # type: ignore[attr-defined]
        backend = make_backend(self.backend, self.library)
        backend.set_device(device if self.library is None else 0)
        return backend

    def open_publisher(self, backend: Backend) -> Offer:
        return Offer(
            (self.transport,),
            backend,
            slot_bytes=self.slot_bytes,
            num_slots=NUM_SLOTS,
            host=self.host,
            timing=self.timing,
        )

    def open_receiver(
        self, backend: Backend, arenas: dict[int, ArenaHandle], lines: dict[int, ControlClient]
    ) -> ReceiverEnd:
        if not self.is_pair:
            return mapped.open_mapped(self.transport, backend, arenas)
        return pair.PairReceiverEnd(backend, arenas, lines, timing=self.timing)


def pattern(slot: int, nbytes: int = SLOT_BYTES) -> torch.Tensor:
    """No two slots alike, no zeros, and no repetition of a short pattern."""
    counter = torch.arange(nbytes)
    return ((counter * 7 + (counter >> 8) + slot * 13) % 251 + 1).to(torch.uint8)


def publish(kind: Kind, pipe: Connection) -> None:
    """A publisher process: fills its slots, serves its end, then obeys single words."""
    if kind.is_slow:
        outbound.batches = slowly
    backend = kind.make_backend(device=0)
    end = kind.open_publisher(backend)
    for slot in range(NUM_SLOTS):
        end.slot(slot).copy_(pattern(slot, kind.slot_bytes))
        backend.synchronize_current()
        end.seal(slot)
    server = ControlServer(end.answer, MEMBERSHIP, host=kind.host)
    pipe.send_bytes(encode(end.handles[0]))
    pipe.send(server.endpoint)
    while (order := pipe.recv()) != "close":
        match order:
            case "repack":
                end.slot(0).copy_(pattern(9, kind.slot_bytes))
                backend.synchronize_current()
                end.seal(0)
                pipe.send(None)
            case "threads":
                pipe.send([thread.name for thread in threading.enumerate()])
            case "counters":
                pipe.send(end.counters())
            case _:
                raise ValueError(order)
    server.close()
    end.close()


def slowly(messages: Any, size: Callable[[Any], int]) -> Iterator[list[Any]]:
    for message in messages:
        time.sleep(SLOW_PAUSE_S)
        yield [message]


def receive(kind: Kind, handle: bytes, endpoint: str, pipe: Connection) -> None:
    """A receiver process that pulls slot 1 of a slow publisher and reports when the first bytes have arrived."""
    local = Local(kind, name="victim/0")
    end = local.open({4: decode(handle, ArenaHandle)}, {4: endpoint})
    landing = local.empty(kind.slot_bytes)
    said = False

    def check() -> None:
        nonlocal said
        if landing[0] and not said:
            said = True
            pipe.send("receiving")

    end.pull(4, 1, slow_pieces(landing), check=check)
    pipe.send("done")


def slow_pieces(landing: torch.Tensor) -> list[Piece]:
    """The beginning of a slow publisher's slot, as much as `landing` holds, message by message."""
    starts = range(0, landing.numel(), SLOW_MESSAGE_BYTES)
    return [Piece(start, landing[start : start + SLOW_MESSAGE_BYTES]) for start in starts]


class Child:
    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = forks("torch._dynamo", "tests.contract.transports.world")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, timeout_s: float = 60.0) -> Any:
        assert self.pipe.poll(timeout_s), "the child process does not answer"
        return self.pipe.recv()

    def ask(self, word: str) -> Any:
        self.pipe.send(word)
        return self.hear(20)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        if self.process.is_alive():
            os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(10)

    def close(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):
                self.pipe.send("close")
        self.process.join(15)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
            raise AssertionError("the child process did not end by itself")


class Remote(Child):
    """A publisher process. `wait` once, before anything else: several may start side by side."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(publish, kind)
        self.kind = kind

    def wait(self) -> Remote:
        assert self.pipe.poll(90), "the publisher did not come up"
        self.handle = decode(self.pipe.recv_bytes(), ArenaHandle)
        self.endpoint = self.hear()
        return self

    def threads_to(self, peer: str) -> list[str]:
        return [name for name in self.ask("threads") if name.endswith(peer)]


class Local:
    """This process as a receiver: lines and ends, closed together."""

    def __init__(self, kind: Kind, *, name: str = "local/0") -> None:
        self.kind = kind
        self.backend = kind.make_backend(device=1)
        self._name = name
        self._context = zmq.Context()
        self._clients: list[ControlClient] = []
        self._ends: list[ReceiverEnd] = []

    def line(self, endpoint: str) -> ControlClient:
        client = ControlClient(self._context, endpoint, membership=MEMBERSHIP, sender=self._name)
        self._clients.append(client)
        return client

    def open(self, arenas: dict[int, ArenaHandle], endpoints: dict[int, str]) -> ReceiverEnd:
        lines = {rank: self.line(endpoint) for rank, endpoint in endpoints.items()}
        end = self.kind.open_receiver(self.backend, arenas, lines)
        self._ends.append(end)
        return end

    def open_one(self, remote: Remote) -> ReceiverEnd:
        return self.open({4: remote.handle}, {4: remote.endpoint})

    def empty(self, nbytes: int = SLOT_BYTES) -> torch.Tensor:
        """Zeros where this receiver's engine would have its parameters."""
        on_host = self.kind.library is not None or self.kind.backend == "cpu"
        # By its index: torch's current device is one per thread, and the first one in a thread that a test starts.
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu" if on_host else f"{self.backend.torch_device}:1")

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for client in self._clients:
            client.close()
        self._context.term()


class HostNccl:
    """The vendor's group on host memory: the interface of torch's ProcessGroupNCCL, its bytes moved by gloo.

    Like the real one it connects at the first transfer, starts a batch when coalescing ends, completes in the
    background, and reports an aborted transfer as complete.
    """

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: HostNccl.Options) -> None:
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1", "a watchdog would end the process"
        assert size == 2
        self._store, self._rank = store, rank
        self._timeout_s = options._timeout.total_seconds()
        self._gloo: process_groups.GlooGroup | None = None
        self._batch: list[tuple[bool, torch.Tensor]] | None = None
        self.is_aborted = False

    def _start_coalescing(self) -> None:
        assert self._batch is None
        self._batch = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None
        self._batch.append((True, *tensors))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None
        self._batch.append((False, *tensors))

    def _end_coalescing(self) -> HostWork:
        batch, self._batch = self._batch, None
        assert batch
        if self._gloo is None:
            self._gloo = process_groups.GlooGroup(self._store, rank=self._rank, timeout_s=self._timeout_s)
        started = [self._gloo.send([t]) if is_send else self._gloo.receive([t]) for is_send, t in batch]
        return HostWork(self, started)

    def abort(self) -> None:
        self.is_aborted = True
        if self._gloo is not None:
            self._gloo.abort()


class AbortableGroup(Protocol):
    is_aborted: bool


class HostWork:
    """What a fake of a vendor's group returns for a transfer."""

    def __init__(self, group: AbortableGroup, transfers: list[process_groups.GlooTransfer]) -> None:
        self._group = group
        self._transfers = transfers
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for transfer in self._transfers:
                transfer.wait(3600)
        except process_groups.LinkBroken as error:
            self._error = None if self._group.is_aborted else RuntimeError(str(error))

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        assert self.is_completed(), "a wait on a device transfer cannot be woken"
        if self._error is not None:
            raise self._error
