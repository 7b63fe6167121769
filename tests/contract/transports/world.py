"""Publisher and receiver processes for the transport contract."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import zmq

from tests.fakes.drivers.build import make_backend
from tests.fakes.forks import PARTIES
from tests.fakes.processes import Child
from weight_sync.channel import ControlClient, ControlServer
from weight_sync.messages import ArenaHandle, PeerAddress, RunKeys, decode, encode
from weight_sync.transports import pair_sender
from weight_sync.transports.base import Piece
from weight_sync.transports.exporter import SlotExporter
from weight_sync.transports.mapped import MappedReader
from weight_sync.transports.pair import PairReceiver, Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weight_sync.device.base import Backend
    from weight_sync.transports.base import SourceReader

SLOT_BYTES, NUM_SLOTS = 10_007, 3
_PUBLIC, _SECRET = zmq.curve_keypair()
KEYS = RunKeys(run_id="contract", public=_PUBLIC, secret=_SECRET)
QUICK = Timing(connect_s=20.0, stall_s=4.0, silence_s=2.0)
"""For publishers and receivers whose peers are killed: their deadlines are what a test waits for. As in `Timing()`, a
silent publisher is noticed long before a transfer that does not move."""
SLOW_MESSAGE_BYTES, SLOW_MESSAGES = 64 * 1024, 64
SLOW_PAUSE_S = 0.05
"""A slow publisher sends one message at a time, for three seconds in all: time enough to be killed in the middle."""
PRELOAD = (*PARTIES, "tests.contract.transports.world")


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
        backend = make_backend(self.backend, self.library)
        backend.set_device(device)
        return backend


def pattern(slot: int, nbytes: int = SLOT_BYTES) -> torch.Tensor:
    """No two slots alike, no zeros, and no repetition of a short pattern."""
    counter = torch.arange(nbytes)
    return ((counter * 7 + (counter >> 8) + slot * 13) % 251 + 1).to(torch.uint8)


class Publisher:
    """Fills its slots and serves its end."""

    def __init__(self, kind: Kind, keys: RunKeys) -> None:
        if kind.is_slow:
            pair_sender.batches = slowly
        self._backend = kind.make_backend(device=0)
        self._end = SlotExporter(
            (kind.transport,), self._backend, slot_bytes=kind.slot_bytes, num_slots=NUM_SLOTS, host=kind.host,
            timing=kind.timing,
        )  # fmt: skip
        for slot in range(NUM_SLOTS):
            self.pack(slot, pattern(slot, kind.slot_bytes))
        self._server = ControlServer(self._end.answer, keys, epoch=1, host=kind.host)

    def pack(self, slot: int, data: torch.Tensor) -> None:
        self._end.slot(slot).copy_(data)
        self._backend.synchronize_current()
        self._end.seal(slot)

    def address(self) -> tuple[bytes, bytes]:
        return encode(self._end.handles[0]), encode(self._server.address)

    def see_threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    def see_counters(self) -> dict[str, int]:
        return self._end.counters()

    def close(self) -> None:
        self._server.close()
        self._end.close()


def slowly(messages: Any, size: Callable[[Any], int]) -> Iterator[list[Any]]:
    for message in messages:
        time.sleep(SLOW_PAUSE_S)
        yield [message]


class Remote(Child):
    """A publisher process. `wait` once, before anything else: several may start concurrently."""

    def __init__(self, kind: Kind) -> None:
        super().__init__("publisher", Publisher, kind, KEYS, num_lines=2, preload=PRELOAD)
        self.kind = kind

    def wait(self) -> Remote:
        handle, address = self.ask("address", timeout_s=90.0)
        self.address = decode(address, PeerAddress)
        self.handle = decode(handle, ArenaHandle)
        return self

    def threads_to(self, peer: str) -> list[str]:
        return [name for name in self.ask("see_threads") if name.endswith(peer)]

    def close(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
        self.lines[0].close()
        self.process.join(15)
        is_left = self.process.is_alive()
        super().close()
        assert not is_left, "the publisher did not end by itself"


class VictimReceiver:
    """Pulls slot 1 of a slow publisher until it is killed or stopped."""

    def __init__(self, kind: Kind, handle: bytes, address: bytes, keys: RunKeys) -> None:
        local = Local(kind, name="victim/0", keys=keys)
        self._end = local.open(decode(handle, ArenaHandle), decode(address, PeerAddress))
        self._landing = local.empty(kind.slot_bytes)

    def pull(self) -> None:
        self._end.pull(1, slow_pieces(self._landing), check=lambda: None)

    def see_first_byte(self) -> int:
        return int(self._landing[0])

    def close(self) -> None:
        """Its process ends."""


def slow_pieces(landing: torch.Tensor) -> list[Piece]:
    """The beginning of a slow publisher's slot, as much as `landing` holds, message by message."""
    starts = range(0, landing.numel(), SLOW_MESSAGE_BYTES)
    return [Piece(start, landing[start : start + SLOW_MESSAGE_BYTES]) for start in starts]


class Local:
    """This process as a receiver: lines and ends, closed together."""

    def __init__(self, kind: Kind, *, name: str = "local/0", keys: RunKeys = KEYS) -> None:
        self.kind = kind
        self._keys = keys
        self.backend = kind.make_backend(device=1)
        self._name, self._context = name, zmq.Context()
        self._clients: list[ControlClient] = []
        self._ends: list[SourceReader] = []

    def line(self, address: PeerAddress) -> ControlClient:
        self._clients.append(ControlClient(self._context, address, self._keys, epoch=1, sender=self._name))
        return self._clients[-1]

    def open(self, arena: ArenaHandle, address: PeerAddress) -> SourceReader:
        if self.kind.is_pair:
            end = PairReceiver(self.backend, arena, self.line(address), host=self.kind.host, timing=self.kind.timing)
        else:
            end = MappedReader(self.backend, arena)
        self._ends.append(end)
        return end

    def open_one(self, remote: Remote) -> SourceReader:
        return self.open(remote.handle, remote.address)

    def empty(self, nbytes: int = SLOT_BYTES) -> torch.Tensor:
        """Zeros where this receiver's engine would have its parameters."""
        on_host = self.kind.library is not None or self.kind.backend == "cpu"
        # By its index: torch's current device is one per thread, and the first one in a thread that a test starts.
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu" if on_host else f"{self.backend.torch_device}:1")

    def close(self) -> None:
        for one in (*self._ends, *self._clients):
            one.close()
        self._context.term()
