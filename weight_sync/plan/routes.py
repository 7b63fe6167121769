"""Which workers read from learners and which from other workers.

A learner's egress is shared by everyone who reads it, so with more receivers than learners each would get a fraction of
a link. Replicas with the same worker index pull the same bytes into the same layout, so one can read them from another.
The receivers of one worker index on one node form a **ring**, cut into groups. A source enters the ring at the head of
one group and is handed on, neighbour to neighbour, until it has been everywhere:

    4 receivers, learners 0 and 1:                 first half            second half
                                             a: 1 from learner 1    a: 0 from d
         a ──> b ──> c ──> d ──> (a)         b: 1 from a            b: 0 from a
       groups [a b] [c d]                    c: 0 from learner 0    c: 1 from b
                                             d: 0 from c            d: 1 from c

What that promises, for R receivers of one worker index on a node and P sources of equal size (tests/unit prove it):

- A receiver has one predecessor and one successor, whatever the source: it opens one mapping, and never serves two.
- It forwards P * (R - 1) / R shares, rounded down or up; so egress never exceeds ingress.
- Each relayed source is read from its learner once per node and worker index.
- With W worker indices the groups start at different sources, and no learner serves two heads at once while W <= P.
- Nobody waits in a circle: what a receiver pulls in its t-th step its predecessor pulled earlier, or pulls in its own
  t-th step further up the same group.

Learners and receivers on one node that are not outnumbered need none of this: every receiver reads every learner
itself, each starting at another one, and all links are full.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    K = TypeVar("K")
    T = TypeVar("T")


RelayMode = Literal["auto", "off"]
Routes = dict[str, dict[int, str | None]]
"""Receiver -> source rank -> the receiver to read it from, None for the learner itself. The inner order is the order in
which to pull the sources; the promises above hold in that order."""


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a replica."""

    name: str
    """ "replica/worker", unique."""
    worker: int
    """Index in its replica: parties with the same one read the same bytes."""
    node: str
    """What `addresses.node_id` says there."""
    relays: bool = True
    """False if others cannot read from it (no shadow block, or memory that cannot be shared); then it reads everything
    from the learners."""


