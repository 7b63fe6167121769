"""A learner rank of `sync_world` in a process of its own, so that it can really be killed or stopped."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from typing import Any

from tests.fakes.sync_world import LocalPublisher, full_weights


def serve(rank: int, num_ranks: int, pipe: Any) -> None:
    publisher = LocalPublisher(rank, num_ranks, full_weights(0))
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            publisher.ws_close()
            return
        if method == "train":
            publisher.full = full_weights(*args)
            pipe.send(None)
        else:
            pipe.send(getattr(publisher, method)(*args))


class PublisherProcess:
    """A `PublisherHandle`."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.rank = rank
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(rank, num_ranks, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: object, timeout_s: float = 60.0) -> Any:
        self._pipe.send((method, args))
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"rank {self.rank} did not answer {method}")
        return self._pipe.recv()

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        return await asyncio.to_thread(self.ask, method, *args, timeout_s=timeout_s)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(10)

    def close(self) -> None:
        self._pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.kill()
