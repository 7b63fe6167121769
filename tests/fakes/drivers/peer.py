"""A second process that allocates, exports, opens, reads and writes blocks on request."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import torch

from tests.fakes.drivers.build import make_backend
from tests.fakes.forks import PARTIES
from tests.fakes.processes import Child
from weight_sync.device.base import Backend, IpcHandle, PersistentBlock

if TYPE_CHECKING:
    from collections.abc import Mapping


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return ((torch.arange(nbytes) * 131 + seed) % 251).to(torch.uint8)


class Peer(Child):
    """`environ` is that of the process. If torch has to find it when it is imported, the process is `spawned`."""

    def __init__(self, environ: Mapping[str, str] | None = None, *, spawned: bool = False) -> None:
        environ = {} if environ is None else dict(environ)
        context = multiprocessing.get_context("spawn") if spawned else None
        with mock.patch.dict(os.environ, environ if spawned else {}):
            super().__init__("peer", Blocks, environ, preload=(*PARTIES, "tests.fakes.drivers.peer"), context=context)

    def call(self, method: str, *args: object) -> Any:
        return self.ask(method, *args, timeout_s=300.0)

    def export(self, block: int) -> IpcHandle:
        return msgspec.msgpack.decode(self.call("export", block), type=IpcHandle)

    def open(self, name: str, library: str | None, handle: IpcHandle) -> int:
        return self.call("open", name, library, msgspec.msgpack.encode(handle))


class Blocks:
    """In that process. Blocks go by number; handles through msgpack, as they travel between learner and engine."""

    def __init__(self, environ: dict[str, str]) -> None:
        os.environ |= environ
        self._backends: dict[tuple[str, str | None], Backend] = {}
        self._blocks: list[tuple[Backend, PersistentBlock]] = []

    def backend(self, name: str, library: str | None) -> Backend:
        if (name, library) not in self._backends:
            self._backends[name, library] = make_backend(name, library)
        return self._backends[name, library]

    def _keep(self, backend: Backend, block: PersistentBlock) -> int:
        self._blocks.append((backend, block))
        return len(self._blocks) - 1

    def set_device(self, name: str, library: str | None, index: int) -> None:
        self.backend(name, library).set_device(index)

    def identity(self, name: str, library: str | None, index: int) -> str:
        self.set_device(name, library, index)
        return self.backend(name, library).device_identity()

    def alloc(self, name: str, library: str | None, nbytes: int) -> int:
        backend = self.backend(name, library)
        return self._keep(backend, backend.alloc_persistent(nbytes))

    def export(self, number: int) -> bytes:
        backend, block = self._blocks[number]
        return msgspec.msgpack.encode(backend.ipc_export(block))

    def open(self, name: str, library: str | None, handle: bytes) -> int:
        backend = self.backend(name, library)
        return self._keep(backend, backend.ipc_open(msgspec.msgpack.decode(handle, type=IpcHandle)))

    def give_up(self, number: int) -> None:
        self._blocks[number][1].close()

    def write(self, number: int, offset: int, data: bytes) -> None:
        backend, block = self._blocks[number]
        block.tensor[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        backend.synchronize()

    def read(self, number: int, offset: int, nbytes: int) -> bytes:
        backend, block = self._blocks[number]
        backend.synchronize()
        return block.tensor[offset : offset + nbytes].cpu().numpy().tobytes()

    def digest(self, number: int) -> int:
        backend, block = self._blocks[number]
        return backend.digest(block.tensor)

    def copy(self, dst: int, src: int) -> None:
        backend, block = self._blocks[dst]
        stream = backend.new_stream()
        backend.copy_async(block.tensor, self._blocks[src][1].tensor, stream)
        backend.synchronize(stream)

    def run(self, source: str) -> Any:
        """Execute `source`, which sets `result`: for checks that only one test needs."""
        scope: dict[str, Any] = {"self": self}
        exec(source, scope)
        return scope["result"]

    def close(self) -> None:
        """Blocks end with the process."""
