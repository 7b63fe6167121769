"""Dotted paths in place of built-in names: what the configuration accepts, refuses and says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.config.test_validate import problems_in
from trainer.config.algorithm import LOSS_KEYS
from trainer.config.compose import load_config
from trainer.config.describe import describe_objective
from trainer.config.field import type_text
from trainer.config.plain import to_run_config
from trainer.config.schema import all_keys
from trainer.errors import ConfigurationError


def problems(**algorithm: Any) -> list[str]:
    config, misfits = to_run_config({"algorithm": algorithm})
    return [str(problem) for problem in [*misfits, *problems_in(config)]]


def test_a_dotted_path_is_accepted_and_nothing_is_imported() -> None:
    config = load_config(
        ["algorithm.loss=no.such.loss", "+algorithm.loss_args.beta=0.5", "algorithm.advantage=no.such.estimator"]
    )
    assert (config.algorithm.loss, config.algorithm.loss_args) == ("no.such.loss", {"beta": 0.5})
    assert config.algorithm.advantage == "no.such.estimator"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.loss=ppo_clp", "did you mean ppo_clip?"),
        ("algorithm.loss=ppo_clp", "sapo"),
        ("algorithm.advantage=rlo", "did you mean rloo?"),
        ("algorithm.loss=my_loss", "package.module.function"),
        ("algorithm.loss=.my_loss", "joins names by dots"),
        ("algorithm.loss=my_package.", "joins names by dots"),
        ("algorithm.loss=my-package.loss", "joins names by dots"),
        ("algorithm.loss=losses.py:my_loss", "joins names by dots"),
        ("algorithm.loss=0.5", "joins names by dots"),
    ],
)
def test_a_name_without_a_dot_is_a_built_in_one_and_a_typo_is_told(override: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_config([override])
    assert words in str(error.value)


@pytest.mark.parametrize("key", ["loss", "advantage"])
def test_numbers_of_an_own_function_are_refused_with_a_built_in_one(key: str) -> None:
    (problem,) = problems(**{f"{key}_args": {"beta": 1.0}})
    assert problem.startswith(f"algorithm.{key}_args")
    assert "is built in" in problem
    assert problems(**{key: "my.function", f"{key}_args": {"beta": 1.0}}) == []


@pytest.mark.parametrize("key", sorted({key for keys in LOSS_KEYS.values() for key in keys}))
def test_an_own_loss_reads_no_key_of_a_built_in_one(key: str) -> None:
    value = {"clip_dual": 3.0, "cov_max": 9.0, "cov_min": 0.5}.get(key, 0.123)
    (problem,) = problems(loss="my.loss", **{key: value})
    assert f"algorithm.{key}" in problem
    assert "algorithm.loss=my.loss does not read it" in problem


def test_numbers_must_be_numbers() -> None:
    (problem,) = problems(loss="my.loss", loss_args={"beta": "much"})
    assert "entry beta" in problem


def test_the_objective_names_own_functions_with_their_numbers() -> None:
    config, _ = to_run_config(
        {
            "algorithm": {
                "loss": "my_package.my_loss",
                "loss_args": {"beta": 0.5},
                "entropy_coef": 0.01,
            }
        }
    )
    assert describe_objective(config.algorithm).startswith(
        "grpo / std -> own my_package.my_loss(beta=0.5) - 0.01 x entropy -> token_mean"
    )


def test_the_documentation_says_that_a_path_is_allowed() -> None:
    for key in ("algorithm.loss", "algorithm.advantage"):
        assert "or the dotted path of your own function" in type_text(all_keys()[key].hint)
