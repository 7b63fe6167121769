"""Which workers read from learners and which from other workers.

A learner's egress is shared by everyone who reads it, so with many receivers each would get a fraction of a link.
Replicas with the same worker index pull the same bytes into the same layout, so one can read them from another. The
receivers of one worker index form **rings** over the nodes. A source enters a ring once, at the head of its group, and
is handed on from neighbour to neighbour until everyone has it:

    node X        node Y              learner 0 enters at a: a > b > c > d
    a   b         c   d               learner 1 enters at d: d > c > b > a

What that promises (tests/unit prove it):

- A source enters a ring once, and a node once per ring; receivers of one node hand it on to each other.
- A receiver forwards a source at most once, so egress never exceeds ingress, which is one copy of the version.
- Traffic between nodes is spread over the receivers of a node: each group enters it at the next one.
- Nobody waits in a circle: a receiver pulls the sources by their distance from the learner, so in every pull it waits
  for one at a smaller distance.
- The second predecessor of a receiver is its predecessor's. Who is lost is skipped; after two the learner is read.

A source is read from its learner by everyone on the learner's own node, unless together they want more of it than one
receiver can take.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    K = TypeVar("K")
    T = TypeVar("T")


RING_SIZE = 64
"""A version reaches the end of a ring after this many hops, of a few milliseconds each."""
NUM_PREDECESSORS = 2
RelayMode = Literal["auto", "off"]


class Stage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sources that a receiver pulls one after the other, from the same party."""

    ranks: tuple[int, ...]
    via: tuple[int, ...] = ()
    """Whom to ask for them, in this order, before the learner: indices into the route's predecessors."""


