from __future__ import annotations

import time
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.plan.routes import Party, Routes, plan_routes

small = settings(max_examples=150, deadline=None)


def team(num_replicas: int, num_workers: int = 1, node: str = "n") -> list[Party]:
    return [
        Party(name=f"{node}-{replica}/{worker}", worker=worker, node=node)
        for replica in range(num_replicas)
        for worker in range(num_workers)
    ]


def one_node(num_publishers: int, num_replicas: int, num_workers: int = 1) -> Routes:
    """Equal shares, everything on one node."""
    sources = dict.fromkeys(range(num_workers), range(num_publishers))
    return plan_routes(
        dict.fromkeys(range(num_publishers), "n"), team(num_replicas, num_workers), sources, relay="auto"
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, str], list[Party], dict[int, list[int]]]:
    """Any number of nodes, workers with any sources, some receivers that cannot relay."""
    nodes = [f"node{i}" for i in range(draw(st.integers(1, 3)))]
    publishers = {
        rank: draw(st.sampled_from(nodes)) for rank in draw(st.sets(st.integers(0, 20), min_size=1, max_size=6))
    }
    num_workers = draw(st.integers(1, 3))
    sources = {w: draw(st.lists(st.sampled_from(sorted(publishers)), max_size=6)) for w in range(num_workers)}
    receivers = [
        Party(name=f"r{i}", worker=draw(st.integers(0, num_workers - 1)), node=draw(st.sampled_from(nodes)),
              relays=draw(st.sampled_from([True, True, True, False])))
        for i in range(draw(st.integers(0, 9)))
    ]  # fmt: skip
    return publishers, receivers, sources


@small
@given(worlds(), st.sampled_from(["auto", "off"]))
def test_every_receiver_gets_every_source_once_along_a_chain_inside_its_node(world, relay) -> None:
    publishers, receivers, sources = world
    routes = plan_routes(publishers, receivers, sources, relay=relay)
    by_name = {party.name: party for party in receivers}
    assert list(routes) == [party.name for party in receivers]
    for name, route in routes.items():
        me = by_name[name]
        assert sorted(route) == sorted(set(sources[me.worker]))
        assert relay == "auto" or set(route.values()) <= {None}
        for rank in route:
            walked, at = [name], route[rank]
            while at is not None:
                assert at not in walked, "a circle: the source never enters it"
                walked.append(at)
                other = by_name[at]
                assert (other.node, other.worker, other.relays) == (me.node, me.worker, True)
                at = routes[at][rank]


@small
@given(worlds())
def test_a_receiver_has_one_predecessor_and_one_successor(world) -> None:
    routes = plan_routes(*world, relay="auto")
    predecessors = {name: {other for other in route.values() if other} for name, route in routes.items()}
    assert all(len(found) <= 1 for found in predecessors.values())
    assert max(Counter(other for found in predecessors.values() for other in found).values(), default=0) <= 1


@small
@given(worlds())
def test_a_source_of_another_node_enters_a_node_once_per_worker_index(world) -> None:
    publishers, receivers, sources = world
    routes = plan_routes(publishers, receivers, sources, relay="auto")
    entries: Counter[tuple[str, int, int]] = Counter()
    for party in receivers:
        for rank, predecessor in routes[party.name].items():
            if party.relays and publishers[rank] != party.node:
                entries[party.node, party.worker, rank] += predecessor is None
    assert set(entries.values()) <= {1}


@small
@given(worlds())
def test_nobody_waits_in_a_circle(world) -> None:
    """A pull is done once the pull before it and the same pull at the predecessor are: some order must exist."""
    routes = plan_routes(*world, relay="auto")
    open_pulls = {(name, rank) for name, route in routes.items() for rank in route}
    waits: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    for name, route in routes.items():
        for before, after in pairwise(route):
            waits[name, after].add((name, before))
        for rank, predecessor in route.items():
            if predecessor is not None:
                waits[name, rank].add((predecessor, rank))
    while open_pulls:
        free = {pull for pull in open_pulls if not waits[pull] & open_pulls}
        assert free, f"these wait for each other: {sorted(open_pulls)}"
        open_pulls -= free


@small
@given(st.integers(1, 9), st.integers(2, 20))
def test_forwarding_is_shared_to_within_one_source(num_publishers: int, num_replicas: int) -> None:
    if num_replicas <= num_publishers:
        return
    routes = one_node(num_publishers, num_replicas)
    egress = Counter(other for route in routes.values() for other in route.values() if other)
    heads = Counter(rank for route in routes.values() for rank, other in route.items() if other is None)
    fair = num_publishers * (num_replicas - 1) / num_replicas
    assert all(fair - 1 < egress[name] < fair + 1 for name in routes)
    assert max(egress.values()) <= num_publishers, "egress never exceeds ingress"
    assert heads == dict.fromkeys(range(num_publishers), 1), "a learner feeds one head"


