"""Measuring one case: start everyone, sync N times, check bit for bit, compare with baselines and with the ceiling.

The parties of a sync are child processes: started in parallel, asked with a deadline, and never left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weight_sync.bench.case import NUM_WARM_UPS, Case, CaseError, assign_devices
from weight_sync.bench.engines import (
    BETWEEN_SYNCS_S,
    SETTLE_S,
    UNDISTURBED_S,
    VllmHost,
    engine_setup,
    merged,
    windows_of,
)
from weight_sync.bench.hosts import BASELINES, LearnerHost, WorkerHost, store
from weight_sync.bench.report import Results, SyncSample
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.control.members import gather_all
from weight_sync.device.select import get_backend
from weight_sync.errors import DeviceError, DigestMismatch, WeightSyncError
from weight_sync.messages import CommitResult, PullReport, ReceiverInfo, make_error, open_reply, reply_state
from weight_sync.vllm.compat import UnsupportedVllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection

    from weight_sync.bench.report import Window
    from weight_sync.plan.agreement import SharedPlan

BASELINE_ROUNDS, CEILING_ROUNDS = 3, 10
HEAD_START_S = 0.02
"""Between the order to copy and the instant at which all begin: enough for the order to reach everyone."""
EXPECTED_ERRORS = (WeightSyncError, TimeoutError, RuntimeError, OSError)
END_S, END_TREE_S = 5.0, 40.0
"""A child that is hung up on gets this long before it is killed; one with children of its own, much longer."""


class Answer(NamedTuple):
    """What a call returned. Times are of the host's monotonic clock, taken in the child around the call."""

    number: int
    value: Any
    error: tuple[str, str] | None
    """Type name and message."""
    started: float
    stopped: float


