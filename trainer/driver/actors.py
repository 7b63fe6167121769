"""What every actor is made of, and how actors start, stop and are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rollout.buffer.rollout_buffer import RolloutBuffer
from rollout.engine.actor import PAUSE_LIMIT_S, engine_actor
from rollout.engine.interface import EngineSpec
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.consolidation import ConsolidationRule
from rollout.fleet.scheduler import order_of
from rollout.plugins import is_file
from rollout.reward.process import LOAD_TIMEOUT_S
from rollout.reward.registry import BUILTIN_REWARDS, lookup
from rollout.types import SamplingParams
from rollout.worker.actor import rollout_worker_actor
from rollout.worker.worker import WorkerSpec, derive_seed, gather_or_cancel
from trainer.builtin import tiny_model
from trainer.builtin.tiny_model import with_model_directory
from trainer.config.algorithm import traits_of
from trainer.config.rules import longest_sequence
from trainer.config.schema import with_model_paths
from trainer.driver.fleet import Fleet
from trainer.driver.placement import RESTARTED, ranks_of
from trainer.driver.scratch import engine_python
from trainer.driver.weight_updates import ColocatedDevices, DedicatedDevices
from trainer.errors import first_cause, one_line
from trainer.learner.actor import learner_actor
from trainer.learner.group import LearnerGroup
from trainer.remote import ACTOR_OUTPUT, EngineReplica, call, start_actor
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device import EnvVar, merge_env
from weight_sync.vllm.compat import EXTENSION, has_float32_head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rollout.engine.interface import SleepLevel
    from rollout.prompts.prompt_source import PromptSource
    from trainer.config.schema import RolloutConfig, RunConfig
    from trainer.driver.checkpointing import ResumePoint
    from trainer.driver.placement import Placement
    from trainer.telemetry.console import Progress
    from trainer.telemetry.trace import Tracer
    from weight_sync.device.base import Backend, Role


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """The actors of a run, created and not yet started."""

    learner: LearnerGroup
    engines: dict[str, Any]
    workers: list[Any]

    async def close(self, *, timeout_s: float) -> None:
        """Let all of them close for a moment, then kill their processes. Never raises."""
        others = {**{f"rollout_worker_{index}": actor for index, actor in enumerate(self.workers)}, **self.engines}
        endings = [self.learner.close(), *(_close(actor, name, timeout_s) for name, actor in others.items())]
        for result in await asyncio.gather(*endings, return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("an actor did not shut down cleanly: %s", one_line(first_cause(result)))


async def _close(actor: Any, name: str, timeout_s: float) -> None:
    try:
        hint = "killing it; increase trainer.shutdown_timeout_s to allow a longer shutdown"
        await call(actor.close.remote(), timeout_s=timeout_s, who=name, what="close", hint=hint)
    finally:
        ray.kill(actor)


async def create_learner(cfg: RunConfig, placement: Placement, backend: Backend) -> tuple[LearnerGroup, Placement]:
    """Create the learner, which begins to import its libraries; the model need not be there yet. Where engines share
    its devices, it waits until Ray has assigned them: the returned placement has them."""
    # Chosen once, here: a learner's node might find another kind of device.
    learner_cfg = replace(cfg.learner, fp32_head=float32_head(cfg, backend))
    own = replace(for_actors(cfg), device=replace(cfg.device, name=backend.name), learner=learner_cfg)
    ranks = [
        learner_actor()
        .options(**_options(cfg, backend, placement, role="learner", name=f"learner_{rank}"))
        .remote(own, rank=rank, world_size=cfg.learner.num_ranks)
        for rank in range(cfg.learner.num_ranks)
    ]
    learner = LearnerGroup(ranks, timeout_s=cfg.learner.timeout_s, ranks_per_batch=cfg.learner.ranks_per_batch)
    if placement.is_paired and backend.visible_devices_var is not None:
        ids = await learner.device_ids()
        shared = {
            f"replica_{i}": tuple(ids[rank] for rank in ranks_of(i, cfg)) for i in range(cfg.rollout.num_replicas)
        }
        placement = replace(placement, engine_devices=shared)
    return learner, placement


def create_engines(cfg: RunConfig, placement: Placement, backend: Backend, *, version: int) -> dict[str, Any]:
    """Create the engines, by their names. They begin to import their libraries; neither their sizes nor the model need
    be known yet."""
    replicas = (f"replica_{index}" for index in range(cfg.rollout.num_replicas))
    return {name: new_engine(cfg, placement, backend, name=name, version=version) for name in replicas}


def new_engine(cfg: RunConfig, placement: Placement, backend: Backend, *, name: str, version: int) -> Any:
    """One engine actor that imports its libraries, not yet started."""
    spec = engine_spec(with_located_models(cfg), backend, name=name, version=version)
    factory = engine_actor().options(**_options(cfg, backend, placement, role="engine", name=name))
    # Longer than any sync, after which the coordinator ends the pause.
    actor = factory.remote(spec, pause_limit_s=max(PAUSE_LIMIT_S, 2 * cfg.weight_sync.timeout_s))
    if spec.forks:
        actor.begin_imports.remote()
    return actor


async def start_engine(cfg: RunConfig, placement: Placement, actor: Any, *, name: str) -> Mapping[str, float]:
    """With its sizes (`plan_engines`) and devices. Returns the seconds of each stage."""
    found: dict[str, Any] = {"max_num_seqs": num_seats(cfg.rollout), "devices": placement.devices(name)}
    if placement.cache_bytes is not None:
        found["kv_cache_gib"] = placement.cache_bytes / 2**30
    return await start_actor(actor, name, timeout_s=cfg.trainer.startup_timeout_s, **found)


@contextlib.contextmanager
def _killed_on_failure(actor: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        ray.kill(actor)  # it would keep its device memory
        raise


def with_workers(cfg: RunConfig, placement: Placement, actors: Actors) -> Actors:
    """Create the rollout workers too, which read the tokenizer at once, so the model must be there."""
    workers = [new_worker(cfg, placement, actors.engines, index=index) for index in range(cfg.rollout.num_workers)]
    return replace(actors, workers=workers)


def new_worker(
    cfg: RunConfig, placement: Placement, engines: Mapping[str, Any], *, index: int, restart: str = ""
) -> Any:
    """Rollout worker `index` as an actor, not yet started."""
    name = f"rollout_worker_{index}{restart}"
    order = order_of(list(engines), worker=index, num_workers=cfg.rollout.num_workers)
    actor = rollout_worker_actor().options(**placement.options(name), name=name, max_restarts=0)
    return actor.remote(worker_spec(for_actors(cfg)), {engine: engines[engine] for engine in order})


def make_coordinator(cfg: RunConfig, actors: Actors) -> SyncCoordinator:
    """Weight sync between all learner ranks and all engines."""
    options = SyncOptions(
        transport=cfg.weight_sync.transport,
        commit=cfg.weight_sync.commit,
        num_slots=cfg.weight_sync.num_slots,
        timeout_s=cfg.weight_sync.timeout_s,
        verify=cfg.weight_sync.verify,
        relay=cfg.weight_sync.relay,
        rolling=not cfg.mode.shares_devices,
        # On one host no other host needs the control sockets.
        host="127.0.0.1" if cfg.ray.address == "local" else None,
    )
    replicas = [EngineReplica(name, actor) for name, actor in actors.engines.items()]
    return SyncCoordinator(actors.learner.ranks, replicas, options=options)


def make_devices(cfg: RunConfig, actors: Actors, coordinator: SyncCoordinator, tracer: Tracer) -> DedicatedDevices:
    """The learner must be set up. Where it stays on shared devices, none is handed over."""
    if not cfg.mode.shares_devices or actors.learner.stays_on_device:
        return DedicatedDevices(coordinator)
    return ColocatedDevices(
        coordinator, actors.learner, actors.engines, tracer=tracer, sleep_timeout_s=cfg.weight_sync.timeout_s
    )


def make_buffer(cfg: RunConfig, resumed: ResumePoint | None, source: PromptSource) -> RolloutBuffer:
    buffer = RolloutBuffer(
        groups_per_step=cfg.trainer.groups_per_step,
        max_staleness=cfg.mode.max_staleness,
        max_retries=cfg.rollout.max_retries,
        max_filtered_batches_per_step=cfg.algorithm.max_filtered_batches_per_step,
        step=0 if resumed is None else resumed.step,
        version=0 if resumed is None else resumed.version,
        end_step=cfg.trainer.total_steps,
    )
    if resumed is not None:
        buffer.load_state_dict(resumed.state["buffer"], source.find)
    return buffer


def group_timeout_s(cfg: RunConfig) -> float:
    """The deadlines of a rollout worker for one group: generation, the queue of the rewards, the start of a process,
    and the call."""
    generation_s = cfg.task.agent_timeout_s if cfg.task.agent else cfg.rollout.request_timeout_s
    return generation_s + cfg.task.reward.queue_timeout_s + LOAD_TIMEOUT_S + cfg.task.reward.timeout_s


def make_fleet(
    cfg: RunConfig,
    placement: Placement,
    backend: Backend,
    actors: Actors,
    coordinator: SyncCoordinator,
    devices: DedicatedDevices,
    live_version: Callable[[], int],
) -> Fleet:
    """Restarts have new names, since Ray frees a name some time after its actor's death."""
    timeout_s = cfg.trainer.startup_timeout_s

    async def restart_worker(index: int, number: int) -> Any:
        restart = f"{RESTARTED}{number}"
        actors.workers[index] = new = new_worker(cfg, placement, actors.engines, index=index, restart=restart)
        with _killed_on_failure(new):
            await start_actor(new, f"rollout_worker_{index}{restart}", timeout_s=timeout_s)
        return new

    async def restart_engine(name: str, number: int) -> int | None:
        async with devices.engines_active():
            ray.kill(actors.engines[name])
            restarted = f"{name}{RESTARTED}{number}"
            actors.engines[name] = new = new_engine(cfg, placement, backend, name=restarted, version=live_version())
            with _killed_on_failure(new):
                await start_engine(cfg, placement, new, name=restarted)
                return await coordinator.join(EngineReplica(name, new))

    fleet = Fleet(
        actors.engines,
        actors.workers,
        group_timeout_s=group_timeout_s(cfg),
        heartbeat_timeout_s=cfg.rollout.heartbeat_timeout_s,
        max_engine_restarts=cfg.rollout.max_engine_restarts,
        max_worker_restarts=cfg.rollout.max_worker_restarts,
        restart_engine=restart_engine,
        restart_worker=restart_worker,
        sync_states=lambda: coordinator.members,
    )
    coordinator.on_change(fleet.exclude_lost_engines)
    fleet.exclude_lost_engines()  # one may have missed the first version
    return fleet


