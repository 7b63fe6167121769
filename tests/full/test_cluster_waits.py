"""What has a limit of its own on a Ray cluster that exists: the wait for room, and the wait of a node for its head."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.util import placement_group

from tests.fakes.trainer_process import ROOT, TrainerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timing, pytest.mark.timeout(300)]


@pytest.fixture
def head() -> Iterator[RayCluster]:
    cluster = RayCluster(shutdown_at_exit=False)
    cluster.add_node(num_cpus=3, object_store_memory=80 * 2**20, include_dashboard=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_run_waits_for_room_that_others_hold_no_longer_than_it_was_told(
    head: RayCluster, tmp_path: Path, tiny_cache: Path
) -> None:
    ray.init(address=head.address, log_to_driver=False)
    assert placement_group([{"CPU": 2}]).wait(30)
    limit_s = 3
    run = TrainerProcess(
        tmp_path / "run",
        "device=cpu",
        "learner.num_ranks=1",
        f"ray.address={head.address}",
        f"ray.placement_timeout_s={limit_s}",
        cache=tiny_cache,
    )
    try:
        assert run.wait(timeout_s=120.0) == 2, run.text[-3000:]
    finally:
        run.close()
    assert f"after ray.placement_timeout_s={limit_s} no node had that left" in run.text
    assert "no room for " in run.text
    assert "the Ray cluster is large enough" in run.text


def test_a_node_whose_head_does_not_come_ends_with_code_2() -> None:
    settings = {"TANDEM_RAY_PORT": "1", "TANDEM_NODES_TIMEOUT_S": "1"}
    ended = subprocess.run(
        ["bash", "scripts/multinode.sh", "worker", "127.0.0.1"],
        cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "no cluster at 127.0.0.1:1 within 1 s" in ended.stdout + ended.stderr
