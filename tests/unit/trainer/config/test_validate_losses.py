"""Keys that the chosen loss or aggregation does not read are refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
import yaml

from tests.unit.trainer.config.test_validate import problems_in
from trainer.config.algorithm import LOSS_KEYS, AggregationName, AlgorithmConfig, LossName, unread_keys
from trainer.config.plain import to_run_config

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

RECIPES = Path(__file__).parents[4] / "configs" / "algorithm"
MOVED: dict[str, Any] = {
    "clip_low": 0.1, "clip_high": 0.1, "clip_dual": 3.0, "sapo_tau_positive": 2.0, "sapo_tau_negative": 2.0,
    "cov_frac": 0.1, "cov_min": 0.5, "cov_max": 9.0, "cov_kl_coef": 2.0, "dppo_threshold": 0.3, "dro_beta": 0.3,
}  # fmt: skip


def config_with(**algorithm: Any) -> RunConfig:
    """Synchronous, so that losses which are blind to the age of a sample are right too."""
    config, problems = to_run_config({"algorithm": algorithm, "mode": {"name": "sync", "max_staleness": 0}})
    assert problems == []
    return config


def refused(config: RunConfig) -> list[str]:
    return [problem.key for problem in problems_in(config)]


@pytest.mark.parametrize("loss", get_args(LossName))
def test_a_loss_accepts_its_keys_and_refuses_all_others(loss: LossName) -> None:
    assert MOVED.keys() == {key for keys in LOSS_KEYS.values() for key in keys}
    for key, value in MOVED.items():
        problems = problems_in(config_with(loss=loss, **{key: value}))
        expected = [] if key in LOSS_KEYS[loss] else [f"algorithm.{key}"]
        assert [p.key for p in problems] == expected
        assert all(f"algorithm.loss={loss} does not read it" in p.allowed for p in problems)
        assert (key in unread_keys(loss)) == bool(expected)


@pytest.mark.parametrize("aggregation", get_args(AggregationName))
def test_the_constant_divisor_belongs_to_one_aggregation(aggregation: str) -> None:
    wrong = [] if aggregation == "seq_mean_token_sum_norm" else ["algorithm.aggregation_norm_tokens"]
    assert refused(config_with(aggregation=aggregation, aggregation_norm_tokens=100)) == wrong


def test_bounds_of_the_covariance_must_leave_room() -> None:
    assert refused(config_with(loss="clip_cov", cov_min=5.0)) == ["algorithm.cov_min"]


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
@pytest.mark.parametrize("loss", get_args(LossName))
def test_every_loss_takes_an_entropy_bonus(loss: str, coefficient: float) -> None:
    assert refused(config_with(loss=loss, entropy_coef=coefficient)) == []


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_is_accepted_and_names_its_source(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#"), f"{path.name} does not say where its numbers come from"
    keys = yaml.safe_load(text)
    if keys["name"] == "opd":
        keys["kl"]["path"] = "some/teacher"  # which the user names
    assert refused(config_with(**keys)) == []


def test_every_loss_has_a_recipe_or_is_a_variant_of_one() -> None:
    named = {yaml.safe_load(path.read_text()).get("loss", AlgorithmConfig().loss) for path in RECIPES.glob("*.yaml")}
    assert set(get_args(LossName)) - named <= {"importance_sampling", "dppo_kl"}
