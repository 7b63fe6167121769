"""The four backends, side by side: cpu for real, the others on fake driver libraries compiled here."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.drivers.build import HostBinding, compile_fakes, compiler, make_backend, make_binding
from tests.fakes.drivers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.drivers.host_npu import HostNpuBinding
    from weight_sync.device.base import Backend, IpcHandle

ACCELERATORS = ("cuda", "rocm", "npu")


@dataclass
class Harness:
    """One backend and, for an accelerator, its fake library and torch binding."""

    name: str
    library: str | None
    backend: Backend
    binding: HostBinding | HostNpuBinding
    peer: Peer
    theirs: list[Any] = field(default_factory=list)
    """Open blocks of the second process."""

    def counter(self, name: str) -> int:
        function = self._fake().fake_counter
        function.restype = ctypes.c_long
        return function(name.encode())

    def fail(self, function: str, code: int, times: int = 1) -> None:
        self._fake().fake_fail(function.encode(), code, times)

    def set_total(self, nbytes: int) -> None:
        self._fake().fake_set_total(ctypes.c_size_t(nbytes))

    def call(self, op: str, **arguments: object) -> object:
        """A call on this backend in the second process."""
        return self.peer.call(op, name=self.name, library=self.library, **arguments)

    def alloc(self, nbytes: int = 1024) -> Any:
        """A block of this backend in the second process, which the end of the test closes."""
        block = self.call("alloc", nbytes=nbytes)
        self.theirs.append(block)
        return block

    def close(self, block: Any) -> None:
        self.theirs.remove(block)
        self.peer.call("close", block=block)

    def open_in_peer(self, handle: IpcHandle) -> int:
        self.theirs.append(self.peer.open(self.name, self.library, handle))
        return self.theirs[-1]

    def function(self, cuda: str, acl: str) -> str:
        """The vendor's name of a call, given as cudart and as ACL have it."""
        return {"cuda": "cuda" + cuda, "rocm": "hip" + cuda, "npu": acl}[self.name]

    def _fake(self) -> ctypes.CDLL:
        assert self.library is not None
        return ctypes.CDLL(self.library)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if compiler() is None:
        pytest.skip("no C compiler `cc` to build the fake driver libraries with")
    return compile_fakes(tmp_path_factory.mktemp("drivers"))


@pytest.fixture(scope="session")
def peer() -> Iterator[Peer]:
    process = Peer()
    yield process
    process.stop()


def _harness(request: pytest.FixtureRequest, peer: Peer) -> Iterator[Harness]:
    name = request.param
    library = None if name == "cpu" else request.getfixturevalue("libraries")[name]
    if library is not None:
        ctypes.CDLL(library).fake_reset()
    binding = HostBinding() if library is None else make_binding(name, library)
    harness = Harness(name, library, make_backend(name, library, binding), binding, peer)
    yield harness
    for block in [*harness.theirs]:
        harness.close(block)


@pytest.fixture(params=("cpu", *ACCELERATORS))
def every(request: pytest.FixtureRequest, peer: Peer) -> Iterator[Harness]:
    yield from _harness(request, peer)


@pytest.fixture(params=ACCELERATORS)
def accelerator(request: pytest.FixtureRequest, peer: Peer) -> Iterator[Harness]:
    yield from _harness(request, peer)
