"""A run in virtual time: the real loops, buffer, fleet, rollout worker, generation, scheduler and batcher
around scripted replicas, learner and weight sync.

    Plan, Fleet (fleet.py)  ->  Simulation (the run)  ->  Books (books.py: what became of every group)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from rollout.buffer.rollout_buffer import RolloutBuffer
from rollout.errors import RewardError
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.consolidation import ConsolidationRule
from rollout.fleet.scheduler import order_of
from rollout.prompts.prompt_source import PromptSource
from rollout.reward.call import RewardResult
from rollout.types import SamplingParams
from rollout.worker.worker import RolloutWorker, WorkerSpec
from tests.fakes.local_actor import LocalActor, Ref, ServedWorker
from tests.fakes.scripted_replica import Counting
from tests.fakes.scripted_run import InlineExecutor, config, forever, held_out, prompt_set, telemetry_in
from tests.simulation.books import Books
from tests.simulation.fleet import Fleet, Plan
from trainer.driver import fleet as workers
from trainer.driver.evaluation import pinned_versions
from trainer.driver.loops import TrainingRun
from trainer.driver.state import RunState
from trainer.driver.weight_updates import ColocatedDevices, DedicatedDevices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rollout.types import Group, Prompt, RolloutRequest, Trajectory
    from trainer.config.schema import RunConfig
    from trainer.telemetry.session import Telemetry
    from weight_sync.messages import SyncReport

REQUEST_TIMEOUT_S = 5_000.0
SLEEP_TIMEOUT_S = 20.0
HELD_OUT = 5
"""Prompts of an evaluation."""


class LocalWorker(LocalActor):
    """A rollout worker as `Fleet` sees an actor."""

    def __init__(self, worker: RolloutWorker, books: Books) -> None:
        self.served = _Served(worker, books)
        super().__init__(self.served)

    def die(self) -> None:
        super().die()
        self.served.server.close()

    @property
    def worker(self) -> RolloutWorker:
        return self.served.worker


class _Served(ServedWorker):
    def __init__(self, worker: RolloutWorker, books: Books) -> None:
        super().__init__(worker)
        self._books = books

    async def run_group(self, item: RolloutRequest) -> Group:
        self._books.on_attempt(item)
        return await super().run_group(item)


class Simulation:
    """One run; `await run()` under `run_virtual`. Afterwards `books`, `buffer`, `peaks` and `fleet` say what was."""

    def __init__(self, plan: Plan, telemetry: Telemetry, cfg: RunConfig) -> None:
        self.plan, self.telemetry, self.cfg = plan, telemetry, cfg
        self.books = Books(plan)
        self.peaks: Counter[str] = Counter()
        """Largest size of every table of the control plane, looked at after each step."""
        self.num_choices = 0
        """How often `take` looked through the buffer."""
        self.running: list[int] = []
        """Groups that were being generated, at each step."""
        self.num_turns = 0
        """Turns of the event loop."""
        self.state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
        self.turns: list[dict[str, object]] = []
        """Metrics of shared devices, at each version that went live."""
        self.evaluated: list[set[int]] = []
        """Versions of every share of an evaluation that came back."""

    async def run(self) -> None:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        clock = asyncio.get_running_loop().time
        self.fleet = Fleet(self.plan)
        self.devices = self._devices()
        self.workers = [LocalWorker(self._worker(index, clock), self.books) for index in range(self.plan.num_workers)]
        self.pool = workers.Fleet(
            self.fleet.engines,
            self.workers,
            group_timeout_s=2 * REQUEST_TIMEOUT_S,
            heartbeat_timeout_s=120.0,
            max_engine_restarts=self.plan.max_restarts,
            max_worker_restarts=1_000_000,
            restart_engine=self._restart_engine,
            restart_worker=self._restart_worker,
            sync_states=lambda: self.fleet.states,
        )
        self.fleet.coordinator.on_change(self.pool.exclude_lost_engines)
        self._note_evaluations(self.pool)
        self.buffer = RolloutBuffer(
            groups_per_step=self.plan.groups_per_step,
            max_staleness=self.plan.max_staleness,
            max_retries=self.plan.max_retries,
            max_filtered_batches_per_step=self.cfg.algorithm.max_filtered_batches_per_step,
            clock=clock,
        )
        self.books.watch(self.buffer, self.plan.num_steps)
        self._count_work(self.buffer)
        await self.fleet.coordinator.open()
        await self.devices.acquire_for_training()
        await self.devices.publish(0)
        self.training = self._training(await self.devices.sync(0))
        try:
            await self.training.run(*self._losses())
        finally:
            self.buffer.close()
        await self._end_workers()

    def _losses(self) -> list[Coroutine[Any, Any, Any]]:
        plan, losses = self.plan, list[Coroutine[Any, Any, Any]]()
        if plan.death_every_s:
            losses.append(self.fleet.lose_replicas())
        if plan.worker_death_every_s:
            losses.append(self.fleet.lose_workers(self.workers))
        if not (losses or plan.failed_pull_frac or plan.most_requests or plan.repack_below):
            self.pool.watch = forever  # type: ignore[method-assign]  # there is nothing to watch, and polls cost time
        return losses

    def _count_work(self, buffer: Any) -> None:
        selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select, choose = selector.select, buffer._choose

        def counting_select(timeout: float | None = None) -> list[Any]:
            self.num_turns += 1
            return select(timeout)

        def counting_choose() -> Any:
            self.num_choices += 1
            return choose()

        selector.select, buffer._choose = counting_select, counting_choose

    def _note_evaluations(self, pool: Any) -> None:
        evaluate = pool.evaluate

        async def noting(*how: Any) -> list[Trajectory]:
            responses = await evaluate(*how)
            self.evaluated.append({version for one in responses for version in one.policy_versions})
            return responses

        pool.evaluate = noting

    async def _end_workers(self) -> None:
        """Actors outlive the loops; these end with the run."""
        tasks = [task for worker in self.workers for task in worker.tasks]
        for task in tasks:
            task.cancel()
        for worker in self.workers:
            worker.served.server.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _worker(self, index: int, clock: Callable[[], float]) -> RolloutWorker:
        plan = self.plan
        repacking = (
            ConsolidationRule(below=plan.repack_below, most=plan.workload.kv_requests) if plan.repack_below else None
        )
        spec = WorkerSpec(
            group_size=plan.group_size,
            sampling=SamplingParams(max_tokens=plan.max_response_tokens),
            request_timeout_s=REQUEST_TIMEOUT_S,
            concurrency=LimitRange(lowest=1, highest=plan.most_requests) if plan.most_requests else None,
            repacking=repacking,
            seed=plan.seed,
        )
        order = order_of(list(self.fleet.replicas), worker=index, num_workers=plan.num_workers)
        engines = [self.fleet.replicas[name] for name in order]
        return RolloutWorker(spec, engines, tokenizer=Counting(), score=self._score, clock=clock)

    async def _score(self, prompt: Prompt, _text: str) -> RewardResult:
        draw, plan = self.fleet.rng.random(), self.plan
        if draw < plan.group_error_frac:
            raise OSError(f"the reward of {prompt.prompt_id} is not there")
        if draw < plan.group_error_frac + plan.reward_error_frac:
            raise RewardError("no verdict")
        return RewardResult(reward=float(self.fleet.rng.random() < 0.5))

    def _devices(self) -> DedicatedDevices:
        fleet = self.fleet
        if not self.plan.shares_devices:
            return DedicatedDevices(fleet.coordinator)
        return ColocatedDevices(
            fleet.coordinator,
            fleet,
            fleet.engines,
            tracer=self.telemetry.tracer,
            sleep_timeout_s=SLEEP_TIMEOUT_S,
            kill=lambda actor: actor.target.die("it did not fall asleep"),
            clock=asyncio.get_running_loop().time,
        )

    async def _restart_engine(self, name: str, _number: int) -> int | None:
        async with self.devices.engines_active():
            return await self.fleet.restart(name)

    async def _restart_worker(self, index: int, _number: int) -> LocalWorker:
        await asyncio.sleep(self.plan.restart_s)
        clock = asyncio.get_running_loop().time
        self.workers[index] = worker = LocalWorker(self._worker(index, clock), self.books)
        return worker

    def _training(self, live: SyncReport) -> TrainingRun:
        cfg, fleet = self.cfg, self.fleet
        anything: Any = fleet
        return WatchedRun(
            self,
            source=PromptSource(prompt_set(200), seed=self.plan.seed, shuffle=True),
            buffer=self.buffer,
            workers=self.pool,
            learner=anything,
            devices=self.devices,
            eval_sets=held_out(cfg, HELD_OUT if self.plan.eval_every else 0),
            pin_versions=partial(pinned_versions, coordinator=fleet.coordinator, workers=self.pool),
            live=live,
        )

    def before_live(self, report: SyncReport) -> None:
        """No engine that is behind gets requests of training."""
        fleet = self.fleet
        fleet.live = report.version
        self.turns.append(self.devices.record())
        behind = {
            name: version
            for name, version in fleet.coordinator.live_versions.items()
            if fleet.states[name] == "live" and (version is None or version < report.version)
        }
        for name in behind:  # leased to an evaluation, or lost and on its way to be replaced
            assert self.pool._table[name].state != "live", f"{behind}, and {name} gets requests of training"

    def look(self, run: TrainingRun) -> None:
        buffer = vars(run.buffer)
        sizes = {f"buffer.{name}": len(buffer[f"_{name}"]) for name in ("queued", "running", "ready", "in_training")}
        sizes["buffer.tokens"] = len(buffer["_tokens"])
        sizes |= {"tasks": len(asyncio.all_tasks()), "calls at workers": sum(len(w.tasks) for w in self.workers)}
        sizes["streams"] = sum(replica.num_streams for replica in self.fleet.replicas.values())
        for index, (local, place) in enumerate(zip(self.workers, self.pool._workers, strict=True)):
            scheduler = local.worker._scheduler
            holders = {"scheduler": scheduler, "server": local.served.server, "calls": place}
            for holder, thing in holders.items():
                for name, value in vars(thing).items():
                    if isinstance(value, Sized) and not isinstance(value, str):
                        sizes[f"{holder} {index}.{name}"] = len(value)
        for holder, thing in {"lengths": run.metrics.lengths, "queue": run.metrics.queue}.items():
            sizes |= {f"{holder}.{name}": len(value) for name, value in vars(thing).items() if isinstance(value, Sized)}
        sizes["answers"] = sum(replica.num_open for replica in self.fleet.replicas.values())
        self.running.append(sizes["buffer.running"])
        for name, size in sizes.items():
            self.peaks[name] = max(self.peaks[name], size)


class WatchedRun(TrainingRun):
    """Looks at everything at each version."""

    def __init__(self, world: Simulation, **parties: Any) -> None:
        super().__init__(world.cfg, world.state, world.telemetry, **parties)
        self._world = world

    async def on_live(self, report: SyncReport) -> None:
        self._world.before_live(report)
        await super().on_live(report)
        self._world.look(self)


def run_config(plan: Plan) -> RunConfig:
    return config(
        rollout={
            "group_size": plan.group_size,
            "max_response_tokens": plan.max_response_tokens,
            "max_retries": plan.max_retries,
        },
        trainer={
            "total_steps": plan.num_steps,
            "groups_per_step": plan.groups_per_step,
            "eval_every": plan.eval_every,
            "eval_at_start": bool(plan.eval_every),
            "eval_at_end": bool(plan.eval_every),
            "eval_blocking": plan.shares_devices,
            "stall_timeout_s": 1e6,
        },
        algorithm={"max_filtered_batches_per_step": 1_000, "dynamic_sampling": plan.dynamic_sampling},
        learner={"max_tokens_per_micro_batch": 64 * plan.max_response_tokens},
        mode={"name": "colocated" if plan.shares_devices else "async", "max_staleness": plan.max_staleness},
    )


@contextlib.contextmanager
def simulation(plan: Plan, path: Path) -> Iterator[Simulation]:
    """With the real metric sinks in `path`; without trace and trajectory files, which cost more than the run."""
    cfg = run_config(plan)
    with telemetry_in(cfg, path, with_files=False) as telemetry, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "kill_actor", LocalWorker.die)
        patch.setattr(workers, "cancel_call", Ref.cancel)
        # Looking after pulls would cost more than everything else.
        yield Simulation(plan, telemetry, cfg)
