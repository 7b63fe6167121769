"""What a version costs its links, by the routes that a run would take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.model_7b import BIG, NUM_7B, config, planned
from trainer.tools.dry_run import describe_placement, format_plan
from trainer.tools.run_plan import Workload, plan_run, sync_traffic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.config.schema import RunConfig
    from trainer.tools.memory_plan import ModelShape
    from trainer.tools.run_plan import SyncTraffic
    from weight_sync.routes import RelayMode

HALF = {"gpu_memory_utilization": 0.5}
"""Room for a shadow, so that engines may hand versions on."""


def test_a_version_moves_every_published_byte_to_every_replica() -> None:
    def to_three_engines(relay: RelayMode) -> SyncTraffic:
        return sync_traffic(2 * NUM_7B, ranks=[""] * 4, replicas=[""] * 3, tensor_parallel_size=2, relay=relay)

    sync = to_three_engines("off")
    assert (sync.version_bytes, sync.device_bytes, sync.relays) == (2 * NUM_7B, NUM_7B, False)
    assert sync.rank_bytes == -(-3 * 2 * NUM_7B // 4)
    assert sync.floor_s(25e9) == pytest.approx(3 * 2 * NUM_7B / 4 / 25e9)
    relayed = to_three_engines("auto")
    assert (relayed.rank_bytes, relayed.relays) == (2 * NUM_7B // 4, True)
    assert relayed.floor_s(25e9) == pytest.approx(NUM_7B / 25e9), "an engine device reads more than a rank sends"


def test_the_least_time_of_a_pull_knows_whether_engines_hand_versions_on(shape_7b: ModelShape) -> None:
    many = {"num_replicas": 16, "gpu_memory_utilization": 0.5}

    def told(commit: str, relay: str) -> str:
        cfg = config(rollout=many, weight_sync={"commit": commit, "relay": relay})
        return format_plan(planned(cfg, shape_7b), cfg).partition("no pull is faster than ")[2].splitlines()[0]

    alone, sixteenfold = (f"{times * 2 * NUM_7B / 4 / 25e9:.3g} s at 25 GB/s" for times in (4, 16))
    assert told("auto", "auto").startswith(alone), "four ranks, and every engine device reads all of it"
    assert told("auto", "off").startswith(sixteenfold)
    assert told("inplace", "auto").startswith(sixteenfold), "only shadow blocks are handed on"


def test_engines_hand_nothing_on_where_learners_outnumber_them(shape_7b: ModelShape) -> None:
    """As the routes of weight_sync decide it for one node."""
    for replicas, served in ((4, 4), (5, 1)):
        cfg = config(rollout={"num_replicas": replicas, "gpu_memory_utilization": 0.5})
        assert planned(cfg, shape_7b).sync.rank_bytes == served * 2 * NUM_7B // 4


@pytest.mark.parametrize(
    ("sizes", "counts", "relay", "served"),
    [
        ((8, 8, 1), (8, 8), "auto", 1),  # all engines on the other node
        ((8, 8, 1), (8, 8), "off", 8),
        ((8, 16, 1), (8, 8, 8), "auto", 2),  # on two others
        ((4, 20, 1), (8, 8, 8), "auto", 2 + 4),  # and four beside the learners, which do not outnumber them
        ((2, 22, 1), (8, 8, 8), "auto", 3),  # six beside them, which do
        ((8, 4, 4), (8, 8, 8), "auto", 2),
        ((8, 4, 4), (8, 8, 8), "off", 4),
    ],
)
def test_a_learner_sends_its_share_to_every_node_on_which_there_are_engines(
    shape_7b: ModelShape, sizes: tuple[int, int, int], counts: tuple[int, ...], relay: str, served: int
) -> None:
    ranks, replicas, tp = sizes
    cfg = config(
        learner={"num_ranks": ranks},
        rollout={"num_replicas": replicas, "tensor_parallel_size": tp, **HALF},
        weight_sync={"relay": relay},
    )
    placement = describe_placement(cfg, counts, backend="fast", resource="GPU")
    assert placement.node_of is not None
    sync = traffic(shape_7b, cfg, placement.node_of)
    assert sync.rank_bytes == -(-served * 2 * NUM_7B // ranks)
    assert sync.relays == (relay == "auto")


def traffic(shape: ModelShape, cfg: RunConfig, node_of: Mapping[str, str]) -> SyncTraffic:
    known = Workload(prompt_tokens=100.0)
    return plan_run(cfg, shape, BIG, critic=None, workload=known, node_of=node_of).sync
