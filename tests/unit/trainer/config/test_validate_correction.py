"""Off-policy corrections that mean nothing are refused, and every preset means something."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.algorithm import CorrectionConfig
from trainer.config.compose import load_config
from trainer.config.schema import RunConfig


def refused(**keys: Any) -> list[str]:
    """`clamp__upper=2` for a key of `algorithm.correction`; other keys from their section."""
    sections = {"objective", "level", "clamp", "mask", "reject"}
    return keys_refused(
        config_with(
            **{f"algorithm__correction__{k}" if k.split("__")[0] in sections else k: v for k, v in keys.items()}
        )
    )


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"level": "sequence"}, "level"),
        ({"level": "sequence", "reject__upper": 2.0}, "level"),
        ({"mask__metric": "k3"}, "mask.metric"),
        ({"reject__metric": "tv"}, "reject.metric"),
        ({"reject__level": "token"}, "reject.level"),
        ({"clamp__upper": 1.0}, "clamp.upper"),
        ({"clamp__lower": 1.5}, "clamp.lower"),
        ({"mask__upper": 0.5}, "mask.upper"),
        ({"mask__lower": 1.0}, "mask.lower"),
        ({"mask__lower": -1.0}, "mask.lower"),
        ({"mask__metric": "k3", "mask__lower": 0.1}, "mask.lower"),
        ({"mask__metric": "k3", "mask__lower": -0.1}, "mask.lower"),
        ({"mask__metric": "k1", "mask__lower": 0.1}, "mask.lower"),
        ({"reject__metric": "k2", "reject__upper": 0.0}, "reject.upper"),
        ({"clamp__upper": 5.0, "mask__upper": 2.0}, "clamp.upper"),
        ({"clamp__lower": 0.1, "mask__lower": 0.2}, "clamp.lower"),
        ({"objective": "loglinear", "mode__name": "sync", "mode__max_staleness": 0}, "objective"),
        ({"objective": "decoupled", "algorithm__loss": "reinforce"}, "objective"),
        ({"objective": "loglinear", "algorithm__loss": "dro"}, "objective"),
        (
            {"clamp__upper": 2.0, "algorithm__loss": "reinforce", "mode__name": "sync", "mode__max_staleness": 0},
            "clamp.upper",
        ),
    ],
)
def test_a_correction_without_meaning_is_refused(keys: dict[str, Any], key: str) -> None:
    assert refused(**keys) == [f"algorithm.correction.{key}"]


@pytest.mark.parametrize(
    "keys",
    [
        {"clamp__upper": 2.0, "mask__upper": 5.0, "reject__upper": 1.1},
        {"level": "sequence_mean", "clamp__upper": 2.0, "algorithm__loss": "gspo"},
        {"level": "sequence", "objective": "decoupled", "algorithm__loss": "importance_sampling"},
        {"mask__metric": "k1", "mask__lower": -1.0, "mask__upper": 1.0},
        {"mask__metric": "k3", "mask__upper": 0.1, "clamp__upper": 2.0},
        {
            "objective": "decoupled",
            "algorithm__loss": "importance_sampling",
            "mode__name": "sync",
            "mode__max_staleness": 0,
        },
        {"mask__upper": 5.0, "algorithm__loss": "reinforce"},
    ],
)
def test_a_correction_with_meaning_passes(keys: dict[str, Any]) -> None:
    assert refused(**keys) == []


@pytest.mark.parametrize("preset", ["none", "tis", "mis", "icepop", "decoupled", "a3po"])
def test_every_preset_composes_and_all_but_none_differ_from_the_default(preset: str) -> None:
    config = load_config([f"correction={preset}"]).algorithm
    assert (config.correction == CorrectionConfig()) == (preset == "none")
    expected = "importance_sampling" if preset == "decoupled" else RunConfig().algorithm.loss
    assert config.loss == expected


def test_a_preset_can_be_refined_key_by_key() -> None:
    config = load_config(["correction=tis", "algorithm.correction.objective=loglinear", "algorithm=dapo"]).algorithm
    assert config.correction.objective == "loglinear" and config.correction.clamp.upper == 2.0
    assert config.name == "dapo"
