"""`--dry-run`: what a run would do and need."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from rollout.worker.group_server import MAX_BYTES
from trainer.config.describe import describe_run
from trainer.config.schema import LoraConfig
from trainer.driver.memory_plan import GIB, Device, MemoryItem, gib, min_bytes, model_shape, total, workspace_bytes
from trainer.driver.models import beside_policy
from trainer.driver.placement import ROUNDING, Node, assign_nodes, check_fits, kind_of, plan_placement, ranks_of
from trainer.driver.preflight import check_inputs, preflight
from trainer.errors import ConfigurationError, ModelError, Problem
from trainer.tools.run_plan import (
    FULL_EFFICIENCY,
    LINK_BYTES_PER_S,
    TAIL_EFFICIENCY,
    plan_run,
    problems,
)
from weight_sync.device.cpu import host_memory
from weight_sync.device.select import AUTO_ORDER, build, get_backend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.config.schema import ModelConfig, RunConfig
    from trainer.driver.datasets import DataSets
    from trainer.driver.memory_plan import Items, ModelShape
    from trainer.driver.models import ModelInfo
    from trainer.tools.run_plan import RunPlan


HOST_BYTES_PER_S = 50e9
"""Assumed between a device and page-locked memory: PCIe 5.0 x16 has 63 GB/s each way."""
UNDOUBTED_FLOPS = 100e12
"""Every device in use trains as fast: a third of the peak of the slowest."""


def format_plan(plan: RunPlan, cfg: RunConfig, *, placement: Sequence[str] = ()) -> str:
    """`placement`: the lines with the actors of each node."""
    parts = (
        _placement(plan, cfg, placement),
        _memory(plan, cfg),
        _traffic(plan, cfg),
        _flight(plan, cfg),
        _store(plan),
        _balance(plan, cfg),
    )
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _placement(plan: RunPlan, cfg: RunConfig, by_node: Sequence[str]) -> list[str]:
    ranks, replicas, tp = cfg.learner.num_ranks, cfg.rollout.num_replicas, cfg.rollout.tensor_parallel_size
    per_device = cfg.rollout.engines_per_device
    engines = f"{replicas} x {tp} = {replicas * tp}"
    if per_device > 1:
        engines = f"{replicas}, {per_device} per device, on {cfg.rollout.num_devices}"
    shape, what = plan.shape, "processes on the CPU" if plan.device.is_shared else "devices"
    if plan.is_paired:
        what += " shared with the engines"
    adapters = f", of which {shape.num_adapter_params:,} in adapters are trained" if shape.num_adapter_params else ""
    return [
        "Placement",
        f"  learner         {ranks} {what}, one FSDP2 rank each",
        f"  engines         {engines} {'of the same devices' if plan.is_paired else what}",
        f"  rollout workers {cfg.rollout.num_workers} processes on the CPU",
        f"  device          {plan.device.name}: {gib(plan.device.total_bytes)}"
        + (", shared by all" if plan.device.is_shared else " each"),
        *by_node,
        "",
        f"Model: {shape.num_params + shape.num_adapter_params:,} parameters in {shape.num_layers} blocks{adapters}",
    ]


def _memory(plan: RunPlan, cfg: RunConfig) -> list[str]:
    engine, items, ranks = plan.engine, plan.engine.items, cfg.learner.num_ranks
    num_engines = cfg.rollout.engines_per_device
    titles = "Per learner device", f"Per engine device (commit: {'staged' if engine.is_staged else 'in place'})"
    if plan.is_paired:
        titles = "Per device in the learner's turn", "Per device in the engine's turn"
        if plan.fit.stays_on_device:
            titles = "Per device, of the learner", "Per device beside it, of the engine"
        items = (*items, MemoryItem("arena of the learner", plan.arena_bytes, ""))
    of_each = "" if num_engines == 1 else " of each engine"
    demand = plan.at_once(cfg) * engine.longest_tokens
    wanted = f"{plan.at_once(cfg)} x {engine.longest_tokens} = {demand:,}"
    share = min(engine.kv_tokens / demand, 1.0)
    tight = "  (may not fit: the longest sequence needs more)" if engine.may_not_fit else ""
    full = "all of them" if share == 1 else f"{share:.0%} of them; the rest waits, or prompts and responses are shorter"
    lines = [
        *_table(titles[0], plan.learner, plan),
        *_micro_batches(plan, cfg),
        *_table(titles[1], items, plan),
        f"  The cache{of_each} holds {engine.kv_tokens:,} tokens; {wanted} may be wanted: {full}.{tight}",
    ]
    if not plan.device.is_shared:
        workspace = gib(workspace_bytes(plan.device))
        sized = "it measures its own at the start" if num_engines == 1 else "its cache is as planned here"
        if num_engines == 1 and plan.is_paired and plan.fit.stays_on_device:
            sized = "its cache is as planned here if it starts beside the learner; otherwise it measures its own"
        lines.append(f"  Assumed workspace of {'the' if num_engines == 1 else 'each'} engine: {workspace}; {sized}.")
    if engine.uncounted:
        names = ", ".join(f"rollout.engine_args.{name}" for name in engine.uncounted)
        lines.append(
            f"  Counted as without {names}: weights and cache take as much as the engine reports at its start."
        )
    if plan.host:  # all ranks of a host allocate it together
        has = "" if plan.host_bytes is None else f" of {gib(plan.host_bytes)}"
        lines += ["Host memory per learner rank", *(_line(item.name, item.nbytes) for item in plan.host)]
        if ranks > 1 or has:
            lines.append(_line(f"{ranks} ranks together", ranks * total(plan.host), has))
    if plan.is_paired and plan.fit.stays_on_device:
        lines.append("  Both fit on a device at once, so nothing moves to the host.")
    elif plan.is_paired:
        lines.append(
            f"  To the host and back at every step: {gib(plan.moved_bytes)} per device, at "
            f"least {2 * plan.moved_bytes / HOST_BYTES_PER_S:.2g} s at {HOST_BYTES_PER_S / 1e9:.0f} GB/s."
        )
    return [*lines, "  ~ marks an estimate, which may be off by half; attention is assumed to keep no scores."]


def _micro_batches(plan: RunPlan, cfg: RunConfig) -> list[str]:
    if cfg.learner.max_tokens_per_micro_batch != "auto":
        return []
    how = "" if plan.device.is_shared else "; the learner measures at its start how many it takes"
    return [f"  Micro-batches have up to {plan.fit.tokens:,} tokens{how}."]


def _line(name: str, nbytes: int, note: str = "") -> str:
    return f"  {name:<34}{gib(nbytes):>12}{note}"


def _table(title: str, items: Items, plan: RunPlan) -> list[str]:
    needed = total(items)
    tight = needed > plan.device.total_bytes >= min_bytes(items)
    return [title, *_rows(items), _line("together", needed, "  (may not fit)" if tight else "")]


def _rows(items: Items) -> list[str]:
    found = sorted((item for item in items if item.nbytes), key=lambda item: -item.nbytes)
    return [_line(item.name, item.nbytes, "" if item.is_exact else " ~") for item in found]


def _traffic(plan: RunPlan, cfg: RunConfig) -> list[str]:
    sync = plan.sync
    floors = "; ".join(f"{sync.floor_s(rate):.3g} s at {rate / 1e9:.0f} GB/s" for rate in LINK_BYTES_PER_S)
    served = f"{gib(sync.rank_bytes)} {'to engines that relay it' if sync.relays else 'to all of them'}"
    ends = f"each engine device reads {gib(sync.device_bytes)}, each learner rank serves {served}"
    return [
        "Weight sync, per version",
        f"  published {gib(sync.version_bytes)} ({cfg.model.rollout_dtype}); {ends}",
        f"  no pull is faster than {floors} per device (assumed rates of a link)",
    ]


def _flight(plan: RunPlan, cfg: RunConfig) -> list[str]:
    staleness, groups, limit_s = cfg.mode.max_staleness, cfg.trainer.groups_per_step, cfg.rollout.request_timeout_s
    slots = f"at most (S + 1) x B = ({staleness} + 1) x {groups} = {plan.num_slots} groups"
    at_once = cfg.rollout.num_replicas * plan.at_once(cfg)
    lines = [f"In flight: {slots}, {plan.num_responses} responses; the engines generate {at_once} at once"]
    if plan.seats.why:
        lines.append(f"  rollout.max_num_seqs={plan.seats}")
    turns = -(-plan.num_responses // at_once)
    if turns > 1:
        lines.append(
            f"  Up to {turns} responses are generated one after the other: {limit_s / turns:,.0f} s for each, by "
            f"rollout.request_timeout_s={limit_s:,.0f}"
        )
    return lines


def _store(plan: RunPlan) -> list[str]:
    store = plan.store
    has = "" if store.total_bytes is None else f" of {gib(store.total_bytes)}"
    tight = "  (may not fit: it spills to disk)" if store.may_spill else ""
    lines = [
        "Object store of Ray, at most", *_rows(store.items), _line("together", total(store.items), f"{has}{tight}")
    ]  # fmt: skip
    if not store.carries_groups:
        size, limit = f"{store.group_bytes / 1000:.3g} kB", f"{MAX_BYTES / 1000:.0f} kB"
        lines.append(f"  Groups bypass it, as up to {limit} do: one with the longest responses has about {size}.")
    return lines


def _balance(plan: RunPlan, cfg: RunConfig) -> list[str]:
    notes = ("on average",) if len(plan.work) == 1 else ("the longest", "a quarter of it")
    lines = ["Expected bottleneck, with responses of"]
    for (tokens, work), note in zip(plan.work.items(), notes, strict=True):
        full, few = work.generation_over_learning
        times = f"generation takes {full:.2g} to {few:.2g} times the time of learning"
        lines.append(f"  {f'{tokens:,.0f} tokens, {note}':<34}{work.bottleneck}: {times}")
    if len(plan.work) > 1:
        lines.append("  Their mean is not known; --response-tokens N plans for a mean of N.")
    if cfg.mode.max_staleness == 0:
        lines.append("  With S = 0 both sides alternate: a step takes the sum.")
    limit_s = cfg.learner.timeout_s
    needed = next(iter(plan.work.values())).learner_flops / limit_s
    if needed >= UNDOUBTED_FLOPS:  # not every accelerator would do that within the deadline
        rate = f"each learner device trains at {needed / 1e12:,.0f} TFLOP/s or more"
        lines.append(f"  Such a step ends within learner.timeout_s={limit_s:,.0f} if {rate}.")
    reached = f"{FULL_EFFICIENCY:.0%} (engines kept full) to {TAIL_EFFICIENCY:.0%} (few responses in each)"
    return [
        *lines,
        f"  Decoding is assumed to reach {reached} of the arithmetic efficiency",
        "  of training, as it did on H200s. Run some steps, and ask python -m trainer advise RUN_DIR.",
    ]


class PlacementPlan(NamedTuple):
    """Actors by node, or why they do not fit; empty where the nodes are unknown."""

    lines: tuple[str, ...] = ()
    """Assumptions; then one line per node, if all actors fit."""
    problems: tuple[Problem, ...] = ()
    node_of: Mapping[str, str] | None = None
    """Name of an actor -> its node; None if not all fit."""


def describe_placement(cfg: RunConfig, counts: Sequence[int], *, backend: str, resource: str) -> PlacementPlan:
    """Assign learners, engines and rollout workers to nodes, as a run does that joins a Ray cluster of these.

    Args:
        counts: devices of every node; the driver is on the first.
        backend: name for messages.
        resource: Ray's name of a device.
    """
    head = (
        f"  nodes           {len(counts)}, joined with ray.address={cfg.ray.address}; assumed: "
        "the driver on node 0, and on each as many CPUs as all take together"
    )
    try:
        placement = plan_placement(cfg, resource=resource)
        check_fits(cfg, placement, backend=backend, num_devices=sum(counts), where="the Ray cluster")
        cpus = math.ceil(placement.num_cpus)
        nodes = [
            Node(node_id=str(i), address=f"node {i}", resources={"CPU": cpus, resource: count}, is_driver=i == 0)
            for i, count in enumerate(counts)
        ]
        chosen = assign_nodes(placement, nodes)
    except ConfigurationError as error:
        return PlacementPlan(lines=(head,), problems=error.problems)
    bundles, lines = placement.bundles, [head]
    for node, count in zip(nodes, counts, strict=True):
        names = [name for name in bundles if chosen[name] == node.node_id]
        free = count - math.ceil(sum(bundles[name].get(resource, 0.0) for name in names) - ROUNDING)
        devices = f"{count} device{'' if count == 1 else 's'}"
        lines.append(f"  {node.address} ({devices}): {_who(names, cfg, is_paired=placement.is_paired)}; {free} free")
    return PlacementPlan(lines=tuple(lines), node_of=chosen)


def _who(names: Sequence[str], cfg: RunConfig, *, is_paired: bool) -> str:
    """Example: `learner ranks 0-3; replica_0 (2), replica_3 (2); rollout worker 0`"""
    numbers: dict[str, list[int]] = {"learner": [], "replica": [], "rollout_worker": []}
    for name in names:
        numbers[kind_of(name)].append(int(name.rpartition("_")[2]))

    def share(replica: int) -> str:
        tp, per_device = cfg.rollout.tensor_parallel_size, cfg.rollout.engines_per_device
        part = str(tp) if per_device == 1 else f"1/{per_device}"
        return f"{part}, with {numbered('rank', ranks_of(replica, cfg))}" if is_paired else part

    parts = (
        numbered("learner rank", numbers["learner"]),
        ", ".join(f"replica_{replica} ({share(replica)})" for replica in numbers["replica"]),
        numbered("rollout worker", numbers["rollout_worker"]),
    )
    return "; ".join(filter(None, parts)) or "no actor"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Example: `("rank", [0, 1, 2, 5])` -> `ranks 0-2, 5`; no numbers give an empty text."""
    if not numbers:
        return ""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{noun}{'' if len(numbers) == 1 else 's'} {spans}"


