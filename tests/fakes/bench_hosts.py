"""Hosts for children of the benchmark: one that echoes, dies and dawdles on demand."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from weight_sync.errors import LeaseExpired


class MoodyHost:
    def __init__(self, name: str) -> None:
        self.name = name
        if name == "unborn":
            raise ValueError("this one cannot be built")

    def call(self, method: str, *args: Any) -> Any:
        match method:
            case "echo":
                return (self.name, *args)
            case "dawdle":
                time.sleep(args[0])
                return "late"
            case "expire":
                raise LeaseExpired("the lease is gone")
            case "die":
                return os.kill(os.getpid(), signal.SIGKILL)
            case _:
                raise ValueError(method)

    def close(self) -> None:
        pass
