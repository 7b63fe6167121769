"""`--dry-run`: what a run would do and need, without starting it."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from rollout.worker.group_server import MAX_BYTES
from trainer.builtin import tiny_model
from trainer.builtin.tiny_model import ensure_model, with_model_directory
from trainer.config.describe import describe_critic, describe_objective, describe_rollout
from trainer.config.schema import LoraConfig, model_paths
from trainer.driver.placement import Node, assign_nodes, bundles_by_actor, check_fits, plan_placement, ranks_beside
from trainer.driver.preflight import check_inputs, preflight
from trainer.errors import ConfigurationError, ModelError, Problem
from trainer.tools.memory_plan import GIB, Device, MemoryItem, gib, min_bytes, model_shape, total, workspace_bytes
from trainer.tools.run_plan import (
    FULL_EFFICIENCY,
    LINK_BYTES_PER_S,
    TAIL_EFFICIENCY,
    Workload,
    plan_run,
    problems,
)
from weight_sync.device.host_memory import host_memory
from weight_sync.device.select import build, get_backend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.config.schema import RunConfig
    from trainer.driver.datasets import DataSets
    from trainer.driver.placement import Bundle, Placement
    from trainer.tools.memory_plan import Items, ModelShape
    from trainer.tools.run_plan import RunPlan, StepWork


HOST_BYTES_PER_S = 50e9
"""Assumed of a device's link to the host's page-locked memory: PCIe 5.0 x16 has 63 GB/s each way."""

UNDOUBTED_FLOPS = 100e12
"""Rate of training that a device for such models is trusted to reach: a third of the peak of the slowest in use."""


def format_plan(plan: RunPlan, cfg: RunConfig, *, placement: Sequence[str] = ()) -> str:
    """What `--dry-run` prints. `placement` are the lines with the actors of each node, where the nodes are known."""
    lines = [
        *_placement(plan, cfg, placement),
        *_memory(plan, cfg),
        *_traffic(plan, cfg),
        *_flight(plan, cfg),
        *_store(plan),
    ]
    return "\n".join([*lines, *_balance(plan, cfg)]) + "\n"


def _placement(plan: RunPlan, cfg: RunConfig, by_node: Sequence[str]) -> list[str]:
    ranks, replicas, tp = cfg.learner.num_ranks, cfg.rollout.num_replicas, cfg.rollout.tensor_parallel_size
    shape, what = plan.shape, "processes on the CPU" if plan.device.is_shared else "devices"
    if plan.is_paired:
        what += " shared with the engines"
    adapters = f", of which {shape.num_adapter_params:,} in adapters are trained" if shape.num_adapter_params else ""
    return [
        "Placement",
        f"  learner         {ranks} {what}, one FSDP2 rank each",
        f"  engines         {replicas} x {tp} = {replicas * tp} {'of the same devices' if plan.is_paired else what}",
        f"  rollout workers {cfg.rollout.num_workers} processes on the CPU",
        f"  device          {plan.device.name}: {gib(plan.device.total_bytes)}"
        + (", shared by all" if plan.device.is_shared else " each"),
        *by_node,
        "",
        f"Model: {shape.num_params + shape.num_adapter_params:,} parameters in {shape.num_layers} blocks{adapters}",
        "",
    ]


def _memory(plan: RunPlan, cfg: RunConfig) -> list[str]:
    engine = plan.engine
    commit = "staged" if engine.is_staged else "in place"
    seats = f"{engine.max_num_seqs} x {engine.longest_tokens} = {engine.kv_demand:,}"
    share = min(engine.kv_tokens / engine.kv_demand, 1.0)
    tight = "  (may not fit: the longest sequence needs more)" if engine.may_not_fit else ""
    full = "all of them" if share == 1 else f"{share:.0%} of them; the rest waits, or prompts and answers are shorter"
    lines = [
        *_table("Per device in the learner's turn" if plan.is_paired else "Per learner device", plan.learner, plan),
        *_table(
            "Per device in the engine's turn" if plan.is_paired else f"Per engine device (commit: {commit})",
            _engine_items(plan),
            plan,
        ),
        f"  The cache holds {engine.kv_tokens:,} tokens; {seats} may be wanted: {full}.{tight}",
    ]
    if not plan.device.is_shared:
        lines.append(
            f"  Assumed workspace of the engine: {gib(workspace_bytes(plan.device))}; it measures its own at the start."
        )
    if engine.uncounted:
        names = ", ".join(f"rollout.engine_args.{name}" for name in engine.uncounted)
        lines.append(f"  Counted as without {names}: weights and cache take as much as the engine says at its start.")
    if plan.host:
        lines += _host(plan, cfg)
    if plan.is_paired:
        lines.append(
            f"  To the host and back at every step: {gib(plan.moved_bytes)} per device, at "
            f"least {2 * plan.moved_bytes / HOST_BYTES_PER_S:.2g} s at {HOST_BYTES_PER_S / 1e9:.0f} GB/s."
        )
    return [*lines, "  ~ marks an estimate, which may be off by half; attention is taken to keep no scores.", ""]


def _host(plan: RunPlan, cfg: RunConfig) -> list[str]:
    """Host memory is asked for by all ranks of a host together."""
    has = "" if plan.host_bytes is None else f" of {gib(plan.host_bytes)}"
    ranks = cfg.learner.num_ranks
    together = f"  {f'{ranks} ranks together':<34}{gib(ranks * total(plan.host)):>12}{has}"
    rows = [f"  {item.name:<34}{gib(item.nbytes):>12}" for item in plan.host]
    return ["Host memory per learner rank", *rows, *([together] if ranks > 1 or has else [])]


def _engine_items(plan: RunPlan) -> Items:
    """What is on a device while an engine has it."""
    if not plan.is_paired:
        return plan.engine.items
    return (*plan.engine.items, MemoryItem(name="arena of the learner", nbytes=plan.arena_bytes, hint=""))


def _table(title: str, items: Items, plan: RunPlan) -> list[str]:
    needed = total(items)
    tight = needed > plan.device.total_bytes >= min_bytes(items)
    return [title, *_rows(items), f"  {'together':<34}{gib(needed):>12}{'  (may not fit)' if tight else ''}"]


def _rows(items: Items) -> list[str]:
    return [
        f"  {item.name:<34}{gib(item.nbytes):>12}{'' if item.is_exact else ' ~'}"
        for item in sorted(items, key=lambda item: -item.nbytes)
        if item.nbytes
    ]


def _traffic(plan: RunPlan, cfg: RunConfig) -> list[str]:
    sync = plan.sync
    floors = "; ".join(f"{sync.floor_s(rate):.3g} s at {rate / 1e9:.0f} GB/s" for rate in LINK_BYTES_PER_S)
    served = f"{gib(sync.rank_bytes)} {'to engines that hand it on' if sync.relays else 'to all of them'}"
    ends = f"each engine device reads {gib(sync.device_bytes)}, each learner rank serves {served}"
    return [
        "Weight sync, per version",
        f"  published {gib(sync.version_bytes)} ({cfg.model.rollout_dtype}); {ends}",
        f"  no pull is faster than {floors} per device (assumed rates of a link)",
        "",
    ]


def _flight(plan: RunPlan, cfg: RunConfig) -> list[str]:
    staleness, groups = cfg.mode.max_staleness, cfg.trainer.groups_per_step
    slots = f"at most (S + 1) x B = ({staleness} + 1) x {groups} = {plan.num_slots} groups"
    seats = cfg.rollout.num_replicas * plan.engine.max_num_seqs
    lines = [f"In flight: {slots}, {plan.num_answers} answers over {seats} seats"]
    turns = -(-plan.num_answers // seats)
    if turns > 1:
        limit_s = cfg.rollout.request_timeout_s
        lines.append(
            f"  Up to {turns} answers have a seat one after the other: {limit_s / turns:,.0f} s for each, by "
            f"rollout.request_timeout_s={limit_s:,.0f}"
        )
    return [*lines, ""]


def _store(plan: RunPlan) -> list[str]:
    store = plan.store
    has = "" if store.total_bytes is None else f" of {gib(store.total_bytes)}"
    tight = "  (may not fit: it spills to disk)" if store.may_spill else ""
    rows = [*_rows(store.items), f"  {'together':<34}{gib(total(store.items)):>12}{has}{tight}"]
    if not store.carries_groups:
        size, most = f"{store.group_bytes / 1000:.3g} kB", f"{MAX_BYTES / 1000:.0f} kB"
        rows.append(f"  Groups go past it, as up to {most} do: one with the longest answers has about {size}.")
    return ["Object store of Ray, at most", *rows, ""]


def _balance(plan: RunPlan, cfg: RunConfig) -> list[str]:
    if len(plan.work) == 1:
        notes, unknown = ("on average",), []
    else:
        notes = ("the longest", "a quarter of it")
        unknown = ["  Their mean is not known; --response-tokens N plans for a mean of N."]
    turns = ["  With S = 0 both sides take turns: a step takes the sum."] if cfg.mode.max_staleness == 0 else []
    reached = f"{FULL_EFFICIENCY:.0%} (engines kept full) to {TAIL_EFFICIENCY:.0%} (few answers in each)"
    return [
        "Expected bottleneck, with answers of",
        *(_verdict(tokens, note, work) for (tokens, work), note in zip(plan.work.items(), notes, strict=True)),
        *unknown,
        *turns,
        *_step_deadline(plan, cfg),
        f"  Decoding is taken to reach {reached} of the arithmetic efficiency",
        "  of training, as it did on H200s. Run some steps, and ask python -m trainer.advise RUN_DIR.",
    ]


def _step_deadline(plan: RunPlan, cfg: RunConfig) -> list[str]:
    """What the learner has to compute within its deadline, where not every accelerator would."""
    limit_s = cfg.learner.timeout_s
    needed = next(iter(plan.work.values())).learner_flops / limit_s
    if needed < UNDOUBTED_FLOPS:
        return []
    rate = f"each learner device trains at {needed / 1e12:,.0f} TFLOP/s or more"
    return [f"  Such a step is over within learner.timeout_s={limit_s:,.0f} if {rate}."]


def _verdict(tokens: float, note: str, work: StepWork) -> str:
    full, few = work.generation_over_learning
    times = f"generation takes {full:.2g} to {few:.2g} times the time of learning"
    return f"  {f'{tokens:,.0f} tokens, {note}':<34}{work.bottleneck}: {times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Actors by node in words, or why they do not fit. Empty where the nodes are not known."""

    lines: tuple[str, ...] = ()
    """What is assumed; then one line per node, if all actors fit."""
    problems: tuple[Problem, ...] = ()
    """What a start on such a cluster would refuse."""
    node_of: Mapping[str, str] | None = None
    """Name of an actor -> its node; None if not all fit."""