def dry_run(
    cfg: RunConfig,
    *,
    device_memory_gib: float | None,
    response_tokens: float | None,
    nodes: Sequence[int] | None = None,
) -> None:
    """
    Args:
        device_memory_gib: plan for devices of this size elsewhere, without the engine's package; all else is checked.
            None asks the device layer and, where Ray is started on this host, its memory.
        response_tokens: mean length; None if unknown.
        nodes: devices of every node of a cluster that is joined, the driver's first; None assigns no nodes.

    Raises:
        ConfigurationError, DataError: the run would be refused, or does not fit; then the plan is printed first.
    """
    longest, host_bytes = cfg.rollout.max_response_tokens, None
    if response_tokens is not None and response_tokens > longest:
        message = f"a mean is at most the longest response, rollout.max_response_tokens={longest}"
        raise ConfigurationError([Problem(key="--response-tokens", value=f"{response_tokens:g}", message=message)])
    if device_memory_gib is None:
        device, inputs, models = _here(cfg)
        if cfg.ray.address == "local":
            _, host_bytes = host_memory()
    else:
        inputs, models = check_inputs(cfg)
        kind = build(AUTO_ORDER[0] if cfg.device.name == "auto" else cfg.device.name)
        device = Device("given", int(device_memory_gib * GIB), is_shared=False, collective=kind.collective)
    if device.is_shared:  # engines on a CPU have no device to divide
        cfg = replace(cfg, rollout=replace(cfg.rollout, engines_per_device=1))
    placement = (
        PlacementPlan() if nodes is None else _placement_on(cfg, nodes, is_elsewhere=device_memory_gib is not None)
    )
    critic, teacher = beside_policy(cfg, models)
    whole = replace(cfg.model, lora=LoraConfig())  # adapters are the policy's
    plan = plan_run(
        cfg,
        _shape(cfg.model, models["model.path"]),
        device,
        prompt_tokens=inputs.prompt_tokens,
        response_tokens=response_tokens,
        num_evaluated=inputs.num_evaluated(cfg),
        critic=None if critic is None else _shape(whole, critic),
        teacher=None if teacher is None else _shape(whole, teacher),
        host_bytes=host_bytes,
        node_of=placement.node_of,
    )
    sys.stdout.write("\n".join([*describe_run(cfg), "", format_plan(plan, cfg, placement=placement.lines)]))
    sys.stdout.flush()
    # Both look at how devices are paired: report it once.
    if found := dict.fromkeys([*problems(plan, cfg), *placement.problems]):
        raise ConfigurationError(found)


