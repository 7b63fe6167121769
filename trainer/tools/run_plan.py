"""What a run will need: memory per device, traffic, object store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.worker.group_server import MOST_BYTES
from trainer.config.algorithm import SELECTING_LOSSES, traits_of
from trainer.config.validate_mode import pairing_problems
from trainer.errors import Problem
from trainer.tools.memory_plan import (
    GIB,
    UNCOUNTED,
    Device,
    EngineMemory,
    EnginePlan,
    LearnerPlan,
    ModelShape,
    Part,
    Parties,
    Side,
    StepWork,
    SyncTraffic,
    Workload,
    arena_bytes,
    engine_memory,
    host_parts,
    learner_parts,
    least,
    params_met,
    step_work,
    sync_traffic,
    total,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.config.schema import RunConfig


TRAJECTORY_BYTES = 4 + 1 + 4 + 4
"""Per token of prompt and answer in `rollout.types.Trajectory`: token_ids, loss_mask, logprobs, versions."""
TEXT_BYTES = 4
"""Per token of the answer in `Trajectory.text`; assumed, as for English."""
MICRO_BATCH_BYTES = 4 + 1 + 4 + 4 + 4 + 4
"""Per token in `trainer.data.batch.MicroBatch`: token_ids, loss_mask, behavior_logprobs, versions, advantages,
loss_weights."""
SELECTED_BYTES, REWARDS_BYTES = 1, 4
"""Further ones there, where a loss selects tokens, and where the learner finishes advantages."""
SPILL_SHARE = 0.8
"""From this share of the store on, Ray writes objects to disk (its object_spilling_threshold)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """With every answer at its longest, so a run has less there."""

    parts: tuple[Part, ...]
    group_bytes: int
    """Of one group."""
    total_bytes: int | None
    """Its size; None if the cluster is not ours."""

    @property
    def carries_groups(self) -> bool:
        """Whether a group goes through the store, and not to the driver itself."""
        return self.group_bytes > MOST_BYTES

    @property
    def may_spill(self) -> bool:
        return self.total_bytes is not None and total(self.parts) > SPILL_SHARE * self.total_bytes


def object_store(cfg: RunConfig, workload: Workload, *, num_slots: int, group_size: int) -> ObjectStore:
    """
    Args:
        num_slots: groups in flight.
        group_size: answers that are generated for a prompt, a greedy baseline included.
    """
    answer = cfg.task.agent_max_sequences * answer_bytes(workload, response_tokens=cfg.rollout.max_response_tokens)
    num_asked = workload.num_evaluated
    parts = [_part("micro-batches of one step", _batch_bytes(cfg, workload))]
    if group_size * answer > MOST_BYTES:
        parts.append(_part(f"{num_slots:,} groups in flight", num_slots * group_size * answer))
    if num_asked * answer > MOST_BYTES:
        parts.append(_part(f"{num_asked:,} answers of an evaluation", num_asked * answer))
    return ObjectStore(
        parts=tuple(parts),
        group_bytes=group_size * answer,
        total_bytes=int(cfg.ray.object_store_gib * GIB) if cfg.ray.address == "local" else None,
    )


def answer_bytes(workload: Workload, *, response_tokens: int) -> int:
    """Of one trajectory, without what does not grow with its length."""
    return int(TRAJECTORY_BYTES * workload.prompt_tokens) + (TRAJECTORY_BYTES + TEXT_BYTES) * response_tokens


def _part(name: str, nbytes: int) -> Part:
    return Part(name=name, nbytes=nbytes, remedy="ray.object_store_gib: more", is_exact=False)


