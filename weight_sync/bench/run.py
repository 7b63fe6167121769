"""Measuring one case: start everyone, sync N times, check bit for bit, compare with baselines and with the ceiling."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from weight_sync.bench.baselines import BASELINES, GroupSpec, host_store
from weight_sync.bench.case import NUM_WARM_UPS, Case, CaseError, assign_devices
from weight_sync.bench.ceiling import HEAD_START_S, volumes_of
from weight_sync.bench.children import all_of
from weight_sync.bench.engines import BETWEEN_SYNCS_S, Generation, vllm_replicas
from weight_sync.bench.processes import Fleet, synthetic_replica
from weight_sync.bench.results import BaselineResult, Results, SyncSample
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device.select import get_backend
from weight_sync.errors import DeviceError, DigestMismatch, WeightSyncError
from weight_sync.vllm.compat import UnsupportedVllm

if TYPE_CHECKING:
    from weight_sync.bench.children import Child
    from weight_sync.plan.types import Manifest

BASELINE_ROUNDS = 3
CEILING_ROUNDS = 10
EXPECTED_ERRORS = (WeightSyncError, TimeoutError, RuntimeError, OSError)


def measure(case: Case) -> Results:
    """Run a case from the first process to the end of the last. What fails is in the results, not raised.

    Raises:
        CaseError: the case cannot run here, e.g. there are too few devices. Nothing was started.
    """
    try:
        backend = get_backend(case.device)
        if case.churn and backend.name == "cpu":
            raise CaseError("--churn empties the cache of a device's allocator, and cpu has none; leave it out")
        devices = assign_devices(case, backend.num_devices())
        make_replica = vllm_replicas(case, backend) if case.engine == "vllm" else synthetic_replica(case)
    except (DeviceError, UnsupportedVllm) as error:
        raise CaseError(str(error)) from error
    options = sync_options(case)
    results = Results(case=case, device=backend.name)
    started = time.monotonic()
    fleet = Fleet(case, devices, make_replica)
    generation = Generation(fleet, case) if case.engine == "vllm" else None
    try:
        coordinator = SyncCoordinator(fleet.learners, fleet.replicas, options=options)
        run = _Run(fleet, coordinator, results, generation)
        asyncio.run(run.everything(started))
    except EXPECTED_ERRORS as error:
        results.failures.append(f"{type(error).__name__}: {error}")
    finally:
        fleet.close()
        if generation is not None:
            generation.kill_orphans()
        results.total_s = time.monotonic() - started
    return results


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
        try:
            await asyncio.wait_for(self._steps(started), self.case.case_timeout)
        except asyncio.CancelledError as error:
            raise TimeoutError(f"the case was not done after {self.case.case_timeout} s") from error

    async def _steps(self, started: float) -> None:
        await self.fleet.ready(self.case.case_timeout)
        self.results.start_s = time.monotonic() - started
        manifest = await self._open()
        try:
            if self.generation is not None:
                await self.generation.start()
            await self._syncs()
            await self._check()
            if self.generation is not None:
                await self.generation.end(self.results)
            if self.case.baselines:
                await self._baselines()
        finally:
            await self.coordinator.close()
        await self._ceiling(manifest)

    async def _open(self) -> Manifest:
        started = time.monotonic()
        await self.coordinator.open()
        self.results.open_s = time.monotonic() - started
        self.results.transport = str(getattr(self.coordinator, "transport", ""))
        receivers = self.fleet.journal.receivers
        self.results.commit = ", ".join(sorted({info.commit for info in receivers.values()}))
        self.results.worker_bytes = {name: info.pull_bytes for name, info in sorted(receivers.items())}
        assert self.coordinator.manifest is not None
        return self.coordinator.manifest

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
        self.version += 1
        if self.generation is not None:
            await asyncio.sleep(BETWEEN_SYNCS_S)  # so that each sync meets an engine in full swing
        await self.fleet.on_learners("train", self.version, timeout_s=self.case.timeout)
        if self.case.churn:
            await self._churn()
        journal = self.fleet.journal
        journal.clear()
        started = time.monotonic()
        await self.coordinator.publish(self.version)
        published = time.monotonic()
        report = await self.coordinator.sync(self.version)
        stopped = time.monotonic()
        blocked = [span.stopped - span.started for span in journal.spans if span.phase == "publish"]
        return SyncSample(
            started=started,
            published=published,
            stopped=stopped,
            publish_s=max(blocked),
            report=report,
            pulls=dict(journal.pulls),
            spans=tuple(journal.spans),
        )

    async def _churn(self) -> None:
        children = self._own_children()
        await all_of(child.ask("churn", self.version, timeout_s=self.case.timeout) for child in children)

    async def _used_bytes(self) -> dict[str, int]:
        children = self._own_children()
        answers = await all_of(child.ask("used_bytes", timeout_s=self.case.timeout) for child in children)
        return {child.name: answer.value for child, answer in zip(children, answers, strict=True)}

    def _own_children(self) -> list[Child]:
        """The processes that are the bench's own: all but those of a real engine."""
        if self.case.engine == "synthetic":
            return list(self.fleet.children())
        return [learner.child for learner in self.fleet.learners]

    async def _check(self) -> None:
        try:
            await self.coordinator.self_test()
        except DigestMismatch as error:
            self.results.mismatches.append(str(error))

    # ---------------------------------------------------------------- baselines

    async def _baselines(self) -> None:
        reason = _why_no_baselines(self.case, self.results.device)
        if reason:
            self.results.baselines_skipped = reason
            return
        store = host_store(self.case.timeout)
        try:
            await self._join(store.port)
            for name in BASELINES:
                self.results.baselines[name] = await self._baseline(name)
        finally:
            await all_of(child.ask("leave", timeout_s=self.case.timeout) for child in self.fleet.children())

    async def _join(self, port: int) -> None:
        children = list(self.fleet.children())
        specs = [
            GroupSpec(
                port=port,
                rank=rank,
                num_learners=self.case.learners,
                world=len(children),
                timeout_s=self.case.timeout,
                bucket_bytes=self.case.bucket_mib << 20,
            )
            for rank in range(len(children))
        ]
        pairs = zip(children, specs, strict=True)
        await all_of(child.ask("join", spec, timeout_s=self.case.timeout) for child, spec in pairs)

    async def _baseline(self, name: str) -> BaselineResult:
        """Time some transfers; then bring the last version once more by weight sync: both must leave the same bytes."""
        timeout_s, seconds = self.case.timeout, []
        before = await self._digests()
        for _ in range(1 + BASELINE_ROUNDS):
            self.version += 1
            await self.fleet.on_learners("train", self.version, timeout_s=timeout_s)
            answers = await all_of(child.ask("baseline", name, timeout_s=timeout_s) for child in self.fleet.children())
            seconds.append(max(a.stopped for a in answers) - min(a.started for a in answers))
        after = await self._digests()
        await self.coordinator.publish(self.version)
        await self.coordinator.sync(self.version)
        await self.coordinator.self_test()
        return BaselineResult(
            seconds=seconds[1:],
            is_bit_exact=after == await self._digests(),
            has_written=all(a != b for a, b in zip(before, after, strict=True)),
        )

    async def _digests(self) -> list[int]:
        answers = await self.fleet.on_workers("digests", timeout_s=self.case.timeout)
        return [digest for answer in answers for digest in answer.value]

    # ---------------------------------------------------------------- ceiling

    async def _ceiling(self, manifest: Manifest) -> None:
        if self.case.engine != "synthetic":
            return
        volumes, timeout_s = volumes_of(manifest), self.case.timeout
        offered = {rank: size for rank in range(self.case.learners) if (size := volumes.block_bytes(rank))}
        sources = {rank: self.fleet.learners[rank].child for rank in offered}
        opened = await all_of(
            child.ask("open_ceiling", offered[rank], timeout_s=timeout_s) for rank, child in sources.items()
        )
        handles = {rank: answer.value for rank, answer in zip(sources, opened, strict=True)}
        sinks = [
            (child, volumes.of_worker[worker])
            for replica in self.fleet.replicas
            for worker, child in enumerate(replica.children)
        ]
        await all_of(
            child.ask("open_ceiling", {rank: handles[rank] for rank in taken}, taken, index, timeout_s=timeout_s)
            for index, (child, taken) in enumerate(sinks)
        )
        for round_number in range(NUM_WARM_UPS + CEILING_ROUNDS):
            start_at = time.monotonic() + HEAD_START_S
            answers = await self.fleet.on_workers("run_ceiling", start_at, timeout_s=timeout_s)
            if round_number >= NUM_WARM_UPS:
                self.results.ceiling_s.append(max(answer.value for answer in answers))
        await self.fleet.on_workers("close_ceiling", timeout_s=timeout_s)
        await all_of(child.ask("close_ceiling", timeout_s=timeout_s) for child in sources.values())


def _why_no_baselines(case: Case, device: str) -> str:
    """Why the baselines cannot run here; empty if they can."""
    if case.engine != "synthetic":
        return "the workers belong to a real engine, which takes part in no other process group"
    if case.colocate and device != "cpu":
        return "a collective library takes no two ranks on one device, and this case is colocated"
    return ""
