"""Runs on a Ray cluster that exists, with several nodes. Here they are raylets of one machine, each with a node name
and a loopback address of its own, so that weights may not take the way that only processes of one node have.
"""

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
    "trainer.groups_per_step=8",
    "rollout.group_size=4",
    "trainer.eval_at_start=false",
    "trainer.eval_at_end=false",
    "trainer.eval_every=0",
    "trainer.stop_at_accuracy=null",
    "checkpoint.every_steps=0",
    "checkpoint.save_at_end=false",
    "checkpoint.export_hf=false",
)

pytestmark = [pytest.mark.timing, pytest.mark.timeout(900)]


class Nodes:
    """A Ray cluster on this machine; `add` returns a node that can be taken away."""

    def __init__(self) -> None:
        self._cluster = RayCluster(shutdown_at_exit=False)
        self.all: list[Any] = []

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self, *, num_cpus: int) -> Any:
        """The first one is the head, where the driver is. Node number i has the address 127.0.0.(i + 1)."""
        number = len(self.all) + 1
        env = {
            "TANDEM_NODE": f"node-{number}",
            "TANDEM_HOST": f"127.0.0.{number + 1}",
            "PYTHONPATH": str(ROOT),
        }
        self.all.append(
            self._cluster.add_node(
                num_cpus=num_cpus, env_vars=env, object_store_memory=80 * 2**20, include_dashboard=False
            )
        )
        return self.all[-1]

    def lose(self, node: Any) -> None:
        """As if its power had failed."""
        self._cluster.remove_node(node, allow_graceful=False)

    @staticmethod
    def has(node: Any, actor: str) -> bool:
        """Whether a process of that name runs on the node."""
        (raylet,) = node.all_processes["raylet"]
        return any(actor in command_line(child) for child in psutil.Process(raylet.process.pid).children())

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """With two nodes of one CPU."""
    nodes = Nodes()
    try:
        nodes.add(num_cpus=1)
        nodes.add(num_cpus=1)
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def start(tmp_path: Path, tiny_cache: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`start(*overrides)`: a run on the cluster, which it finds by itself."""
    processes: list[TrainerProcess] = []
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)  # several clusters may run on a machine that tests

    def begin(*overrides: str) -> TrainerProcess:
        process = TrainerProcess(
            tmp_path / f"run{len(processes)}", "ray.address=auto", *SMALL, *overrides, cache=tiny_cache
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.close()


def test_a_cluster_that_is_too_small_is_refused_with_what_every_node_has(start: Any) -> None:
    process = start("learner.num_ranks=1", "rollout.tensor_parallel_size=2", "trainer.total_steps=1")
    assert process.wait(timeout_s=180) == 2
    assert "1 learner of 1 CPU, 1 replica of 2 CPU, 1 rollout worker of 0.5 CPU" in process.text
    assert "1 CPU; " in process.text
    assert "no node has 2 CPU" in process.text


def engine_processes(nodes: Nodes) -> list[psutil.Process]:
    raylets = [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in nodes.all]
    everything = [one for raylet in raylets for one in raylet.children(recursive=True)]
    return [one for one in everything if "EngineCore" in command_line(one)]


def test_a_run_spans_nodes_survives_the_loss_of_an_engine_and_ends_with_the_reason_without_its_learner(
    nodes: Nodes, start: Any
) -> None:
    """Two learner ranks have room together on one node only; engines sit on nodes of their own. Weights cross between
    nodes by sockets."""
    of_learner, _ = nodes.add(num_cpus=2), nodes.add(num_cpus=1)
    process = start(
        "learner.num_ranks=2", "rollout.num_replicas=2", "rollout.max_engine_restarts=0", "trainer.total_steps=100000"
    )
    process.until(lambda: len(process.lines) >= STEPS, timeout_s=400)
    assert process.lines[0]["sync/replicas_live"] == 2
    seats = re.search(r"nodes: (.*)", process.text)
    assert seats is not None
    places = [place.partition(": ")[2] for place in seats[1].split("; ")]
    assert sorted(places) == ["learner_0, learner_1", "replica_0", "replica_1", "rollout_worker_0"]
    ways = re.findall(r"replica_\d/0: .*?learner 0 by (\w+), learner 1 by (\w+)", process.text)
    assert ways == [("gloo", "gloo")] * 2, "nodes share no memory"

    engines = engine_processes(nodes)
    assert len(engines) == 2

    # Three nodes of one CPU have two engines and the rollout worker, in any order.
    of_engine = next(node for node in nodes.all[1:] if nodes.has(node, "EngineActor"))
    nodes.lose(of_engine)
    process.until(lambda: process.lines[-1]["sync/replicas_live"] == 1)
    before = len(process.lines)
    process.until(lambda: len(process.lines) >= before + STEPS)
    assert {line["discarded_tokens"] for line in process.lines} == {0}
    assert process.lines[-1]["buffer/failed"] == 0, "what the lost engine had went on in the other one"
    assert re.search(r"(WARNING|ERROR) .*replica_[01]", process.text), "the loss was told"
    process.until(lambda: sum(map(is_running, engines)) == 1)  # an engine that outlives its node keeps its device

    nodes.lose(of_learner)
    assert process.wait(timeout_s=300) == 1, process.text[-4000:]
    # Weight sync or the step notices first: the step names the rank, Ray's own words the actor.
    assert re.search(r"learner rank [01]|[Aa]ctor", process.summary["error"]), process.summary["error"]