def engine_spec(cfg: RunConfig, backend: Backend, *, name: str, version: int) -> EngineSpec:
    """What the engine `name` is made of."""
    rollout = cfg.rollout
    return EngineSpec(
        model=cfg.model.path,
        tokenizer=_tokenizer_path(cfg),
        trust_remote_code=cfg.model.trust_remote_code,
        device=backend.name,
        dtype=cfg.model.rollout_dtype,
        float32_head=float32_head(cfg, backend),
        tensor_parallel_size=rollout.tensor_parallel_size,
        max_model_len=rollout.max_model_len if rollout.max_model_len else longest_sequence(cfg),
        gpu_memory_utilization=rollout.gpu_memory_utilization / rollout.engines_per_device,
        kv_cache_gib=rollout.kv_cache_gib if backend.name == "cpu" else None,
        num_threads=cfg.device.cpu_threads,
        enforce_eager=rollout.enforce_eager,
        stream_interval=rollout.stream_interval,
        reports_load=rollout.engine_stats or rollout.concurrency == "adaptive",
        seed=derive_seed(cfg.seed, name),  # engines must not draw the same numbers
        in_flight=cfg.mode.in_flight,
        sleep_level=sleep_level(cfg, backend),
        initial_version=version,
        stop_token_ids=tuple(rollout.stop_token_ids),
        lora_rank=cfg.model.lora.rank,
        lora_targets=tuple(cfg.model.lora.target_modules.split("+")),
        extension=EXTENSION,
        forks=backend.capabilities().forks,
        # Engines read no weights where the first sync, which precedes the first request, brings all of them.
        engine_args={
            **({} if why_engines_read_weights(cfg) else {"load_format": "dummy"}),
            **backend.engine_args(rollout.engine_args),
        },
    )


