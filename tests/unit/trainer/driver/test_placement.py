"""What every actor takes, which node it goes to, and what an engine is shown of devices that it shares."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.scripted_run import config
from trainer.driver.placement import (
    RESTARTED,
    Node,
    Placement,
    assign_free_nodes,
    assign_nodes,
    check_fits,
    describe_idle_devices,
    plan_placement,
    ranks_of,
)
from trainer.errors import ConfigurationError

HIP, CUDA = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def sized(ranks: int, replicas: int, tp: int = 1, *, workers: int = 1, per_device: int = 1, **mode: Any) -> Any:
    rollout = {"num_replicas": replicas, "tensor_parallel_size": tp, "engines_per_device": per_device}
    return config(learner={"num_ranks": ranks}, rollout={**rollout, "num_workers": workers}, mode=mode)


def plan(*sizes: int, workers: int = 1, per_device: int = 1) -> Placement:
    """With separate devices, of (ranks, replicas, tensor parallel size)."""
    return plan_placement(sized(*sizes, workers=workers, per_device=per_device), resource="GPU")


def shared(replicas: int, tp: int) -> tuple[Any, Placement]:
    cfg = sized(replicas * tp, replicas, tp, name="colocated", in_flight="abort")
    return cfg, plan_placement(cfg, resource="GPU")


def hosts(*gpus: int, cpus: float = 16, driver: int = 0) -> list[Node]:
    return [
        Node(node_id=f"n{i}", address=f"10.0.0.{i}", resources={"CPU": cpus, "GPU": count}, is_driver=i == driver)
        for i, count in enumerate(gpus)
    ]


def by_node(chosen: dict[str, str], kind: str) -> dict[str, int]:
    return dict(Counter(node for name, node in chosen.items() if name.startswith(f"{kind}_")))


# --- what actors take ---


@pytest.mark.parametrize(
    ("resource", "learner", "engine", "num_devices", "num_cpus"),
    [
        (None, {"num_cpus": 2}, {"num_cpus": 4}, 0, 2 * (4 + 3 * 2) + 2.5),
        ("GPU", {"num_gpus": 1, "num_cpus": 1}, {"num_gpus": 2, "num_cpus": 1}, 10, 4 + 3 + 2.5),
        ("NPU", {"resources": {"NPU": 1}, "num_cpus": 1}, {"resources": {"NPU": 2}, "num_cpus": 1}, 10, 4 + 3 + 2.5),
    ],
)
def test_every_actor_gets_its_devices(
    resource: str | None, learner: dict[str, Any], engine: dict[str, Any], num_devices: int, num_cpus: float
) -> None:
    cfg = replace(sized(4, 3, 2, workers=5), device=config(device={"cpu_threads": 2}).device)
    placement = plan_placement(cfg, resource=resource)
    found = [placement.options(name) for name in ("learner_3", "replica_2", "rollout_worker_4")]
    assert found == [learner, engine, {"num_cpus": 0.5}]
    assert (placement.num_devices, placement.num_cpus) == (num_devices, num_cpus)


def test_too_few_devices_are_refused_with_the_sum_and_what_is_there() -> None:
    cfg = sized(4, 3, 2)
    placement = plan_placement(cfg, resource="GPU")
    check_fits(cfg, placement, backend="cuda", num_devices=10, where="this host")
    with pytest.raises(ConfigurationError, match=r"(?s)4 \+ 3 \* 2 = 10.*this host has 9 cuda devices"):
        check_fits(cfg, placement, backend="cuda", num_devices=9, where="this host")
    plain = plan_placement(sized(1000, 1), resource=None)
    check_fits(cfg, plain, backend="cpu", num_devices=0, where="this host")


def test_a_restarted_actor_gets_the_place_and_the_devices_of_the_lost_one() -> None:
    placement = replace(plan(1, 2, 4), strategies={"replica_1": "there"}, engine_devices={"replica_1": ("1",)})
    restarted = f"replica_1{RESTARTED}3"
    assert placement.options(restarted) == {"num_gpus": 4, "num_cpus": 1, "scheduling_strategy": "there"}
    assert placement.options("replica_0") == {"num_gpus": 4, "num_cpus": 1}
    assert placement.devices(restarted) == ("1",)
    assert placement.devices("replica_0") == placement.devices("learner_0") == ()


# --- nodes ---


@pytest.mark.parametrize(
    ("sizes", "nodes", "learners", "engines"),
    [
        pytest.param((4, 4), hosts(8, 8), {"n0": 4}, {"n0": 2, "n1": 2}, id="engines are spread, learners are not"),
        pytest.param((4, 1, 4), hosts(4, 4, driver=1), {"n1": 4}, {"n0": 1}, id="the driver's node is the first"),
        pytest.param((8, 1, 4), hosts(4, 8), {"n1": 8}, {"n0": 1}, id="unless only another holds all learners"),
        pytest.param((12, 2, 2), hosts(8, 8), {"n0": 8, "n1": 4}, {"n1": 2}, id="two nodes where one is too small"),
        # Learners on one node of three would leave a device that no engine of two can use.
        pytest.param((2, 2, 2), hosts(3, 3), {"n0": 1, "n1": 1}, {"n0": 1, "n1": 1}, id="engines need one piece"),
    ],
)
def test_learners_share_few_nodes_and_leave_room_for_engines(
    sizes: tuple[int, ...], nodes: list[Node], learners: dict[str, int], engines: dict[str, int]
) -> None:
    chosen = assign_nodes(plan(*sizes), nodes)
    assert (by_node(chosen, "learner"), by_node(chosen, "replica")) == (learners, engines)
    by_rank = [chosen[f"learner_{rank}"] for rank in range(sizes[0])]
    assert by_rank == sorted(by_rank), "ranks of a node follow each other"


def test_workers_stay_with_the_driver_while_there_is_room() -> None:
    # Four learners take four CPUs of the driver's five, which leaves room for two workers of half a CPU.
    chosen = assign_nodes(plan(4, 1, 4, workers=5), hosts(4, 4, cpus=5))
    assert by_node(chosen, "rollout_worker") == {"n0": 2, "n1": 3}


@pytest.mark.parametrize("sizes", itertools.product((1, 3, 8), (1, 2, 5), (1, 2, 4)))
@pytest.mark.parametrize("gpus", [(8,), (8, 8), (4, 4, 4), (2, 8, 3, 1)])
def test_no_node_holds_more_than_it_has(sizes: tuple[int, int, int], gpus: tuple[int, ...]) -> None:
    placement, nodes = plan(*sizes, workers=3), hosts(*gpus)
    try:
        chosen = assign_nodes(placement, nodes)
    except ConfigurationError:
        ranks, replicas, tp = sizes
        num_whole = sum(count // tp for count in gpus)
        assert ranks + replicas * tp > sum(gpus) or replicas > num_whole, "it would have fitted"
        return
    assert chosen.keys() == placement.bundles.keys()
    for node in nodes:
        for resource, there_is in node.resources.items():
            here = [name for name, where in chosen.items() if where == node.node_id]
            assert sum(placement.bundles[name].get(resource, 0) for name in here) <= there_is


def test_what_does_not_fit_is_refused_with_what_is_asked_and_what_every_node_has() -> None:
    with pytest.raises(ConfigurationError) as caught:
        assign_nodes(plan(2, 1, 8), hosts(4, 4))
    for words in (
        "2 learners of 1 CPU + 1 GPU, 1 replica of 1 CPU + 8 GPU, 1 rollout worker of 0.5 CPU",
        "10.0.0.0 (driver): 16 CPU + 4 GPU; 10.0.0.1: 16 CPU + 4 GPU",
        "no node has 1 CPU + 8 GPU",
    ):
        assert words in str(caught.value)
    with pytest.raises(ConfigurationError, match="CPUs count too"):
        assign_nodes(plan(2, 2), hosts(4, cpus=2))


def test_what_is_free_decides_and_what_others_hold_is_waited_for_only_where_it_must_be() -> None:
    """An engine of 4 devices has room in one piece only if the learners do not take a part of each free node."""
    placement, nodes, cpus = plan(4, 1, 4), hosts(8, 4, 4), {"CPU": 16.0}
    free = {"n0": cpus, "n1": {**cpus, "GPU": 4.0}, "n2": {**cpus, "GPU": 4.0}}
    chosen = assign_free_nodes(placement, nodes, free)
    assert (by_node(chosen, "learner"), by_node(chosen, "replica")) == ({"n1": 4}, {"n2": 1})
    assert by_node(chosen, "rollout_worker") == {"n0": 1}
    by_totals = assign_nodes(placement, nodes)
    assert assign_free_nodes(placement, nodes, {**free, "n2": cpus}) == by_totals
    assert assign_free_nodes(placement, nodes, {}) == by_totals
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1: 16 CPU \+ 4 GPU"):
        assign_free_nodes(plan(4, 4, 4), nodes, free)


@pytest.mark.parametrize(
    ("placement", "gpus", "expected"),
    [
        # the recipes' 4 + 4 devices on three nodes of 8, and docs/multinode.md with all 24
        (plan(4, 4), (8, 8, 8), "8 of 24 GPU; 3 on 10.0.0.0, 6 on 10.0.0.1, 7 on 10.0.0.2 stay idle"),
        (plan(8, 16), (8, 8, 8), None),
        (plan(1, 1), (2, 0), None),
        (plan(1, 6, per_device=3), (3,), None),
        (plan(1, 5, per_device=2), (8,), "4 of 8 GPU; 4 on 10.0.0.0 stay idle"),
        # a shared device is in use, and counts once
        (shared(4, 1)[1], (4,), None),
        (shared(4, 1)[1], (6,), "4 of 6 GPU; 2 on 10.0.0.0 stay idle"),
    ],
)
def test_idle_devices_are_named_with_their_nodes(
    placement: Placement, gpus: tuple[int, ...], expected: str | None
) -> None:
    chosen = assign_nodes(placement, hosts(*gpus))
    assert describe_idle_devices(chosen, placement.bundles, hosts(*gpus), resource="GPU") == expected


# --- shared devices ---


def test_engines_divide_a_device_that_they_share_with_its_learner_or_have_to_themselves() -> None:
    cfg = sized(2, 6, per_device=3, name="colocated", in_flight="abort")
    placement = plan_placement(cfg, resource="GPU")
    assert placement.num_devices == 2
    units = [["learner_0", "replica_0", "replica_1", "replica_2"], ["learner_1", "replica_3", "replica_4", "replica_5"]]
    assert placement.units == [*units, ["rollout_worker_0"]]
    assert [[*ranks_of(i, cfg)] for i in range(6)] == [[0]] * 3 + [[1]] * 3
    apart = plan(1, 5, per_device=2)
    assert (apart.num_devices, apart.options("replica_4")) == (1 + 3, {"num_cpus": 1, "num_gpus": 0.5})
    assert apart.units[1:4] == [["replica_0", "replica_1"], ["replica_2", "replica_3"], ["replica_4"]]
    assert placement.is_paired and not apart.is_paired
    with pytest.raises(
        ConfigurationError, match=r"(?s)engines_per_device = 1 \+ 5 / 2, rounded up: 4\n.*this host has 3 cuda"
    ):
        check_fits(sized(1, 5, per_device=2), apart, backend="cuda", num_devices=3, where="this host")


def test_an_engine_is_on_the_node_of_its_learners_and_ray_counts_their_devices_once() -> None:
    cfg, placement = shared(2, 2)
    assert placement.num_devices == 4
    assert (placement.bundles["learner_3"], placement.bundles["replica_1"]) == ({"CPU": 1, "GPU": 1}, {"CPU": 1})
    units = [["learner_0", "learner_1", "replica_0"], ["learner_2", "learner_3", "replica_1"]]
    assert placement.units == [*units, ["rollout_worker_0"]]
    with pytest.raises(ConfigurationError, match=r"(?s)learner.num_ranks = 4.*this host has 3 cuda devices"):
        check_fits(cfg, placement, backend="cuda", num_devices=3, where="this host")
    # Three devices per node: the pairs of two must not be cut.
    chosen = assign_nodes(placement, hosts(3, 3))
    for unit in units:
        assert len({chosen[name] for name in unit}) == 1
    assert by_node(chosen, "learner") == {"n0": 2, "n1": 2}
    with pytest.raises(ConfigurationError):
        assign_nodes(placement, hosts(1, 3))


def test_numbers_that_leave_a_device_alone_are_refused_but_a_cpu_has_none() -> None:
    cfg = sized(3, 2, 2, name="colocated", in_flight="abort")
    with pytest.raises(ConfigurationError, match=r"(?s)learner.num_ranks = 3.*2 \* 2 = 4"):
        plan_placement(cfg, resource="GPU")
    placement = plan_placement(cfg, resource=None)
    assert not placement.is_paired
    assert placement.num_cpus == pytest.approx(3 + 4 + 0.5)
