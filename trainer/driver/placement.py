"""Which node and device each actor is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainer.config.rules import pairing_problems
from trainer.errors import ConfigurationError, Problem
from weight_sync.device.select import names_by_resource

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
    is_paired: bool = False
    """Engines compute on the learners' devices."""
    seats: Mapping[str, Any] = field(default_factory=dict)
    """Name of an actor -> what Ray calls its scheduling strategy. Empty on a private cluster, which is one node."""
    engine_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Name of an engine -> variables that show it the devices of the learners it shares them with. Empty where engines
    have devices of their own, which Ray shows them."""

    def options(self, name: str) -> dict[str, Any]:
        """Keyword arguments for `.options(...)` of the actor `name`: what it needs, and where it sits.

        A restarted engine sits where the one sat that it replaces.
        """
        original = _original(name)
        seat = self.seats.get(original)
        kinds = {"learner": self.learner, "replica": self.engine, "rollout_worker": self.rollout_worker}
        needs = kinds[original.rpartition("_")[0]]
        return needs if seat is None else {**needs, "scheduling_strategy": seat}

    def env(self, name: str) -> Mapping[str, str]:
        """Variables of the actor `name` that depend on where it sits."""
        return self.engine_env.get(_original(name), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a cluster."""

    node_id: str
    address: str
    resources: Bundle
    """All it has, in use or not."""
    is_driver: bool = False


def plan_placement(cfg: RunConfig, *, resource: str | None) -> Placement:
    """Resources for the actors of a run. `resource` is what Ray calls one device; None means plain CPUs.

    Raises:
        ConfigurationError: learners and engines cannot share devices in these numbers.
    """
    ranks, replicas, tp = cfg.learner.num_ranks, cfg.rollout.num_replicas, cfg.rollout.tensor_parallel_size
    threads = cfg.device.cpu_threads
    if resource is None:
        learner, engine = {"num_cpus": threads}, {"num_cpus": threads * tp}
        num_devices, compute_cpus = 0, threads * (ranks + replicas * tp)
    else:
        if unpaired := list(pairing_problems(cfg)):
            raise ConfigurationError(unpaired)
        # On shared devices Ray counts the learner alone: it knows no actor with halves of several devices.
        own = 0 if cfg.mode.shares_devices else tp
        learner, engine = _devices(resource, 1), _devices(resource, own)
        num_devices, compute_cpus = ranks + replicas * own, ranks + replicas
    return Placement(
        learner=learner,
        engine=engine,
        is_paired=cfg.mode.shares_devices and resource is not None,
        rollout_worker={"num_cpus": ROLLOUT_WORKER_CPUS},
        num_devices=num_devices,
        num_cpus=compute_cpus + ROLLOUT_WORKER_CPUS * cfg.rollout.num_workers,
    )


def check_fits(cfg: RunConfig, placement: Placement, *, backend: str, num_devices: int, where: str) -> None:
    """Raises ConfigurationError if more accelerators are asked for than `where` (this host, the cluster) has."""
    if placement.num_devices <= num_devices:
        return
    ranks, replicas, tp = cfg.learner.num_ranks, cfg.rollout.num_replicas, cfg.rollout.tensor_parallel_size
    is_shared = placement.is_paired
    raise ConfigurationError(
        [
            Problem(
                key="learner.num_ranks" if is_shared else SIZES,
                value=str(ranks) if is_shared else f"{ranks} + {replicas} * {tp} = {placement.num_devices}",
                message=f"{where} has {num_devices} {backend} device{'' if num_devices == 1 else 's'}",
                hint="ask for fewer ranks or replicas, or show more devices",
            )
        ]
    )


def check_cpus(cfg: RunConfig, placement: Placement) -> None:
    """Raises ConfigurationError if the private cluster would have fewer CPUs than the actors take: some would wait for
    the others to end."""
    num_cpus = cfg.ray.num_cpus
    if num_cpus == 0 or num_cpus >= placement.num_cpus - _ROUNDING:
        return
    message = f"must be at least {placement.num_cpus:g}, which all actors take together, or 0 for as many as they take"
    hint = "CPUs are counted, not pinned: raise it, leave it out, or ask for fewer ranks, replicas or rollout workers"
    raise ConfigurationError([Problem(key="ray.num_cpus", value=str(num_cpus), message=message, hint=hint)])


def check_device_is_named(cfg: RunConfig, *, backend: str, resource: str | None, there: Mapping[str, float]) -> None:
    """Raises ConfigurationError if `device=auto` found no accelerator here and the cluster, which has `there`, does."""
    names = names_by_resource()
    found = {name: num for name, num in there.items() if name in names and num}
    if cfg.device.name != "auto" or resource is not None or not found:
        return
    choices = [f"device={name}" for resource in found for name in names[resource]]
    raise ConfigurationError(
        [
            Problem(
                key="device",
                value=f"auto, which is {backend} on the driver's host",
                message=f"the Ray cluster has {_text(found)}, and auto looks at the driver's host alone",
                hint=f"say which the run takes: {' or '.join(choices)}; device={backend} leaves them idle",
                related=("ray.address",),
            )
        ]
    )


def _original(name: str) -> str:
    """The actor that `name` takes the place of, or `name`."""
    return name.partition(RESTARTED)[0]


def ranks_beside(replica: int, cfg: RunConfig) -> range:
    """The learner ranks on whose devices an engine computes, where devices are shared."""
    tp = cfg.rollout.tensor_parallel_size
    return range(replica * tp, (replica + 1) * tp)