def describe_placement(cfg: RunConfig, counts: Sequence[int], *, backend: str, resource: str) -> PlacementPlan:
    """Assign learners, engines and rollout workers to nodes, as a run does that joins a Ray cluster of these.

    Args:
        counts: devices of every node; the driver is on the first.
        backend: name of the device layer's backend, for messages.
        resource: what Ray calls one of its devices.
    """
    head = (
        f"  nodes           {len(counts)}, joined with ray.address={cfg.ray.address}; assumed: "
        "the driver on node 0, and on each as many CPUs as all take together"
    )
    try:
        placement = plan_placement(cfg, resource=resource)
        check_fits(cfg, placement, backend=backend, num_devices=sum(counts), where="the Ray cluster")
        nodes = _nodes(counts, placement, resource=resource)
        chosen = assign_nodes(cfg, placement, nodes)
    except ConfigurationError as error:
        return PlacementPlan(lines=(head,), problems=error.problems)
    bundles = bundles_by_actor(cfg, placement)
    by_node = {node.address: [name for name in bundles if chosen[name] == node.node_id] for node in nodes}
    lines = (
        f"  {address} ({_devices(count)}): {_who({name: bundles[name] for name in names}, cfg, placement)}; "
        f"{count - round(sum(bundles[name].get(resource, 0.0) for name in names))} free"
        for (address, names), count in zip(by_node.items(), counts, strict=True)
    )
    return PlacementPlan(lines=(head, *lines), node_of=chosen)