def _batch_bytes(cfg: RunConfig, workload: Workload) -> int:
    """All samples of a step; a greedy baseline is not trained."""
    selected = SELECTED_BYTES * (cfg.algorithm.loss in SELECTING_LOSSES)
    per_token = MICRO_BATCH_BYTES + selected + REWARDS_BYTES * cfg.algorithm.finishes_on_ranks
    sequences = cfg.trainer.groups_per_step * cfg.rollout.group_size * cfg.task.agent_max_sequences
    return int(sequences * (workload.prompt_tokens + cfg.rollout.max_response_tokens) * per_token)


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNSHARDED_SHARE = 1 / 8
"""As trainer/learner/fsdp.py has it; tests compare the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """All of it."""

    shape: ModelShape
    device: Device
    learner: tuple[Part, ...]
    host: tuple[Part, ...]
    """What one learner rank keeps in host memory; on a CPU that is the device."""
    host_bytes: int | None
    """Of the host that has all ranks; None if they may be on several, or elsewhere."""
    engine: EngineMemory
    sync: SyncTraffic
    work: Mapping[float, StepWork]
    """By the mean length of an answer: the one that was given, or the longest, and a quarter of it."""
    store: ObjectStore
    num_slots: int
    """Groups between admission and live weights, at most."""
    num_answers: int
    """Answers in flight at most."""
    arena_bytes: int
    """Of one rank: stays on a shared device in the engine's turn."""
    is_paired: bool
    """Learner and engine take turns on every device."""

    @property
    def moved_bytes(self) -> int:
        """What one rank moves to the host, and back, at every step on a shared device."""
        return sum(part.nbytes for part in self.learner if part.is_state)


def plan_run(
    cfg: RunConfig,
    shape: ModelShape,
    device: Device,
    *,
    critic: ModelShape | None,
    teacher: ModelShape | None = None,
    workload: Workload,
    host_bytes: int | None = None,
    homes: Mapping[str, str] | None = None,
) -> RunPlan:
    """
    Args:
        critic: of a critic with its own backbone.
        teacher: of the model that `algorithm.kl.path` names.
        host_bytes: memory of the host that has all ranks; None if that is not known.
        homes: name of a learner or an engine -> its node; None takes all to be on one.
    """
    group = cfg.rollout.group_size + traits_of(cfg.algorithm).greedy_baseline
    num_slots = (cfg.mode.max_staleness + 1) * cfg.trainer.groups_per_step
    if critic is not None:
        critic = critic.with_value_head()
    learner = learner_plan(cfg, shape, device, critic=critic, teacher=teacher)
    engine = engine_memory(shape, engine_plan(cfg, device), device)
    is_paired = cfg.mode.shares_devices and not device.is_shared
    on_device, on_host = learner_parts(shape, learner), host_parts(shape, learner)
    if is_paired and (moved := _moved(on_device)).nbytes:
        on_host = (*on_host, moved)
    return RunPlan(
        shape=shape,
        device=device,
        learner=on_device,
        host=on_host,
        host_bytes=host_bytes,
        engine=engine,
        sync=_sync(cfg, shape, homes, is_staged=engine.is_staged),
        work=_work(cfg, workload, params=_learner_params(cfg, shape, critic=critic, teacher=teacher), shape=shape),
        store=object_store(cfg, workload, num_slots=num_slots, group_size=group),
        num_slots=num_slots,
        num_answers=num_slots * group,
        arena_bytes=arena_bytes(shape, learner),
        is_paired=is_paired,
    )


def _sync(cfg: RunConfig, shape: ModelShape, homes: Mapping[str, str] | None, *, is_staged: bool) -> SyncTraffic:
    ranks = [f"learner_{rank}" for rank in range(cfg.learner.num_ranks)]
    replicas = [f"replica_{replica}" for replica in range(cfg.rollout.num_replicas)]
    nodes = dict.fromkeys([*ranks, *replicas], "") if homes is None else homes
    parties = Parties(
        ranks=[nodes[name] for name in ranks],
        replicas=[nodes[name] for name in replicas],
        tensor_parallel_size=cfg.rollout.tensor_parallel_size,
        relay=cfg.weight_sync.relay if is_staged else "off",  # only shadow blocks are handed on
    )
    return sync_traffic(shape, parties, dtype_bytes=DTYPE_BYTES[cfg.model.rollout_dtype])


