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

from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    _check(publishers, receivers, sources)
    nodes = list(dict.fromkeys(party.node for party in receivers))
    routes: Routes = {party.name: {} for party in receivers}
    for place, node in enumerate(nodes):
        residents = [party for party in receivers if party.node == node]
        distant = {rank for rank, home in publishers.items() if home != node}
        relayed = set[int]() if relay == "off" else distant | _overloaded(residents, sources)
        workers = sorted({party.worker for party in residents})
        for nth, worker in enumerate(workers):
            team = [party for party in residents if party.worker == worker]
            ranks = sorted(set(sources[worker]))
            ring = [party.name for party in team if party.relays]
            loners = [party.name for party in team if not party.relays]
            num_groups = min(len(ring), max(1, len(ranks) // len(workers))) if relayed & set(ranks) else len(ring)
            shift = Fraction(place, len(nodes))
            for names, groups, chained in ((ring, num_groups, relayed), (loners, len(loners), set[int]())):
                starts = _starts(len(ranks), groups, shift=shift, turn=nth)
                routes |= _walk_ring(names, ranks, starts=starts, relayed=chained)
    return routes


def _check(publishers: Mapping[int, str], receivers: Sequence[Party], sources: Mapping[int, Sequence[int]]) -> None:
    names = [party.name for party in receivers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"receivers must have names of their own, got {', '.join(twice)} more than once")
    if silent := sorted({party.worker for party in receivers} - sources.keys()):
        raise ValueError(f"sources must name every worker index of the receivers, got {sorted(sources)}, not {silent}")
    wanted = {rank for party in receivers for rank in sources[party.worker]}
    if unknown := sorted(wanted - publishers.keys()):
        raise ValueError(f"sources must be publishers {sorted(publishers)}, got also {unknown}")


def _overloaded(residents: Sequence[Party], sources: Mapping[int, Sequence[int]]) -> set[int]:
    """Learners from which the receivers of a node together read more than one receiver's whole pull."""
    load: dict[int, Fraction] = {}
    for party in residents:
        ranks = set(sources[party.worker])
        for rank in ranks:
            load[rank] = load.get(rank, Fraction(0)) + Fraction(1, len(ranks))
    return {rank for rank, wanted in load.items() if wanted > 1}


def _starts(num_sources: int, num_groups: int, *, shift: Fraction, turn: int) -> list[int]:
    """Index of the source that each group of a ring begins with, evenly spread, falling along the ring.

    Falling, so that what a group begins with is what the next group on the ring comes to a little later. Node and
    worker index move all of them, so that heads of different rings begin at different learners.
    """
    return [
        (int((group + shift) * num_sources / num_groups) + turn) % num_sources if num_sources else 0
        for group in reversed(range(num_groups))
    ]


def _walk_ring(ring: Sequence[str], ranks: Sequence[int], *, starts: Sequence[int], relayed: set[int]) -> Routes:
    """Routes of one ring: `starts[g]` is where group `g` begins; groups follow each other along the ring."""
    size, count = len(ring), len(ranks)
    groups = [place * len(starts) // size for place in range(size)]
    routes: Routes = {}
    for place, name in enumerate(ring):
        start = starts[groups[place]]
        is_head = place == 0 or groups[place] != groups[place - 1]
        route: dict[int, str | None] = {}
        for step in range(count):
            index = (start + step) % count
            # A source enters at the head of the group that comes to it first; to everyone else it comes along the ring.
            first = min((index - each) % count for each in starts)
            enters = is_head and step == first
            rank = ranks[index]
            route[rank] = None if enters or rank not in relayed else ring[place - 1]
        routes[name] = route
    return routes
