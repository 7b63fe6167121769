"""What a run will need: memory per device, traffic of weight sync, arithmetic of a step, object store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from rollout.worker.group_server import MAX_BYTES
from trainer.config.algorithm import SELECTING_LOSSES
from trainer.config.rules import pairing_problems
from trainer.config.seats import Seats, engine_seats, num_in_flight
from trainer.driver.memory_plan import (
    DTYPE_BYTES,
    GIB,
    Device,
    EngineMemory,
    Items,
    MemoryItem,
    ModelShape,
    arena_bytes,
    engine_memory,
    gib,
    host_items,
    learner_items,
    min_bytes,
    planned_fit,
    reference_shape,
    total,
    with_tokens,
)
from trainer.errors import Problem
from trainer.learner.flops import FROZEN, TRAINED
from weight_sync.plan.routes import Peer, plan_routes
from weight_sync.transports.pair import pair_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trainer.config.schema import RunConfig
    from trainer.learner.fit import Fit
    from weight_sync.plan.routes import Route


LINK_BYTES_PER_S = (25e9, 200e9)
"""A 200 Gbit/s network card per device, and a link between devices of one host."""
TAIL_EFFICIENCY, FULL_EFFICIENCY = 0.2, 0.45
"""Arithmetic efficiency of decoding over that of training, with few responses in each engine, as in a long tail, and
with full engines. Asynchronous runs on H200s (docs/benchmarks.md) had 0.20 to 0.26 by the measured generation-bound
time, and 0.27 to 0.55 by that at the full rate: tests/unit/trainer/tools/test_run_plan.py."""
FORWARD = 2
"""Operations per weight and token of a forward pass (Kaplan et al. 2020, section 2.1), attention left out."""
TRAJECTORY_BYTES = 4 + 1 + 4 + 4
"""Per token of `rollout.types.Trajectory`: token_ids, loss_mask, logprobs, versions."""
TEXT_BYTES = 4
"""Per token of the response, as in English."""
MICRO_BATCH_BYTES = 4 + 1 + 4 + 4 + 4 + 4
"""Per token of `trainer.data.batch.MicroBatch`: token_ids, loss_mask, behavior_logprobs, versions, advantages,
loss_weights."""
SELECTED_BYTES, REWARDS_BYTES = 1, 4
"""More, where a loss selects tokens, and where the learner finishes advantages."""
SPILL_SHARE = 0.8
"""Where Ray begins to spill to disk (its object_spilling_threshold)."""


class SyncTraffic(NamedTuple):
    """Of one policy version."""

    version_bytes: int
    """All published parameters, once."""
    device_bytes: int
    """That one engine device reads."""
    rank_bytes: int
    """That the busiest learner rank serves."""
    relays: bool
    pairs: tuple[Items, Items]
    """Memory of groups of two: of the learner device that has most of them, and of the engine device."""

    def floor_s(self, link_bytes_per_s: float) -> float:
        """No pull is faster than the busier end of its link."""
        return max(self.device_bytes, self.rank_bytes) / link_bytes_per_s


class StepWork(NamedTuple):
    """Arithmetic of one step per device, in floating point operations."""

    learner_flops: float
    engine_flops: float

    @property
    def generation_over_learning(self) -> tuple[float, float]:
        """Of their times: with full engines, and with few responses in them."""
        ratio = self.engine_flops / self.learner_flops
        return ratio / FULL_EFFICIENCY, ratio / TAIL_EFFICIENCY

    @property
    def bottleneck(self) -> Literal["learning", "generation", "either"]:
        """The side that takes longer at both efficiencies of decoding."""
        full, tail = self.generation_over_learning
        if tail < 1:
            return "learning"
        return "generation" if full > 1 else "either"


class ObjectStore(NamedTuple):
    """With every response at its longest."""

    items: Items
    group_bytes: int
    total_bytes: int | None
    """None if the cluster is not ours."""

    @property
    def carries_groups(self) -> bool:
        """Small groups go to the driver itself."""
        return self.group_bytes > MAX_BYTES

    @property
    def may_spill(self) -> bool:
        return self.total_bytes is not None and total(self.items) > SPILL_SHARE * self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    shape: ModelShape
    device: Device
    learner: Items
    host: Items
    """Of one learner rank, in host memory; on a CPU that is the device."""
    host_bytes: int | None
    """Of the host with all ranks; None if unknown."""
    engine: EngineMemory
    seats: Seats
    sync: SyncTraffic
    work: Mapping[float, StepWork]
    """By the mean length of a response: the given one, or the longest and a quarter of it."""
    store: ObjectStore
    num_slots: int
    """Groups in flight, at most."""
    num_responses: int
    fit: Fit
    """Of a micro-batch, and of the learner beside an engine."""
    arena_bytes: int
    """Of one rank, which stays on a shared device in the engine's turn."""
    is_paired: bool
    """Learner and engine alternate on every device."""

    def at_once(self, cfg: RunConfig) -> int:
        """Sequences that one engine generates."""
        most = cfg.rollout.max_concurrency
        return self.seats.number if most is None else min(self.seats.number, most)

    @property
    def moved_bytes(self) -> int:
        """What one rank moves to the host and back at every step on a shared device, unless it stays there."""
        return sum(item.nbytes for item in self.learner if item.is_state)


