"""How the two members of a group find each other: a store on each side, kept equal over the control line.

torch's groups exchange a few hundred bytes (addresses, an identifier) through a key-value store before they connect.
Here each side has a store in its own memory, and what one side writes is carried to the other. So the exchange
is authenticated like everything on the control line, no further port is opened, and no C++ thread ever calls into
Python (a store written in Python would be called from the library's threads, and could deadlock with the interpreter's
lock). Keys are written once; a key that changes later would not be carried again.
"""

from __future__ import annotations

import socket

import torch.distributed as dist

from weight_sync.errors import TransportUnusable

WILDCARDS = ("", "0.0.0.0", "::", "*")


class StoreMirror:
    """One side's store. Not thread-safe itself; the store is."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        self._own: set[str] = set()
        self._learned: set[str] = set()

    def own(self) -> dict[str, bytes]:
        """Every key that this side made. All of them, whenever it is asked: an answer that came too late is thrown
        away, and nobody says so."""
        self._own |= set(self.store.list_keys()) - self._learned
        return {key: bytes(self.store.get(key)) for key in sorted(self._own)}

    def learn(self, entries: dict[str, bytes]) -> None:
        """Take over what the other side made. Keys that are known already are left alone."""
        for key, value in entries.items():
            if key not in self._own and key not in self._learned:
                self._learned.add(key)
                self.store.set(key, value)  # type: ignore[arg-type]


def require_reachable(host: str) -> str:
    """
    Raises:
        TransportUnusable: `host` is no address that another process could connect to.
    """
    if host in WILDCARDS:
        raise TransportUnusable(
            f"a two-sided transport needs the address under which others reach this process, got {host!r}; "
            "name one of this host's addresses"
        )
    return host


def own_address(peer: str) -> str:
    """The address of this host from which the kernel would reach `peer`. Sends nothing.

    Raises:
        TransportUnusable: there is no route.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportUnusable(f"no route to the publisher at {peer!r}: {error}") from error
