"""Ports of this host: one to choose, and those that somebody listens on."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection


def free_port() -> int:
    """It is free now, and the kernel does not assign it: Linux assigns ports from 32768 on."""
    for port in random.SystemRandom().sample(range(20000, 32768), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port from 20000 to 32767 could be bound, of 100 that were tried")


def listening_ports(pids: Collection[int] | None = None) -> list[int]:
    """Of these processes, or of all."""
    found = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [connection.laddr.port for connection in found if pids is None or connection.pid in pids]


def has_ipv6() -> bool:
    """Of loopback."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
