"""An engine replica of `sync_world`, with all its workers, in a process of its own, under a watchdog."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from rollout.engine.weight_commit import EngineGate
from tests.fakes.party_process import Line, PartyProcess, settle
from tests.fakes.sync_world import LocalReplica, expected_engine, full_weights
from weight_sync.messages import CommitResult, OpenReceiver, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fakes.protocol_traps import Traps


POOL_SIZE = 8
"""As many calls of workers may be under way in a replica."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long things may take in this replica."""

    lease_s: float = 10.0
    pause_limit_s: float = 60.0


class Condition(NamedTuple):
    """What a test sees of a replica."""

    weights: int | None
    """Seed of the weights that every worker holds; None if none of those asked for, or a mixture."""
    is_paused: bool
    is_dirty: bool
    live_versions: tuple[int | None, ...]
    is_given_up: bool
    """Of the watchdog."""


def whole_pool(size: int) -> ThreadPoolExecutor:
    """A pool whose threads all run already: otherwise chance decides when one more is started."""
    pool, everybody = ThreadPoolExecutor(size, thread_name_prefix="engine-pool"), threading.Barrier(size)
    for _ in pool.map(lambda _: everybody.wait(20.0), range(size)):
        pass
    return pool


class ReplicaParty:
    """Its event loop runs in a thread, so a hanging call blocks no look from outside."""

    def __init__(self, name: str, num_workers: int, patience: Patience, traps: Traps) -> None:
        self.replica = LocalReplica(name, num_workers)
        self._patience = patience
        self._traps = traps
        self._is_ended = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(whole_pool(POOL_SIZE))
        threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True).start()
        self._gate = EngineGate(resume=self._resume, give_up=self._give_up, pause_limit_s=patience.pause_limit_s)

    def call(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[bytes]:
        if method == "ws_open":
            opening = decode(args[0], OpenReceiver)
            args = (encode(msgspec.structs.replace(opening, lease_s=self._patience.lease_s)),)
        answer = self._run(self.replica.call(method, *args, timeout_s=timeout_s))
        if method == "ws_open":
            self._traps.reach("opened")
        return answer

    def commit(self, version: int, method: str, args: tuple[Any, ...], timeout_s: float) -> CommitResult:
        with self._traps.committing():
            return self._run(self._commit(version, method, args, timeout_s))

    async def _commit(self, version: int, method: str, args: tuple[Any, ...], timeout_s: float) -> CommitResult:
        async with self._gate.closed(), self._gate.pause():
            try:
                return await self.replica.commit(version, method, *args, timeout_s=timeout_s)
            finally:
                self._gate.outcome = "dirty" if self.replica.is_paused else "ok"

    async def _resume(self) -> None: ...

    def _give_up(self, reason: str) -> None:
        """A mixture must not generate: an engine reports that it is dead instead."""
        self._is_ended = True

    def see_condition(self, seeds: Iterable[int]) -> Condition:
        receivers = self.replica.receivers
        return Condition(
            weights=next((seed for seed in seeds if self._holds(seed)), None),
            is_paused=self.replica.is_paused and not self._is_ended,
            is_dirty=any(receiver.is_dirty for receiver in receivers),
            live_versions=tuple(receiver.live_version for receiver in receivers),
            is_given_up=self._is_ended,
        )

    def settle(self, node: str, host: str) -> None:
        """From now on this process is on `node`, reached at `host`."""
        settle(node, host)

    def see_is_committing(self) -> bool:
        return self._traps.is_committing

    def see_transports(self) -> list[dict[int, str]]:
        """Of each worker: learner rank -> how its slots are read when they are read directly."""
        return [receiver._epoch.transports for receiver in self.replica.receivers if receiver._epoch is not None]

    def see_counters(self) -> list[dict[str, int]]:
        return [receiver.counters() for receiver in self.replica.receivers]

    def close(self) -> None:
        for receiver in self.replica.receivers:
            receiver.close()

    def _holds(self, seed: int) -> bool:
        full = full_weights(seed)
        models = self.replica.models
        expected = [expected_engine(full, worker=worker, num_workers=len(models)) for worker in range(len(models))]
        return all(
            torch.equal(parameter, expected[worker][name])
            for worker, model in enumerate(models)
            for name, parameter in model.named_parameters()
        )

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class ReplicaLine:
    """A `ReplicaHandle` over one line."""

    def __init__(self, name: str, line: Line) -> None:
        self.name, self._line = name, line

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        return await self._line.ask_async("call", method, args, timeout_s, timeout_s=timeout_s)

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        return await self._line.ask_async("commit", version, method, args, timeout_s, timeout_s=timeout_s)


class ReplicaProcess(PartyProcess):
    """`handle` is its `ReplicaHandle`."""

    def __init__(self, name: str, num_workers: int = 1, *, patience: Patience | None = None) -> None:
        self.patience = Patience() if patience is None else patience
        super().__init__(name, ReplicaParty, name, num_workers, self.patience, num_lines=3)
        # The test looks over lines[0] while a call of the coordinator hangs on lines[1].
        self.handle = ReplicaLine(name, self.lines[1])

    def condition(self, *seeds: int) -> Condition:
        return self.ask("see_condition", seeds)
