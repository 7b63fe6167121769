"""A run with the real Ray whose replicas and learner ranks are scripted, to see what the driver has to do.

    driver: loops, rollout buffer, fleet, batch building, learner group, metric sinks     all real; it is measured
    2 rollout worker actors: the real shell and worker, on replicas that sample arithmetic   actors.py
    2 learner rank actors: fetch their micro-batches from the object store, count tokens     actors.py

Weight sync is one call to every rollout worker, which sets the version of its replicas. In real time: replicas take the
time of their responses, so that as many trajectories are in flight as the case asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from rich.console import Console

from rollout.processes import rare_collections
from rollout.prompts.prompt_source import PromptSet, PromptSource, fingerprint
from rollout.types import Prompt, SamplingParams
from rollout.worker.worker import WorkerSpec
from tests.fakes.scripted_replica import Workload
from tests.fakes.scripted_run import config, sync_report
from tests.simulation.bench.actors import ScriptedRank, ScriptedWorker
from trainer.driver.actors import make_buffer
from trainer.driver.fleet import Fleet
from trainer.driver.loops import TrainingRun
from trainer.driver.state import RunState
from trainer.driver.weight_updates import DedicatedDevices
from trainer.learner.group import LearnerGroup
from trainer.telemetry.run_dir import open_run_dir
from trainer.telemetry.session import Telemetry, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema import RunConfig
    from weight_sync.messages import SyncReport

REPOSITORY = Path(__file__).resolve().parents[3]
CALL_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 1_000.0
REQUEST_TIMEOUT_S = 600.0
NUM_PROMPTS = 200
SAMPLE_S = 0.25


@dataclass(frozen=True, kw_only=True)
class RayCase:
    """One run: so many groups, with so many trajectories admitted at a time."""

    series: str = ""
    """Of the picture."""
    num_groups: int
    trajectories_admitted: int
    group_size: int = 4
    max_staleness: int = 4
    num_replicas: int = 64
    num_workers: int = 2
    num_ranks: int = 2
    trajectories_per_s: int = 500
    """What the machine can keep up with; responses take as long as that many of them per second allow."""
    prompt_tokens: int = 64
    least_tokens: int = 64
    most_tokens: int = 256
    files: bool = False
    """With trace, trajectory files and TensorBoard, as a run has them by default."""
    object_store_mib: int = 512

    @property
    def groups_per_step(self) -> int:
        return max(1, self.trajectories_admitted // self.group_size // (self.max_staleness + 1))

    @property
    def num_steps(self) -> int:
        return max(1, self.num_groups // self.groups_per_step)

    @property
    def tokens_per_micro_batch(self) -> int:
        return 16 * (self.prompt_tokens + self.most_tokens)

    def workload(self) -> Workload:
        """Lengths are Pareto with shape 3, whose mean is 1.5 times the least."""
        token_s = self.trajectories_admitted / self.trajectories_per_s / (1.5 * self.least_tokens)
        return Workload(
            tail=3.0,
            min_tokens=self.least_tokens,
            token_s=(0.8 * token_s, 1.2 * token_s),
            stream_interval=self.least_tokens,
            kv_requests=self.trajectories_admitted,
        )

    def config(self) -> RunConfig:
        return config(
            rollout={"group_size": self.group_size, "max_response_tokens": self.most_tokens},
            trainer={
                "total_steps": self.num_steps,
                "groups_per_step": self.groups_per_step,
                "eval_every": 0,
                "eval_at_start": False,
                "eval_at_end": False,
                "stall_timeout_s": RUN_TIMEOUT_S,
            },
            learner={
                "num_ranks": self.num_ranks,
                "max_tokens_per_micro_batch": self.tokens_per_micro_batch,
            },
            mode={"max_staleness": self.max_staleness},
            # A lone response has no peer to be compared with, and most estimators would leave it out of the batch.
            algorithm={
                "advantage_estimator": "grpo" if self.group_size > 1 else "reinforce",
                "dynamic_sampling": False,
            },
            telemetry={"trace": self.files, "record_trajectories": self.files, "tensorboard": self.files},
        )


class _Sync:
    """Stands in for the sync coordinator: a version is live once every worker's replicas have it."""

    def __init__(self, workers: list[Any]) -> None:
        self._workers = workers

    async def publish(self, _version: int) -> float:
        return 0.0

    async def sync(self, version: int) -> SyncReport:
        await _answers([worker.commit.remote(version) for worker in self._workers])
        return sync_report(version)


