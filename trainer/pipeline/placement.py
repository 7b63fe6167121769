"""Which actor needs which resources, and which node it goes to. Pure: decides, starts nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema import RunConfig

ROLLOUT_WORKER_CPUS = 0.5
"""Rollout workers wait most of the time; two share a core."""
RESTARTED = "_restart_"
"""Between the name of a replica and the number of its restart, in the name of the actor that takes its place."""
SIZES = "learner.num_ranks + rollout.num_replicas * rollout.tensor_parallel_size"
_ROUNDING = 1e-6
"""Ray counts resources in ten-thousandths; sums of such floats are not exact."""

Bundle = Mapping[str, float]
"""What one actor takes of its node, by Ray's names: {"CPU": 1, "GPU": 4}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Resources of each kind of actor, as keyword arguments for `actor.options(...)`."""

    learner: dict[str, Any]
    engine: dict[str, Any]
    rollout_worker: dict[str, Any]
    num_devices: int
    """Accelerators needed in all; 0 on a backend whose devices are not a Ray resource."""
    num_cpus: float
    """Logical CPUs needed in all."""
    seats: Mapping[str, Any] = field(default_factory=dict)
    """Name of an actor -> what Ray calls its scheduling strategy. Empty on a private cluster, which is one node."""

    def options(self, name: str) -> dict[str, Any]:
        """Keyword arguments for `.options(...)` of the actor `name`: what it needs, and where it sits.

        A restarted engine sits where the one sat that it replaces.
        """
        original = name.partition(RESTARTED)[0]
        seat = self.seats.get(original)
        kinds = {"learner": self.learner, "replica": self.engine, "rollout_worker": self.rollout_worker}
        needs = kinds[original.rpartition("_")[0]]
        return needs if seat is None else {**needs, "scheduling_strategy": seat}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a cluster."""

    node_id: str
    address: str
    resources: Bundle
    """All it has, in use or not."""
    is_driver: bool = False


def plan_placement(cfg: RunConfig, *, resource: str | None) -> Placement:
    """Resources for the actors of a run. `resource` is what Ray calls one device; None means plain CPUs."""
    ranks, replicas, tp = cfg.learner.num_ranks, cfg.rollout.num_replicas, cfg.rollout.tensor_parallel_size
    threads = cfg.device.cpu_threads
    if resource is None:
        learner, engine = {"num_cpus": threads}, {"num_cpus": threads * tp}
        num_devices, compute_cpus = 0, threads * (ranks + replicas * tp)
    else:
        learner, engine = _devices(resource, 1), _devices(resource, tp)
        num_devices, compute_cpus = ranks + replicas * tp, ranks + replicas
    return Placement(
        learner=learner,
        engine=engine,
        rollout_worker={"num_cpus": ROLLOUT_WORKER_CPUS},
        num_devices=num_devices,
        num_cpus=compute_cpus + ROLLOUT_WORKER_CPUS * cfg.rollout.num_workers,
    )


def check_fits(cfg: RunConfig, placement: Placement, *, backend: str, num_devices: int, where: str) -> None:
    """Raises ConfigurationError if more accelerators are asked for than `where` (this host, the cluster) has."""
    if placement.num_devices <= num_devices:
        return
    ranks, replicas, tp = cfg.learner.num_ranks, cfg.rollout.num_replicas, cfg.rollout.tensor_parallel_size
    raise ConfigurationError(
        [
            Problem(
                key=SIZES,
                got=f"{ranks} + {replicas} * {tp} = {placement.num_devices}",
                allowed=f"{where} has {num_devices} {backend} device{'' if num_devices == 1 else 's'}",
                do="ask for fewer ranks or replicas, or show more devices",
            )
        ]
    )


def _devices(resource: str, count: int) -> dict[str, Any]:
    if resource == "GPU":
        return {"num_gpus": count, "num_cpus": 1}
    return {"resources": {resource: count}, "num_cpus": 1}


# --- nodes ------------------------------------------------------------------------------------------------------------


def bundle_of(options: Mapping[str, Any]) -> Bundle:
    """Keyword arguments of `actor.options` as Ray writes the resources of a placement group.

    Example: `{"num_gpus": 4, "num_cpus": 1}` -> `{"CPU": 1.0, "GPU": 4.0}`
    """
    found = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    return {name: float(amount) for name, amount in sorted(found.items()) if amount}


def bundles_by_actor(cfg: RunConfig, placement: Placement) -> dict[str, Bundle]:
    """What every actor of the run takes, by its name: learners in order of rank, then engines, then rollout workers."""
    counts = {
        "learner": cfg.learner.num_ranks,
        "replica": cfg.rollout.num_replicas,
        "rollout_worker": cfg.rollout.num_workers,
    }
    names = [f"{kind}_{index}" for kind, count in counts.items() for index in range(count)]
    return {name: bundle_of(placement.options(name)) for name in names}


def assign_nodes(cfg: RunConfig, placement: Placement, nodes: Sequence[Node]) -> dict[str, str]:
    """Name of an actor -> id of its node.

    - Learners share as few nodes as the rest allows, the driver's first: their collectives are the busiest traffic.
    - An engine with all its devices is on one node. Engines are spread: each goes where the fewest are.
    - Rollout workers are on the driver's node while it has room: without that node there is no run anyway.

    Raises:
        ConfigurationError: they do not fit; says what is asked for and what every node has.
    """
    bundles = bundles_by_actor(cfg, placement)
    engines_first = sorted(bundles, key=lambda name: not name.startswith("replica_"))
    for order in _learner_orders(nodes):
        seats = _Seats(nodes)
        names = engines_first if order is None else list(bundles)
        if all(seats.take(name, bundles[name], order) for name in names):
            return seats.taken
    raise ConfigurationError([_does_not_fit(bundles, nodes)])


def _learner_orders(nodes: Sequence[Node]) -> Iterator[list[str] | None]:
    """Nodes that learners may fill, in order: one, then two, ... None leaves them what the engines do not take."""
    first = sorted(nodes, key=lambda node: not node.is_driver)
    largest = sorted(first, key=lambda node: -sum(node.resources.values()))
    yield from ([node.node_id] for node in first)
    for count in range(2, len(nodes) + 1):
        yield from ([node.node_id for node in order[:count]] for order in (first, largest))
    yield None


class _Seats:
    """Nodes that fill up."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.taken: dict[str, str] = {}
        self._free = {node.node_id: Counter[str](node.resources) for node in nodes}
        self._driver = {node.node_id: node.is_driver for node in nodes}
        self._num_engines: Counter[str] = Counter()
        self._num_learners: Counter[str] = Counter()

    def take(self, name: str, bundle: Bundle, learner_order: list[str] | None) -> bool:
        """Put the actor where it belongs; False if there is no room."""
        fitting = [node for node, free in self._free.items() if _covers(free, bundle)]
        match name.rpartition("_")[0]:
            case "learner":
                order = list(self._free) if learner_order is None else learner_order
                node = next((node for node in order if node in fitting), None)
                counter = self._num_learners
            case "replica":
                node = min(fitting, key=lambda n: (self._num_engines[n], self._num_learners[n]), default=None)
                counter = self._num_engines
            case "rollout_worker":
                node = min(fitting, key=lambda n: (not self._driver[n], -self._free[n]["CPU"]), default=None)
                counter = Counter[str]()
            case kind:
                raise ValueError(f"no actor is a {kind}, got {name}")
        if node is None:
            return False
        self.taken[name] = node
        counter[node] += 1
        self._free[node].subtract(bundle)
        return True


