from __future__ import annotations

import pytest

from rollout.fleet.scheduler import NoReplica, Router, order_of


def test_a_new_group_goes_to_the_replica_with_fewest_outstanding_tokens() -> None:
    router = Router(["a", "b"])
    assert router.route("g1", 100) == "a"
    assert router.route("g2", 30) == "b"
    assert router.route("g3", 30) == "b"
    assert router.route("g4", 30) == "b"
    router.done("a", 100)
    assert router.route("g5", 1) == "a"
    assert router.outstanding_tokens == {"a": 1, "b": 90}


def test_a_group_stays_where_it_is_until_it_is_forgotten() -> None:
    router = Router(["a", "b"])
    router.route("g", 100)
    assert router.route("g", 100) == "a"
    router.forget("g")
    assert router.route("g", 1) == "b"


def test_a_quarantined_replica_gets_nothing_and_its_groups_move() -> None:
    router = Router(["a", "b"])
    assert router.route("g", 10) == "a"
    router.quarantine("a", "died")
    assert router.route("g", 10) == "b"
    assert router.route("other", 1) == "b"
    router.restore("a")
    assert router.route("new", 1) == "a"
    assert router.route("g", 10) == "b", "it has moved, with its prefix cache"


def test_no_replica_left_is_an_error_with_every_first_reason() -> None:
    router = Router(["a", "b"])
    router.quarantine("a", "out of memory")
    router.quarantine("a", "does not answer")
    router.quarantine("b", "missed a sync")
    with pytest.raises(NoReplica, match=r"all 2 .*a: out of memory; b: missed a sync"):
        router.route("g", 1)


def test_more_tokens_back_than_sent_are_refused() -> None:
    router = Router(["a"])
    router.route("g", 10)
    with pytest.raises(ValueError, match="11 tokens came back from 'a', but only 10 were outstanding"):
        router.done("a", 11)


def test_unknown_and_missing_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        Router([])
    with pytest.raises(ValueError, match="unknown replica 'c'; known are"):
        Router(["a"]).quarantine("c", "x")


def test_a_replica_set_aside_gives_its_groups_up_and_waits_for_a_new_one() -> None:
    router = Router(["a", "b", "c"])
    for group in ("g1", "g2", "g3"):
        router.route(group, 10)
    router.set_aside("a")
    assert router.in_service == ["b", "c"]
    assert router.home("g1") is None
    router.done("a", 10)
    assert router.route("g1", 10) == "b", "a is empty, but g1 has begun"
    assert router.home("g1") == "b"
    router.route("g3", 20)
    assert router.route("new", 1) == "a"
    assert router.in_service == ["a", "b", "c"]
    assert router.groups("a") == {"new"}


def test_a_group_that_finds_no_room_elsewhere_goes_to_a_replica_set_aside() -> None:
    router = Router(["a", "b"])
    router.route("g1", 10)
    router.route("g2", 10)
    router.limit("b", 1)
    router.set_aside("a")
    router.done("a", 10)
    assert router.route("g1", 10) == "a"
    assert router.in_service == ["a", "b"]


def test_a_group_of_a_lost_replica_leaves_the_one_set_aside_alone() -> None:
    router = Router(["a", "b", "c"])
    for group in ("g1", "g2", "g3"):
        router.route(group, 10)
    router.set_aside("a")
    router.done("a", 10)
    router.quarantine("b", "died")
    assert router.route("g2", 10) == "c"
    router.quarantine("c", "died")
    assert router.route("g2", 10) == "a"


def test_a_new_engine_is_not_set_aside() -> None:
    router = Router(["a", "b"])
    router.set_aside("a")
    router.restore("a")
    assert router.in_service == ["a", "b"]
    with pytest.raises(ValueError, match="unknown replica 'c'"):
        router.set_aside("c")


@pytest.mark.parametrize(
    ("num_replicas", "num_workers", "groups_each"),
    [(16, 16, 4), (16, 4, 8), (4, 16, 1), (2, 8, 3), (6, 4, 3), (3, 1, 7), (1, 5, 2)],
)
def test_workers_that_know_nothing_of_each_other_spread_their_groups(
    num_replicas: int, num_workers: int, groups_each: int
) -> None:
    names = [f"e{i}" for i in range(num_replicas)]
    sent = dict.fromkeys(names, 0)
    for worker in range(num_workers):
        order = order_of(names, worker=worker, num_workers=num_workers)
        assert sorted(order) == sorted(names)
        router = Router(order)
        for group in range(groups_each):
            replica = router.route(f"{worker}-{group}", 4096)
            assert replica is not None
            sent[replica] += 1
    fair = num_workers * groups_each / num_replicas
    assert min(sent.values()) >= fair - 1
    assert max(sent.values()) <= fair + 1