def plan_run(
    cfg: RunConfig,
    shape: ModelShape,
    device: Device,
    *,
    prompt_tokens: float,
    response_tokens: float | None = None,
    num_evaluated: int = 0,
    critic: ModelShape | None = None,
    teacher: ModelShape | None = None,
    host_bytes: int | None = None,
    node_of: Mapping[str, str] | None = None,
) -> RunPlan:
    """
    Args:
        prompt_tokens, response_tokens: means; None if unknown.
        num_evaluated: responses of an evaluation.
        critic: with a separate backbone.
        teacher: `algorithm.kl.reference_model`.
        host_bytes: memory of the host with all ranks; None if unknown.
        node_of: name of a learner or an engine -> its node; None: all are on one.
    """
    num_slots = (cfg.mode.max_staleness + 1) * cfg.trainer.groups_per_step
    group_size = num_in_flight(cfg) // num_slots
    critic = None if critic is None else critic.with_value_head()
    reference = reference_shape(cfg, shape, teacher)
    fit = planned_fit(cfg, shape, device, reference, critic)
    cfg = with_tokens(cfg, fit.tokens)
    engine = engine_memory(cfg, shape, device)
    sync = sync_traffic(cfg, shape, node_of, is_staged=engine.is_staged, collective=device.collective)
    learner = (*learner_items(cfg, shape, device, reference, critic), *sync.pairs[0])
    weights, *others = engine.items
    engine = replace(engine, items=(weights, *sync.pairs[1], *others))
    kv_tokens = None if engine.uncounted else engine.kv_tokens
    host = host_items(cfg, shape, reference, critic)
    is_paired = cfg.mode.shares_devices and not device.is_shared
    if is_paired and not fit.stays_on_device and (moved := sum(item.nbytes for item in learner if item.is_state)):
        hint = "mode: async or sync, with separate devices for the learner"
        host = (*host, MemoryItem("the learner, while engines compute", moved, hint))
    longest = cfg.rollout.max_response_tokens
    per_token = _learner_flops(cfg, shape, critic=critic, teacher=teacher)
    means = (longest, longest / 4) if response_tokens is None else (response_tokens,)
    return RunPlan(
        shape=shape,
        device=device,
        learner=learner,
        host=host,
        host_bytes=host_bytes,
        engine=engine,
        sync=sync,
        seats=engine_seats(cfg, prompt_tokens=prompt_tokens, num_evaluated=num_evaluated, kv_tokens=kv_tokens),
        work={mean: _work(cfg, shape, prompt_tokens, mean, group_size, per_token) for mean in means},
        store=object_store(cfg, prompt_tokens, num_evaluated, num_slots=num_slots, group_size=group_size),
        num_slots=num_slots,
        num_responses=num_slots * group_size,
        fit=fit,
        arena_bytes=arena_bytes(cfg, shape),
        is_paired=is_paired,
    )


