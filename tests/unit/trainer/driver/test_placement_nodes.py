"""Which node every actor goes to."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.fakes.scripted_run import config
from trainer.driver.placement import (
    RESTARTED,
    Node,
    Placement,
    assign_free_nodes,
    assign_nodes,
    bundle_of,
    bundles_by_actor,
    describe_idle_devices,
    plan_placement,
)
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig


def sized(ranks: int, replicas: int, tp: int, workers: int = 1) -> tuple[RunConfig, Placement]:
    cfg = config(
        learner={"num_ranks": ranks},
        rollout={"num_replicas": replicas, "tensor_parallel_size": tp, "num_workers": workers},
    )
    return cfg, plan_placement(cfg, resource="GPU")


def hosts(*gpus: int, cpus: float = 16, driver: int = 0) -> list[Node]:
    return [
        Node(node_id=f"n{i}", address=f"10.0.0.{i}", resources={"CPU": cpus, "GPU": count}, is_driver=i == driver)
        for i, count in enumerate(gpus)
    ]


def by_node(seats: dict[str, str], kind: str) -> dict[str, int]:
    return dict(Counter(node for name, node in seats.items() if name.startswith(f"{kind}_")))


def test_learners_share_one_node_and_engines_are_spread_over_all() -> None:
    seats = assign_nodes(*sized(4, 4, 1), hosts(8, 8))
    assert by_node(seats, "learner") == {"n0": 4}
    assert by_node(seats, "replica") == {"n0": 2, "n1": 2}


def test_the_drivers_node_is_the_learners_first_choice() -> None:
    assert by_node(assign_nodes(*sized(4, 1, 4), hosts(4, 4, driver=1)), "learner") == {"n1": 4}


def test_learners_leave_the_drivers_node_if_only_another_holds_all_of_them() -> None:
    assert by_node(assign_nodes(*sized(8, 1, 4), hosts(4, 8)), "learner") == {"n1": 8}


def test_learners_take_two_nodes_only_where_one_does_not_do() -> None:
    seats = assign_nodes(*sized(12, 2, 2), hosts(8, 8))
    assert by_node(seats, "learner") == {"n0": 8, "n1": 4}
    assert [seats[f"learner_{rank}"] for rank in range(12)] == ["n0"] * 8 + ["n1"] * 4


def test_learners_make_room_where_engines_need_it_in_one_piece() -> None:
    """Learners on one node of three would leave a device that no engine of two can use."""
    seats = assign_nodes(*sized(2, 2, 2), hosts(3, 3))
    assert by_node(seats, "learner") == by_node(seats, "replica") == {"n0": 1, "n1": 1}


def test_workers_stay_with_the_driver_while_there_is_room() -> None:
    nodes = hosts(4, 4, cpus=5)
    # Four learners take four CPUs of the driver's five: two workers of half a CPU are left a place.
    seats = assign_nodes(*sized(4, 1, 4, workers=5), nodes)
    assert by_node(seats, "rollout_worker") == {"n0": 2, "n1": 3}


@pytest.mark.parametrize("sizes", itertools.product((1, 3, 8), (1, 2, 5), (1, 2, 4)))
@pytest.mark.parametrize("gpus", [(8,), (8, 8), (4, 4, 4), (2, 8, 3, 1)])
def test_no_node_holds_more_than_it_has(sizes: tuple[int, int, int], gpus: tuple[int, ...]) -> None:
    cfg, placement = sized(*sizes, workers=3)
    nodes = hosts(*gpus)
    try:
        seats = assign_nodes(cfg, placement, nodes)
    except ConfigurationError:
        ranks, replicas, tp = sizes
        num_whole = sum(count // tp for count in gpus)
        assert ranks + replicas * tp > sum(gpus) or replicas > num_whole, "it would have fitted"
        return
    bundles = bundles_by_actor(cfg, placement)
    assert seats.keys() == bundles.keys()
    for node in nodes:
        for resource, there_is in node.resources.items():
            taken = sum(bundles[name].get(resource, 0) for name, where in seats.items() if where == node.node_id)
            assert taken <= there_is


def test_what_does_not_fit_is_refused_with_what_is_asked_and_what_every_node_has() -> None:
    with pytest.raises(ConfigurationError) as caught:
        assign_nodes(*sized(2, 1, 8), hosts(4, 4))
    text = str(caught.value)
    assert "2 learners of 1 CPU + 1 GPU, 1 replica of 1 CPU + 8 GPU, 1 rollout worker of 0.5 CPU" in text
    assert "10.0.0.0 (driver): 16 CPU + 4 GPU; 10.0.0.1: 16 CPU + 4 GPU" in text
    assert "no node has 1 CPU + 8 GPU" in text


def test_what_is_free_decides_and_what_others_hold_is_waited_for_only_where_it_must_be() -> None:
    """An engine of 4 devices has room in one piece only if the learners do not take a part of each free node."""
    cfg, placement = sized(4, 1, 4)
    nodes, cpus = hosts(8, 4, 4), {"CPU": 16.0}
    free = {"n0": cpus, "n1": {**cpus, "GPU": 4.0}, "n2": {**cpus, "GPU": 4.0}}
    seats = assign_free_nodes(cfg, placement, nodes, free)
    assert (by_node(seats, "learner"), by_node(seats, "replica")) == ({"n1": 4}, {"n2": 1})
    assert by_node(seats, "rollout_worker") == {"n0": 1}
    by_totals = assign_nodes(cfg, placement, nodes)
    assert assign_free_nodes(cfg, placement, nodes, {**free, "n2": cpus}) == by_totals
    assert assign_free_nodes(cfg, placement, nodes, {}) == by_totals
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1: 16 CPU \+ 4 GPU"):
        assign_free_nodes(*sized(4, 4, 4), nodes, free)


def test_a_lack_of_cpus_alone_is_refused_too() -> None:
    with pytest.raises(ConfigurationError, match="CPUs count too"):
        assign_nodes(*sized(2, 2, 1), hosts(4, cpus=2))


def test_a_restarted_engine_sits_where_the_lost_one_sat() -> None:
    _, placement = sized(1, 2, 4)
    seated = Placement(
        learner=placement.learner,
        engine=placement.engine,
        rollout_worker=placement.rollout_worker,
        num_devices=9,
        num_cpus=4,
        seats={"replica_0": "here", "replica_1": "there"},
    )
    assert seated.options(f"replica_1{RESTARTED}3") == {"num_gpus": 4, "num_cpus": 1, "scheduling_strategy": "there"}
    assert placement.options("replica_1") == {"num_gpus": 4, "num_cpus": 1}


def test_resources_are_named_as_ray_names_them() -> None:
    assert bundle_of({"resources": {"NPU": 2}, "num_cpus": 1}) == {"CPU": 1.0, "NPU": 2.0}


@pytest.mark.parametrize(
    ("sizes", "gpus", "expected"),
    [
        # the recipes' 4 + 4 devices on three nodes of 8
        ((4, 4, 1), (8, 8, 8), "8 of 24 GPU; 3 on 10.0.0.0, 6 on 10.0.0.1, 7 on 10.0.0.2 stay idle"),
        # docs/multinode.md: all 24
        ((8, 16, 1), (8, 8, 8), None),
        ((4, 2, 2), (8,), None),
        ((1, 1, 1), (8,), "2 of 8 GPU; 6 on 10.0.0.0 stay idle"),
        ((1, 1, 1), (2, 0), None),
    ],
)
def test_devices_that_nobody_has_are_named_with_their_nodes(
    sizes: tuple[int, int, int], gpus: tuple[int, ...], expected: str | None
) -> None:
    cfg, placement = sized(*sizes)
    nodes = hosts(*gpus)
    chosen = assign_nodes(cfg, placement, nodes)
    assert describe_idle_devices(chosen, bundles_by_actor(cfg, placement), nodes, resource="GPU") == expected


def test_a_shared_device_is_in_use_and_counts_once() -> None:
    cfg = config(mode={"name": "colocated", "max_staleness": 0}, learner={"num_ranks": 4}, rollout={"num_replicas": 4})
    placement, nodes = plan_placement(cfg, resource="GPU"), hosts(4)
    chosen = assign_nodes(cfg, placement, nodes)
    assert describe_idle_devices(chosen, bundles_by_actor(cfg, placement), nodes, resource="GPU") is None
    assert describe_idle_devices(chosen, bundles_by_actor(cfg, placement), hosts(6), resource="GPU") == (
        "4 of 6 GPU; 2 on 10.0.0.0 stay idle"
    )
