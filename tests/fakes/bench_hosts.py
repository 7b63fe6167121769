"""A host for children of the benchmark that echoes, dies and dawdles on demand."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from weight_sync.errors import PullTimeout


class MoodyHost:
    def __init__(self, name: str) -> None:
        self.name = name
        if name == "unborn":
            raise ValueError("this one cannot be built")

    def echo(self, *args: Any) -> Any:
        return (self.name, *args)

    def dawdle(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self) -> None:
        raise PullTimeout("no bytes came")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None: ...