def float32_head(cfg: RunConfig, backend: Backend) -> bool:
    """Whether learner and engines leave logits in float32. Both or neither: where both round, they mostly round to the
    same number, and where one does, log-probs differ by percents."""
    if cfg.learner.fp32_head is None:
        return backend.capabilities().float32_products and has_float32_head()
    return cfg.learner.fp32_head


def why_engines_read_weights(cfg: RunConfig) -> str | None:
    """The key that makes engines load `model.path`, if any: a sync does not bring the model below an adapter, scales of
    a cache, or a draft model."""
    if cfg.model.lora.rank:
        return "model.lora.rank"
    keys = (key for key in ("quantization", "kv_cache_dtype", "speculative_config") if key in cfg.rollout.engine_args)
    return next((f"rollout.engine_args.{key}" for key in keys), None)


def sleep_level(cfg: RunConfig, backend: Backend) -> SleepLevel | None:
    """How deep engines sleep while the learner has the devices; None where they have separate devices."""
    if not cfg.mode.shares_devices:
        return None
    if not backend.capabilities().sleep_mode:
        return 0
    return 1 if cfg.model.lora.rank else 2  # a sync brings adapters only; the model stays on the host


def num_seats(rollout: RolloutConfig) -> int:
    """Of an engine."""
    assert rollout.max_num_seqs != "auto", "see trainer/config/seats.py"
    return rollout.max_num_seqs


