from __future__ import annotations

import pytest

from tests.fakes.scripted_run import config
from trainer.driver.placement import check_fits, plan_placement
from trainer.errors import ConfigurationError

SIZES = {"learner": {"num_ranks": 4}, "rollout": {"num_replicas": 3, "tensor_parallel_size": 2, "num_workers": 5}}


@pytest.mark.parametrize(
    ("resource", "learner", "engine", "num_devices", "num_cpus"),
    [
        (None, {"num_cpus": 2}, {"num_cpus": 4}, 0, 2 * (4 + 3 * 2) + 2.5),
        ("GPU", {"num_gpus": 1, "num_cpus": 1}, {"num_gpus": 2, "num_cpus": 1}, 10, 4 + 3 + 2.5),
        (
            "NPU",
            {"resources": {"NPU": 1}, "num_cpus": 1},
            {"resources": {"NPU": 2}, "num_cpus": 1},
            10,
            4 + 3 + 2.5,
        ),
    ],
)
def test_every_actor_gets_its_devices(
    resource: str | None, learner: dict, engine: dict, num_devices: int, num_cpus: float
) -> None:
    placement = plan_placement(config(**SIZES, device={"cpu_threads": 2}), resource=resource)
    assert placement.learner == learner
    assert placement.engine == engine
    assert placement.rollout_worker == {"num_cpus": 0.5}
    assert (placement.num_devices, placement.num_cpus) == (num_devices, num_cpus)


def test_too_few_devices_are_refused_with_the_sum_and_what_is_there() -> None:
    cfg = config(**SIZES)
    placement = plan_placement(cfg, resource="GPU")
    check_fits(cfg, placement, backend="cuda", num_devices=10, where="this host")
    with pytest.raises(ConfigurationError) as caught:
        check_fits(cfg, placement, backend="cuda", num_devices=9, where="this host")
    text = str(caught.value)
    assert "4 + 3 * 2 = 10" in text
    assert "this host has 9 cuda devices" in text
    with pytest.raises(ConfigurationError, match="the Ray cluster has 1 cuda device\n"):
        check_fits(cfg, placement, backend="cuda", num_devices=1, where="the Ray cluster")


def test_plain_cpus_are_never_too_few() -> None:
    cfg = config(learner={"num_ranks": 1000})
    check_fits(cfg, plan_placement(cfg, resource=None), backend="cpu", num_devices=0, where="this host")
