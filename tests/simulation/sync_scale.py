"""What one version costs at sizes that no test can run: connections and bytes per NIC, counted from the real routes.

    python -m tests.simulation.sync_scale        prints the table of docs/weight_sync.md

Counted: who reads which source from whom, and over which wire. Computed: bytes, as every learner holds an equal
share of what a worker pulls. Nodes have 8 devices with a NIC each; what is mapped inside a node costs no NIC.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from weight_sync.plan.routes import Peer, RelayMode, plan_routes

GB = 1e9


class Cluster(NamedTuple):
    num_learners: int
    num_replicas: int
    num_workers: int
    """Of a replica."""
    model_gb: float

    @property
    def name(self) -> str:
        return f"{self.num_learners:,} + {self.num_replicas * self.num_workers:,}"


CLUSTERS = (Cluster(2, 2, 1, 14), Cluster(8, 8, 1, 14), Cluster(64, 64, 8, 140), Cluster(1024, 512, 8, 470))


class Costs(NamedTuple):
    connections: int
    """Pairs of parties between which bytes go, mapped or sent."""
    per_learner: int
    per_worker: int
    """Those that it reads and those that read it."""
    learner_out_gb: float
    """Sent by the busiest learner's NIC."""
    worker_in_gb: float
    worker_out_gb: float


def count(cluster: Cluster, relay: RelayMode) -> Costs:
    """2 + 2 share a node; else learners have nodes of their own."""
    share_gb = cluster.model_gb / cluster.num_workers / cluster.num_learners
    on_one_node = cluster.num_learners + cluster.num_replicas * cluster.num_workers <= 8
    nodes = {f"learner{rank}": f"l{rank // 8}" for rank in range(cluster.num_learners)}
    parties: list[Peer] = []
    for replica in range(cluster.num_replicas):
        for worker in range(cluster.num_workers):
            node = "l0" if on_one_node else f"e{(replica * cluster.num_workers + worker) // 8}"
            parties.append(Peer(name=f"r{replica}/{worker}", worker=worker, node=node))
            nodes[parties[-1].name] = node
    learners = {rank: nodes[f"learner{rank}"] for rank in range(cluster.num_learners)}
    sources = dict.fromkeys(range(cluster.num_workers), range(cluster.num_learners))
    pairs: set[tuple[str, str]] = set()
    shares_out, shares_in = Counter[str](), Counter[str]()
    for name, route in plan_routes(learners, parties, sources, relay=relay).items():
        for stage in route.stages:
            givers = (
                dict.fromkeys([route.predecessors[stage.via[0]]], len(stage.ranks))
                if stage.via
                else {f"learner{rank}": 1 for rank in stage.ranks}
            )
            for giver, num_shares in givers.items():
                pairs.add((giver, name))
                if nodes[giver] != nodes[name]:
                    shares_out[giver] += num_shares
                    shares_in[name] += num_shares
    ends = Counter(end for pair in pairs for end in pair)
    workers = {party.name for party in parties}

    def most(counts: Counter[str], *, of_workers: bool) -> int:
        return max((n for name, n in counts.items() if (name in workers) == of_workers), default=0)

    return Costs(
        connections=len(pairs),
        per_learner=most(ends, of_workers=False),
        per_worker=most(ends, of_workers=True),
        learner_out_gb=share_gb * most(shares_out, of_workers=False),
        worker_in_gb=share_gb * most(shares_in, of_workers=True),
        worker_out_gb=share_gb * most(shares_out, of_workers=True),
    )


def table() -> list[str]:
    """Rows of Markdown: each cell is without rings -> with them."""
    costs = [(count(cluster, "off"), count(cluster, "auto")) for cluster in CLUSTERS]
    rows = {
        "connections": [f"{off.connections:,} -> {on.connections:,}" for off, on in costs],
        "of the busiest learner": [f"{off.per_learner:,} -> {on.per_learner:,}" for off, on in costs],
        "of the busiest worker": [f"{off.per_worker:,} -> {on.per_worker:,}" for off, on in costs],
        "GB out of a learner's NIC": [f"{off.learner_out_gb:.2f} -> {on.learner_out_gb:.2f}" for off, on in costs],
        "GB into a worker's NIC": [f"{off.worker_in_gb:.2f} -> {on.worker_in_gb:.2f}" for off, on in costs],
        "GB out of a worker's NIC": [f"{off.worker_out_gb:.2f} -> {on.worker_out_gb:.2f}" for off, on in costs],
    }
    head = ["at most", *(f"{cluster.name} ({cluster.model_gb:g} GB, TP {cluster.num_workers})" for cluster in CLUSTERS)]
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows.items())]
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    print("\n".join(table()))
