"""Who sits where, in words; what is refused is refused as a start refuses it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.fakes.model_7b import config
from trainer.driver.placement import Node, assign_nodes, check_fits, plan_placement
from trainer.errors import ConfigurationError
from trainer.tools.dry_run import describe_placement, numbered

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig
    from trainer.tools.dry_run import PlacementPlan


def sized(ranks: int, replicas: int, tp: int, *, mode: str = "async", workers: int = 1) -> RunConfig:
    return config(
        learner={"num_ranks": ranks},
        rollout={"num_replicas": replicas, "tensor_parallel_size": tp, "num_workers": workers},
        mode={"name": mode},
    )


def placed(cfg: RunConfig, *counts: int) -> PlacementPlan:
    return describe_placement(cfg, counts, backend="fast", resource="GPU")


def engines(line: str) -> dict[int, int]:
    """Number of a replica -> its devices, of one line."""
    return {int(replica): int(tp) for replica, tp in re.findall(r"replica_(\d+) \((\d+)", line)}


def test_every_node_has_a_line_with_who_is_there_and_what_is_free() -> None:
    placement = placed(sized(4, 3, 2, workers=3), 8, 8, 1)
    assert not placement.problems
    assert [line.strip() for line in placement.lines[1:]] == [
        "node 0 (8 devices): learner ranks 0-3; replica_1 (2); rollout workers 0-2; 2 free",
        "node 1 (8 devices): replica_0 (2), replica_2 (2); 4 free",
        "node 2 (1 device): nobody; 1 free",
    ]


@pytest.mark.parametrize(("tp", "counts"), [(2, (3, 5, 4)), (4, (8, 4, 7)), (1, (4, 4, 4)), (2, (2, 8, 3, 1))])
def test_an_engine_stays_on_one_node_and_no_node_has_too_many(tp: int, counts: tuple[int, ...]) -> None:
    num_replicas = sum(count // tp for count in counts) - 1
    placement = placed(sized(1, num_replicas, tp), *counts)
    on_nodes = [engines(line) for line in placement.lines[1:]]
    assert sorted(replica for there in on_nodes for replica in there) == list(range(num_replicas))
    for count, there, line in zip(counts, on_nodes, placement.lines[1:], strict=True):
        assert set(there.values()) <= {tp}
        num_free = count - tp * len(there) - ("learner" in line)
        assert num_free >= 0
        assert line.endswith(f"; {num_free} free")


def test_ranks_on_several_nodes_are_told_as_ranges() -> None:
    lines = placed(sized(12, 2, 2), 8, 8).lines
    assert ["learner ranks 0-7" in lines[1], "learner ranks 8-11" in lines[2]] == [True, True]
    one_each = placed(sized(2, 2, 2), 3, 3).lines
    assert ["learner rank 0;" in one_each[1], "learner rank 1;" in one_each[2]] == [True, True]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "rank 3"),
        ([0, 1, 2], "ranks 0-2"),
        ([0, 2], "ranks 0, 2"),
        ([0, 1, 4, 6, 7], "ranks 0-1, 4, 6-7"),
    ],
)
def test_a_range_names_nobody_who_is_not_there(numbers: list[int], text: str) -> None:
    assert numbered("rank", numbers) == text


def test_a_colocated_engine_is_told_with_the_ranks_whose_devices_it_shares() -> None:
    placement = placed(sized(4, 2, 2, mode="colocated"), 3, 3)
    assert [line.strip() for line in placement.lines[1:]] == [
        "node 0 (3 devices): learner ranks 0-1; replica_0 (2, with ranks 0-1); rollout worker 0; 1 free",
        "node 1 (3 devices): learner ranks 2-3; replica_1 (2, with ranks 2-3); 1 free",
    ]


def test_cpus_of_the_nodes_are_assumed_to_suffice() -> None:
    placement = placed(sized(8, 16, 1, workers=64), 8, 8, 8)
    assert not placement.problems
    assert "rollout workers 0-63" in placement.lines[1]
    assert "assumed: the driver on node 0, and on each as many CPUs as all take together" in placement.lines[0]


def refusal_of_a_start(cfg: RunConfig, counts: tuple[int, ...], cpus: int) -> str:
    """In the order of a run that joins a cluster."""
    with pytest.raises(ConfigurationError) as caught:
        bundles = plan_placement(cfg, resource="GPU")
        check_fits(cfg, bundles, backend="fast", num_devices=sum(counts), where="the Ray cluster")
        nodes = [
            Node(node_id=f"id{i}", address=f"node {i}", resources={"CPU": cpus, "GPU": count}, is_driver=i == 0)
            for i, count in enumerate(counts)
        ]
        assign_nodes(cfg, bundles, nodes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cfg", "counts", "cpus", "said"),
    [
        (sized(4, 4, 2), (4, 4), 0, "the Ray cluster has 8 fast devices"),
        (sized(2, 1, 4), (3, 3), 4, "no node has 1 CPU + 4 GPU"),
        (sized(1, 3, 2), (3, 3, 1), 5, "must fit on the 3 nodes of the Ray cluster: node 0 (driver): "),
        (sized(4, 2, 2, mode="colocated"), (1, 3), 7, "4 learners of 1 CPU + 1 GPU, 2 replicas of 1 CPU"),
        (sized(3, 2, 1, mode="colocated"), (8,), 0, "every device has one learner rank and one engine worker"),
    ],
)
def test_what_cannot_be_seated_is_refused_in_the_words_of_a_start(
    cfg: RunConfig, counts: tuple[int, ...], cpus: int, said: str
) -> None:
    placement = placed(cfg, *counts)
    assert len(placement.lines) == 1, "nobody has a seat"
    text = str(ConfigurationError(placement.problems))
    assert said in text
    assert text == refusal_of_a_start(cfg, counts, cpus)