def _covers(free: Bundle, bundle: Bundle) -> bool:
    return all(free.get(name, 0.0) >= amount - _ROUNDING for name, amount in bundle.items())


def _does_not_fit(bundles: Mapping[str, Bundle], nodes: Sequence[Node]) -> Problem:
    too_large = {_text(bundle) for bundle in bundles.values() if not any(_covers(n.resources, bundle) for n in nodes)}
    if too_large:
        do = f"no node has {' or '.join(sorted(too_large))}, and an actor is on one node: make it smaller, or add nodes"
    else:
        do = "ask for fewer ranks or replicas, or start Ray on more nodes; CPUs count too (`ray start --num-cpus`)"
    return Problem(
        key=SIZES,
        got=describe_bundles(bundles),
        allowed=f"must fit on the {len(nodes)} nodes of the Ray cluster: {describe_nodes(nodes)}",
        do=do,
        also=("rollout.num_workers",),
    )


def describe_bundles(bundles: Mapping[str, Bundle]) -> str:
    """Example: `2 learners of 1 CPU + 1 GPU, 1 replica of 1 CPU + 4 GPU`"""
    counts = Counter((name.rpartition("_")[0], _text(bundle)) for name, bundle in bundles.items())
    return ", ".join(
        f"{count} {kind.replace('_', ' ')}{'' if count == 1 else 's'} of {text}"
        for (kind, text), count in counts.items()
    )


def describe_nodes(nodes: Sequence[Node]) -> str:
    """Example: `10.0.0.1 (driver): 16 CPU + 8 GPU; 10.0.0.2: 16 CPU + 8 GPU`"""
    return "; ".join(
        f"{n.address}{' (driver)' if n.is_driver else ''}: {_text(n.resources) or 'nothing'}" for n in nodes
    )


def _text(bundle: Bundle) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
