"""What each actor takes and which node it goes to: pure functions over plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainer.config.rules import pairing_problems
from trainer.config.schema import problem
from trainer.errors import ConfigurationError, Problem
from weight_sync.device.select import names_by_resource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema import RunConfig


ROLLOUT_WORKER_CPUS = 0.5  # they mostly wait, so two share a core
RESTARTED = "_restart_"
"""In the name of a restarted actor, between the original name and the number of the restart."""
DEVICES_NEEDED = "learner.num_ranks + rollout.num_replicas * rollout.tensor_parallel_size"
DEVICES_NEEDED_DIVIDED = "learner.num_ranks + rollout.num_replicas / rollout.engines_per_device"
ROUNDING = 1e-6  # Ray counts ten-thousandths of resources, whose float sums are not exact

Bundle = Mapping[str, float]
"""What one actor takes of its node, by Ray's names: {"CPU": 1, "GPU": 4}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What every actor of a run takes and where it goes, by its name."""

    bundles: Mapping[str, Bundle]
    """Learners in order of rank, then engines, then rollout workers."""
    units: Sequence[Sequence[str]]
    """Actors that must share a node: engines of one device, and the learners whose devices they use. All others are
    alone."""
    strategies: Mapping[str, Any] = field(default_factory=dict)
    """Scheduling strategies of Ray; empty on a private cluster, which is one node."""
    engine_devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of the devices that an engine shares with its learners; empty if Ray gives engines their own."""
    cache_bytes: int | None = None
    """KV cache of an engine that cannot measure what its device has left, since others start there at the same time."""

    @property
    def is_paired(self) -> bool:
        """Whether engines compute on the learners' devices."""
        return any(len({kind_of(name) for name in unit}) > 1 for unit in self.units)

    @property
    def num_cpus(self) -> float:
        return sum(bundle["CPU"] for bundle in self.bundles.values())

    @property
    def num_devices(self) -> int:
        """Accelerators; 0 on a backend whose devices are not a Ray resource."""
        return math.ceil(sum(sum(bundle.values()) - bundle["CPU"] for bundle in self.bundles.values()) - ROUNDING)

    def options(self, name: str) -> dict[str, Any]:
        """Keyword arguments for `actor.options(...)`. A restarted engine gets those of the one it replaces."""
        original = name.partition(RESTARTED)[0]
        rest = dict(self.bundles[original])
        options: dict[str, Any] = {"num_cpus": rest.pop("CPU")}
        if "GPU" in rest:
            options["num_gpus"] = rest.pop("GPU")
        if rest:
            options["resources"] = rest
        if original in self.strategies:
            options["scheduling_strategy"] = self.strategies[original]
        return options

    def devices(self, name: str) -> tuple[str, ...]:
        """Ids of the devices that an actor shares."""
        return self.engine_devices.get(name.partition(RESTARTED)[0], ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    node_id: str
    address: str
    resources: Bundle
    is_driver: bool = False


def plan_placement(cfg: RunConfig, *, resource: str | None) -> Placement:
    """`resource` is Ray's name of a device, None for plain CPUs. Raises ConfigurationError if learners and engines
    cannot share devices in these numbers."""
    replicas, tp, threads = cfg.rollout.num_replicas, cfg.rollout.tensor_parallel_size, cfg.device.cpu_threads
    per_device = cfg.rollout.engines_per_device
    together: list[list[str]] = []
    if resource is None:
        learner, engine = {"CPU": threads}, {"CPU": threads * tp}
    else:
        starts = range(0, replicas, per_device)
        together = [[f"replica_{i}" for i in range(first, min(first + per_device, replicas))] for first in starts]
        if unpaired := list(pairing_problems(cfg)):
            raise ConfigurationError(unpaired)
        learner, engine = {"CPU": 1, resource: 1}, {"CPU": 1, resource: tp if per_device == 1 else 1 / per_device}
        if cfg.mode.shares_devices:
            engine = {"CPU": 1}  # Ray counts the learner alone: it knows no actor with halves of several devices
            learners = ([f"learner_{rank}" for rank in ranks_of(first, cfg)] for first in starts)
            together = [[*ranks, *engines] for ranks, engines in zip(learners, together, strict=True)]
    bundles: dict[str, Bundle] = {
        **{f"learner_{rank}": learner for rank in range(cfg.learner.num_ranks)},
        **{f"replica_{index}": engine for index in range(replicas)},
        **{f"rollout_worker_{index}": {"CPU": ROLLOUT_WORKER_CPUS} for index in range(cfg.rollout.num_workers)},
    }
    unit_of = {name: unit for unit in together for name in unit}
    units = [unit for name in bundles if (unit := unit_of.get(name, [name]))[0] == name]
    return Placement(bundles=bundles, units=units)


def ranks_of(replica: int, cfg: RunConfig) -> range:
    """Learner ranks whose devices an engine shares."""
    tp, first = cfg.rollout.tensor_parallel_size, replica // cfg.rollout.engines_per_device
    return range(first * tp, (first + 1) * tp)


def check_fits(cfg: RunConfig, placement: Placement, *, backend: str, num_devices: int, where: str) -> None:
    """Raises ConfigurationError if the run needs more accelerators than `where` (this host, the cluster) has."""
    if placement.num_devices <= num_devices:
        return
    ranks, rollout, needed = cfg.learner.num_ranks, cfg.rollout, placement.num_devices
    key, value = DEVICES_NEEDED, f"{ranks} + {rollout.num_replicas} * {rollout.tensor_parallel_size} = {needed}"
    if (per_device := rollout.engines_per_device) > 1:
        key, value = DEVICES_NEEDED_DIVIDED, f"{ranks} + {rollout.num_replicas} / {per_device}, rounded up: {needed}"
    if placement.is_paired:
        key, value = "learner.num_ranks", str(ranks)
    message = f"{where} has {num_devices} {backend} device{'' if num_devices == 1 else 's'}"
    hint = "ask for fewer ranks or replicas, or show more devices"
    raise ConfigurationError([Problem(key=key, value=value, message=message, hint=hint)])


def check_cpus(cfg: RunConfig, placement: Placement) -> None:
    """Raises ConfigurationError if the private cluster has fewer CPUs than the actors take: some would never start."""
    needed, num_cpus = placement.num_cpus, cfg.ray.num_cpus
    if 0 < num_cpus < needed - ROUNDING:
        message = f"must be at least {needed:g}, the number that all actors take together, or 0 to use that number"
        hint = "CPUs are only counted: raise it, leave it out, or ask for fewer ranks, replicas or workers"
        raise ConfigurationError([problem(cfg, "ray.num_cpus", message, hint)])


def check_device_is_named(cfg: RunConfig, *, backend: str, resource: str | None, there: Bundle) -> None:
    """Raises ConfigurationError if `device=auto` found no accelerator here, but the cluster has some (`there`)."""
    names = names_by_resource()
    found = {name: num for name, num in there.items() if name in names and num}
    if found and cfg.device.name == "auto" and resource is None:
        choices = " or ".join(f"device={name}" for resource in found for name in names[resource])
        problem = Problem(
            key="device",
            value=f"auto, which is {backend} on the driver's host",
            message=f"the Ray cluster has {_text(found)}, and auto only looks at the driver's host",
            hint=f"set the device to use: {choices}; device={backend} leaves them idle",
            related=("ray.address",),
        )
        raise ConfigurationError([problem])


def assign_free_nodes(placement: Placement, nodes: Sequence[Node], free: Mapping[str, Bundle]) -> dict[str, str]:
    """As `assign_nodes`, by what is `free` on each node id; if that is not enough, by what the nodes have."""
    try:
        return assign_nodes(placement, [replace(node, resources=free.get(node.node_id, {})) for node in nodes])
    except ConfigurationError:
        return assign_nodes(placement, nodes)


def assign_nodes(placement: Placement, nodes: Sequence[Node]) -> dict[str, str]:
    """Name of an actor -> id of its node. Raises ConfigurationError if they do not fit.

    - Learners share few nodes, the driver's first: their collectives are the busiest traffic. Not every set of nodes
      is tried (`_learner_orders`), so it may not be the smallest.
    - All devices of an engine are on one node, and so are the learners that share them. Engines are spread.
    - Rollout workers are on the driver's node while it has room: without that node there is no run.
    """
    for order in _learner_orders(nodes):
        if (chosen := _fill(placement, nodes, order)) is not None:
            return chosen
    raise ConfigurationError([_does_not_fit(placement.bundles, nodes)])


def _learner_orders(nodes: Sequence[Node]) -> Iterator[list[str] | None]:
    """Nodes that learners may fill, in order: each alone, then the first two, the two largest, the first three, ...
    None leaves them what the engines do not take."""
    first = sorted(nodes, key=lambda node: not node.is_driver)
    largest = sorted(first, key=lambda node: -sum(node.resources.values()))
    yield from ([node.node_id] for node in first)
    for count in range(2, len(nodes) + 1):
        yield from ([node.node_id for node in order[:count]] for order in (first, largest))
    yield None


def _fill(placement: Placement, nodes: Sequence[Node], learner_order: list[str] | None) -> dict[str, str] | None:
    """As `assign_nodes`, with learners only on `learner_order`; None if a unit finds no room."""
    free = {node.node_id: Counter[str](node.resources) for node in nodes}
    driver = next((node.node_id for node in nodes if node.is_driver), None)
    chosen: dict[str, str] = {}
    count = Counter[tuple[str, str]]()  # (kind, node)
    units = placement.units
    if learner_order is None:
        units = sorted(units, key=lambda unit: not unit[0].startswith("replica_"))
    for unit in units:
        needed = Counter[str]()
        for name in unit:
            needed.update(placement.bundles[name])
        fitting = [node for node, there in free.items() if _covers(there, needed)]
        match kind := kind_of(unit[0]):  # the learner's for an engine that shares devices
            case "learner":
                order = free if learner_order is None else learner_order
                node = next((node for node in order if node in fitting), None)
            case "replica":
                node = min(fitting, key=lambda n: (count["replica", n], count["learner", n]), default=None)
            case "rollout_worker":
                node = min(fitting, key=lambda n: (n != driver, -free[n]["CPU"]), default=None)
            case _:
                raise ValueError(f"no actor is a {kind}, got {unit[0]}")
        if node is None:
            return None
        count[kind, node] += 1
        free[node].subtract(needed)
        chosen |= dict.fromkeys(unit, node)
    return chosen


def kind_of(name: str) -> str:
    """`learner`, `replica` or `rollout_worker`."""
    return name.rpartition("_")[0]


def _covers(free: Bundle, bundle: Bundle) -> bool:
    return all(free.get(name, 0.0) >= amount - ROUNDING for name, amount in bundle.items())


def _does_not_fit(bundles: Mapping[str, Bundle], nodes: Sequence[Node]) -> Problem:
    too_large = {_text(one) for one in bundles.values() if not any(_covers(node.resources, one) for node in nodes)}
    hint = "ask for fewer ranks or replicas, or start Ray on more nodes; CPUs count too (`ray start --num-cpus`)"
    if too_large:
        sizes = " or ".join(sorted(too_large))
        hint = f"no node has {sizes}, and an actor is on one node: make it smaller, or add nodes"
    return Problem(
        key=DEVICES_NEEDED,
        value=describe_bundles(bundles),
        message=f"must fit on the {len(nodes)} nodes of the Ray cluster: {describe_nodes(nodes)}",
        hint=hint,
        related=("rollout.num_workers",),
    )


def describe_bundles(bundles: Mapping[str, Bundle]) -> str:
    """Example: `2 learners of 1 CPU + 1 GPU, 1 replica of 1 CPU + 4 GPU`"""
    counts = Counter((kind_of(name).replace("_", " "), _text(bundle)) for name, bundle in bundles.items())
    return ", ".join(f"{count} {kind}{'' if count == 1 else 's'} of {text}" for (kind, text), count in counts.items())


def describe_nodes(nodes: Sequence[Node]) -> str:
    """Example: `10.0.0.1 (driver): 16 CPU + 8 GPU; 10.0.0.2: 16 CPU + 8 GPU`"""
    return "; ".join(
        f"{n.address}{' (driver)' if n.is_driver else ''}: {_text(n.resources) or 'nothing'}" for n in nodes
    )


def describe_idle_devices(
    chosen: Mapping[str, str], bundles: Mapping[str, Bundle], nodes: Sequence[Node], *, resource: str
) -> str | None:
    """None if there are none; `chosen` is as of `assign_nodes`.

    Example: `8 of 24 GPU; 3 on 10.0.0.1, 6 on 10.0.0.2, 7 on 10.0.0.3 stay idle`
    """
    taken = Counter[str]()
    for name, node_id in chosen.items():
        taken[node_id] += bundles[name].get(resource, 0.0)  # pyright: ignore[reportArgumentType]
    has = {node.node_id: round(node.resources.get(resource, 0.0)) for node in nodes}
    idle = Counter({node_id: number - math.ceil(taken[node_id] - ROUNDING) for node_id, number in has.items()})
    total = sum(has.values())
    places = ", ".join(f"{idle[node.node_id]} on {node.address}" for node in nodes if idle[node.node_id] > 0)
    return f"{total - idle.total()} of {total} {resource}; {places} stay idle" if places else None


def _text(bundle: Bundle) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