@dataclass(kw_only=True)
class Samples:
    """Samples taken during the run."""

    groups_running: list[int]
    private_bytes: list[int]
    """Of the driver's memory, without what it shares with the object store."""
    shared_bytes: list[int]

    async def run(self, parts: TrainingRun) -> None:
        """Consumes: nothing. Waits for: its interval. Unblocked by: cancellation."""
        while True:
            self.look(parts)
            await asyncio.sleep(SAMPLE_S)

    def look(self, parts: TrainingRun) -> None:
        self.groups_running.append(parts.buffer.stats().num_running)
        memory = _memory_bytes()
        self.private_bytes.append(memory["RssAnon"])
        self.shared_bytes.append(memory["RssShmem"])


def measure(case: RayCase) -> dict[str, Any]:
    """Runs the case; this process is the driver."""
    logging.disable(logging.ERROR)
    cfg = case.config()
    with _cluster(case), tempfile.TemporaryDirectory() as folder:
        run_dir = open_run_dir(replace(cfg, run_dir=str(Path(folder) / "run")))
        console = Console(file=io.StringIO())
        with contextlib.closing(run_dir), opened(cfg, run_dir, console) as telemetry:
            return asyncio.run(_run(case, cfg, telemetry))


async def _run(case: RayCase, cfg: RunConfig, telemetry: Telemetry) -> dict[str, Any]:
    workers, ranks = _start_actors(case)
    await _answers([worker.start.remote() for worker in workers])
    await _answers([rank.num_tokens.remote() for rank in ranks])
    samples = Samples(groups_running=[], private_bytes=[], shared_bytes=[])
    learner = LearnerGroup(ranks, timeout_s=CALL_TIMEOUT_S)
    learner.max_tokens_per_micro_batch = case.tokens_per_micro_batch  # as its set-up would report
    workers_began, _ = await _account(workers)
    with rare_collections():
        began, threads_began, wall_began = time.process_time(), _thread_cpu_s(), time.monotonic()
        async with asyncio.timeout(RUN_TIMEOUT_S):
            parts = await _train(cfg, case, telemetry, workers, learner, samples)
        cpu_s, wall_s = time.process_time() - began, time.monotonic() - wall_began
        threads = {name: cpu - threads_began.get(name, 0.0) for name, cpu in _thread_cpu_s().items()}
    workers_ended, tokens_generated = await _account(workers)
    at_ranks = await _answers([rank.num_tokens.remote() for rank in ranks])
    await learner.close()
    return _result(case, parts, samples) | {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "threads_cpu_s": dict(sorted(threads.items(), key=lambda one: -one[1])),
        "workers_cpu_s": workers_ended - workers_began,
        "tokens_generated": tokens_generated,
        "tokens_at_ranks": sum(at_ranks),
        "cpu_ms_per_trajectory": 1e3 * cpu_s / parts.buffer.stats().finished / case.group_size,
    }


async def _train(
    cfg: RunConfig,
    case: RayCase,
    telemetry: Telemetry,
    workers: list[Any],
    learner: LearnerGroup,
    samples: Samples,
) -> TrainingRun:
    """As `Driver._train`, until the last step."""
    source = PromptSource(_prompts(case.prompt_tokens), seed=0, shuffle=True)
    fleet = Fleet({}, workers, group_timeout_s=REQUEST_TIMEOUT_S, heartbeat_timeout_s=120.0)
    sync: Any = _Sync(workers)
    state = RunState(started_at=time.time(), wall_clock=time.time)
    nothing: Any = None
    training = TrainingRun(
        cfg,
        state,
        telemetry,
        source=source,
        buffer=make_buffer(cfg, None, source),
        workers=fleet,
        learner=learner,
        devices=DedicatedDevices(sync),
        eval_sets=(),
        pin_versions=nothing,
        live=sync_report(0),
    )
    samples.look(training)
    try:
        await training.run(samples.run(training))
    finally:
        training.buffer.close()
    return training


