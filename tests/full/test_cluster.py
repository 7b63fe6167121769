"""A private Ray cluster that is slow to start or loses its control service, and the places that a run gets on one that
others use too. Devices are numbers that Ray counts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray._private import services
from ray.cluster_utils import Cluster as RayCluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.fakes.scripted_run import config
from trainer.driver import cluster
from trainer.driver.cluster import POLL_INTERVAL_S, Cluster, ClusterLost
from trainer.driver.placement import plan_placement
from trainer.driver.process_cleaner import RUN_ID_VAR, processes_of
from weight_sync.device.select import get_backend, take_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    SlowStarts = Callable[[int], list[tuple[str, Path]]]

pytestmark = [pytest.mark.timing, pytest.mark.timeout(300)]

# --- a private cluster ---

TOO_SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"
"""As Ray 2.60 reports it, with a plain `Exception`, after 30 s."""


@pytest.fixture
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> SlowStarts:
    """`slow_starts(2)`: at the next two starts Ray's daemons run, but the node is reported as late. Returns the id and
    the scratch directory of each, as they come."""
    found: list[tuple[str, Path]] = []
    get_node = services.get_node

    def begin(number: int) -> list[tuple[str, Path]]:
        def asked(*args: Any, **options: Any) -> Any:
            if len(found) == number:
                return get_node(*args, **options)
            run_id = os.environ[RUN_ID_VAR]
            words = [word for process in daemons(run_id) for word in process.cmdline()]
            (scratch,) = {word.partition("=")[2] for word in words if word.startswith(("--temp_dir=", "--temp-dir="))}
            found.append((run_id, Path(scratch)))
            raise Exception(TOO_SLOW)

        monkeypatch.setattr(services, "get_node", asked)
        return found

    monkeypatch.setenv(RUN_ID_VAR, "")  # set by the cluster, and restored with the rest
    return begin


def daemons(run_id: str, scratch: Path = Path("/nowhere")) -> list[Any]:
    return list(processes_of(run_id, scratch, spare=(os.getpid(),)))


def start() -> Cluster:
    cfg = config()
    return Cluster.start(cfg, plan_placement(cfg, resource=None), get_backend("cpu", cpu_threads=1))


def test_a_cluster_that_was_too_slow_once_is_started_again_and_nothing_of_the_first_is_left(
    slow_starts: SlowStarts, caplog: pytest.LogCaptureFixture
) -> None:
    slow = slow_starts(1)
    private = start()
    try:
        assert "starting it again" in caplog.text
        ((run_id, scratch),) = slow
        assert os.environ[RUN_ID_VAR] != run_id
        assert not daemons(run_id, scratch) and not scratch.exists()
        assert ray.get(ray.remote(lambda: 7).options(num_cpus=1).remote(), timeout=120) == 7
    finally:
        private.stop(keep_logs_in=None)


def test_a_cluster_that_is_too_slow_twice_is_given_up(slow_starts: SlowStarts) -> None:
    slow = slow_starts(2)
    with pytest.raises(Exception, match="timed out during startup"):
        start()
    assert len(slow) == 2
    assert not any(daemons(run_id, scratch) or scratch.exists() for run_id, scratch in slow)


def test_the_end_of_rays_control_service_is_noticed_long_before_ray_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RUN_ID_VAR, "")
    private = start()

    async def lose_it() -> None:
        watch = asyncio.create_task(private.watch())
        await asyncio.sleep(2 * POLL_INTERVAL_S)
        assert not watch.done()
        (service,) = (one for one in daemons(os.environ[RUN_ID_VAR]) if one.cmdline()[0].endswith("gcs_server"))
        service.kill()
        with pytest.raises(ClusterLost, match="control service"):
            await asyncio.wait_for(watch, 20)

    try:
        asyncio.run(lose_it())
    finally:
        private.stop(keep_logs_in=None)


# --- places on a shared cluster ---


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
    def place(self) -> tuple[str, tuple[str, ...]]:
        """Its node and its devices."""
        context = ray.get_runtime_context()
        return context.get_node_id(), tuple(sorted(context.get_accelerator_ids()["GPU"]))


class Shown:
    """An actor with a loop, like an engine, on a fake of a backend for which Ray must not set the variable."""

    def __init__(self) -> None:
        self._places = take_devices("rocm", ray)

    async def seen(self) -> tuple[list[str], tuple[int, ...]]:
        own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return sorted(own), self._places


def on(node: str) -> Any:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def hold(node: str, num_gpus: int) -> Any:
    """An actor of another run on this node."""
    actor = ray.remote(Actor).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=on(node)).remote()
    ray.get(actor.place.remote())
    return actor


def places(*, ranks: int, tp: int, mode: dict[str, Any] | None = None) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of an actor -> its node and its devices, once all of them have been started."""
    rollout = {"num_replicas": 1, "tensor_parallel_size": tp}
    limits = {"address": "auto", "placement_timeout_s": 5.0}
    cfg = config(learner={"num_ranks": ranks}, rollout=rollout, ray=limits, mode=mode or {})
    placement = cluster._reserve(cfg, plan_placement(cfg, resource="GPU"), resource="GPU")
    actors = {name: ray.remote(Actor).options(**placement.options(name)).remote() for name in placement.strategies}
    return {name: ray.get(actor.place.remote(), timeout=60) for name, actor in actors.items()}


def test_an_engine_and_the_learners_whose_devices_it_shares_are_on_one_node_wherever_they_go(
    two_nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's node was free when the run chose it, and is not any more."""
    here, there = two_nodes
    free = cluster._free()
    monkeypatch.setattr(cluster, "_free", lambda: free)
    other = hold(here, 2)
    found = places(ranks=2, tp=2, mode={"name": "colocated", "in_flight": "abort", "max_staleness": 0})
    assert {found[name][0] for name in ("learner_0", "learner_1", "replica_0")} == {there}
    (first,), (second,) = found["learner_0"][1], found["learner_1"][1]
    assert first != second, "a learner has its own device"
    assert found["replica_0"][1] == ()
    del other


def test_a_run_takes_what_is_free_where_others_hold_the_first_choice(two_nodes: list[str]) -> None:
    """By what the nodes have, learners would be on the driver's and the engine on the other: two devices there."""
    here, there = two_nodes
    other = hold(there, 2)
    found = places(ranks=1, tp=3)
    assert (found["learner_0"][0], found["replica_0"][0]) == (there, here)
    del other


def test_a_run_without_room_reports_what_is_left_of_every_node_after_its_timeout(two_nodes: list[str]) -> None:
    other = hold(two_nodes[0], 1)
    with pytest.raises(cluster.ConfigurationError) as caught:
        places(ranks=3, tp=3)
    for words in ("after ray.placement_timeout_s=5 no node had that left", "the Ray cluster is large enough"):
        assert words in str(caught.value)
    del other


def test_actors_for_which_ray_sets_nothing_see_the_whole_host_and_take_their_own_devices(two_nodes: list[str]) -> None:
    actors = [
        ray.remote(Shown).options(num_cpus=1, num_gpus=count, scheduling_strategy=on(two_nodes[0])).remote()
        for count in (1, 2)
    ]
    (first, seen_first), (second, seen_second) = ray.get([actor.seen.remote() for actor in actors], timeout=60)
    assert sorted(first + second) == ["0", "1", "2"]
    assert (seen_first, seen_second) == (tuple(map(int, first)), tuple(map(int, second)))
