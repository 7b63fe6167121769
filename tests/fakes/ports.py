"""Ports of this host: one to choose, and those that somebody listens on."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LISTENING = "0A"
"""As proc(5) net/tcp writes the state."""


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


def listening_sockets() -> set[tuple[int, str]]:
    """(port, inode) of this host's TCP sockets that listen. A port may soon have another owner; the inode shows it."""
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return {(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if row[3] == LISTENING}
