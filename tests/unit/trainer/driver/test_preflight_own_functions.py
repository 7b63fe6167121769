"""A path that does not lead to a usable loss or estimator is refused before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainer.config.compose import load_config
from trainer.driver import preflight
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
from trainer.config.algorithm import EstimatorTraits, with_traits

def loss(inputs, *, beta): ...

def estimator(groups): ...

@with_traits(EstimatorTraits(needs_peers=False))
def alone(groups): ...

@with_traits(EstimatorTraits(needs_peers=False, uses_parts=True, reward_to_go=True))
def greedy(groups): ...
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_preflight_for_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def reached(*overrides: str) -> None:
    preflight.check_own_functions(load_config(["device=cpu", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.loss=own_preflight_for_test.los"], "did you mean 'loss'?"),
        (["algorithm.loss=own_preflight_for_test.loss"], "missing a required argument: 'beta'"),
        (["algorithm.loss=no_such_module_for_test.loss"], "does not import"),
        (["algorithm.advantage_estimator=own_preflight_for_test.MODULE"], "has no 'MODULE'"),
        (
            ["algorithm.advantage_estimator=own_preflight_for_test.estimator", "rollout.group_size=1"],
            "rollout.group_size",
        ),
        (
            ["algorithm.advantage_estimator=own_preflight_for_test.alone", "algorithm.dynamic_sampling=true"],
            "algorithm.dynamic_sampling",
        ),
        (
            ["algorithm.advantage_estimator=own_preflight_for_test.estimator", "algorithm.normalize_by_std=false"],
            "algorithm.normalize_by_std",
        ),
        (
            ["algorithm.advantage_estimator=own_preflight_for_test.greedy", "algorithm.normalize_by_std=false"],
            "algorithm.normalize_by_std",
        ),
        (
            ["algorithm.advantage_estimator=own_preflight_for_test.greedy", "+algorithm.gdpo_weights.correct=2.0"],
            "algorithm.gdpo_weights",
        ),
        (
            [
                "algorithm.advantage_estimator=own_preflight_for_test.greedy",
                "algorithm.kl.coef=0.1",
                "algorithm.kl.apply_to=reward",
            ],
            "declares reward_to_go",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        reached(*overrides)
    assert words in str(error.value)


def test_what_works_passes() -> None:
    reached("algorithm.loss=own_preflight_for_test.loss", "+algorithm.loss_args.beta=0.1")
    reached("algorithm.advantage_estimator=own_preflight_for_test.alone", "rollout.group_size=1")
    reached()
