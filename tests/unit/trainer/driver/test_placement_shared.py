"""Learners and engines on the same devices: what Ray counts, who sits beside whom, and what an engine is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.fakes.scripted_run import config
from tests.unit.trainer.driver.test_placement_nodes import by_node, hosts
from trainer.driver.actors import shared_devices_env
from trainer.driver.placement import (
    RESTARTED,
    Placement,
    assign_nodes,
    bundles_by_actor,
    check_fits,
    plan_placement,
    ranks_beside,
    shared_visibility,
    units_of,
)
from trainer.errors import ConfigurationError
from weight_sync.device import merge_env
from weight_sync.device.select import build
from weight_sync.device.visibility import shown

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

HIP, CUDA = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def shared(replicas: int, tp: int) -> tuple[RunConfig, Placement]:
    cfg = config(
        learner={"num_ranks": replicas * tp},
        rollout={"num_replicas": replicas, "tensor_parallel_size": tp},
        mode={"name": "colocated", "in_flight": "abort"},
    )
    return cfg, plan_placement(cfg, resource="GPU")


def test_ray_counts_a_shared_device_once() -> None:
    cfg, placement = shared(2, 2)
    bundles = bundles_by_actor(cfg, placement)
    assert placement.num_devices == 4
    assert (bundles["learner_3"], bundles["replica_1"]) == ({"CPU": 1, "GPU": 1}, {"CPU": 1})
    check_fits(cfg, placement, backend="cuda", num_devices=4, where="this host")
    with pytest.raises(ConfigurationError, match=r"(?s)learner.num_ranks = 4.*this host has 3 cuda devices"):
        check_fits(cfg, placement, backend="cuda", num_devices=3, where="this host")


def test_an_engine_sits_beside_its_learners_all_on_one_node() -> None:
    # Three devices per node: the pairs of two must not be cut.
    cfg, placement = shared(2, 2)
    seats = assign_nodes(cfg, placement, hosts(3, 3))
    assert by_node(seats, "learner") == {"n0": 2, "n1": 2}
    for replica in range(2):
        assert {seats[f"learner_{rank}"] for rank in ranks_beside(replica, cfg)} == {seats[f"replica_{replica}"]}
    with pytest.raises(ConfigurationError):
        assign_nodes(cfg, placement, hosts(1, 3))


def test_an_engine_and_its_learners_are_one_unit_where_they_share_devices() -> None:
    beside = [["learner_0", "learner_1", "replica_0"], ["learner_2", "learner_3", "replica_1"]]
    cfg, placement = shared(2, 2)
    assert units_of(cfg, placement) == [*beside, ["rollout_worker_0"]]
    on_cpu = plan_placement(cfg, resource=None)
    assert units_of(cfg, on_cpu) == [[name] for name in bundles_by_actor(cfg, on_cpu)]


@pytest.mark.parametrize(
    ("seen", "shown"),
    [(["2"], "2"), (["2", "3"], "2,3"), (["GPU-b", "GPU-a"], "GPU-b,GPU-a"), (["2,0,1,3", "3,0,1,2"], "2,3,0,1")],
)
def test_an_engine_is_shown_its_learners_devices_first(seen: list[str], shown: str) -> None:
    assert shared_visibility(seen) == shown


@pytest.mark.parametrize("inherited", [{}, {HIP: "0,1,2,3"}, {HIP: "0,1,2,3", CUDA: "0,1,2,3"}])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_starts_wherever_its_learners_do_whatever_names_their_devices(
    tp: int, inherited: dict[str, str]
) -> None:
    backend, (cfg, _) = build("rocm"), shared(4 // tp, tp)
    learners = [{**inherited, **shown(backend, [str(r)], num_devices=4, environ=inherited)} for r in range(4)]
    for env in learners:
        assert backend.check_env("learner", merge_env(backend.process_env("learner"), env, {})) == []
    told = shared_devices_env(cfg, backend, [env[HIP] for env in learners])
    assert [env[HIP].split(",")[:tp] for env in told] == [
        [str(r) for r in ranks_beside(i, cfg)] for i in range(4 // tp)
    ]
    for env in told:
        own = merge_env(backend.process_env("engine"), {**inherited, **env}, {})
        assert backend.check_env("engine", own) == []


def test_one_variable_is_enough_where_the_driver_reads_one() -> None:
    cfg, _ = shared(2, 1)
    assert shared_devices_env(cfg, build("cuda"), ["5", "3"]) == [{CUDA: "5"}, {CUDA: "3"}]


def test_a_restarted_engine_is_shown_the_same_devices() -> None:
    _, placement = shared(2, 1)
    placement = replace(placement, engine_env={"replica_1": {"CUDA_VISIBLE_DEVICES": "1"}})
    assert placement.env(f"replica_1{RESTARTED}2") == {"CUDA_VISIBLE_DEVICES": "1"}
    assert placement.env("replica_0") == placement.env("learner_1") == {}


def test_numbers_that_leave_a_device_alone_are_refused_but_a_cpu_has_none() -> None:
    cfg, _ = shared(2, 2)
    cfg = replace(cfg, learner=replace(cfg.learner, num_ranks=3))
    with pytest.raises(ConfigurationError, match=r"(?s)learner.num_ranks = 3.*2 \* 2 = 4"):
        plan_placement(cfg, resource="GPU")
    placement = plan_placement(cfg, resource=None)
    assert not placement.is_paired
    assert placement.num_cpus == pytest.approx(3 + 4 + 0.5)
