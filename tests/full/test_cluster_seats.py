"""Where Ray puts the actors of a run on a cluster that others use too. The devices are numbers that Ray counts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.fakes.scripted_run import config
from trainer.driver import cluster
from trainer.driver.placement import plan_placement
from weight_sync.device.visibility import show_own_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.timing, pytest.mark.timeout(300)]


@pytest.fixture
def two_nodes() -> Iterator[list[str]]:
    """Ids of two nodes of 3 devices each, the driver's first."""
    nodes = RayCluster(shutdown_at_exit=False)
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=8, num_gpus=3, object_store_memory=80 * 2**20, include_dashboard=False)
        ray.init(address=nodes.address, log_to_driver=False)
        own = ray.get_runtime_context().get_node_id()
        yield sorted((node["NodeID"] for node in ray.nodes()), key=lambda node: node != own)
    finally:
        ray.shutdown()
        nodes.shutdown()


class Actor:
    """Tells where it is."""

    def seat(self) -> tuple[str, tuple[str, ...]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), tuple(sorted(context.get_accelerator_ids()["GPU"]))


class Shown:
    """An actor as an engine is one, with a loop, on a fake of a backend for which Ray must not set the variable."""

    def __init__(self) -> None:
        show_own_devices("rocm", ray)

    async def seen(self) -> tuple[list[str], str]:
        own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return sorted(own), os.environ["HIP_VISIBLE_DEVICES"]


def hold(node: str, num_gpus: int) -> Any:
    """Another one's actor on this node."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(Actor).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=where).remote()
    ray.get(actor.seat.remote())
    return actor


def seats(cfg: Any) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of an actor -> its node and its devices, once all of them have been started."""
    placement = cluster._reserve(cfg, plan_placement(cfg, resource="GPU"), resource="GPU")
    actors = {name: ray.remote(Actor).options(**placement.options(name)).remote() for name in placement.strategies}
    return {name: ray.get(actor.seat.remote(), timeout=60) for name, actor in actors.items()}


def test_an_engine_and_the_learners_whose_devices_it_shares_are_on_one_node_wherever_they_go(
    two_nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's node was free when the run chose, and is not when it comes."""
    here, there = two_nodes
    free = cluster._free()
    monkeypatch.setattr(cluster, "_free", lambda: free)
    other = hold(here, 2)
    cfg = config(
        learner={"num_ranks": 2},
        rollout={"num_replicas": 1, "tensor_parallel_size": 2},
        mode={"name": "colocated", "in_flight": "abort", "max_staleness": 0},
        ray={"address": "auto"},
    )
    found = seats(cfg)
    assert {found[name][0] for name in ("learner_0", "learner_1", "replica_0")} == {there}
    (first,), (second,) = found["learner_0"][1], found["learner_1"][1]
    assert first != second, "a learner has a device of its own"
    assert found["replica_0"][1] == ()
    del other


def test_a_run_takes_what_is_free_where_the_first_choice_is_held_by_others(two_nodes: list[str]) -> None:
    """By what the nodes have, the learners would be on the driver's and the engine on the other: two devices there."""
    here, there = two_nodes
    other = hold(there, 2)
    cfg = config(
        learner={"num_ranks": 1},
        rollout={"num_replicas": 1, "tensor_parallel_size": 3},
        ray={"address": "auto", "placement_timeout_s": 5.0},
    )
    found = seats(cfg)
    assert (found["learner_0"][0], found["replica_0"][0]) == (there, here)
    del other


def test_who_finds_no_room_is_told_what_is_left_of_every_node(two_nodes: list[str]) -> None:
    here, _ = two_nodes
    other = hold(here, 1)
    cfg = config(
        learner={"num_ranks": 3}, rollout={"tensor_parallel_size": 3}, ray={"address": "auto", "placement_timeout_s": 3}
    )
    with pytest.raises(cluster.ConfigurationError) as caught:
        seats(cfg)
    text = str(caught.value)
    assert "besides what others hold and what was reserved for the rest of this run" in text
    assert "others still held" not in text
    del other


def test_actors_for_which_ray_sets_nothing_see_the_whole_host_and_their_own_devices_first(two_nodes: list[str]) -> None:
    here, _ = two_nodes
    where = NodeAffinitySchedulingStrategy(here, soft=False)
    actors = [
        ray.remote(Shown).options(num_cpus=1, num_gpus=count, scheduling_strategy=where).remote() for count in (1, 2)
    ]
    (first, seen_first), (second, seen_second) = ray.get([actor.seen.remote() for actor in actors], timeout=60)
    assert sorted(first + second) == ["0", "1", "2"]
    assert seen_first.split(",") == first + second
    assert seen_second.split(",") == second + first