def _serve(pipe: Connection, make_host: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Body of a child: answer one call after the other, of which the first, "start", builds the host.

    Unblocked by: the pipe, which the kernel closes when the parent dies, however it dies.
    """
    host: Any = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            number, method, passed = pipe.recv()
            started, value, error = time.monotonic(), None, None
            try:
                if method == "start":
                    host = make_host(*args)
                else:
                    value = getattr(host, method)(*passed)
            except Exception as failure:  # noqa: BLE001 - the edge of a process: the parent raises it again
                where = traceback.extract_tb(failure.__traceback__)[-1]
                error = (type(failure).__name__, f"{failure} ({where.filename.rpartition('/')[2]}:{where.lineno})")
            pipe.send(Answer(number, value, error, started, time.monotonic()))
    if host is not None:
        host.close()


class Child:
    """One child process, asked from one event loop. `start` is answered when its host is built."""

    def __init__(self, name: str, make_host: Callable[..., Any], *args: Any, has_children: bool = False) -> None:
        """A child that starts processes (`has_children`) is spawned, since vLLM looks at the state of its process to
        decide how it starts its own, and cannot be a daemon."""
        context: Any = multiprocessing.get_context("spawn" if has_children else "forkserver")
        self.name = name
        self._end_s = END_TREE_S if has_children else END_S
        self._pipe, theirs = context.Pipe()
        target = (theirs, make_host, args)
        self.process = context.Process(target=_serve, args=target, name=name, daemon=not has_children)
        self.process.start()
        theirs.close()
        self._numbers = itertools.count()
        # One thread: questions to a child go one after the other, and the loop never waits for a pipe.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Answer:
        """
        Raises:
            TimeoutError: no answer in time; a late one is thrown away.
            WeightSyncError: (or its subclass) what the child raised, or that it died.
        """
        give_up = time.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, self._exchange, method, args, give_up)
        if found.error is not None:
            kind, message = found.error
            raise make_error(kind, f"{self.name}: {message}")
        return found

    def end(self) -> None:
        """Hang up, so that the child ends by itself and a question under way fails. `join` waits."""
        # Closing would not wake a thread that waits on the pipe, and its number might be given away under it.
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as line, contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until the child is gone; kill it if it does not go. Call it once, after `end`."""
        self.process.join(self._end_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(END_S)
        self._thread.shutdown(cancel_futures=True)
        self._pipe.close()

    def _exchange(self, method: str, args: tuple[Any, ...], give_up: float) -> Answer:
        number = next(self._numbers)
        try:
            self._pipe.send((number, method, args))
            while self._pipe.poll(max(0.0, give_up - time.monotonic())):
                found: Answer = self._pipe.recv()
                if found.number == number:
                    return found
        except (EOFError, OSError) as error:
            self.process.join(1.0)
            raise WeightSyncError(f"{self.name} died (exit code {self.process.exitcode}) during {method}") from error
        raise TimeoutError(f"{self.name} did not answer {method} in time")


class Learner(Child):
    """A `PublisherHandle`."""

    publish_s = 0.0
    """How long it was blocked, the last time."""

    def __init__(self, rank: int, *args: Any) -> None:
        super().__init__(f"learner {rank}", *args)
        self.rank = rank

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        answer = await self.ask(method, *args, timeout_s=timeout_s)
        if method == "ws_publish":
            self.publish_s = answer.stopped - answer.started
        return answer.value


class Replica:
    """A `ReplicaHandle`: one child per worker, or (`is_engine`) one for an engine with its workers. Where nothing
    generates, a pause is the commit itself."""

    def __init__(self, name: str, children: Sequence[Child], *, is_engine: bool = False) -> None:
        self.name, self.children, self._is_engine = name, children, is_engine
        self.committed: Window = (0.0, 0.0)
        """When, the last time."""
        self.pulls: dict[str, PullReport] = {}
        """Worker ("r0/1") -> what bringing the version cost it."""
        self.receivers: dict[str, ReceiverInfo] = {}
        """Worker -> how it opened."""

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        asked = (child.ask("call", method, args, timeout_s, timeout_s=timeout_s) for child in self.children)
        replies = [reply for answer in await gather_all(asked) for reply in answer.value]
        if method == "ws_open":
            with contextlib.suppress(WeightSyncError):  # a refusal is the coordinator's to report
                self.receivers = self._by_worker(replies, ReceiverInfo)
        return replies

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        started = time.monotonic()
        if self._is_engine:
            asked = self.children[0].ask("commit", version, method, args, timeout_s, timeout_s=timeout_s)
            result: CommitResult = (await asked).value
        else:
            replies = await self.call(method, *args, timeout_s=timeout_s)
            result = CommitResult(results=replies, pause_s=time.monotonic() - started)
        if reply_state(result.results) == "ok":
            self.committed = started, time.monotonic()
            self.pulls = self._by_worker(result.results, PullReport)
        return result

    def _by_worker(self, replies: Sequence[bytes], kind: type[Any]) -> dict[str, Any]:
        values = (open_reply(reply, kind, party=self.name) for reply in replies)
        return {f"{self.name}/{worker}": value for worker, value in enumerate(values)}


def measure(case: Case) -> Results:
    """Run a case from the first process to the end of the last. What fails is in the results, not raised.

    Raises:
        CaseError: the case cannot run here, e.g. there are too few devices.
    """
    started = time.monotonic()
    try:
        run = _Run(case)
    except (DeviceError, UnsupportedVllm) as error:
        raise CaseError(str(error)) from error
    try:
        asyncio.run(run.everything(started))
    except EXPECTED_ERRORS as error:
        run.results.failures.append(f"{type(error).__name__}: {error}")
    finally:
        run.close()
    run.results.case_s = time.monotonic() - started
    return run.results


def sync_options(case: Case) -> SyncOptions:
    """
    Raises:
        CaseError: `--option` names no field of `SyncOptions`, or a value of another type.
    """
    fields: dict[str, Any] = {
        "transport": case.transport, "commit": case.commit, "num_slots": case.slots, "timeout_s": case.timeout
    }  # fmt: skip
    for option in case.option:
        name, separator, fields[name] = option.partition("=")
        if not separator or name not in SyncOptions.__struct_fields__:
            allowed = ", ".join(SyncOptions.__struct_fields__)
            raise CaseError(f"--option must be FIELD=VALUE with a field of SyncOptions ({allowed}), got {option!r}")
    try:
        return msgspec.convert(fields, SyncOptions, strict=False)
    except msgspec.ValidationError as error:
        raise CaseError(f"--option: {error}") from error


class _Run:
    """The processes of one case, and its steps in order."""

    def __init__(self, case: Case) -> None:
        """Starts all processes, without waiting for them."""
        options, backend = sync_options(case), get_backend(case.device)
        if case.churn and backend.name == "cpu":
            raise CaseError("--churn empties the cache of a device's allocator, and cpu has none; leave it out")
        learners, replicas = assign_devices(case, backend.num_devices())
        self.case, self.results, self.version = case, Results(case=case, device=backend.name), 0
        self.is_engine = case.engine == "vllm"
        self.learners: list[Learner] = []
        self.replicas: list[Replica] = []
        self.engine_pids: list[int] = []
        try:
            for number, devices in enumerate(replicas):
                name = f"r{number}"
                if self.is_engine:
                    children = [Child(name, VllmHost, case, *engine_setup(case, devices), has_children=True)]
                else:
                    children = [Child(f"{name}/{i}", WorkerHost, case, i, device) for i, device in enumerate(devices)]
                self.replicas.append(Replica(name, children, is_engine=self.is_engine))
            for rank, device in enumerate(learners):
                self.learners.append(Learner(rank, LearnerHost, case, rank, device))
        except BaseException:
            self.close()
            raise
        self.coordinator = SyncCoordinator(self.learners, self.replicas, options=options)

    @property
    def workers(self) -> list[Child]:
        return [child for replica in self.replicas for child in replica.children]

    @property
    def plain_children(self) -> list[Child]:
        """The processes that hold no real engine."""
        return [*self.learners, *([] if self.is_engine else self.workers)]

    def close(self) -> None:
        """Every process has ended afterwards."""
        children = [*self.learners, *self.workers]
        for child in children:
            child.end()
        for child in children:
            child.join()
        for pid in self.engine_pids:  # vLLM's engine process does not notice that its owner is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def everything(self, started: float) -> None:
        """
        Raises:
            TimeoutError: the case did not end in time.
            WeightSyncError, RuntimeError: a step failed.
        """
        limit = asyncio.timeout(self.case.case_timeout)
        try:
            async with limit:
                await self._steps(started)
        except TimeoutError as error:
            if not limit.expired():
                raise  # of one step
            raise TimeoutError(f"the case was not done within {self.case.case_timeout} s") from error

    async def _steps(self, started: float) -> None:
        children = [*self.learners, *self.workers]
        await gather_all(child.ask("start", timeout_s=self.case.case_timeout) for child in children)
        self.results.start_s = time.monotonic() - started
        plan = await self._open()
        try:
            undisturbed = await self._start_traffic() if self.is_engine else (0.0, 0.0)
            await self._syncs()
            try:
                await self.coordinator.self_test()
            except DigestMismatch as error:
                self.results.mismatches.append(str(error))
            if self.is_engine:
                self.results.generation = await self._end_traffic(undisturbed)
            if self.case.baselines:
                await self._baselines()
        finally:
            await self.coordinator.close()
        if not self.is_engine:
            await self._ceiling(plan)

    async def _open(self) -> SharedPlan:
        started = time.monotonic()
        await self.coordinator.open()
        self.results.open_s = time.monotonic() - started
        self.results.transport = self.coordinator.transport
        receivers = {name: info for replica in self.replicas for name, info in replica.receivers.items()}
        self.results.commit = ", ".join(sorted({info.commit for info in receivers.values()}))
        self.results.worker_bytes = {name: info.pull_bytes for name, info in sorted(receivers.items())}
        assert self.coordinator.plan is not None
        return self.coordinator.plan

    async def _start_traffic(self) -> Window:
        """Put requests in flight. Returns a window in which nothing disturbed them."""
        for pids in await self._ask(self.workers, "start_traffic"):
            self.engine_pids += pids
        await asyncio.sleep(SETTLE_S)
        started = time.monotonic()
        await asyncio.sleep(UNDISTURBED_S)
        return started, time.monotonic()

    async def _end_traffic(self, undisturbed: Window) -> dict[str, Any]:
        """Let the requests end. Returns what they saw."""
        timeout_s, samples = self.case.timeout, self.results.samples
        windows = {child: {**windows_of(child.name, samples), "undisturbed": [undisturbed]} for child in self.workers}
        asked = (c.ask("end_traffic", w, timeout_s, timeout_s=2 * timeout_s) for c, w in windows.items())
        return merged([answer.value for answer in await gather_all(asked)])

    async def _syncs(self) -> None:
        for number in range(NUM_WARM_UPS + self.case.syncs):
            sample = await self._sync()
            if number >= NUM_WARM_UPS:
                self.results.samples.append(sample)
            self.results.counters[number > 0] = sample.report.counters
            if number == 0:
                self.results.memory[0] = await self._used_bytes()
        self.results.memory[1] = await self._used_bytes()

    async def _sync(self) -> SyncSample:
        """Train one step, publish, sync."""
        if self.is_engine:
            await asyncio.sleep(BETWEEN_SYNCS_S)  # so that each sync meets an engine in full swing
        await self._train()
        if self.case.churn:
            await self._ask(self.plain_children, "churn", self.version)
        for replica in self.replicas:
            replica.pulls = {}
        started = time.monotonic()
        await self.coordinator.publish(self.version)
        published = time.monotonic()
        report = await self.coordinator.sync(self.version)
        return SyncSample(
            published=published,
            publish_s=max(learner.publish_s for learner in self.learners),
            total_s=time.monotonic() - started,
            report=report,
            pulls={name: pull for replica in self.replicas for name, pull in replica.pulls.items()},
            commits={replica.name: replica.committed for replica in self.replicas if replica.pulls},
        )

    async def _train(self) -> None:
        self.version += 1
        await self._ask(self.learners, "train", self.version)

    async def _ask(self, children: Iterable[Child], method: str, *args: object) -> list[Any]:
        asked = (child.ask(method, *args, timeout_s=self.case.timeout) for child in children)
        return [answer.value for answer in await gather_all(asked)]

    async def _used_bytes(self) -> dict[str, int]:
        children = self.plain_children
        return dict(zip((child.name for child in children), await self._ask(children, "used_bytes"), strict=True))

    async def _baselines(self) -> None:
        if self.is_engine:
            self.results.baselines_skipped = "a real engine takes part in no other process group"
            return
        if self.case.colocate and self.results.device != "cpu":
            self.results.baselines_skipped = "a collective library takes no two ranks on one device (--colocate)"
            return
        timeout_s, children = self.case.timeout, self.plain_children
        meeting = store(timeout_s)
        try:
            await gather_all(
                child.ask("join", rank, meeting.port, timeout_s=timeout_s) for rank, child in enumerate(children)
            )
            for name in BASELINES:
                await self._baseline(name)
        finally:
            await self._ask(children, "leave")

    async def _baseline(self, name: str) -> None:
        """Time some transfers; then bring the last version once more by weight sync: both must leave the same bytes."""
        seconds: list[float] = []
        before = await self._ask(self.workers, "digests")
        for _ in range(1 + BASELINE_ROUNDS):
            await self._train()
            asked = (child.ask("baseline", name, timeout_s=self.case.timeout) for child in self.plain_children)
            answers = await gather_all(asked)
            seconds.append(max(a.stopped for a in answers) - min(a.started for a in answers))
        after = await self._ask(self.workers, "digests")
        await self.coordinator.publish(self.version)
        await self.coordinator.sync(self.version)
        await self.coordinator.self_test()
        self.results.baselines[name] = seconds[1:]
        old, new = itertools.chain(*before), itertools.chain(*after)
        if any(a == b for a, b in zip(old, new, strict=True)) or after != await self._ask(self.workers, "digests"):
            self.results.inexact.append(name)

    async def _ceiling(self, plan: SharedPlan) -> None:
        timeout_s, workers = self.case.timeout, self.workers
        volumes = {worker: plan.pull(worker).bytes_by_source for worker in plan.sources}
        sizes = {rank: max(taken[rank] for taken in volumes.values()) for rank in range(self.case.learners)}
        sources = {rank: self.learners[rank] for rank, size in sizes.items() if size}
        opened = await gather_all(
            child.ask("open_ceiling", sizes[rank], timeout_s=timeout_s) for rank, child in sources.items()
        )
        handles = {rank: answer.value for rank, answer in zip(sources, opened, strict=True)}
        await gather_all(
            child.ask("open_ceiling", handles, dict(volumes[index % self.case.tp]), index, timeout_s=timeout_s)
            for index, child in enumerate(workers)
        )
        for round_number in range(NUM_WARM_UPS + CEILING_ROUNDS):
            seconds = await self._ask(workers, "run_ceiling", time.monotonic() + HEAD_START_S)
            if round_number >= NUM_WARM_UPS:
                self.results.ceiling_s.append(max(seconds))
        await self._ask(workers, "close_ceiling")
        await self._ask(sources.values(), "close_ceiling")