@small
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_receivers_that_are_not_outnumbered_read_directly_and_never_meet(
    num_publishers: int, num_replicas: int, num_workers: int
) -> None:
    if num_replicas * num_workers > num_publishers:
        return
    routes = one_node(num_publishers, num_replicas, num_workers)
    assert all(other is None for route in routes.values() for other in route.values())
    for step in range(num_publishers):
        assert len({list(route)[step] for route in routes.values()}) == len(routes)


def test_nodes_begin_at_different_learners() -> None:
    publishers = {rank: f"learners{rank // 4}" for rank in range(8)}
    receivers = [party for node in ("a", "b") for party in team(2, 2, node)]
    routes = plan_routes(publishers, receivers, dict.fromkeys((0, 1), range(8)), relay="auto")
    for step in range(4):  # afterwards they exchange what they fetched
        fetched = [list(route)[step] for route in routes.values()]
        assert all(routes[name][rank] is None for name, rank in zip(routes, fetched, strict=True))
        assert len(set(fetched)) == 8, "8 receivers fetch from 8 learners at any time"
    for name, route in routes.items():
        assert [other is None for other in route.values()] == [True] * 4 + [False] * 4, name


@small
@given(worlds(), st.data())
def test_those_who_stay_read_from_nobody_who_left(world, data) -> None:
    publishers, receivers, sources = world
    stay = [party for party in receivers if data.draw(st.booleans())]
    routes = plan_routes(publishers, stay, sources, relay="auto")
    assert {other for route in routes.values() for other in route.values() if other} <= {party.name for party in stay}
    assert {name: sorted(route) for name, route in routes.items()} == {
        party.name: sorted(set(sources[party.worker])) for party in stay
    }


@pytest.mark.parametrize("num_nodes", [512, 1], ids=["a node for each replica", "one node"])
def test_512_replicas_of_8_workers_are_routed_to_1024_learners_in_seconds(num_nodes: int) -> None:
    publishers = {rank: f"learners{rank // 8}" for rank in range(1024)}
    receivers = [party for node in range(num_nodes) for party in team(512 // num_nodes, 8, f"engines{node}")]
    started = time.process_time()
    routes = plan_routes(publishers, receivers, dict.fromkeys(range(8), range(1024)), relay="auto")
    assert time.process_time() - started < 4.0
    assert len(routes) == 4096
    assert all(route.keys() == publishers.keys() for route in routes.values())


def simulate(routes: Routes, num_publishers: int, pieces: int) -> int:
    """Ticks until everyone has everything. A piece takes a tick; every port, out or in, moves one piece per tick."""
    have = {name: dict.fromkeys(route, 0) for name, route in routes.items()}
    ticks = 0
    while any(count < pieces for counts in have.values() for count in counts.values()):
        start = {name: dict(counts) for name, counts in have.items()}
        busy: set[object] = set()
        for name, route in routes.items():
            rank = next((rank for rank in route if start[name][rank] < pieces), None)
            if rank is None:
                continue
            server = route[rank]
            port = rank if server is None else server
            if port not in busy and (server is None or start[server][rank] > start[name][rank]):
                busy.add(port)
                have[name][rank] += 1
        ticks += 1
        assert ticks < 10_000, "nobody gets on"
    assert ticks >= pieces * num_publishers
    return ticks


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(3, 9))
def test_a_simulated_sync_takes_as_long_as_the_closed_form_says(
    num_publishers: int, num_replicas: int, num_workers: int, pieces: int
) -> None:
    if -(-num_replicas // max(1, num_publishers // num_workers)) > pieces:
        return  # a chain that is longer than a source never fills
    ticks = simulate(one_node(num_publishers, num_replicas, num_workers), num_publishers, pieces)
    ideal = pieces * num_publishers
    if num_replicas * num_workers > num_publishers:  # relayed: the busiest port, and the way down the longest group
        groups = min(num_replicas, max(1, num_publishers // num_workers))
        ideal = max(1.0, num_workers / num_publishers) * ideal + -(-num_replicas // groups) - 1
    assert ticks == ideal if num_workers <= num_publishers else ticks >= ideal


def test_four_receivers_of_two_learners_are_routed_as_the_picture_shows() -> None:
    receivers = [Party(name=name, worker=0, node="n") for name in "abcd"]
    routes = plan_routes({0: "n", 1: "n"}, receivers, {0: [0, 1]}, relay="auto")
    assert routes == {"a": {1: None, 0: "d"}, "b": {1: "a", 0: "a"}, "c": {0: None, 1: "b"}, "d": {0: "c", 1: "c"}}
    assert [list(route) for route in routes.values()] == [[1, 0], [1, 0], [0, 1], [0, 1]]


def test_a_plan_that_cannot_be_routed_names_the_party() -> None:
    twins = [Party(name="a/0", worker=0, node="n")] * 2
    with pytest.raises(ValueError, match="a/0 more than once"):
        plan_routes({0: "n"}, twins, {0: [0]}, relay="auto")
    with pytest.raises(ValueError, match=r"not \[0\]"):
        plan_routes({0: "n"}, twins[:1], {1: [0]}, relay="auto")
    with pytest.raises(ValueError, match=r"also \[7\]"):
        plan_routes({0: "n"}, twins[:1], {0: [0, 7]}, relay="auto")
