"""The four backends next to each other: cpu for real, the others on fake driver libraries compiled here."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from tests.fakes.drivers.build import HostBinding, make_backend, make_binding
from tests.fakes.drivers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weight_sync.device.base import IpcHandle

ACCELERATORS = ("cuda", "rocm", "npu")


class Harness:
    """One backend and, for an accelerator, its fake library and torch binding; and a second process."""

    def __init__(self, name: str, library: str | None, peer: Peer) -> None:
        self.name, self.library, self.peer = name, library, peer
        if library is not None:
            self._fake().fake_reset()
        self.binding = HostBinding() if library is None else make_binding(name, library)
        self.backend = make_backend(name, library, self.binding)
        self.theirs: list[int] = []
        """Open blocks of the second process."""

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def counter(self, name: str) -> int:
        function = self._fake().fake_counter
        function.restype = ctypes.c_long
        return function(name.encode())

    def counters(self, *names: str) -> tuple[int, ...]:
        return tuple(map(self.counter, names))

    def fail(self, cuda: str, acl: str, code: int, *, times: int = 1) -> str:
        """The next calls of it fail. A call is given as cudart and as ACL have it; returns the vendor's name."""
        name = {"cuda": "cuda" + cuda, "rocm": "hip" + cuda, "npu": acl}[self.name]
        self._fake().fake_fail(name.encode(), code, times)
        return name

    def set_total(self, nbytes: int) -> None:
        self._fake().fake_set_total(ctypes.c_size_t(nbytes))

    def alloc(self, nbytes: int = 1024) -> int:
        """A block of this backend in the second process, which the end of the test closes."""
        self.theirs.append(self.peer.call("alloc", self.name, self.library, nbytes))
        return self.theirs[-1]

    def handle(self, nbytes: int = 1024) -> IpcHandle:
        """Of such a block."""
        return self.peer.export(self.alloc(nbytes))

    def open_in_peer(self, handle: IpcHandle) -> int:
        self.theirs.append(self.peer.open(self.name, self.library, handle))
        return self.theirs[-1]

    def close(self, block: int) -> None:
        self.theirs.remove(block)
        self.peer.call("give_up", block)

    def _fake(self) -> ctypes.CDLL:
        assert self.library is not None
        return ctypes.CDLL(self.library)


@pytest.fixture(scope="session")
def peer() -> Iterator[Peer]:
    process = Peer()
    yield process
    process.close()


@pytest.fixture
def every(request: pytest.FixtureRequest, peer: Peer) -> Iterator[Harness]:
    name = request.param
    harness = Harness(name, None if name == "cpu" else request.getfixturevalue("libraries")[name], peer)
    yield harness
    for block in [*harness.theirs]:
        harness.close(block)


@pytest.fixture
def accelerator(every: Harness) -> Harness:
    return every


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"every", "accelerator"} & set(metafunc.fixturenames):
        names = ACCELERATORS if "accelerator" in metafunc.fixturenames else ("cpu", *ACCELERATORS)
        metafunc.parametrize("every", names, indirect=True)
