"""Builds the parts of a run: actors on the cluster, weight sync between them, and what the loops work with."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from rollout.actor import rollout_worker_actor
from rollout.buffer.work_buffer import WorkBuffer
from rollout.engine.actor import engine_actor
from rollout.engine.base import EngineSpec
from rollout.engine.concurrency import Bounds
from rollout.prompts.source import PromptSource
from rollout.types import SamplingParams
from rollout.worker import WorkerSpec
from trainer.config.errors import first_cause, one_line
from trainer.config.estimators import traits_of
from trainer.learner.worker import LearnerGroup, learner_actor
from trainer.pipeline.cluster import actor_options
from trainer.pipeline.handles import EngineReplica, answer
from trainer.pipeline.inputs import with_model_directory
from trainer.pipeline.workers import WorkerPool
from weight_sync.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device import merge_env
from weight_sync.vllm_compat import EXTENSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.config.schema import RunConfig
    from trainer.config.schema.rollout import RolloutConfig
    from trainer.pipeline.inputs import Inputs
    from trainer.pipeline.placement import Placement
    from trainer.pipeline.resume import Resumed
    from weight_sync.device.base import Backend, Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """The actors of a run, created and not yet started."""

    learner: LearnerGroup
    engines: dict[str, Any]
    workers: tuple[Any, ...]

    async def close(self, *, timeout_s: float) -> None:
        """Let everybody end in order for a moment, then end their processes. Never raises."""
        endings = [self.learner.close()]
        endings += [_end(actor, timeout_s=timeout_s) for actor in (*self.workers, *self.engines.values())]
        for result in await asyncio.gather(*endings, return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("an actor did not close in order: %s", one_line(first_cause(result)))


async def _end(actor: Any, *, timeout_s: float) -> None:
    try:
        await answer(actor.close.remote(), timeout_s=timeout_s)
    finally:
        ray.kill(actor)


def create_actors(cfg: RunConfig, placement: Placement, backend: Backend, *, version: int) -> Actors:
    """Create learner and engines. They begin to import their libraries; the model need not be there yet."""
    cfg = with_model_directory(cfg)
    replicas = [f"replica_{index}" for index in range(cfg.rollout.num_replicas)]
    spec = engine_spec(cfg, backend, version=version)
    engine_options = {name: _options(cfg, backend, placement, role="engine", name=name) for name in replicas}
    engines = {name: engine_actor().options(**engine_options[name]).remote(spec) for name in replicas}
    world_size = cfg.learner.num_ranks
    ranks = [
        learner_actor()
        .options(**_options(cfg, backend, placement, role="learner", name=f"learner_{rank}"))
        .remote(cfg, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    return Actors(learner=LearnerGroup(ranks, timeout_s=cfg.learner.timeout_s), engines=engines, workers=())


def new_engine(cfg: RunConfig, placement: Placement, backend: Backend, *, name: str, version: int) -> Any:
    """One more engine actor like those of `create_actors`, not yet started."""
    cfg = with_model_directory(cfg)
    options = _options(cfg, backend, placement, role="engine", name=name)
    return engine_actor().options(**options).remote(engine_spec(cfg, backend, version=version))


async def replace_engine(
    name: str,
    make: Callable[[], Any],
    *,
    engines: dict[str, Any],
    coordinator: SyncCoordinator,
    workers: WorkerPool,
    timeout_s: float,
) -> int | None:
    """End the engine `name` for good and put a new one in its place, with the newest weights; returns their version.

    Raises:
        WeightSyncError, TimeoutError, RayError: the new engine did not start, or did not get the weights.
    """
    ray.kill(engines[name])
    engines[name] = make()
    await answer(engines[name].start.remote(), timeout_s=timeout_s)
    version = await coordinator.join(EngineReplica(name, engines[name]))
    await workers.replace(name, engines[name])
    return version


def with_workers(cfg: RunConfig, placement: Placement, actors: Actors) -> Actors:
    """Create the rollout workers too. They read the tokenizer at once, so the model must be there."""
    cfg = with_model_directory(cfg)
    workers = tuple(
        rollout_worker_actor()
        .options(**placement.options(name := f"rollout_worker_{index}"), name=name, max_restarts=0)
        .remote(worker_spec(cfg), actors.engines)
        for index in range(cfg.rollout.num_workers)
    )
    return replace(actors, workers=workers)


async def start_actors(cfg: RunConfig, actors: Actors, resumed: Resumed | None) -> None:
    """Load models into learner and engines, side by side, and start the reward processes.

    Raises:
        TimeoutError: not all were ready within `trainer.startup_timeout_s`.
    """
    limit_s = cfg.trainer.startup_timeout_s

    async def learner() -> None:
        await actors.learner.setup()
        if resumed is not None:
            await actors.learner.load(resumed.path)

    starts = [learner()]
    starts += [answer(actor.start.remote(), timeout_s=limit_s) for actor in actors.engines.values()]
    starts += [answer(worker.start.remote(), timeout_s=limit_s) for worker in actors.workers]
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*tasks)
    except TimeoutError as error:
        raise TimeoutError(f"not all actors were ready within trainer.startup_timeout_s={limit_s:g}") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_coordinator(cfg: RunConfig, actors: Actors) -> SyncCoordinator:
    """Weight sync between all learner ranks and all engines."""
    options = SyncOptions(
        transport=cfg.weight_sync.transport,
        commit=cfg.weight_sync.commit,
        num_slots=cfg.weight_sync.num_slots,
        timeout_s=cfg.weight_sync.timeout_s,
        verify=cfg.weight_sync.verify,
        relay=cfg.weight_sync.relay,
        # On one host nobody else needs to reach the control sockets.
        host="127.0.0.1" if cfg.ray.address == "local" else None,
    )
    replicas = [EngineReplica(name, actor) for name, actor in actors.engines.items()]
    return SyncCoordinator(actors.learner.ranks, replicas, options=options)


def make_buffer(cfg: RunConfig, resumed: Resumed | None) -> WorkBuffer:
    buffer = WorkBuffer(
        groups_per_step=cfg.trainer.groups_per_step,
        max_staleness=cfg.mode.max_staleness,
        max_retries=cfg.rollout.max_retries,
        max_refills_per_step=cfg.algorithm.max_refills_per_step,
        version=0 if resumed is None else resumed.step,
    )
    if resumed is not None:
        buffer.load_state_dict(resumed.state["buffer"])
    return buffer


def make_source(cfg: RunConfig, inputs: Inputs, resumed: Resumed | None) -> PromptSource:
    source = PromptSource(inputs.train, seed=cfg.seed, shuffle=cfg.task.shuffle)
    if resumed is not None:
        source.load_state_dict(resumed.state["source"])
    return source


def make_pool(cfg: RunConfig, actors: Actors) -> WorkerPool:
    limit_s = cfg.task.agent_timeout_s if cfg.task.agent else cfg.rollout.request_timeout_s
    return WorkerPool(actors.workers, group_timeout_s=limit_s + cfg.task.reward.timeout_s)


def engine_spec(cfg: RunConfig, backend: Backend, *, version: int) -> EngineSpec:
    """The engine section of the configuration as the engine takes it."""
    rollout = cfg.rollout
    needed = cfg.task.max_prompt_tokens + rollout.max_response_tokens
    return EngineSpec(
        model=cfg.model.path,
        tokenizer=_tokenizer_path(cfg),
        device=backend.name,
        dtype=cfg.model.rollout_dtype,
        tensor_parallel_size=rollout.tensor_parallel_size,
        max_model_len=rollout.max_model_len if rollout.max_model_len else needed,
        max_num_seqs=rollout.max_num_seqs,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_gib=rollout.kv_cache_gib,
        num_threads=cfg.device.cpu_threads,
        enforce_eager=rollout.enforce_eager,
        stream_tokens=rollout.stream_tokens,
        reports_load=rollout.concurrency == "adaptive",
        seed=cfg.seed,
        in_flight=cfg.mode.in_flight,
        initial_version=version,
        lora_rank=cfg.model.lora.rank,
        lora_targets=tuple(cfg.model.lora.target_modules.split("+")),
        extension=EXTENSION,
        engine_args={
            "trust_remote_code": cfg.model.trust_remote_code,
            **backend.engine_defaults(),
            **rollout.engine_args,
        },
    )


def concurrency_of(rollout: RolloutConfig) -> Bounds | None:
    """What one of the rollout workers may have on one replica; None for everything at once."""
    if rollout.concurrency == "adaptive":
        highest = rollout.max_num_seqs if rollout.max_concurrency is None else rollout.max_concurrency
        return Bounds(lowest=rollout.min_concurrency, highest=highest).share(rollout.num_workers)
    if rollout.max_concurrency is None:
        return None
    return Bounds(lowest=rollout.max_concurrency, highest=rollout.max_concurrency).share(rollout.num_workers)


def worker_spec(cfg: RunConfig) -> WorkerSpec:
    rollout, task, reward = cfg.rollout, cfg.task, cfg.task.reward
    return WorkerSpec(
        group_size=rollout.group_size,
        sampling=SamplingParams(
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        ),
        request_timeout_s=rollout.request_timeout_s,
        concurrency=concurrency_of(rollout),
        greedy_baseline=traits_of(cfg.algorithm).greedy_baseline,
        agent=task.agent,
        agent_args=task.agent_args,
        agent_timeout_s=task.agent_timeout_s if task.agent else None,
        seed=cfg.seed,
        tokenizer_path=_tokenizer_path(cfg),
        reward=reward.name,
        reward_timeout_s=reward.timeout_s,
        reward_processes=reward.num_processes,
    )


def _options(cfg: RunConfig, backend: Backend, placement: Placement, *, role: Role, name: str) -> dict[str, Any]:
    env = merge_env(backend.process_env(role), cfg.device.env, dict(os.environ))
    return actor_options(placement.options(name), env=env, name=name)


def _tokenizer_path(cfg: RunConfig) -> str:
    return cfg.model.tokenizer_path if cfg.model.tokenizer_path else cfg.model.path
