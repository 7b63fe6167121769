"""What has a limit of its own on a Ray cluster that exists: the wait for room, and the wait of a node for its head."""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.util import placement_group

from tests.fakes.trainer_process import ROOT, TrainerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def head() -> Iterator[RayCluster]:
    cluster = RayCluster(shutdown_at_exit=False)
    cluster.add_node(num_cpus=3, object_store_memory=80 * 2**20, include_dashboard=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_run_waits_for_room_that_others_hold_no_longer_than_it_was_told(head: RayCluster, tmp_path: Path) -> None:
    ray.init(address=head.address, log_to_driver=False)
    assert placement_group([{"CPU": 2}]).wait(30)
    limit_s = 3
    run = TrainerProcess(
        tmp_path / "run",
        "device=cpu",
        "learner.num_ranks=1",
        f"ray.address={head.address}",
        f"ray.placement_timeout_s={limit_s}",
        cache=tmp_path / "cache",
    )
    try:
        assert run.wait(timeout_s=120.0) == 2, run.text[-3000:]
    finally:
        run.close()
    assert f"after ray.placement_timeout_s={limit_s} others still held it" in run.text
    assert "no room for " in run.text
    assert "the Ray cluster is large enough" in run.text


class LentNode:
    """`scripts/multinode.sh worker` in a session of its own, with the daemons that it starts."""

    def __init__(self, tmp_path: Path, address: str, *, limit_s: int) -> None:
        self._output = tmp_path / "worker.out"
        host, _, port = address.rpartition(":")
        settings = {
            "TANDEM_RAY_PORT": port,
            "TANDEM_NODES_TIMEOUT_S": str(limit_s),
            "TANDEM_RAY_ARGS": "--num-cpus=1 --object-store-memory=83886080",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # Ray's own patience with a head that is gone; 60 by default
        }
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "scripts/multinode.sh", "worker", host],
                cwd=ROOT,
                env={**os.environ, **settings},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._output.read_text()

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def close(self) -> None:
        """Its own trap stops its daemons."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)


def test_a_node_whose_head_does_not_come_ends_with_code_2(tmp_path: Path) -> None:
    node = LentNode(tmp_path, "127.0.0.1:1", limit_s=1)
    try:
        assert node.wait(120.0) == 2, node.text
    finally:
        node.close()
    assert "no cluster at 127.0.0.1:1 within 1 s" in node.text


def test_a_node_whose_head_ends_ends_with_code_0(head: RayCluster, tmp_path: Path) -> None:
    ray.init(address=head.address, log_to_driver=False)
    node = LentNode(tmp_path, head.address, limit_s=120)
    try:
        deadline = time.monotonic() + 60.0
        while sum(one["Alive"] for one in ray.nodes()) < 2:
            assert time.monotonic() < deadline, node.text
            time.sleep(0.2)
        ray.shutdown()
        head.shutdown()
        assert node.wait(200.0) == 0, node.text
    finally:
        node.close()
    assert "lending this node" in node.text
