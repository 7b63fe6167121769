"""Measuring one case: start everyone, sync N times, check bit for bit, compare with baselines and with the ceiling."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from weight_sync.bench.baselines import BASELINES, Seat, store
from weight_sync.bench.case import NUM_WARM_UPS, Case, CaseError, assign_devices
from weight_sync.bench.ceiling import HEAD_START_S, volumes_of
from weight_sync.bench.engines import BETWEEN_SYNCS_S, Generation, vllm_replica
from weight_sync.bench.hosts import LearnerHost, WorkerHost
from weight_sync.bench.processes import Child, Fleet, Learner, Replica
from weight_sync.bench.report import BaselineResult, Results, SyncSample
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.control.members import gather_all
from weight_sync.device.select import get_backend
from weight_sync.errors import DeviceError, DigestMismatch, WeightSyncError
from weight_sync.vllm.compat import UnsupportedVllm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weight_sync.bench.processes import Answer
    from weight_sync.plan.agreement import SharedPlan

BASELINE_ROUNDS = 3
CEILING_ROUNDS = 10
EXPECTED_ERRORS = (WeightSyncError, TimeoutError, RuntimeError, OSError)


def measure(case: Case) -> Results:
    """Run a case from the first process to the end of the last. What fails is in the results, not raised.

    Raises:
        CaseError: the case cannot run here, e.g. there are too few devices. Nothing was started.
    """
    options = sync_options(case)
    started = time.monotonic()
    fleet = Fleet()
    generation = Generation(fleet, case) if case.engine == "vllm" else None
    try:
        results = Results(case=case, device=_start(fleet, case))
        coordinator = SyncCoordinator(fleet.learners, fleet.replicas, options=options)
        try:
            asyncio.run(_Run(fleet, coordinator, results, generation).everything(started))
        except EXPECTED_ERRORS as error:
            results.failures.append(f"{type(error).__name__}: {error}")
    except (DeviceError, UnsupportedVllm) as error:
        raise CaseError(str(error)) from error
    finally:
        fleet.close()
        if generation is not None:
            generation.kill_orphans()
    results.total_s = time.monotonic() - started
    return results


def _start(fleet: Fleet, case: Case) -> str:
    """Start all processes, without waiting for them. Returns the name of the backend."""
    backend = get_backend(case.device)
    if case.churn and backend.name == "cpu":
        raise CaseError("--churn empties the cache of a device's allocator, and cpu has none; leave it out")
    learners, replicas = assign_devices(case, backend.num_devices())
    for number, devices in enumerate(replicas):
        name = f"r{number}"
        if case.engine == "vllm":
            fleet.replicas.append(vllm_replica(case, name, devices))
        else:
            workers = enumerate(devices)
            children = [Child(f"{name}/{worker}", WorkerHost, case, worker, device) for worker, device in workers]
            fleet.replicas.append(Replica(name, children))
    for rank, device in enumerate(learners):
        fleet.learners.append(Learner(rank, Child(f"learner {rank}", LearnerHost, case, rank, device)))
    return backend.name


def sync_options(case: Case) -> SyncOptions:
    """
    Raises:
        CaseError: `--option` names no field of `SyncOptions`, or a value of another type.
    """
    fields: dict[str, Any] = {
        "transport": case.transport,
        "commit": case.commit,
        "num_slots": case.slots,
        "timeout_s": case.timeout,
        "verify": case.verify,
    }
    for option in case.option:
        name, separator, value = option.partition("=")
        if not separator or name not in SyncOptions.__struct_fields__:
            allowed = ", ".join(SyncOptions.__struct_fields__)
            raise CaseError(f"--option must be FIELD=VALUE with a field of SyncOptions ({allowed}), got {option!r}")
        fields[name] = value
    try:
        return msgspec.convert(fields, SyncOptions, strict=False)
    except msgspec.ValidationError as error:
        raise CaseError(f"--option: {error}") from error


class _Run:
    """The steps of one case, in order."""

    def __init__(
        self, fleet: Fleet, coordinator: SyncCoordinator, results: Results, generation: Generation | None
    ) -> None:
        self.case = results.case
        self.fleet = fleet
        self.results = results
        self.coordinator = coordinator
        self.generation = generation
        self.version = 0

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
        await gather_all(child.ask("start", timeout_s=self.case.case_timeout) for child in self.fleet.children())
        self.results.start_s = time.monotonic() - started
        plan = await self._open()
        try:
            if self.generation is not None:
                await self.generation.start()
            await self._syncs()
            try:
                await self.coordinator.self_test()
            except DigestMismatch as error:
                self.results.mismatches.append(str(error))
            if self.generation is not None:
                self.results.generation = await self.generation.end(self.results.samples)
            if self.case.baselines:
                await self._baselines()
        finally:
            await self.coordinator.close()
        if self.case.engine == "synthetic":
            await self._ceiling(plan)

    async def _open(self) -> SharedPlan:
        started = time.monotonic()
        await self.coordinator.open()
        self.results.open_s = time.monotonic() - started
        self.results.transport = self.coordinator.transport
        receivers = {name: info for replica in self.fleet.replicas for name, info in replica.receivers.items()}
        self.results.commit = ", ".join(sorted({info.commit for info in receivers.values()}))
        self.results.worker_bytes = {name: info.pull_bytes for name, info in sorted(receivers.items())}
        assert self.coordinator.plan is not None
        return self.coordinator.plan

    async def _syncs(self) -> None:
        for number in range(NUM_WARM_UPS + self.case.syncs):
            sample = await self._sync()
            if number >= NUM_WARM_UPS:
                self.results.samples.append(sample)
            if number == 0:
                self.results.first_counters = sample.report.counters
                self.results.first_memory = await self._used_bytes()
            self.results.last_counters = sample.report.counters
        self.results.last_memory = await self._used_bytes()

    async def _sync(self) -> SyncSample:
        """Train one step, publish, sync."""
        if self.generation is not None:
            await asyncio.sleep(BETWEEN_SYNCS_S)  # so that each sync meets an engine in full swing
        await self._train()
        if self.case.churn:
            await self._ask(self._plain_children(), "churn", self.version)
        for party in self.fleet.parties():
            party.spans.clear()
        for replica in self.fleet.replicas:
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
            pulls={name: pull for replica in self.fleet.replicas for name, pull in replica.pulls.items()},
            spans=tuple(span for party in self.fleet.parties() for span in party.spans),
        )

    async def _train(self) -> None:
        self.version += 1
        await self._ask((learner.child for learner in self.fleet.learners), "train", self.version)

    async def _ask(self, children: Iterable[Child], method: str, *args: object) -> list[Answer]:
        return await gather_all(child.ask(method, *args, timeout_s=self.case.timeout) for child in children)

    async def _used_bytes(self) -> dict[str, int]:
        children = self._plain_children()
        answers = await self._ask(children, "used_bytes")
        return {child.name: answer.value for child, answer in zip(children, answers, strict=True)}

    def _plain_children(self) -> list[Child]:
        """The processes that hold no real engine."""
        if self.case.engine == "synthetic":
            return self.fleet.children()
        return [learner.child for learner in self.fleet.learners]

    async def _baselines(self) -> None:
        if self.case.engine != "synthetic":
            reason = "the workers belong to a real engine, which takes part in no other process group"
        elif self.case.colocate and self.results.device != "cpu":
            reason = "a collective library takes no two ranks on one device, and this case is colocated"
        else:
            reason = ""
        self.results.baselines_skipped = reason
        if reason:
            return
        timeout_s, children = self.case.timeout, self.fleet.children()
        meeting = store(timeout_s)
        first = Seat(
            port=meeting.port,
            rank=0,
            num_learners=self.case.learners,
            world=len(children),
            timeout_s=timeout_s,
            bucket_bytes=self.case.bucket_mib << 20,
        )
        seats = ((child, replace(first, rank=rank)) for rank, child in enumerate(children))
        try:
            await gather_all(child.ask("join", seat, timeout_s=timeout_s) for child, seat in seats)
            for name in BASELINES:
                self.results.baselines[name] = await self._baseline(name)
        finally:
            await self._ask(children, "leave")

    async def _baseline(self, name: str) -> BaselineResult:
        """Time some transfers; then bring the last version once more by weight sync: both must leave the same bytes."""
        seconds: list[float] = []
        before = await self._digests()
        for _ in range(1 + BASELINE_ROUNDS):
            await self._train()
            answers = await self._ask(self.fleet.children(), "baseline", name)
            seconds.append(max(a.stopped for a in answers) - min(a.started for a in answers))
        after = await self._digests()
        await self.coordinator.publish(self.version)
        await self.coordinator.sync(self.version)
        await self.coordinator.self_test()
        has_written = all(a != b for a, b in zip(before, after, strict=True))
        return BaselineResult(seconds=seconds[1:], is_bit_exact=has_written and after == await self._digests())

    async def _digests(self) -> list[int]:
        answers = await self._ask(self.fleet.workers(), "digests")
        return [digest for answer in answers for digest in answer.value]

    async def _ceiling(self, plan: SharedPlan) -> None:
        volumes, timeout_s, workers = volumes_of(plan), self.case.timeout, self.fleet.workers()
        sizes = {rank: max(taken[rank] for taken in volumes.values()) for rank in range(self.case.learners)}
        sources = {rank: self.fleet.learners[rank].child for rank, size in sizes.items() if size}
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
