"""Which node everybody would sit on, for a dry run that is told the nodes. Pure: the decision of a real start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigurationError, Problem
from trainer.pipeline.placement import (
    Node,
    assign_nodes,
    bundles_by_actor,
    check_fits,
    plan_placement,
    ranks_beside,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.config.schema import RunConfig
    from trainer.pipeline.placement import Bundle, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Seats in words, or why there are none. Empty where the nodes are not known."""

    lines: tuple[str, ...] = ()
    """What is assumed; then one line per node, if everybody has a seat."""
    problems: tuple[Problem, ...] = ()
    """What a start on such a cluster would refuse."""
    homes: Mapping[str, str] | None = None
    """Name of an actor -> its node; None if not everybody has a seat."""


def seat(cfg: RunConfig, counts: Sequence[int], *, backend: str, resource: str) -> Seating:
    """Seat learners, engines and rollout workers as a run does that joins a Ray cluster of these nodes.

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
        return Seating(lines=(head,), problems=error.problems)
    bundles = bundles_by_actor(cfg, placement)
    by_node = {node.address: [name for name in bundles if chosen[name] == node.node_id] for node in nodes}
    lines = (
        f"  {address} ({_devices(count)}): {_who({name: bundles[name] for name in names}, cfg, placement)}; "
        f"{count - round(sum(bundles[name].get(resource, 0.0) for name in names))} free"
        for (address, names), count in zip(by_node.items(), counts, strict=True)
    )
    return Seating(lines=(head, *lines), homes=chosen)


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
