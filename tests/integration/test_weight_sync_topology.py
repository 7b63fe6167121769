"""Who may share a host, who may come and go, and what is left of them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.fakes.ports import listening_ports
from tests.fakes.weight_job import ReplicaProcess, WeightJob, opened_job
from trainer.driver.scratch import SCRATCH_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fakes.weight_job import PartyProcess

pytestmark = pytest.mark.timing

FOUR = ("r0", "r1", "r2", "r3")


def named_things(party: PartyProcess) -> list[str]:
    """Files under the temporary directories and bound unix sockets that a process holds or maps."""
    places = tuple({"/dev/shm", "/tmp", tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", "/run/user")})
    process = psutil.Process(party.pid)
    # A memfd shows as /memfd:name, which no directory holds.
    held = [file.path for file in process.open_files()] + [region.path for region in process.memory_maps()]
    sockets = [connection.laddr for connection in process.net_connections(kind="unix")]
    # This repository and its libraries may themselves lie under a temporary directory.
    installed = (str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix)
    named = [path for path in held if path.startswith(places) and not path.startswith(installed)]
    return named + [name for name in sockets if name]


def unix_sockets() -> set[str]:
    """Names of all bound unix sockets of this host, abstract ones too."""
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {row[7] for row in rows if len(row) > 7}


def directory_entries() -> set[str]:
    return {str(path) for place in ("/dev/shm", tempfile.gettempdir()) for path in Path(place).iterdir()}


def ours(names: Iterable[str]) -> set[str]:
    """Other programs of this host may come and go meanwhile, and the clusters of runs that other tests start."""
    words, others = ("tandem", "weight", "sync", "zmq"), SCRATCH_PREFIX
    return {name for name in names if any(word in name.lower() for word in words) and others not in name}


async def test_two_jobs_with_tensor_parallel_replicas_share_a_host_and_no_endpoint() -> None:
    """Two jobs, one with two tensor parallel pairs of data parallel replicas; they even use the same names."""
    async with (
        opened_job(names=FOUR, num_workers=4) as first,
        opened_job(num_workers=4) as second,
    ):
        for version in (1, 2, 3):
            await first.step(version, seed=version)
            await second.step(version, seed=100 + version)
        for job, seed in ((first, 3), (second, 103)):
            for replica in job.replicas:
                found = replica.condition(seed)
                assert (found.weights, found.live_versions) == (seed, (3,) * 4)
        ports = listening_ports([party.pid for job in (first, second) for party in job.parties])
        assert len(ports) == len(set(ports)), "two processes listen on one port"
        assert len(ports) >= 4, "every learner listens somewhere"
        for job in (first, second):
            for party in job.parties:
                assert named_things(party) == [], f"{party.name} holds something with a name that would outlive it"


async def test_nothing_is_left_of_a_killed_job_and_it_starts_again() -> None:
    job = WeightJob(num_workers=2)
    before = ours(unix_sockets() | directory_entries())
    try:
        await job.coordinator.open()
        await job.step(1)
        ports = listening_ports([party.pid for party in job.parties])
        assert ports
        for party in job.parties:
            party.kill()
        assert ours(unix_sockets() | directory_entries()) <= before
        assert not {*ports} & {*listening_ports()}, "a socket outlived its process"
    finally:
        await job.close()
    async with opened_job(num_workers=2) as again:
        await again.step(1, seed=7)
        assert again.weights(7) == [7, 7]


async def test_late_replica_joins_with_the_newest_version_and_the_others_do_not_notice() -> None:
    async with opened_job(num_workers=2) as job:
        for version in (1, 2):
            await job.step(version)
        counters = [replica.ask("see_counters") for replica in job.replicas]
        files = [party.ask("see_vitals").num_files for party in job.replicas]
        late = ReplicaProcess("late", 2)
        job.replicas.append(late)
        assert await job.coordinator.join(late.handle) == 2
        assert late.condition(2) == job.replicas[0].condition(2)
        assert job.coordinator.live_versions == {"r0": 2, "r1": 2, "late": 2}
        assert [replica.ask("see_counters") for replica in job.replicas[:2]] == counters, "they opened something again"
        # Routes changed: what is not read any more is closed, what is read now is opened by the next version.
        now = [party.ask("see_vitals").num_files for party in job.replicas[:2]]
        assert all(after <= before for after, before in zip(now, files, strict=True))
        await job.step(3)
        assert job.weights(3) == [3, 3, 3]
        assert job.coordinator.members == dict.fromkeys(["r0", "r1", "late"], "live")


async def test_killed_replica_joins_again_under_its_old_name() -> None:
    async with opened_job() as job:
        await job.step(1)
        job.replicas[0].kill()
        await job.step(2)
        assert job.coordinator.members["r0"] == "dead"
        job.replicas[0].close()
        job.replicas[0] = ReplicaProcess("r0")
        assert await job.coordinator.join(job.replicas[0].handle) == 2
        await job.step(3)
        assert job.weights(3) == [3, 3]


@pytest.mark.parametrize("is_dead", [False, True], ids=["alive", "dead"])
async def test_replica_leaves_and_the_others_go_on(is_dead: bool) -> None:
    async with opened_job(names=FOUR[:3]) as job:
        await job.step(1)
        counters = job.replicas[1].ask("see_counters")
        if is_dead:
            job.replicas[0].kill()
        await job.coordinator.leave("r0")
        assert job.coordinator.members == {"r1": "live", "r2": "live"}
        assert job.replicas[1].ask("see_counters") == counters
        for version in (2, 3, 4):
            await job.step(version)
        assert [replica.condition(4).weights for replica in job.replicas[1:]] == [4, 4]
        if not is_dead:
            assert job.replicas[0].condition(1).weights == 1, "it keeps the weights it had"
