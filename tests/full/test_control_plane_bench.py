"""The benchmark of the control plane, scaled down: in one process, and with Ray."""

from __future__ import annotations

import pytest

from tests.simulation.bench.__main__ import Case, in_own_process
from tests.simulation.bench.ray_run import RayCase

pytestmark = pytest.mark.timing


def test_a_run_in_one_process_is_measured() -> None:
    result = in_own_process(Case(num_groups=40, trajectories_admitted=80, num_replicas=4))
    assert result["groups_generated"] >= result["num_steps"] * result["groups_per_step"] == 40
    assert result["discarded_tokens"] == 0
    assert 0 < result["trajectories_in_flight_mean"] <= result["trajectories_in_flight_max"] <= 80
    assert result["cpu_ms_per_trajectory"] == pytest.approx(1e3 * result["cpu_s"] / result["groups_generated"] / 4)


def test_the_driver_of_a_run_with_ray_is_measured() -> None:
    case = RayCase(num_groups=24, trajectories_admitted=80, num_replicas=4, num_ranks=1, files=True)
    result = in_own_process(case)
    assert result["groups_generated"] == result["num_steps"] * result["groups_per_step"] == 24
    assert (result["groups_failed"], result["discarded_tokens"]) == (0, 0)
    num_trajectories = 24 * case.group_size
    assert result["tokens_at_ranks"] == result["tokens_generated"]
    assert num_trajectories * case.least_tokens <= result["tokens_generated"] <= num_trajectories * case.most_tokens
    assert 0 < result["trajectories_in_flight_mean"] <= result["trajectories_in_flight_max"] <= 80
    assert result["cpu_ms_per_trajectory"] == pytest.approx(1e3 * result["cpu_s"] / num_trajectories)
    # The kernel counts threads in ticks of 10 ms.
    assert sum(result["threads_cpu_s"].values()) == pytest.approx(result["cpu_s"], rel=0.1, abs=0.2)
    assert result["threads_cpu_s"]["event loop"] > 0
    assert result["workers_cpu_s"] > 0
