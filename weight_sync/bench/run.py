"""Measuring one case: start everyone, sync N times, check bit for bit, compare with baselines and with the ceiling."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import msgspec

from weight_sync.bench.baselines import BASELINES, store
from weight_sync.bench.case import NUM_WARM_UPS, Case, CaseError, assign_devices
from weight_sync.bench.ceiling import HEAD_START_S, volumes_of
from weight_sync.bench.engines import (
    BETWEEN_SYNCS_S,
    SETTLE_S,
    UNDISTURBED_S,
    make_engine,
    merged,
    windows_of,
)
from weight_sync.bench.hosts import LearnerHost, WorkerHost
from weight_sync.bench.processes import Child, Learner, Replica
from weight_sync.bench.report import Results, SyncSample
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.control.members import gather_all
from weight_sync.device.select import get_backend
from weight_sync.errors import DeviceError, DigestMismatch, WeightSyncError
from weight_sync.vllm.compat import UnsupportedVllm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weight_sync.bench.processes import Answer
    from weight_sync.bench.report import Window
    from weight_sync.plan.agreement import SharedPlan

BASELINE_ROUNDS = 3
CEILING_ROUNDS = 10
EXPECTED_ERRORS = (WeightSyncError, TimeoutError, RuntimeError, OSError)


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
    own = {"transport": case.transport, "commit": case.commit, "verify": case.verify}
    fields: dict[str, Any] = {**own, "num_slots": case.slots, "timeout_s": case.timeout}
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
        self.learners: list[Learner] = []
        self.replicas: list[Replica] = []
        self.engine_pids: list[int] = []
        try:
            for number, devices in enumerate(replicas):
                name, workers = f"r{number}", enumerate(devices)
                self.replicas.append(
                    Replica(name, [make_engine(case, name, devices)], is_engine=True)
                    if case.engine == "vllm"
                    else Replica(name, [Child(f"{name}/{i}", WorkerHost, case, i, device) for i, device in workers])
                )
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
        return [*self.learners, *([] if self.case.engine == "vllm" else self.workers)]

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
        is_engine, limit_s = self.case.engine == "vllm", self.case.case_timeout
        await gather_all(child.ask("start", timeout_s=limit_s) for child in (*self.learners, *self.workers))
        self.results.start_s = time.monotonic() - started
        plan = await self._open()
        try:
            undisturbed = await self._start_traffic() if is_engine else (0.0, 0.0)
            await self._syncs()
            try:
                await self.coordinator.self_test()
            except DigestMismatch as error:
                self.results.mismatches.append(str(error))
            if is_engine:
                self.results.generation = await self._end_traffic(undisturbed)
            if self.case.baselines:
                await self._baselines()
        finally:
            await self.coordinator.close()
        if not is_engine:
            await self._ceiling(plan)

    async def _start_traffic(self) -> Window:
        """Put requests in flight. Returns a window in which nothing disturbed them."""
        for answer in await self._ask(self.workers, "start_traffic"):
            self.engine_pids += answer.value
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
        if self.case.engine == "vllm":
            await asyncio.sleep(BETWEEN_SYNCS_S)  # so that each sync meets an engine in full swing
        await self._train()
        if self.case.churn:
            await self._ask(self.plain_children, "churn", self.version)
        for party in (*self.learners, *self.replicas):
            party.spans.clear()
        for replica in self.replicas:
            replica.pulls.clear()
        started = time.monotonic()
        await self.coordinator.publish(self.version)
        published = time.monotonic()
        report = await self.coordinator.sync(self.version)
        return SyncSample(
            started=started,
            published=published,
            stopped=time.monotonic(),
            report=report,
            pulls={name: pull for replica in self.replicas for name, pull in replica.pulls.items()},
            spans=tuple(span for party in (*self.learners, *self.replicas) for span in party.spans),
        )

    async def _train(self) -> None:
        self.version += 1
        await self._ask(self.learners, "train", self.version)

    async def _ask(self, children: Iterable[Child], method: str, *args: object) -> list[Answer]:
        return await gather_all(child.ask(method, *args, timeout_s=self.case.timeout) for child in children)

    async def _used_bytes(self) -> dict[str, int]:
        children = self.plain_children
        answers = await self._ask(children, "used_bytes")
        return {child.name: answer.value for child, answer in zip(children, answers, strict=True)}

    async def _baselines(self) -> None:
        if self.case.engine != "synthetic":
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
        before = await self._digests()
        for _ in range(1 + BASELINE_ROUNDS):
            await self._train()
            answers = await self._ask(self.plain_children, "baseline", name)
            seconds.append(max(a.stopped for a in answers) - min(a.started for a in answers))
        after = await self._digests()
        await self.coordinator.publish(self.version)
        await self.coordinator.sync(self.version)
        await self.coordinator.self_test()
        self.results.baselines[name] = seconds[1:]
        if any(a == b for a, b in zip(before, after, strict=True)) or after != await self._digests():
            self.results.inexact.append(name)

    async def _digests(self) -> list[int]:
        answers = await self._ask(self.workers, "digests")
        return [digest for answer in answers for digest in answer.value]

    async def _ceiling(self, plan: SharedPlan) -> None:
        volumes, timeout_s, workers = volumes_of(plan), self.case.timeout, self.workers
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
            start_at = time.monotonic() + HEAD_START_S
            answers = await self._ask(workers, "run_ceiling", start_at)
            if round_number >= NUM_WARM_UPS:
                self.results.ceiling_s.append(max(answer.value for answer in answers))
        await self._ask(workers, "close_ceiling")
        await self._ask(sources.values(), "close_ceiling")
