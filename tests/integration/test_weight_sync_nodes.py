"""Several nodes, each a loopback address: what crosses between them, and how."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.fakes.ports import has_ipv6
from tests.fakes.weight_job import WeightJob

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.timing

IPV4 = ("127.0.0.2", "127.0.0.3")
IPV6 = ("::1", "::1")
"""There is one loopback address only; the nodes have separate names."""


class Cluster(WeightJob):
    """Two learner ranks and a replica on one node, two replicas on another."""

    def __init__(self, hosts: tuple[str, str]) -> None:
        super().__init__(names=("near", "far0", "far1"), host=None)
        for number, party in enumerate(self.parties):
            is_other = number >= 3
            party.ask("settle", "ab"[is_other], hosts[is_other])

    def sent(self) -> Counter[str]:
        """Receiver -> orders that learners carried out for it, over all learners."""
        return sum((Counter(learner.ask("see_sent")) for learner in self.learners), Counter[str]())


@contextlib.asynccontextmanager
async def opened(hosts: tuple[str, str] = IPV4) -> AsyncIterator[Cluster]:
    cluster = Cluster(hosts)
    try:
        await cluster.coordinator.open()
        yield cluster
    finally:
        await cluster.close()


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
        workers = [info for member in cluster.coordinator._members.values() for info in member.workers]
        home, other = (f"tcp://[{host}]" if ":" in host else f"tcp://{host}" for host in hosts)
        assert [info.address.endpoint.rpartition(":")[0] for info in workers] == [home, other, other]
        before = cluster.sent()
        num_syncs = 4
        for version in range(1, num_syncs + 1):
            await cluster.step(version)
            assert cluster.weights(version) == [version] * 3
        crossed = cluster.sent() - before
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
