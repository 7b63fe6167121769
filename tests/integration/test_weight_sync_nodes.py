"""Several nodes, each a loopback address: what crosses between them, and how."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.fakes.publisher_process import PublisherProcess
from tests.fakes.replica_process import ReplicaProcess
from weight_sync.coordinator import SyncCoordinator, SyncOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.timing

IPV4 = ("127.0.0.2", "127.0.0.3")
IPV6 = ("::1", "::1")
"""There is one loopback address only; the nodes have names of their own."""


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((IPV6[0], 0))
    except OSError:
        return False
    return True


class Cluster:
    """Two learner ranks and a replica on one node, two replicas on another."""

    def __init__(self, hosts: tuple[str, str]) -> None:
        self.learners = [PublisherProcess(rank, 2) for rank in range(2)]
        self.replicas = [ReplicaProcess(name) for name in ("near", "far0", "far1")]
        for number, party in enumerate([*self.learners, *self.replicas]):
            is_other = number >= 3
            party.ask("settle", "ab"[is_other], hosts[is_other])
        handles = [replica.handle for replica in self.replicas]
        self.coordinator = SyncCoordinator(self.learners, handles, options=SyncOptions(timeout_s=20.0, host=None))

    async def step(self, version: int) -> None:
        for learner in self.learners:
            learner.ask("train", version)
        await self.coordinator.publish(version)
        await self.coordinator.sync(version)

    def sent(self) -> dict[str, int]:
        """Receiver -> orders that learners carried out for it, over all learners."""
        total: dict[str, int] = {}
        for learner in self.learners:
            for peer, number in learner.ask("see_sent").items():
                total[peer] = total.get(peer, 0) + number
        return total

    def close(self) -> None:
        for party in (*self.learners, *self.replicas):
            party.close()


@contextlib.asynccontextmanager
async def opened(hosts: tuple[str, str] = IPV4) -> AsyncIterator[Cluster]:
    cluster = Cluster(hosts)
    try:
        await cluster.coordinator.open()
        yield cluster
    finally:
        await cluster.coordinator.close()
        cluster.close()


@pytest.mark.parametrize(
    "hosts",
    [
        IPV4,
        pytest.param(IPV6, marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")),
    ],
    ids=["ipv4", "ipv6"],
)
async def test_a_version_enters_a_node_once_and_is_handed_on_there(hosts: tuple[str, str]) -> None:
    async with opened(hosts) as cluster:
        near, far0, far1 = cluster.replicas
        assert near.ask("see_transports") == [{0: "ipc", 1: "ipc"}]
        assert far0.ask("see_transports") == far1.ask("see_transports") == [{0: "gloo", 1: "gloo"}]
        endpoints = [info.endpoint for member in cluster.coordinator._members.values() for info in member.workers]
        home, other = (f"tcp://[{host}]" if ":" in host else f"tcp://{host}" for host in hosts)
        assert [endpoint.rpartition(":")[0] for endpoint in endpoints] == [home, other, other]
        before = cluster.sent()
        num_syncs = 4
        for version in range(1, num_syncs + 1):
            await cluster.step(version)
            for replica in cluster.replicas:
                assert replica.condition(version).weights == version
        crossed = {peer: number - before[peer] for peer, number in cluster.sent().items()}
        assert "near/0" not in crossed, "what is on the learner's node is mapped"
        # Two sources cross the border once per version, whichever of the two takes them.
        assert sum(crossed.values()) == 2 * num_syncs
        other_family = {IPV4: "tcp6", IPV6: "tcp4"}[hosts]
        for party in (*cluster.learners, *cluster.replicas):
            assert psutil.Process(party.pid).net_connections(other_family) == [], "messages or bytes take another way"


async def test_a_node_whose_head_dies_gets_its_versions_from_the_learners() -> None:
    async with opened() as cluster:
        near, far0, far1 = cluster.replicas
        await cluster.step(1)
        far0.kill()
        await cluster.step(2)
        assert cluster.coordinator.members == {"near": "live", "far0": "dead", "far1": "live"}
        before = cluster.sent()
        await cluster.step(3)
        for replica in (near, far1):
            assert replica.condition(3).weights == 3
        assert cluster.sent()["far1/0"] - before["far1/0"] == 2, "the one that is left reads both learners itself"