def _placement_on(cfg: RunConfig, nodes: Sequence[int], *, is_elsewhere: bool) -> PlacementPlan:
    """Devices elsewhere are of the kind that `device` names; `auto` takes what is here, or, if that is no accelerator,
    what Ray calls a GPU. Raises ConfigurationError for devices that Ray does not count."""
    name = cfg.device.name
    backend = get_backend() if name == "auto" else build(name)
    if backend.ray_resource is not None:
        return describe_placement(cfg, nodes, backend=backend.name, resource=backend.ray_resource)
    if is_elsewhere and name == "auto":
        return describe_placement(cfg, nodes, backend="GPU", resource="GPU")
    message = f"counts accelerators, and the device is {backend.name}: its processes are placed by CPUs alone"
    do = "leave --nodes out, or plan for accelerators that are elsewhere: --device-memory-gib N, without device=cpu"
    raise ConfigurationError([Problem(key="--nodes", value=",".join(map(str, nodes)), message=message, hint=do)])


def _here(cfg: RunConfig) -> tuple[Device, DataSets, Mapping[str, ModelInfo]]:
    """After every check that the run would make."""
    checked = preflight(cfg)
    backend = checked.backend
    if (reason := backend.unavailable_reason()) is not None:  # on a cluster that is joined it may be elsewhere
        do = "plan for devices that are elsewhere: --device-memory-gib N"
        raise ConfigurationError([Problem(key="device", value=backend.name, message=f"is not here: {reason}", hint=do)])
    is_shared = backend.ray_resource is None
    device = Device(backend.name, backend.device_bytes(), is_shared=is_shared, collective=backend.collective)
    return device, checked.inputs, checked.models


def _shape(model: ModelConfig, info: ModelInfo) -> ModelShape:
    try:
        if info.config is None:
            raise ModelError(info.error)
        return model_shape(model, info.config)
    except ModelError as error:
        message = " ".join(str(error).split())
        raise ConfigurationError([Problem(key=info.key, value=info.path, message=message)]) from error
