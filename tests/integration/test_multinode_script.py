"""`scripts/multinode.sh` as its users start it: on a head and on one more node, each with an address of its own on this
machine. An engine of two devices has room on one of them only."""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.fakes.ports import free_port
from tests.fakes.trainer_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[..., subprocess.Popen[bytes]]

pytestmark = pytest.mark.timeout(1000)

RUN = (
    "device=cpu",
    "learner.num_ranks=1",
    "rollout.tensor_parallel_size=2",
    "rollout.group_size=2",
    "trainer.groups_per_step=4",
    "trainer.total_steps=2",
    "trainer.eval_every=0",
    "trainer.stop_at_accuracy=null",
    "telemetry.progress=plain",
    "trainer.eval_at_start=false",
    "trainer.eval_at_end=false",
    "checkpoint.save_at_end=false",
    "checkpoint.export_hf=false",
)


@pytest.fixture
def start(tmp_path: Path, tiny_cache: Path) -> Iterator[Start]:
    """`start(number, *arguments)`: the script on node `number`. Output goes to `node{number}.out`."""
    (tmp_path / "home").mkdir()
    settings = {
        "HOME": str(tmp_path / "home"),  # where Ray keeps the token that all nodes need
        "TANDEM_CACHE_DIR": str(tiny_cache),
        "TANDEM_RAY_PORT": str(free_port()),
        "TANDEM_RAY_ARGS": "--num-cpus=2 --object-store-memory=83886080",
        "TANDEM_NODES_TIMEOUT_S": "120",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # a node gives up a head that is gone; Ray's default is 60
    }
    started: list[subprocess.Popen[bytes]] = []

    def begin(number: int, *arguments: str) -> subprocess.Popen[bytes]:
        own = {"TANDEM_HOST": f"127.0.0.{number + 1}", "TANDEM_NODE": f"node-{number}"}
        with (tmp_path / f"node{number}.out").open("wb") as output:
            started.append(
                subprocess.Popen(
                    ["bash", "scripts/multinode.sh", *arguments],
                    cwd=ROOT, env={**os.environ, **settings, **own}, stdout=output, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait(10)


def test_a_head_trains_over_two_nodes_and_the_other_one_is_released_when_it_is_done(
    start: Start, tmp_path: Path
) -> None:
    token = tmp_path / "home" / ".ray" / "auth_token"
    refused = start(2, "worker", "127.0.0.2")
    assert refused.wait(60) == 2, "nobody without the token may run code on the cluster"
    assert "there is no Ray token on this node" in (tmp_path / "node2.out").read_text()

    head = start(1, "head", "2", *RUN, f"run_dir={tmp_path / 'run'}")
    until = time.monotonic() + 60
    while not token.exists():
        assert time.monotonic() < until, (tmp_path / "node1.out").read_text()
        time.sleep(0.1)
    other = start(2, "worker", "127.0.0.2")
    try:
        code = head.wait(800)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end: {(tmp_path / 'node1.out').read_text()[-4000:]}")
    text = (tmp_path / "node1.out").read_text()
    assert code == 0, text[-4000:]
    assert "step 2/2" in text
    seats = re.search(r"nodes: (.*)", text)
    assert seats is not None, text[-4000:]
    places = sorted(place.partition(": ")[2] for place in seats[1].split("; "))
    assert places == ["learner_0, rollout_worker_0", "replica_0"], "an engine is on one node"
    assert other.wait(60) == 0, (tmp_path / "node2.out").read_text()[-2000:]