def _work(cfg: RunConfig, workload: Workload, *, params: float, shape: ModelShape) -> dict[float, StepWork]:
    rollout, longest = cfg.rollout, cfg.rollout.max_response_tokens
    trained = cfg.trainer.groups_per_step * rollout.group_size
    generated = cfg.trainer.groups_per_step * (rollout.group_size + traits_of(cfg.algorithm).greedy_baseline)
    means = (longest, longest / 4) if workload.response_tokens is None else (workload.response_tokens,)
    return {
        mean: step_work(
            Side(
                num_devices=cfg.learner.num_ranks,
                params=params,
                tokens=trained * (workload.prompt_tokens + mean),
            ),
            Side(
                num_devices=rollout.num_replicas * rollout.tensor_parallel_size,
                params=shape.num_active_params + shape.num_adapter_params,
                tokens=generated * mean,
            ),
        )
        for mean in means
    }


def _learner_params(
    cfg: RunConfig, shape: ModelShape, *, critic: ModelShape | None, teacher: ModelShape | None
) -> float:
    """Parameters that a token meets in all passes of a step: of the policy, the reference and the critic."""
    recomputes, forward = cfg.learner.activation_checkpointing, shape.num_active_params + shape.num_adapter_params
    params = params_met(shape, recomputes=recomputes)
    if cfg.algorithm.kl.coef > 0:
        params += (shape if teacher is None else teacher).num_active_params
    if critic is not None:
        params += cfg.critic.updates_per_step * params_met(critic, recomputes=recomputes)
    elif cfg.algorithm.uses_critic:
        params += forward  # a shared backbone gives the values before it is trained
    return params


def _moved(parts: tuple[Part, ...]) -> Part:
    nbytes = sum(part.nbytes for part in parts if part.is_state)
    remedy = "mode: async or sync, with devices of their own for the learner"
    return Part(name="the learner, while engines compute", nbytes=nbytes, remedy=remedy)


def learner_plan(
    cfg: RunConfig, shape: ModelShape, device: Device, *, critic: ModelShape | None, teacher: ModelShape | None = None
) -> LearnerPlan:
    first_policy = None if shape.num_adapter_params else shape
    reference = first_policy if teacher is None else teacher
    learner, compute = cfg.learner, DTYPE_BYTES[cfg.model.compute_dtype]
    most_whole = UNSHARDED_SHARE * device.total_bytes
    return LearnerPlan(
        num_ranks=learner.num_ranks,
        compute_bytes=compute,
        published_bytes=DTYPE_BYTES[cfg.model.rollout_dtype],
        keeps_unsharded=shape.num_params * compute <= most_whole,
        max_tokens=learner.max_tokens_per_micro_batch,
        logprob_chunk_tokens=learner.logprob_chunk_tokens,
        checkpoints_activations=learner.activation_checkpointing,
        cpu_offload=learner.cpu_offload,
        num_slots=cfg.weight_sync.num_slots,
        reference=reference if cfg.algorithm.kl.coef > 0 else None,
        reference_cpu_offload=learner.reference_cpu_offload,
        critic=critic,
        keeps_critic_unsharded=critic is not None and critic.num_params * compute <= most_whole,
        critic_cpu_offload=cfg.critic.cpu_offload,
    )


def engine_plan(cfg: RunConfig, device: Device) -> EnginePlan:
    rollout, given = cfg.rollout, cfg.rollout.engine_args
    needed = cfg.task.max_prompt_tokens + rollout.max_response_tokens
    return EnginePlan(
        tensor_parallel_size=rollout.tensor_parallel_size,
        dtype_bytes=DTYPE_BYTES[cfg.model.rollout_dtype],
        memory_share=rollout.gpu_memory_utilization,
        kv_bytes=int(rollout.kv_cache_gib * GIB) if device.is_shared else None,
        max_model_len=rollout.max_model_len if rollout.max_model_len else needed,
        num_seats=min(n for n in (rollout.max_num_seqs, rollout.max_concurrency) if n is not None),
        commit=cfg.weight_sync.commit,
        uncounted=tuple(name for name in UNCOUNTED if given.get(name, "auto") not in ("auto", None)),
    )