def sync_traffic(
    cfg: RunConfig, shape: ModelShape, node_of: Mapping[str, str] | None, *, is_staged: bool, collective: str
) -> SyncTraffic:
    """Every replica needs every published byte once, spread over its devices, by the routes of weight sync."""
    num_ranks, tp = cfg.learner.num_ranks, cfg.rollout.tensor_parallel_size
    version_bytes = shape.num_trained_params * DTYPE_BYTES[cfg.model.rollout_dtype]

    def node(name: str) -> str:
        return "" if node_of is None else node_of[name]

    parties = [
        Peer(name=f"{replica}/{worker}", worker=worker, node=node(f"replica_{replica}"))
        for replica in range(cfg.rollout.num_replicas)
        for worker in range(tp)
    ]
    learners = {rank: node(f"learner_{rank}") for rank in range(num_ranks)}
    routes = plan_routes(
        learners,
        parties,
        dict.fromkeys(range(tp), range(num_ranks)),
        relay=cfg.weight_sync.relay if is_staged else "off",  # only staging buffers are relayed
    )
    stages = [stage for route in routes.values() for stage in route.stages]
    readers = Counter(rank for stage in stages if not stage.via for rank in stage.ranks)
    return SyncTraffic(
        version_bytes=version_bytes,
        device_bytes=-(-version_bytes // tp) * cfg.rollout.engines_per_device,
        rank_bytes=-(-version_bytes * max(readers.values()) // (tp * num_ranks)),
        relays=any(route.predecessors for route in routes.values()),
        pairs=_pairs(cfg.weight_sync.transport, collective, learners, {one.name: one.node for one in parties}, routes),
    )


def _pairs(
    transport: str,
    collective: str,
    learners: Mapping[int, str],
    workers: Mapping[str, str],
    routes: Mapping[str, Route],
) -> tuple[Items, Items]:
    """What groups of two take of the learner device that has most of them, and of the engine device. Learners and
    workers are given with their nodes."""
    found: dict[str | int, list[int]] = {}
    for name, route in routes.items():
        direct = {rank for stage in route.stages if not stage.via for rank in stage.ranks}
        givers = [
            (rank, pair_bytes(transport, collective, same_node=learners[rank] == workers[name])) for rank in direct
        ]
        givers += [
            (other, pair_bytes("auto", collective, same_node=workers[other] == workers[name]))
            for other in route.predecessors
        ]
        for giver, nbytes in givers:
            for party in (giver, name) if nbytes else ():
                found.setdefault(party, []).append(nbytes)

    def most(parties: Iterable[str | int], hint: str) -> Items:
        sizes = max((found.get(party, []) for party in parties), key=sum)
        return (MemoryItem(f"groups of two ({len(sizes)})", sum(sizes), hint),) if sizes else ()

    hint = "weight_sync.relay=auto, with commit=staged" if transport == "auto" else "weight_sync.transport=auto"
    return most(learners, hint), most(workers, hint)


def training_flops(shape: ModelShape, *, recomputes: bool) -> float:
    """Operations per token of forward and backward, which `recomputes` with activation checkpointing."""
    again = FORWARD * recomputes
    if shape.num_adapter_params:
        return (FROZEN + again) * shape.num_active_params + (TRAINED + again) * shape.num_adapter_params
    return (TRAINED + again) * shape.num_active_params


def _learner_flops(
    cfg: RunConfig, shape: ModelShape, *, critic: ModelShape | None, teacher: ModelShape | None
) -> float:
    """Operations per token in all passes of policy, reference and critic."""
    recomputes = cfg.learner.activation_checkpointing is True  # all products
    flops = cfg.learner.updates_per_batch * training_flops(shape, recomputes=recomputes)
    if cfg.algorithm.kl.coef > 0:
        flops += FORWARD * (shape if teacher is None else teacher).num_active_params
    if critic is not None:
        flops += (
            cfg.learner.updates_per_batch * cfg.critic.updates_per_step * training_flops(critic, recomputes=recomputes)
        )
    elif cfg.algorithm.uses_critic:  # a shared backbone gives the values before it is trained
        flops += FORWARD * (shape.num_active_params + shape.num_adapter_params)
    return flops


def _work(
    cfg: RunConfig, shape: ModelShape, prompt_tokens: float, mean: float, group_size: int, per_token: float
) -> StepWork:
    """With responses of `mean` tokens. `group_size` includes a greedy baseline, which is not trained; `per_token` are
    operations of the learner."""
    trained = cfg.trainer.groups_per_step * cfg.rollout.group_size
    generated = cfg.trainer.groups_per_step * group_size
    forward = FORWARD * (shape.num_active_params + shape.num_adapter_params)
    return StepWork(
        learner_flops=per_token * trained * (prompt_tokens + mean) / cfg.learner.num_ranks,
        engine_flops=forward * generated * mean / cfg.rollout.num_devices,
    )


def object_store(
    cfg: RunConfig, prompt_tokens: float, num_evaluated: int, *, num_slots: int, group_size: int
) -> ObjectStore:
    """`num_slots` groups are in flight; `group_size` includes a greedy baseline."""
    longest = cfg.rollout.max_response_tokens
    response = int(TRAJECTORY_BYTES * prompt_tokens) + (TRAJECTORY_BYTES + TEXT_BYTES) * longest
    response *= cfg.task.agent_max_sequences
    # Of all samples of a step; a greedy baseline is not trained.
    selected = SELECTED_BYTES * (cfg.algorithm.loss in SELECTING_LOSSES)
    per_token = MICRO_BATCH_BYTES + selected + REWARDS_BYTES * cfg.algorithm.finishes_on_ranks
    sequences = cfg.trainer.groups_per_step * cfg.rollout.group_size * cfg.task.agent_max_sequences
    needs = {"micro-batches of one step": int(sequences * (prompt_tokens + longest) * per_token)}
    if group_size * response > MAX_BYTES:
        needs[f"{num_slots:,} groups in flight"] = num_slots * group_size * response
    if num_evaluated * response > MAX_BYTES:
        needs[f"{num_evaluated:,} responses of an evaluation"] = num_evaluated * response
    return ObjectStore(
        items=tuple(MemoryItem(name, n, "ray.object_store_gib: more", is_exact=False) for name, n in needs.items()),
        group_bytes=group_size * response,
        total_bytes=int(cfg.ray.object_store_gib * GIB) if cfg.ray.address == "local" else None,
    )


def problems(plan: RunPlan, cfg: RunConfig) -> list[Problem]:
    """What cannot fit, even if every estimate is twice too large; nothing of an engine with uncounted arguments."""
    found: list[Problem] = []
    if plan.device.is_shared:
        num_engines = cfg.rollout.num_replicas * cfg.rollout.tensor_parallel_size
        items = (*plan.learner, *plan.host) * cfg.learner.num_ranks + plan.engine.items * num_engines
        found += _too_large("this host", items, plan.device.total_bytes)
    else:
        found += pairing_problems(cfg)
        found += _too_large("a learner device", plan.learner, plan.device.total_bytes)
        if plan.host_bytes is not None:
            items = plan.host * cfg.learner.num_ranks
            found += _too_large("the memory of this host", items, plan.host_bytes)
    return [*found, *_engine_problems(plan, cfg)]


def _too_large(where: str, items: Items, total_bytes: int) -> list[Problem]:
    if min_bytes(items) <= total_bytes:
        return []
    by_hint: dict[str, list[MemoryItem]] = {}
    for item in items:
        by_hint.setdefault(item.hint, []).append(item)
    hint, largest = max(by_hint.items(), key=lambda entry: min_bytes(tuple(entry[1])))
    names = ", ".join(dict.fromkeys(item.name for item in largest))
    message = f"{where} has {gib(total_bytes)}; most of it is for {names}: {gib(total(tuple(largest)))}"
    key = hint.split(":")[0].split("=")[0]
    return [Problem(key=key, value=f"{gib(total(items))} for {where}", message=message, hint=hint)]


def _engine_problems(plan: RunPlan, cfg: RunConfig) -> list[Problem]:
    engine, device, share = plan.engine, plan.device, cfg.rollout.gpu_memory_utilization
    weights, buffer, longest = engine.items[0], engine.items[-1], engine.longest_tokens
    utilization = "rollout.gpu_memory_utilization"
    own_bytes, rest_bytes = int(share * device.total_bytes), int((1 - share) * device.total_bytes)
    is_sure, per_device = not engine.uncounted, cfg.rollout.engines_per_device
    limits = "rollout.max_model_len or rollout.max_response_tokens"
    most_tokens, key, do = engine.max_kv_tokens, utilization, f"raise it, lower {limits}, or {weights.hint}"
    in_each = ""
    if per_device > 1:  # their caches are as planned
        most_tokens, key, in_each = engine.kv_tokens, "rollout.engines_per_device", " in each engine"
        do = f"lower it, raise {utilization}, or lower {limits}"
    if device.is_shared:
        key = "rollout.kv_cache_gib"
    kept, what = plan.arena_bytes, "arena that stays"
    hint = "lower it: the learner's context and arena stay while it is away"
    if plan.fit.stays_on_device:
        kept, what, hint = min_bytes(plan.learner), "learner that stays", "lower it, or use mode.offload=auto"
    rows = (
        (
            is_sure and most_tokens < longest,
            key,
            f"room for {most_tokens} tokens next to {gib(weights.nbytes // per_device)} of weights",
            f"an engine device of {gib(device.total_bytes)} must hold one sequence of {longest} tokens{in_each}",
            do,
        ),
        (
            plan.is_paired and own_bytes + kept > device.total_bytes,
            utilization,
            f"{gib(own_bytes)} for the engine, next to {gib(kept)} of {what}",
            f"a shared device has {gib(device.total_bytes)}",
            hint,
        ),
        (
            is_sure and not device.is_shared and cfg.weight_sync.commit == "staged" and not engine.staging_fits,
            "weight_sync.commit",
            f"staged: {gib(buffer.nbytes)} of staging buffer per engine device",
            f"only {gib(rest_bytes)} are left",
            buffer.hint,
        ),
    )
    return [
        Problem(key=key, value=value, message=message, hint=hint)
        for is_wrong, key, value, message, hint in rows
        if is_wrong
    ]
