"""`scripts/multinode.sh` on a head and one more node, each with its own address on this machine; an engine of two
devices has room on one of them only. Failures are shown with stand-ins for Ray and the trainer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.fakes.ports import free_port
from tests.fakes.process_life import is_running, wait_until
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
    """`start(number, *arguments, VARIABLE=value)`: the script on node `number`. Output goes to `node{number}.out`."""
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

    def begin(number: int, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        own = {"TANDEM_HOST": f"127.0.0.{number + 1}", "TANDEM_NODE": f"node-{number}"}
        with (tmp_path / f"node{number}.out").open("wb") as output:
            started.append(
                subprocess.Popen(
                    ["bash", "scripts/multinode.sh", *arguments],
                    cwd=ROOT, env={**os.environ, **settings, **own, **variables},
                    stdout=output, stderr=subprocess.STDOUT,
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
    refused = start(2, "worker", "127.0.0.2", TANDEM_NODES_TIMEOUT_S="0")
    assert refused.wait(60) == 2, "nobody without the token may run code on the cluster"
    assert "there is no Ray token on this node" in (tmp_path / "node2.out").read_text()

    other = start(2, "worker", "127.0.0.2")  # before the head, which makes the token in the home that they share
    await_text(tmp_path / "node2.out", "waiting for a Ray token")
    head = start(1, "head", "2", *RUN, f"run_dir={tmp_path / 'run'}")
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


# Each does as its variable says. The script's own small programs are run, except for those that need Ray or Tandem.
STAND_INS = """#!/usr/bin/env bash
case "$*" in
-c*) exec "$REAL_PYTHON" "$@" ;;
"-m ray.scripts.scripts start"*) echo $$ >"$PIDS/ray"; eval "$RAY" ;;
"-m trainer "*" --cfg job") eval "$CHECK" ;;
"-m trainer"*) echo $$ >"$PIDS/trainer"; eval "$TRAINER" ;;
*) if grep -q ray.nodes; then eval "$COUNT_NODES"; fi ;;
esac
"""
RUNS = 'echo "Ray runtime started."; exec sleep 600'
DIES = 'echo "Ray runtime started."; sleep 0.1; echo "the raylet was lost"; exit 7'
TRAINS_DEAF = 'exec "$REAL_PYTHON" -c "import time; print(\'imports\', flush=True); time.sleep(600)"'

SAVES_WITH_RAY = """trap 'sleep 0.3; kill -0 "$(cat "$PIDS/ray")" && echo saved; exit 130' INT
echo listens; while :; do sleep 0.05; done"""


@pytest.fixture
def start_alone(tmp_path: Path) -> Iterator[Start]:
    """`start_alone(*arguments, VARIABLE=value)`: the script with stand-ins. Output goes to `out`, process ids to `ray`
    and `trainer`."""
    python = tmp_path / "python"
    python.write_text(STAND_INS)
    python.chmod(0o755)
    settings = {
        "PYTHON": str(python),
        "REAL_PYTHON": sys.executable,
        "PIDS": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "RAY_AUTH_MODE": "disabled",
        "TANDEM_HOST": "127.0.0.1",
        "TANDEM_NODES_TIMEOUT_S": "60",
        "COUNT_NODES": "echo 1",
        "RAY": RUNS,
        "CHECK": "true",
        "TRAINER": TRAINS_DEAF,
    }
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "out").open("wb") as output:
            started.append(
                subprocess.Popen(
                    ["env", "--default-signal=INT", "bash", "scripts/multinode.sh", *arguments],
                    cwd=ROOT, env={**os.environ, **settings, **variables}, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )  # fmt: skip
        return started[-1]

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def await_text(file: Path, text: str) -> None:
    wait_until(lambda: file.exists() and text in file.read_text(), within_s=60.0, what=f"{file} does not say {text}")


@pytest.mark.parametrize(
    "ray",
    [
        'echo "this port is taken"; exit 1',
        'echo "Ray runtime started."; echo "this port is taken"; exec sleep 600',  # and ends while nodes are counted
    ],
    ids=["at_once", "while_it_counts"],
)
def test_no_trainer_starts_on_a_cluster_that_is_not_its_own(start_alone: Start, tmp_path: Path, ray: str) -> None:
    end_ray = 'pid=$(cat "$PIDS/ray"); kill "$pid"; while kill -0 "$pid"; do sleep 0.02; done; echo 2'
    head = start_alone("head", "2", "run_dir=one", RAY=ray, COUNT_NODES=end_ray, TRAINER="true")
    assert head.wait(30) == 2
    text = (tmp_path / "out").read_text()
    assert "this port is taken" in text
    assert "ray did not start" in text
    assert not (tmp_path / "trainer").exists()


def test_a_node_whose_head_does_not_come_ends_with_code_2(start_alone: Start, tmp_path: Path) -> None:
    """Ray itself gives up sooner, and is started again."""
    settings = {"TANDEM_RAY_PORT": "1", "TANDEM_NODES_TIMEOUT_S": "1"}
    worker = start_alone("worker", "127.0.0.1", RAY="echo 'no head'; exit 1", **settings)
    assert worker.wait(30) == 2
    assert "no cluster at 127.0.0.1:1 within 1 s" in (tmp_path / "out").read_text()


def test_a_wrong_configuration_is_reported_before_ray_starts(start_alone: Start, tmp_path: Path) -> None:
    check = 'echo "the printed configuration"; echo "asked: $*"; echo "learner.lrr: unknown key" >&2; exit 2'
    head = start_alone("head", "3", "learner.lrr=1", CHECK=check)
    assert head.wait(30) == 2
    text = (tmp_path / "out").read_text()
    assert "learner.lrr: unknown key" in text and "the printed configuration" not in text
    assert not (tmp_path / "ray").exists() and not (tmp_path / "trainer").exists()


@pytest.mark.parametrize(("head_answers", "code"), [(True, 1), (False, 0)])
def test_a_worker_fails_when_its_own_ray_dies_and_not_when_the_head_is_gone(
    start_alone: Start, tmp_path: Path, head_answers: bool, code: int
) -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        if head_answers:
            head.listen()
        worker = start_alone("worker", "127.0.0.1", RAY=DIES, TANDEM_RAY_PORT=str(head.getsockname()[1]))
        assert worker.wait(30) == code
    text = (tmp_path / "out").read_text()
    assert ("the raylet was lost" in text) is head_answers
    assert ("ended with code 7" in text) is head_answers
    assert len(list(tmp_path.glob("tandem-start.*"))) == head_answers, "Ray's log is kept where it says why"


def test_ctrl_c_ends_a_trainer_that_does_not_listen_yet_and_then_ray(start_alone: Start, tmp_path: Path) -> None:
    head = start_alone("head", "1", "run_dir=one")
    await_text(tmp_path / "out", "imports")
    head.send_signal(signal.SIGINT)
    assert head.wait(30) == 130
    assert not is_running(int((tmp_path / "ray").read_text()))


def test_ctrl_c_of_a_terminal_leaves_ray_to_a_trainer_that_saves(start_alone: Start, tmp_path: Path) -> None:
    head = start_alone("head", "1", "run_dir=one", TRAINER=SAVES_WITH_RAY)
    await_text(tmp_path / "out", "listens")
    os.killpg(head.pid, signal.SIGINT)  # as a terminal: to everybody
    assert head.wait(30) == 130
    assert "saved" in (tmp_path / "out").read_text()


def test_kill_9_ends_what_the_script_started(start_alone: Start, tmp_path: Path) -> None:
    head = start_alone("head", "1", "run_dir=one")
    await_text(tmp_path / "out", "imports")
    head.kill()
    left = [int((tmp_path / name).read_text()) for name in ("ray", "trainer")]
    wait_until(lambda: not any(map(is_running, left)), within_s=10.0, what=f"one of {left} runs on")