def concurrency_of(rollout: RolloutConfig) -> LimitRange | None:
    """How many requests one rollout worker may have on one engine; None for no limit."""
    is_adaptive = rollout.concurrency == "adaptive"
    if rollout.max_concurrency is None and not is_adaptive:
        return None
    highest = num_seats(rollout) if rollout.max_concurrency is None else rollout.max_concurrency
    if is_adaptive:
        highest = min(highest, num_seats(rollout))  # more would wait inside the engine
    lowest = min(rollout.min_concurrency, highest) if is_adaptive else highest
    return LimitRange(lowest=lowest, highest=highest).share(rollout.num_workers)


def worker_spec(cfg: RunConfig) -> WorkerSpec:
    rollout, task, reward, on_failure = cfg.rollout, cfg.task, cfg.task.reward, cfg.algorithm.on_failure
    most_at_once, below = num_seats(rollout), rollout.repack_below
    if rollout.max_concurrency is not None:
        most_at_once = min(most_at_once, rollout.max_concurrency)
    return WorkerSpec(
        group_size=rollout.group_size,
        sampling=SamplingParams(
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
        ),
        request_timeout_s=rollout.request_timeout_s,
        evaluation_window=most_at_once,
        concurrency=concurrency_of(rollout),
        repacking=None if below is None else ConsolidationRule(below=below, most=num_seats(rollout)),
        greedy_baseline=traits_of(cfg.algorithm).greedy_baseline,
        agent=task.agent,
        agent_args=task.agent_args,
        chat_template_kwargs=task.chat_template_kwargs,
        agent_timeout_s=task.agent_timeout_s if task.agent else None,
        agent_max_sequences=task.agent_max_sequences,
        on_failure={
            "timeout": on_failure.timeout,
            "agent_error": on_failure.agent_error,
            "reward_timeout": on_failure.reward_timeout,
        },
        seed=cfg.seed,
        per_request_seed=cfg.mode.max_staleness == 0 if rollout.per_request_seed is None else rollout.per_request_seed,
        tokenizer_path=_tokenizer_path(cfg),
        trust_remote_code=cfg.model.trust_remote_code,
        reward=reward.name,
        reward_timeout_s=reward.timeout_s,
        reward_processes=reward.num_processes,
        reward_queue_timeout_s=reward.queue_timeout_s,
        reward_concurrency=reward.max_concurrency,
        reward_directory=str(Path.cwd()),
    )


COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Of torch: where it caches compiled code."""


def _options(cfg: RunConfig, backend: Backend, placement: Placement, *, role: Role, name: str) -> dict[str, Any]:
    """Resources, environment, and a name that people see in `ps` and logs."""
    needed = (*backend.process_env(role), *(backend.sharing_env() if cfg.mode.shares_devices else ()))
    if role == "learner" and cfg.ray.address == "local":  # elsewhere there may be no such directory
        why = "what a run compiles is there for the next, also after a restart of the host"
        needed = (*needed, EnvVar(name=COMPILED, value=str(tiny_model.cache_dir() / "inductor"), why=why))
    env = merge_env(needed, cfg.device.env, dict(os.environ))
    python = engine_python() if role == "engine" else {}
    return {**placement.options(name), "runtime_env": {"env_vars": env, **python}, "name": name, "max_restarts": 0}


def _tokenizer_path(cfg: RunConfig) -> str:
    return cfg.model.tokenizer_path if cfg.model.tokenizer_path else cfg.model.path


TRACE_ROW = "start"


async def start_actors(
    cfg: RunConfig,
    placement: Placement,
    actors: Actors,
    resumed: ResumePoint | None,
    tracer: Tracer,
    *,
    in_turns: bool,
) -> None:
    """Load models into learner and engines concurrently, and start the reward processes.

    Args:
        in_turns: engines wait until the learner is ready, and has left their devices if it does not stay there.

    Raises:
        TimeoutError: not all were ready within `trainer.startup_timeout_s`.
    """
    limit_s, begin_s = cfg.trainer.startup_timeout_s, time.time()

    def log_ready(name: str, stages: Mapping[str, float]) -> None:
        """Time outside the stages is the start of the process, or its wait for others."""
        end_s = time.time()
        tracer.add_span(TRACE_ROW, name, start_s=begin_s, end_s=end_s, overlapping=True, **stages)
        parts = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stages.items())
        log.info("%s is ready after %.1f s%s", name, end_s - begin_s, f" ({parts})" if parts else "")

    async def learner() -> None:
        earlier = {} if resumed is None else resumed.state.get("learner", {})
        ranks = await actors.learner.setup(earlier_tokens=earlier.get("max_tokens_per_micro_batch"))
        for text in dict.fromkeys(text for rank in ranks for text in rank.warnings):
            log.warning("learner: %s", text)
        stages = {stage: max(rank.seconds[stage] for rank in ranks) for stage in ranks[0].seconds}
        if resumed is not None:
            loading_s = time.time()
            await actors.learner.load(resumed.path)
            stages["checkpoint"] = time.time() - loading_s
        log_ready("learner", stages)
        tokens = actors.learner.max_tokens_per_micro_batch
        stays = cfg.mode.shares_devices and actors.learner.stays_on_device
        beside = "; its memory stays beside the engines'" if stays else ""
        log.info("learner: %s; up to %d tokens per micro-batch%s", ranks[0].description, tokens, beside)

    async def engine(name: str, actor: Any) -> None:
        log_ready(name, await start_engine(cfg, placement, actor, name=name))

    async def prepare(name: str, actor: Any) -> None:
        hint = f"increase trainer.startup_timeout_s; its output is in {ACTOR_OUTPUT}"
        ref = actor.prepare.remote(placement.devices(name))
        await call(ref, timeout_s=limit_s, who=name, what="import", hint=hint)

    async def engines() -> None:
        async def started() -> None:
            await gather_or_cancel(engine(name, actor) for name, actor in actors.engines.items())

        if not in_turns:
            await started()
        await prepared
        await learner_ready
        if cfg.mode.shares_devices and not actors.learner.stays_on_device:
            await actors.learner.offload()
        if in_turns:
            await started()

    async def worker(name: str, actor: Any) -> None:
        await start_actor(actor, name, timeout_s=limit_s)
        log_ready(name, {})

    try:
        async with asyncio.timeout(limit_s):
            learner_ready = asyncio.ensure_future(learner())
            early = actors.engines.items() if in_turns else ()
            prepared = asyncio.ensure_future(gather_or_cancel(prepare(name, actor) for name, actor in early))
            workers = [worker(f"rollout_worker_{i}", actor) for i, actor in enumerate(actors.workers)]
            await gather_or_cancel([learner_ready, prepared, engines(), *workers])
    except TimeoutError as error:
        raise TimeoutError(
            f"not all actors were ready within trainer.startup_timeout_s={limit_s:g}; increase it for large models and "
            f"slow disks; their output is in {ACTOR_OUTPUT}"
        ) from error


@contextlib.contextmanager
def start_phase(progress: Progress, tracer: Tracer, name: str) -> Iterator[None]:
    """A phase of the start that is shown and traced."""
    with progress.phase(name), tracer.span(TRACE_ROW, name, overlapping=True):
        yield


def for_actors(cfg: RunConfig) -> RunConfig:
    """The configuration with the directories of built-in models, and absolute paths; a model that is no directory here
    may be one of the hub. Raises DataError if there is no such reward, or no such file."""
    reward = cfg.task.reward
    name = reward.name if reward.name in BUILTIN_REWARDS else _absolute_plugin(reward.name, lookup(reward.name).target)
    task = replace(cfg.task, reward=replace(reward, name=name), agent=_absolute_plugin(cfg.task.agent, cfg.task.agent))
    return replace(with_located_models(cfg), task=task)


def with_located_models(cfg: RunConfig) -> RunConfig:
    """The part of `for_actors` for an engine, which may restart when the reward's file is gone."""
    cfg = with_model_paths(with_model_directory(cfg), _located)
    return replace(cfg, model=replace(cfg.model, tokenizer_path=_located(cfg.model.tokenizer_path)))


def _located(path: str) -> str:
    is_here = Path(path).is_dir() or Path(path) == tiny_model.cached_path()  # which may not have been made yet
    return str(Path(path).absolute()) if path and is_here else path


def _absolute_plugin(name: str, target: str) -> str:
    """`name`, or `/absolute/file.py:function` where `target` is in a file."""
    file, colon, function = target.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{function}" if colon and is_file(file) else name