def plan_routes(
    publishers: Mapping[int, str],
    receivers: Sequence[Party],
    sources: Mapping[int, Sequence[int]],
    *,
    relay: RelayMode,
) -> Routes:
    """Routes of every receiver.

    A source is relayed where its learner is on another node (each byte enters a node once per worker index), and where
    the receivers of the node together want more from a learner than one of them can take. Others are read directly.

    Args:
        publishers: learner rank -> its node.
        receivers: in the order of their replicas; that order is the order of the rings.
        sources: worker index -> learner ranks it reads.

    Raises:
        ValueError: two receivers with one name, a worker index without sources, or a source that nobody publishes.

    Example: `plan_routes({0: "x"}, [Party(name="A/0", worker=0, node="x"), Party(name="B/0", worker=0, node="x")],
    {0: [0]}, relay="auto")` -> `{"A/0": {0: None}, "B/0": {0: "A/0"}}`.
    """
    ranks_of = {worker: sorted(set(sources.get(worker, ()))) for worker in {party.worker for party in receivers}}
    _check(publishers, receivers, sources, ranks_of)
    residents = _by(receivers, lambda party: party.node)
    neighbours = _by(publishers, lambda rank: publishers[rank])
    routes: Routes = {party.name: {} for party in receivers}
    for place, (node, parties) in enumerate(residents.items()):
        teams = dict(sorted(_by(parties, lambda party: party.worker).items()))
        crowds = {worker: len(team) for worker, team in teams.items()}
        near = neighbours.get(node, [])
        direct = set(publishers) if relay == "off" else set(near) - _overloaded(near, crowds, ranks_of)
        for nth, (worker, team) in enumerate(teams.items()):
            ranks = ranks_of[worker]
            ring = [party.name for party in team if party.relays]
            loners = [party.name for party in team if not party.relays]
            unshared = direct.intersection(ranks)
            is_relayed = len(unshared) < len(ranks)
            num_groups = min(len(ring), max(1, len(ranks) // len(teams))) if is_relayed else len(ring)
            for names, groups, alone in ((ring, num_groups, unshared), (loners, len(loners), ranks)):
                starts = _starts(len(ranks), groups, shift=(place, len(residents)), turn=nth)
                routes |= _walk_ring(names, ranks, starts=starts, direct=alone)
    return routes


def _by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by their key, both in the order in which they come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _check(
    publishers: Mapping[int, str],
    receivers: Sequence[Party],
    sources: Mapping[int, Sequence[int]],
    ranks_of: Mapping[int, Sequence[int]],
) -> None:
    if twice := sorted(name for name, n in Counter(party.name for party in receivers).items() if n > 1):
        raise ValueError(f"receivers must have names of their own, got {', '.join(twice)} more than once")
    if silent := sorted(ranks_of.keys() - sources.keys()):
        raise ValueError(f"sources must name every worker index of the receivers, got {sorted(sources)}, not {silent}")
    if unknown := sorted({rank for ranks in ranks_of.values() for rank in ranks} - publishers.keys()):
        raise ValueError(f"sources must be publishers {sorted(publishers)}, got also {unknown}")


def _overloaded(near: Iterable[int], crowds: Mapping[int, int], ranks_of: Mapping[int, Sequence[int]]) -> set[int]:
    """Learners of a node from which its receivers together read more than one receiver's whole pull.

    Args:
        near: the learners of the node.
        crowds: worker index -> its receivers on the node.
    """
    load = dict.fromkeys(near, Fraction(0))
    for worker, num_receivers in crowds.items():
        ranks = ranks_of[worker]
        for rank in load.keys() & set(ranks):
            load[rank] += Fraction(num_receivers, len(ranks))
    return {rank for rank, wanted in load.items() if wanted > 1}


def _starts(num_sources: int, num_groups: int, *, shift: tuple[int, int], turn: int) -> list[int]:
    """Index of the source that each group of a ring begins with, evenly spread, falling along the ring.

    Falling, so that what a group begins with is what the next group on the ring comes to a little later. Node and
    worker index move all of them, so that heads of different rings begin at different learners. `shift`: which node,
    of how many.
    """
    node, num_nodes = shift
    return [
        ((group * num_nodes + node) * num_sources // (num_groups * num_nodes) + turn) % num_sources
        if num_sources
        else 0
        for group in reversed(range(num_groups))
    ]


def _walk_ring(ring: Sequence[str], ranks: Sequence[int], *, starts: Sequence[int], direct: Collection[int]) -> Routes:
    """Routes of one ring: `starts[g]` is where group `g` begins; groups follow each other along the ring.

    Args:
        direct: those of `ranks` that everyone reads from the learner itself.
    """
    size, count = len(ring), len(ranks)
    if size == 1 or len(direct) == count:  # nothing is handed on
        return {name: dict.fromkeys(_from(ranks, start)) for name, start in zip(ring, starts, strict=True)}
    routes: Routes = {}
    for place, name in enumerate(ring):
        group = place * len(starts) // size
        order = _from(ranks, starts[group])
        route: dict[int, str | None] = dict.fromkeys(order, ring[place - 1])
        route.update(dict.fromkeys(direct))
        if place == 0 or group != (place - 1) * len(starts) // size:
            # A source enters at the head of the group that comes to it first; to everyone else it comes along the ring.
            # Starts fall along the ring, so the next one up is that of the group before.
            route.update(dict.fromkeys(order[: (starts[group - 1] - starts[group] - 1) % count + 1]))
        routes[name] = route
    return routes


def _from(ranks: Sequence[int], start: int) -> list[int]:
    return [*ranks[start:], *ranks[:start]]
