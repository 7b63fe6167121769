"""A user's own loss and estimator by dotted path: called like the built-in ones, and named where they break."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from trainer.algorithms.advantages import GroupRewards, step_advantages
from trainer.algorithms.losses import LossInputs, policy_loss
from trainer.config.algorithm import OWN_TRAITS, AlgorithmConfig, EstimatorTraits, traits_of
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

BUILT_IN = "trainer.algorithms.losses.ppo_clip_loss"

ESTIMATOR = """
import numpy as np
from trainer.config.algorithm import EstimatorTraits, with_traits

def scaled(groups, *, scale=1.0):
    return [scale * (g.rewards_G - g.rewards_G.mean()) for g in groups]

@with_traits(EstimatorTraits(needs_peers=False, uses_parts=True))
def alone(groups):
    return [g.parts_G["correct"] for g in groups]

def bad_nan(groups):
    with np.errstate(invalid="ignore"):
        return [(g.rewards_G - g.rewards_G.mean()) / g.rewards_G.std() for g in groups]

def bad_shape(groups):
    return [np.zeros(1) for g in groups]

def bad_count(groups):
    return [np.zeros(3)]

def bad_kind(groups):
    return None

def bad_text(groups):
    return [["good"] * g.rewards_G.size for g in groups]
"""

LOSS = """
from trainer.algorithms.losses import loss_stats, ratio_and_log

def scaled(inputs, *, scale):
    ratio_L, _ = ratio_and_log(inputs)
    return -scale * inputs.advantages_L * ratio_L, loss_stats(inputs)

def bad_mean(inputs):
    ratio_L, _ = ratio_and_log(inputs)
    return (-inputs.advantages_L * ratio_L).mean(), loss_stats(inputs)

def bad_detached(inputs):
    return -inputs.advantages_L * inputs.logprobs_L.detach(), loss_stats(inputs)

def bad_half(inputs):
    return (-inputs.advantages_L * inputs.logprobs_L).half(), loss_stats(inputs)

def bad_stats(inputs):
    return -inputs.advantages_L * inputs.logprobs_L, {}

def bad_alone(inputs):
    return -inputs.advantages_L * inputs.logprobs_L

async def bad_async(inputs):
    pass

bad_number = 3
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_estimators_for_test.py").write_text(ESTIMATOR)
    (tmp_path / "own_losses_for_test.py").write_text(LOSS)
    (tmp_path / "own_broken_for_test.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))


def loss_config(name: str, **args: float) -> AlgorithmConfig:
    return AlgorithmConfig(loss=name if "." in name else f"own_losses_for_test.{name}", loss_args=args)


def advantage_config(name: str, **args: float) -> AlgorithmConfig:
    return AlgorithmConfig(advantage_estimator=f"own_estimators_for_test.{name}", advantage_args=args)


def inputs() -> LossInputs:
    return LossInputs(
        logprobs_L=torch.tensor([-1.0, -0.5, -2.0], requires_grad=True),
        old_logprobs_L=torch.tensor([-1.5, -0.5, -1.0]),
        advantages_L=torch.tensor([1.0, 1.0, -1.0]),
        sequence_L=torch.tensor([0, 0, 1]),
        num_sequences=2,
    )


def groups(*rewards: list[float]) -> list[GroupRewards]:
    return [
        GroupRewards(rewards_G=np.array(one), lengths_G=np.full(len(one), 3), parts_G={"correct": np.array(one) + 1.0})
        for one in rewards
    ]


def test_a_built_in_loss_by_its_path_is_the_built_in_loss() -> None:
    keys = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "dual_clip": 3.0}
    named = policy_loss(inputs(), config=AlgorithmConfig(**keys))
    by_path = policy_loss(inputs(), config=loss_config(BUILT_IN, **keys))
    assert torch.equal(named[0], by_path[0])
    assert named[1].clipped_high == by_path[1].clipped_high == 1


def test_an_own_loss_gets_its_numbers_and_has_a_gradient() -> None:
    given = inputs()
    loss_L, _ = policy_loss(given, config=loss_config("scaled", scale=3.0))
    (grad_L,) = torch.autograd.grad(loss_L.sum(), given.logprobs_L)
    expected = -3.0 * given.advantages_L * (given.logprobs_L - given.old_logprobs_L).exp()
    torch.testing.assert_close(loss_L, expected)
    torch.testing.assert_close(grad_L, expected)
    with torch.no_grad():
        assert not policy_loss(inputs(), config=loss_config("scaled", scale=1.0))[0].requires_grad


def test_an_own_estimator_gets_its_numbers_and_declares_its_traits_or_promises_least() -> None:
    got = step_advantages(groups([1.0, 0.0], [0.0, 3.0, 0.0]), config=advantage_config("scaled", scale=2.0))
    assert [g.tolist() for g in got] == [[1.0, -1.0], [-2.0, 4.0, -2.0]]
    assert traits_of(advantage_config("scaled")) == OWN_TRAITS
    assert traits_of(advantage_config("alone")) == EstimatorTraits(needs_peers=False, uses_parts=True)
    (got,) = step_advantages(groups([1.0]), config=advantage_config("alone"))
    assert got.tolist() == [2.0]
    with pytest.raises(ValueError, match=r"'own_estimators_for_test.scaled' compares responses"):
        step_advantages(groups([1.0]), config=advantage_config("scaled"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bad_mean", "do not average"),
        ("bad_detached", "without gradient"),
        ("bad_half", "float16"),
        ("bad_stats", "LossStats"),
        ("bad_alone", "of type Tensor"),
        ("bad_nan", "rewards [1.0, 1.0, 1.0]"),
        ("bad_shape", "one advantage per response, shape (2,)"),
        ("bad_count", "got 1 of them"),
        ("bad_kind", "of type NoneType"),
        ("bad_text", "arrays of numbers"),
    ],
)
def test_a_result_that_is_no_loss_or_advantage_is_refused_by_name(name: str, words: str) -> None:
    key = "algorithm.loss=own_losses" if f"def {name}" in LOSS else "algorithm.advantage_estimator=own_estimators"
    with pytest.raises(ValueError, match=f"{key}_for_test.{name}") as error:
        if f"def {name}" in LOSS:
            policy_loss(inputs(), config=loss_config(name))
        step_advantages(groups([0.0, 1.0], [1.0, 1.0, 1.0]), config=advantage_config(name))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (loss_config("scaled"), "missing a required argument: 'scale'"),
        (loss_config("scaled", scal=1.0), "(scal)"),
        (loss_config("scaled", scale=1.0, more=2.0), "'more'"),
        (loss_config("scled", scale=1.0), "did you mean 'scaled'?"),
        (loss_config("bad_async"), "async"),
        (loss_config("bad_number"), "got an object of type int"),
        (loss_config("own_broken_for_test.loss"), "nowhere_at_all"),
        (loss_config("no_such_package_here.loss"), "no_such_package_here"),
        (advantage_config("scaled", scal=1.0), "'scal'"),
    ],
)
def test_a_path_that_leads_to_no_such_function_is_refused_with_the_cause(config: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        if config.loss_args or "loss" in config.loss:
            policy_loss(inputs(), config=config)
        step_advantages(groups([0.0, 1.0]), config=config)
    assert words in str(error.value)
