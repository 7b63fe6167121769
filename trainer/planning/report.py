"""A plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.group_server import MOST_BYTES
from trainer.planning.engine import workspace_bytes
from trainer.planning.plan import gib
from trainer.planning.schedule import FULL_EFFICIENCY, LINK_BYTES_PER_S, TAIL_EFFICIENCY
from trainer.planning.sizes import Part, least, total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.config.schema import RunConfig
    from trainer.planning.plan import RunPlan
    from trainer.planning.schedule import StepWork

HOST_BYTES_PER_S = 50e9
"""Assumed of a device's link to the host's page-locked memory: PCIe 5.0 x16 has 63 GB/s each way."""

UNDOUBTED_FLOPS = 100e12
"""Rate of training that a device for such models is trusted to reach: a third of the peak of the slowest in use."""


def in_words(plan: RunPlan, cfg: RunConfig, *, seats: Sequence[str] = ()) -> str:
    """What `--dry-run` prints. `seats` are the lines that say who sits on which node, where the nodes are known."""
    lines = [
        *_placement(plan, cfg, seats),
        *_memory(plan, cfg),
        *_traffic(plan, cfg),
        *_flight(plan, cfg),
        *_store(plan),
    ]
    return "\n".join([*lines, *_balance(plan, cfg)]) + "\n"


def _placement(plan: RunPlan, cfg: RunConfig, seats: Sequence[str]) -> list[str]:
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
        *seats,
        "",
        f"Model: {shape.num_params + shape.num_adapter_params:,} parameters in {shape.num_layers} blocks{adapters}",
        "",
    ]


def _memory(plan: RunPlan, cfg: RunConfig) -> list[str]:
    engine = plan.engine
    commit = "staged" if engine.is_staged else "in place"
    seats = f"{engine.num_seats} x {engine.longest_tokens} = {engine.wanted_tokens:,}"
    share = min(engine.kv_tokens / engine.wanted_tokens, 1.0)
    tight = "  (may not fit: the longest sequence needs more)" if engine.may_not_fit else ""
    full = "all of them" if share == 1 else f"{share:.0%} of them; the rest waits, or prompts and answers are shorter"
    lines = [
        *_table("Per device in the learner's turn" if plan.is_paired else "Per learner device", plan.learner, plan),
        *_table(_engine_title(plan, commit), engine_parts(plan), plan),
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
    rows = [f"  {part.name:<34}{gib(part.nbytes):>12}" for part in plan.host]
    return ["Host memory per learner rank", *rows, *([together] if ranks > 1 or has else [])]


def engine_parts(plan: RunPlan) -> tuple[Part, ...]:
    """What is on a device while an engine has it."""
    if not plan.is_paired:
        return plan.engine.parts
    return (*plan.engine.parts, Part(name="arena of the learner", nbytes=plan.arena_bytes, remedy=""))


def _engine_title(plan: RunPlan, commit: str) -> str:
    return "Per device in the engine's turn" if plan.is_paired else f"Per engine device (commit: {commit})"


def _table(title: str, parts: tuple[Part, ...], plan: RunPlan) -> list[str]:
    needed = total(parts)
    tight = needed > plan.device.total_bytes >= least(parts)
    return [title, *_rows(parts), f"  {'together':<34}{gib(needed):>12}{'  (may not fit)' if tight else ''}"]


def _rows(parts: tuple[Part, ...]) -> list[str]:
    return [
        f"  {part.name:<34}{gib(part.nbytes):>12}{'' if part.is_exact else ' ~'}"
        for part in sorted(parts, key=lambda part: -part.nbytes)
        if part.nbytes
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
    seats = cfg.rollout.num_replicas * plan.engine.num_seats
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
    rows = [*_rows(store.parts), f"  {'together':<34}{gib(total(store.parts)):>12}{has}{tight}"]
    if not store.carries_groups:
        size, most = f"{store.group_bytes / 1000:.3g} kB", f"{MOST_BYTES / 1000:.0f} kB"
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
