"""A run on a Ray cluster of several nodes: raylets of one machine, each with its own node name and loopback address, so
that weights may not take the way that only processes of one node have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from ray.cluster_utils import Cluster as RayCluster

from tests.fakes.process_life import command_line, is_running
from tests.fakes.trainer_process import ROOT, TrainerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS = 2
SMALL = (
    "device=cpu",
    "learner.num_ranks=2",
    "rollout.num_replicas=2",
    "rollout.max_engine_restarts=0",
    "rollout.group_size=4",
    "trainer.groups_per_step=8",
    "trainer.total_steps=100000",
    "trainer.eval_at_start=false",
    "trainer.eval_at_end=false",
    "trainer.eval_every=0",
    "trainer.stop_at_accuracy=null",
    "checkpoint.every_steps=0",
    "checkpoint.save_at_end=false",
    "checkpoint.export_hf=false",
)

pytestmark = [pytest.mark.timing, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(shutdown_at_exit=False)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def add(cluster: RayCluster, number: int, *, num_cpus: int) -> Any:
    """Node number i has the address 127.0.0.(i + 1); the first one is the head, where the driver is."""
    env = {"TANDEM_NODE": f"node-{number}", "TANDEM_HOST": f"127.0.0.{number + 1}", "PYTHONPATH": str(ROOT)}
    return cluster.add_node(num_cpus=num_cpus, env_vars=env, object_store_memory=80 * 2**20, include_dashboard=False)


def processes(node: Any, name: str) -> list[psutil.Process]:
    """Those of the node that have `name` on their command line."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [process for process in raylet.children(recursive=True) if name in command_line(process)]


def lose(cluster: RayCluster, node: Any) -> None:
    """As if its power had failed."""
    cluster.remove_node(node, allow_graceful=False)


def test_a_run_spans_nodes_survives_the_loss_of_an_engine_and_ends_with_the_reason_without_its_learner(
    cluster: RayCluster, tmp_path: Path, tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the third node has room for both learner ranks; engines are on two of the others. Weights cross between
    nodes by sockets."""
    nodes = [add(cluster, number, num_cpus=2 if number == 3 else 1) for number in (1, 2, 3, 4)]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)  # several clusters may run on a machine that tests
    run = TrainerProcess(tmp_path / "run", "ray.address=auto", *SMALL, cache=tiny_cache)
    try:
        run.until(lambda: len(run.lines) >= STEPS, timeout_s=400)
        assert run.lines[0]["sync/replicas_live"] == 2
        seats = re.search(r"nodes: (.*)", run.text)
        assert seats is not None
        places = sorted(place.partition(": ")[2] for place in seats[1].split("; "))
        assert places == ["learner_0, learner_1", "replica_0", "replica_1", "rollout_worker_0"]
        ways = re.findall(r"replica_\d/0: .*?learner 0 by (\w+), learner 1 by (\w+)", run.text)
        assert ways == [("gloo", "gloo")] * 2, "nodes share no memory"
        engines = [one for node in nodes for one in processes(node, "EngineCore")]
        assert len(engines) == 2

        lose(cluster, next(node for node in nodes[1:] if processes(node, "EngineActor")))
        run.until(lambda: run.lines[-1]["sync/replicas_live"] == 1)
        before = len(run.lines)
        run.until(lambda: len(run.lines) >= before + STEPS)
        assert {line["discarded_tokens"] for line in run.lines} == {0}
        assert run.lines[-1]["buffer/failed"] == 0, "the other engine continued what the lost one had"
        assert re.search(r"(WARNING|ERROR) .*replica_[01]", run.text), "the loss is logged"
        run.until(lambda: sum(map(is_running, engines)) == 1)  # an engine that outlives its node keeps its device

        lose(cluster, nodes[2])
        assert run.wait(timeout_s=300) == 1, run.text[-4000:]
        # Weight sync or the step notices first: the step names the rank, Ray's own words the actor.
        assert re.search(r"learner rank [01]|[Aa]ctor", run.summary["error"]), run.summary["error"]
    finally:
        run.close()