def _beside(replica: int, cfg: RunConfig) -> list[str]:
    return [*(f"learner_{rank}" for rank in ranks_beside(replica, cfg)), f"replica_{replica}"]


def shared_visibility(seen: Sequence[str]) -> str:
    """What an engine has to see to compute on the devices of several learners, from what each of them sees.

    A list of devices begins with the process's own; some backends show the others after it.

    Example: `["2", "3"]` -> `"2,3"`; `["2,0,1,3", "3,0,1,2"]` -> `"2,3,0,1"`
    """
    lists = [text.split(",") for text in seen]
    own = [devices[0] for devices in lists]
    others = [device for devices in lists for device in devices if device not in own]
    return ",".join(dict.fromkeys([*own, *others]))


def _devices(resource: str, count: int) -> dict[str, Any]:
    if count == 0:
        return {"num_cpus": 1}
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


def units_of(cfg: RunConfig, placement: Placement) -> list[list[str]]:
    """Names of actors that have to be on one node, together: an engine and the learners whose devices it computes on.
    Each of the others is alone."""
    together = [_beside(replica, cfg) for replica in range(cfg.rollout.num_replicas)] if placement.is_paired else []
    seated = {name for unit in together for name in unit}
    return [*together, *([name] for name in bundles_by_actor(cfg, placement) if name not in seated)]


def assign_free_nodes(
    cfg: RunConfig, placement: Placement, nodes: Sequence[Node], free: Mapping[str, Bundle]
) -> dict[str, str]:
    """As `assign_nodes`, by what `free` has for the id of a node; where that does not do, by all that the nodes have.

    Raises:
        ConfigurationError: the nodes would be too small with nobody else on them.
    """
    now = [replace(node, resources=free.get(node.node_id, {})) for node in nodes]
    try:
        return assign_nodes(cfg, placement, now)
    except ConfigurationError:
        return assign_nodes(cfg, placement, nodes)


def assign_nodes(cfg: RunConfig, placement: Placement, nodes: Sequence[Node]) -> dict[str, str]:
    """Name of an actor -> id of its node.

    - Learners share few nodes, the driver's first: their collectives are the busiest traffic. Not every set of nodes
      is tried (`_learner_orders`), so among nodes of unlike sizes fewer might have done.
    - An engine with all its devices is on one node. Engines are spread: each goes where the fewest are.
    - On shared devices an engine sits beside its learners, all of them on one node.
    - Rollout workers are on the driver's node while it has room: without that node there is no run anyway.

    Raises:
        ConfigurationError: they do not fit; says what is asked for and what every node has.
    """
    bundles = bundles_by_actor(cfg, placement)
    engines_first = sorted(bundles, key=lambda name: not name.startswith("replica_"))
    for order in _learner_orders(nodes):
        seats = _Seats(nodes)
        shared = [unit for unit in units_of(cfg, placement) if len(unit) > 1]
        fits = all(seats.take_together({name: bundles[name] for name in unit}, order) for unit in shared)
        names = engines_first if order is None else list(bundles)
        if fits and all(seats.take(name, bundles[name], order) for name in names if name not in seats.taken):
            return seats.taken
    raise ConfigurationError([_does_not_fit(bundles, nodes)])


def _learner_orders(nodes: Sequence[Node]) -> Iterator[list[str] | None]:
    """Nodes that learners may fill, in order: each one alone, then the first two and the two largest, then three, ...
    None leaves them what the engines do not take."""
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

    def take_together(self, bundles: Mapping[str, Bundle], order: list[str] | None) -> bool:
        """Put these actors on one node, the first of `order` with room for all; False if there is none."""
        needed: Counter[str] = Counter()
        for bundle in bundles.values():
            needed.update(bundle)
        nodes = self._free if order is None else order
        node = next((node for node in nodes if _covers(self._free[node], needed)), None)
        if node is None:
            return False
        self.taken |= dict.fromkeys(bundles, node)
        self._free[node].subtract(needed)
        return True

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
        hint = (
            f"no node has {' or '.join(sorted(too_large))}, and an actor is on one node: make it smaller, or add nodes"
        )
    else:
        hint = "ask for fewer ranks or replicas, or start Ray on more nodes; CPUs count too (`ray start --num-cpus`)"
    return Problem(
        key=SIZES,
        value=describe_bundles(bundles),
        message=f"must fit on the {len(nodes)} nodes of the Ray cluster: {describe_nodes(nodes)}",
        hint=hint,
        related=("rollout.num_workers",),
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


def describe_idle_devices(
    chosen: Mapping[str, str], bundles: Mapping[str, Bundle], nodes: Sequence[Node], *, resource: str
) -> str | None:
    """Which devices no actor of the run has; None if there are none.

    Args:
        chosen: name of an actor -> id of its node.
        resource: what Ray calls a device.

    Example: `8 of 24 GPU; 3 on 10.0.0.1, 6 on 10.0.0.2, 7 on 10.0.0.3 stay idle`
    """
    used: Counter[str] = Counter()
    for name, node_id in chosen.items():
        used[node_id] += round(bundles[name].get(resource, 0.0))
    there = {node.node_id: round(node.resources.get(resource, 0.0)) for node in nodes}
    idle = [(node.address, num) for node in nodes if (num := there[node.node_id] - used[node.node_id]) > 0]
    if not idle:
        return None
    places = ", ".join(f"{num} on {address}" for address, num in idle)
    return f"{used.total()} of {sum(there.values())} {resource}; {places} stay idle"


def _text(bundle: Bundle) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