def problems(plan: RunPlan, cfg: RunConfig) -> list[Problem]:
    """What cannot fit, even if every estimate is twice too large. Of an engine with arguments that are not counted,
    nothing is sure."""
    found: list[Problem] = []
    if not plan.device.is_shared:
        found += pairing_problems(cfg)
    if plan.device.is_shared:
        num_engines = cfg.rollout.num_replicas * cfg.rollout.tensor_parallel_size
        parts = (*plan.learner, *plan.host) * cfg.learner.num_ranks + plan.engine.parts * num_engines
        found += _too_large("this host", parts, plan.device.total_bytes)
    else:
        found += _too_large("a learner device", plan.learner, plan.device.total_bytes)
        if plan.host_bytes is not None:
            parts = plan.host * cfg.learner.num_ranks
            found += _too_large("the memory of this host", parts, plan.host_bytes)
    return [*found, *_engine_problems(plan, cfg)]


def _too_large(where: str, parts: tuple[Part, ...], total_bytes: int) -> list[Problem]:
    if least(parts) <= total_bytes:
        return []
    by_remedy = {part.remedy: [other for other in parts if other.remedy == part.remedy] for part in parts}
    remedy, largest = max(by_remedy.items(), key=lambda item: sum(part.least_bytes for part in item[1]))
    names = ", ".join(dict.fromkeys(part.name for part in largest))
    nbytes = sum(part.nbytes for part in largest)
    return [
        Problem(
            key=remedy.split(":")[0].split("=")[0],
            got=f"{gib(total(parts))} for {where}",
            allowed=f"{where} has {gib(total_bytes)}; most of it is for {names}: {gib(nbytes)}",
            do=remedy,
        )
    ]


def _engine_problems(plan: RunPlan, cfg: RunConfig) -> list[Problem]:
    engine, device, found = plan.engine, plan.device, list[Problem]()
    longest = engine.longest_tokens
    if engine.most_kv_tokens < longest and not engine.uncounted:
        weights = engine.parts[0]
        where = "rollout.kv_cache_gib" if device.is_shared else "rollout.gpu_memory_utilization"
        found.append(
            Problem(
                key=where,
                got=f"room for {engine.most_kv_tokens} tokens beside {gib(weights.nbytes)} of weights",
                allowed=f"an engine device of {gib(device.total_bytes)} must hold one sequence of {longest} tokens",
                do=f"raise it, lower rollout.max_model_len or rollout.max_response_tokens, or {weights.remedy}",
            )
        )
    own_bytes = int(cfg.rollout.gpu_memory_utilization * device.total_bytes)
    if plan.is_paired and own_bytes + plan.arena_bytes > device.total_bytes:
        found.append(
            Problem(
                key="rollout.gpu_memory_utilization",
                got=f"{gib(own_bytes)} for the engine, beside {gib(plan.arena_bytes)} of arena that stays",
                allowed=f"a shared device has {gib(device.total_bytes)}",
                do="lower it: the learner's context and arena stay while it is away",
            )
        )
    is_sure = not device.is_shared and not engine.uncounted
    if cfg.weight_sync.commit == "staged" and not engine.shadow_fits and is_sure:
        shadow = engine.parts[-1]
        found.append(
            Problem(
                key="weight_sync.commit",
                got=f"staged: {gib(shadow.nbytes)} of shadow per engine device",
                allowed=f"only {gib(int((1 - cfg.rollout.gpu_memory_utilization) * device.total_bytes))} are left",
                do=shadow.remedy,
            )
        )
    return found


def gib(nbytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / (1 << 20):.2f} MiB"