class Route(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one receiver reads, from whom, in the order in which to pull it."""

    stages: tuple[Stage, ...]
    predecessors: tuple[str, ...] = ()
    """Receivers that some stage asks."""


class Peer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker of a replica."""

    name: str
    """ "replica/worker", unique."""
    worker: int
    """Index in its replica: parties with the same one read the same bytes."""
    node: str
    """What `node.node_id` says there."""
    relays: bool = True
    """False if others cannot read from it (commits in place, or memory that cannot be read from elsewhere); then it
    reads everything from the learners."""


def plan_routes(
    publishers: Mapping[int, str],
    receivers: Sequence[Peer],
    sources: Mapping[int, Sequence[int]],
    *,
    relay: RelayMode,
) -> dict[str, Route]:
    """The route of every receiver by its name. Takes O(receivers x groups): 4,096 x 1,024 learners well under a second.

    Args:
        publishers: learner rank -> its node.
        receivers: nodes follow each other in a ring in the order in which they first come here, at every index.
        sources: worker index -> learner ranks it reads.

    Raises:
        ValueError: two receivers with one name, a worker index without sources, or a source that nobody publishes.

    Example: `plan_routes({0: "x"}, [Peer(name="A/0", worker=0, node="y"), Peer(name="B/0", worker=0, node="y")],
    {0: [0]}, relay="auto")` lets A/0 read learner 0 and B/0 read A/0.
    """
    teams = _by(receivers, lambda party: party.worker)
    ranks_of = {worker: sorted(set(sources.get(worker, ()))) for worker in teams}
    _check(publishers, receivers, sources, ranks_of)
    direct = _direct(publishers, receivers, ranks_of)
    nodes = {node: place for place, node in enumerate(dict.fromkeys(party.node for party in receivers))}
    routes: dict[str, Route] = dict.fromkeys((party.name for party in receivers), Route(stages=()))
    turn = 0
    for worker in sorted(teams):
        ranks, num_groups = ranks_of[worker], max(1, len(ranks_of[worker]) // len(teams))
        team = sorted(teams[worker], key=lambda party: nodes[party.node])  # stable
        relaying = [p for p in team if p.relays and relay == "auto" and not direct.get(p.node, set()).issuperset(ranks)]
        ringed = {party.name for party in relaying}
        for party in team:
            if party.name not in ringed:
                routes[party.name] = Route(stages=(Stage(_turned(ranks, turn)),) if ranks else ())
                turn += 1
        for ring in _rings(list(_by(relaying, lambda party: party.node).values())):
            routes.update(_walk(ring, _turned(ranks, turn), num_groups=num_groups, direct=direct))
            turn += 1
    return routes


def _by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by their key, both in the order in which they come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _check(
    publishers: Mapping[int, str],
    receivers: Sequence[Peer],
    sources: Mapping[int, Sequence[int]],
    ranks_of: Mapping[int, Sequence[int]],
) -> None:
    if twice := sorted(name for name, n in Counter(party.name for party in receivers).items() if n > 1):
        raise ValueError(f"receivers must have distinct names, got {', '.join(twice)} more than once")
    if silent := sorted(ranks_of.keys() - sources.keys()):
        raise ValueError(f"sources must name every worker index of the receivers, got {sorted(sources)}, not {silent}")
    if unknown := sorted({rank for ranks in ranks_of.values() for rank in ranks} - publishers.keys()):
        raise ValueError(f"sources must be publishers {sorted(publishers)}, got also {unknown}")


def _direct(
    publishers: Mapping[int, str], receivers: Sequence[Peer], ranks_of: Mapping[int, Sequence[int]]
) -> dict[str, set[int]]:
    """Node -> its own learners from which its receivers together read no more than one receiver's whole pull."""
    crowds = Counter((party.node, party.worker) for party in receivers)
    residents = _by(publishers, lambda rank: publishers[rank])
    load = dict.fromkeys(publishers, 0.0)
    for (node, worker), num_receivers in crowds.items():
        ranks = ranks_of[worker]
        for rank in set(residents.get(node, ())).intersection(ranks):
            load[rank] += num_receivers / len(ranks)
    return {node: {rank for rank in near if load[rank] <= 1 + 1e-9} for node, near in residents.items()}


def _rings(nodes: Sequence[list[Peer]]) -> Iterator[list[list[Peer]]]:
    """Rings of at most `RING_SIZE`, of about equal size; only a node that is larger is cut."""
    num_receivers = sum(map(len, nodes))
    target = -(-num_receivers // max(1, -(-num_receivers // RING_SIZE)))
    ring: list[list[Peer]] = []
    size = 0
    for node in nodes:
        for start in range(0, len(node), RING_SIZE):
            part = node[start : start + RING_SIZE]
            if ring and (size >= target or size + len(part) > RING_SIZE):
                yield ring
                ring, size = [], 0
            ring.append(part)
            size += len(part)
    if ring:
        yield ring


@lru_cache(maxsize=64)
def _chains(sizes: tuple[int, ...], num_groups: int) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """Receiver -> (group, its predecessors from the nearest on) by distance from the head, for a ring of nodes of these
    sizes. Group g enters at the g-th of evenly spaced nodes, and each node at its receiver g (modulo its size)."""
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    found: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in range(sum(sizes))]
    for group in range(num_groups):
        head = group * len(sizes) // num_groups
        chain = [
            starts[node] + (group + step) % sizes[node]
            for node in (*range(head, len(sizes)), *range(head))
            for step in range(sizes[node])
        ]
        for distance, receiver in enumerate(chain):
            before = tuple(reversed(chain[max(0, distance - NUM_PREDECESSORS) : distance]))
            found[receiver].append((distance, group, before))
    return tuple(tuple((group, before) for _, group, before in sorted(each)) for each in found)


def _turned(ranks: Sequence[int], turn: int) -> tuple[int, ...]:
    """So that heads of different rings, and those who read everything from the learners, begin at different ones."""
    start = turn % max(1, len(ranks))
    return (*ranks[start:], *ranks[:start])


def _walk(
    ring: Sequence[Sequence[Peer]], ranks: Sequence[int], *, num_groups: int, direct: Mapping[str, set[int]]
) -> Iterator[tuple[str, Route]]:
    """Routes of one ring, given node by node."""
    members = [party for node in ring for party in node]
    num_groups = min(len(members), num_groups)
    groups = [
        tuple(ranks[g * len(ranks) // num_groups : (g + 1) * len(ranks) // num_groups]) for g in range(num_groups)
    ]
    for party, chain in zip(members, _chains(tuple(map(len, ring)), num_groups), strict=True):
        near = direct.get(party.node, set()).intersection(ranks)
        asked: dict[int, int] = {}
        stages: list[Stage] = []
        for group, before in chain:
            wanted = groups[group]
            if near and (own := tuple(rank for rank in wanted if rank in near)):
                stages.append(Stage(own))
                wanted = tuple(rank for rank in wanted if rank not in near)
            if wanted:
                stages.append(Stage(wanted, tuple([asked.setdefault(other, len(asked)) for other in before])))
        yield party.name, Route(stages=tuple(stages), predecessors=tuple(members[other].name for other in asked))
