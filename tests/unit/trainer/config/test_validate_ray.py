"""Keys of a cluster that is joined, and of one that is started."""

from __future__ import annotations

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused


def test_waiting_for_room_belongs_to_a_cluster_that_is_joined() -> None:
    keys = {"ray__placement_timeout_s": 5.0}
    assert keys_refused(config_with(**keys)) == ["ray.placement_timeout_s"]
    assert keys_refused(config_with(**keys, ray__address="auto")) == []


@pytest.mark.parametrize("key", ["num_cpus", "object_store_gib"])
def test_the_size_of_a_cluster_belongs_to_one_that_is_started(key: str) -> None:
    keys = {f"ray__{key}": 2}
    assert keys_refused(config_with(**keys)) == []
    assert keys_refused(config_with(**keys, ray__address="10.0.0.7:6379")) == [f"ray.{key}"]