def _nodes(counts: Sequence[int], placement: Placement, *, resource: str) -> list[Node]:
    cpus = math.ceil(placement.num_cpus)
    return [
        Node(
            node_id=str(index),
            address=f"node {index}",
            resources={"CPU": cpus, resource: count},
            is_driver=index == 0,
        )
        for index, count in enumerate(counts)
    ]


def _who(bundles: Mapping[str, Bundle], cfg: RunConfig, placement: Placement) -> str:
    """Example: `learner ranks 0-3; replica_0 (2), replica_3 (2); rollout worker 0`"""
    numbers: dict[str, list[int]] = {"learner": [], "replica": [], "rollout_worker": []}
    for name in bundles:
        kind, _, index = name.rpartition("_")
        numbers[kind].append(int(index))
    engines = ", ".join(f"replica_{replica} ({_share(replica, cfg, placement)})" for replica in numbers["replica"])
    parts = (
        numbered("learner rank", numbers["learner"]),
        engines,
        numbered("rollout worker", numbers["rollout_worker"]),
    )
    return "; ".join(part for part in parts if part) or "nobody"


def _share(replica: int, cfg: RunConfig, placement: Placement) -> str:
    """Devices of an engine, and whose they are where it shares them."""
    tp = cfg.rollout.tensor_parallel_size
    return f"{tp}, with {numbered('rank', ranks_beside(replica, cfg))}" if placement.is_paired else str(tp)


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Example: `("rank", [0, 1, 2, 5])` -> `ranks 0-2, 5`; no numbers give an empty text."""
    if not numbers:
        return ""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{noun}{'' if len(numbers) == 1 else 's'} {spans}"


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


def dry_run(
    cfg: RunConfig,
    *,
    device_memory_gib: float | None,
    response_tokens: float | None,
    nodes: Sequence[int] | None = None,
) -> None:
    """
    Args:
        device_memory_gib: plan for devices of this size that need not be here, nor need the engine's package; all else
            is checked. None asks the device layer and, where Ray is started on this host, its memory.
        response_tokens: mean length of the answers; None if that is not known.
        nodes: devices of every node of a cluster that need not be here, the driver's node first, for a configuration
            that joins one; None assigns no nodes.

    Raises:
        ConfigurationError, DataError: the run would be refused, or does not fit; the plan is printed all the same.
    """
    _check_mean(cfg, response_tokens)
    host_bytes = None
    if device_memory_gib is None:
        device, inputs = _here(cfg)
        if cfg.ray.address == "local":
            _, host_bytes = host_memory()
    else:
        inputs = check_inputs(cfg)
        device = Device(name="given", total_bytes=int(device_memory_gib * GIB), is_shared=False)
    placement = (
        PlacementPlan() if nodes is None else _placement_on(cfg, nodes, is_elsewhere=device_memory_gib is not None)
    )
    if tiny_model.BUILTIN_TINY in model_paths(cfg).values():
        asyncio.run(ensure_model(cfg))
    named = with_model_directory(cfg)
    plan = plan_run(
        cfg,
        _shape(named, named.model.path, key="model.path"),
        device,
        critic=_critic_shape(named),
        teacher=_teacher_shape(named),
        workload=_workload(cfg, inputs, response_tokens=response_tokens),
        host_bytes=host_bytes,
        node_of=placement.node_of,
    )
    sys.stdout.write(_objective(cfg) + "\n" + format_plan(plan, cfg, placement=placement.lines))
    sys.stdout.flush()
    # Both look at how devices are paired: report it once.
    if found := dict.fromkeys([*problems(plan, cfg), *placement.problems]):
        raise ConfigurationError(found)


def _objective(cfg: RunConfig) -> str:
    critic = f"{describe_critic(cfg.critic, policy_lr=cfg.learner.lr)}\n" if cfg.algorithm.uses_critic else ""
    return f"objective: {describe_objective(cfg.algorithm)}\n{critic}rollout: {describe_rollout(cfg)}\n"


def _placement_on(cfg: RunConfig, nodes: Sequence[int], *, is_elsewhere: bool) -> PlacementPlan:
    """Which node each actor gets. Devices that are elsewhere are of the kind that `device` names; `auto` takes what is
    here, or, if that is no accelerator, what Ray calls a GPU.

    Raises:
        ConfigurationError: the devices are not such as nodes are counted by.
    """
    name = cfg.device.name
    backend = get_backend() if name == "auto" else build(name)
    if backend.ray_resource is not None:
        return describe_placement(cfg, nodes, backend=backend.name, resource=backend.ray_resource)
    if is_elsewhere and name == "auto":
        return describe_placement(cfg, nodes, backend="GPU", resource="GPU")
    message = f"counts accelerators, and the device is {backend.name}: its processes are seated by CPUs alone"
    do = "leave --nodes out, or plan for accelerators that are elsewhere: --device-memory-gib N, without device=cpu"
    raise ConfigurationError([Problem(key="--nodes", value=",".join(map(str, nodes)), message=message, hint=do)])


def _critic_shape(cfg: RunConfig) -> ModelShape | None:
    if not cfg.algorithm.uses_critic or cfg.critic.shared_backbone:
        return None
    return _shape(cfg, cfg.model.path if cfg.critic.path is None else cfg.critic.path, key="critic.path")


def _teacher_shape(cfg: RunConfig) -> ModelShape | None:
    path = cfg.algorithm.kl.reference_model
    whole = replace(cfg, model=replace(cfg.model, lora=LoraConfig()))  # adapters are the policy's
    return None if path is None else _shape(whole, path, key="algorithm.kl.reference_model")


def _check_mean(cfg: RunConfig, response_tokens: float | None) -> None:
    longest = cfg.rollout.max_response_tokens
    if response_tokens is None or response_tokens <= longest:
        return
    message = f"a mean is at most the longest answer, rollout.max_response_tokens={longest}"
    raise ConfigurationError([Problem(key="--response-tokens", value=f"{response_tokens:g}", message=message)])


def _workload(cfg: RunConfig, inputs: DataSets, *, response_tokens: float | None) -> Workload:
    evaluates = bool(cfg.trainer.eval_every) or cfg.trainer.eval_at_start or cfg.trainer.eval_at_end
    return Workload(
        prompt_tokens=float(np.mean([len(prompt.token_ids) for prompt in inputs.train.prompts])),
        response_tokens=response_tokens,
        num_evaluated=sum(len(one.prompts) * one.num_samples for one in inputs.evaluation) if evaluates else 0,
    )


def _here(cfg: RunConfig) -> tuple[Device, DataSets]:
    """The device that the run would use, after every check that the run would make."""
    checked = preflight(cfg)
    backend = checked.backend
    if (reason := backend.why_unavailable()) is not None:  # on a cluster that is joined it may be elsewhere
        do = "plan for devices that are elsewhere: --device-memory-gib N"
        raise ConfigurationError([Problem(key="device", value=backend.name, message=f"is not here: {reason}", hint=do)])
    backend.set_device(0)
    total_bytes = backend.memory_info()[1]
    is_shared = backend.ray_resource is None
    return Device(name=backend.name, total_bytes=total_bytes, is_shared=is_shared), checked.inputs


def _shape(cfg: RunConfig, path: str, *, key: str) -> ModelShape:
    try:
        return model_shape(cfg.model, path)
    except ModelError as error:
        raise ConfigurationError([Problem(key=key, value=path, message=" ".join(str(error).split()))]) from error
