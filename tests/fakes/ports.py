"""A port of this host."""

from __future__ import annotations

import random
import socket


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
