"""Keys of a cluster that is joined, and of one that is started."""

from __future__ import annotations

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.cli import parse
from trainer.config.compose import resolve
from trainer.config.presets import config_names, packaged_configs


def test_waiting_for_room_belongs_to_a_cluster_that_is_joined() -> None:
    keys = {"ray__placement_timeout_s": 5.0}
    assert keys_refused(config_with(**keys)) == ["ray.placement_timeout_s"]
    assert keys_refused(config_with(**keys, ray__address="auto")) == []


@pytest.mark.parametrize("key", ["num_cpus", "object_store_gib"])
def test_the_size_of_a_cluster_belongs_to_one_that_is_started(key: str) -> None:
    cfg = config_with(**{f"ray__{key}": 2})
    assert keys_refused(cfg, written=[f"ray.{key}"]) == []
    joined = config_with(**{f"ray__{key}": 2}, ray__address="10.0.0.7:6379")
    assert keys_refused(joined, written=[f"ray.{key}"]) == [f"ray.{key}"]
    assert keys_refused(joined) == [], "a YAML file holds it for the runs that start their cluster"


@pytest.mark.parametrize("name", config_names(packaged_configs()))
@pytest.mark.parametrize("joins", [["ray.address=h:1"], ["--dry-run", "--nodes=8,8"]])
def test_every_shipped_configuration_joins_a_cluster(name: str, joins: list[str]) -> None:
    config, problems = resolve(parse(["--config-name", name, *joins]))
    assert not problems
    assert config.ray.address != "local"
    _, problems = resolve(parse(["--config-name", name, *joins, "ray.object_store_gib=24"]))
    assert [(problem.key, problem.got) for problem in problems] == [("ray.object_store_gib", "24")]