def _prompts(num_tokens: int) -> PromptSet:
    rng = np.random.default_rng(0)
    prompts = tuple(
        Prompt(
            prompt_id=f"train/{index}",
            token_ids=rng.integers(3, 30_000, num_tokens).astype(np.int32),
            text="x" * (4 * num_tokens),
            answer=str(index),
        )
        for index in range(NUM_PROMPTS)
    )
    return PromptSet(prompts=prompts, num_duplicates=0, num_overlong=0, fingerprint=fingerprint(prompts))


@contextlib.contextmanager
def _cluster(case: RayCase) -> Iterator[None]:
    """A private one, with what `trainer.driver.cluster` sets. Its processes get the priority of this one, not less:
    replicas have to keep their time."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory(prefix="tandem-cp-", ignore_cleanup_errors=True) as scratch:
        ray.init(
            address="local",
            num_cpus=case.num_workers + case.num_ranks,
            object_store_memory=case.object_store_mib << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}},
            _temp_dir=scratch,
            _system_config={"prestart_worker_first_driver": False},
        )
        try:
            yield
        finally:
            ray.shutdown()


def _start_actors(case: RayCase) -> tuple[list[Any], list[Any]]:
    spec = WorkerSpec(
        group_size=case.group_size,
        sampling=SamplingParams(max_tokens=case.most_tokens),
        request_timeout_s=REQUEST_TIMEOUT_S,
        seed=0,
        reward="arithmetic",
    )
    worker_class: Any = ray.remote(num_cpus=0, max_concurrency=10_000)(ScriptedWorker)  # pyright: ignore[reportCallIssue]
    rank_class: Any = ray.remote(num_cpus=0)(ScriptedRank)
    workload = case.workload()
    workers = [worker_class.remote(spec, workload, num_replicas=case.num_replicas) for _ in range(case.num_workers)]
    return workers, [rank_class.remote() for _ in range(case.num_ranks)]


async def _account(workers: list[Any]) -> tuple[float, int]:
    """Processor time and generated tokens of all workers together."""
    cpu_s, num_tokens = zip(*await _answers([worker.account.remote() for worker in workers]), strict=True)
    return sum(cpu_s), sum(num_tokens)


async def _answers(refs: list[Any]) -> list[Any]:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await asyncio.gather(*refs)


def _result(case: RayCase, parts: TrainingRun, samples: Samples) -> dict[str, Any]:
    stats, running, size = parts.buffer.stats(), samples.groups_running, case.group_size
    return {
        **asdict(case),
        "groups_per_step": case.groups_per_step,
        "num_steps": parts.state.step,
        "groups_generated": stats.finished,
        "groups_failed": stats.failed,
        "discarded_tokens": stats.discarded_tokens,
        "trajectories_in_flight_mean": size * sum(running) / len(running),
        "trajectories_in_flight_max": size * max(running),
        "private_before_mib": samples.private_bytes[0] / 2**20,
        "private_max_mib": max(samples.private_bytes) / 2**20,
        "shared_max_mib": max(samples.shared_bytes) / 2**20,
    }


def _memory_bytes() -> dict[str, int]:
    """The driver's own memory by kind, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = (line.split() for line in lines if line.startswith("Rss"))
    return {name.removesuffix(":"): int(kib) * 1024 for name, kib, _ in fields}


def _thread_cpu_s() -> dict[str, float]:
    """Processor time of the driver's threads so far, added up by name; the event loop's thread is `event loop`."""
    found: dict[str, float] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc/self/task").iterdir():
        try:
            before, _, after = (folder / "stat").read_text(encoding="ascii").rpartition(") ")
        except OSError:  # the thread has just ended
            continue
        name = "event loop" if folder.name == str(os.getpid()) else before.partition("(")[2]
        fields = after.split()
        found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / ticks
    return found
