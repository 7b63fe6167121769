"""Built-in functions keep the contracts, and wrong ones break the promise that they should."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch

from rollout.reward.call import RewardRequest
from rollout.reward.registry import BUILTIN_REWARDS
from trainer.algorithms.advantages import step_advantages
from trainer.algorithms.losses import LossInputs, loss_stats, policy_loss, ratio_and_log
from trainer.config.algorithm import (
    ESTIMATORS,
    OWN_TRAITS,
    SELECTING_LOSSES,
    AlgorithmConfig,
    EstimatorTraits,
    LossName,
)
from trainer.tools.loss_contract import loss_checks
from trainer.tools.plugin_contracts import (
    Check,
    ContractError,
    RewardRunner,
    advantage_checks,
    assert_contract,
    format_outcome,
    reward_checks,
    run_checks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def broken(checks: Sequence[Check]) -> str:
    return "\n".join(format_outcome(rule, reason) for rule, reason in run_checks(checks) if reason)


@pytest.mark.parametrize("loss", get_args(LossName))
def test_a_built_in_loss_keeps_the_contract(loss: LossName) -> None:
    assert_contract(
        loss_checks(partial(policy_loss, config=AlgorithmConfig(loss=loss)), selects=loss in SELECTING_LOSSES)
    )


def policy_gradient(inputs: LossInputs, *, wrong: str = "") -> Any:
    ratio_L, _ = ratio_and_log(inputs)
    loss_L = -inputs.advantages_L * ratio_L
    stats = loss_stats(inputs)
    match wrong:
        case "":
            pass
        case "sign":
            loss_L = -loss_L
        case "mean":
            loss_L = loss_L.mean()
        case "spread mean":
            loss_L = loss_L.mean().expand(loss_L.shape) if len(loss_L) else loss_L
        case "mixes sequences":
            loss_L = loss_L - 0.1 * loss_L.sum()
        case "shifted by one":
            loss_L = -inputs.advantages_L.roll(1) * ratio_L
        case "nan":
            loss_L = loss_L / (inputs.advantages_L - 1.0)
        case "divides by advantage":
            loss_L = loss_L * (inputs.advantages_L / inputs.advantages_L)
        case "no bound":
            loss_L = -inputs.advantages_L * (inputs.logprobs_L - inputs.old_logprobs_L).exp()
        case "no gradient":
            loss_L = loss_L.detach()
        case "other input":
            loss_L = -inputs.advantages_L * torch.zeros_like(loss_L, requires_grad=True)
        case "own parameter":
            loss_L = loss_L * torch.ones((), requires_grad=True)
        case "half precision":
            loss_L = loss_L.bfloat16()
        case "random":
            loss_L = loss_L * (1 + torch.rand(()))
        case "in place":
            inputs.advantages_L.mul_(2.0)
        case "no stats":
            return loss_L
        case "stats of means":
            stats = replace(stats, ratio_sum=stats.ratio_sum / len(loss_L))
        case "fractions":
            stats = replace(stats, clipped_low=torch.tensor(0.5))
        case _:
            raise ValueError(wrong)
    return loss_L, stats


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("sign", "becomes likelier"),
        ("mean", "one float32 per loss token"),
        ("spread mean", "any order and any micro-batch"),
        ("mixes sequences", "any order and any micro-batch"),
        ("shifted by one", "becomes likelier"),
        ("nan", "are finite"),
        ("divides by advantage", "are finite"),
        ("no bound", "stays finite"),
        ("no gradient", "has no gradient"),
        ("other input", "nothing else"),
        ("own parameter", "nothing else"),
        ("half precision", "bfloat16"),
        ("random", "same bits"),
        ("in place", "leave the inputs alone"),
        ("no stats", "LossStats"),
        ("stats of means", "statistics"),
        ("fractions", "must count tokens"),
    ],
)
def test_a_wrong_loss_breaks_its_rule(wrong: str, rule: str) -> None:
    assert_contract(loss_checks(policy_gradient))
    assert rule in broken(loss_checks(partial(policy_gradient, wrong=wrong)))


# gae is no function of rewards alone, and zero is none of rewards.
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in {"gae", "zero"}])
def test_a_built_in_estimator_keeps_the_contract(name: Any) -> None:
    estimator = partial(step_advantages, config=AlgorithmConfig(advantage_estimator=name))
    assert_contract(advantage_checks(estimator, traits=ESTIMATORS[name]))


def minus_mean(groups: Any, *, wrong: str = "") -> Any:
    advantages = [group.rewards_G - group.rewards_G.mean() for group in groups]
    match wrong:
        case "":
            pass
        case "sign":
            return [-a for a in advantages]
        case "second best":
            return [-np.abs(group.rewards_G - 0.6) for group in groups]
        case "zero":
            return [0 * a for a in advantages]
        case "nan":
            return [a / a.std() for a in advantages]
        case "over the step":
            return [group.rewards_G - np.mean([r for g in groups for r in g.rewards_G]) for group in groups]
        case "first answer":
            return [group.rewards_G - group.rewards_G[0] for group in groups]
        case "first group":
            return [group.rewards_G - groups[0].rewards_G.mean() for group in groups]
        case "one number":
            return [a.mean() for a in advantages]
        case "one array":
            return np.concatenate(advantages)
        case "random":
            return [a + np.random.default_rng().random(a.shape) for a in advantages]
        case "in place":
            for group in groups:
                group.rewards_G[:] = 0.0
        case _:
            raise ValueError(wrong)
    return advantages


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("sign", "never gets less"),
        ("sign", "check the sign"),
        ("second best", "check the sign"),
        ("zero", "nothing is learned"),
        ("nan", "are finite"),
        ("over the step", "other groups do not matter"),
        ("first answer", "order of answers"),
        ("first group", "order of groups"),
        ("one number", "one advantage per answer"),
        ("one array", "a list of one array"),
        ("random", "same bits"),
        ("in place", "leave the groups alone"),
    ],
)
def test_a_wrong_estimator_breaks_its_rule(wrong: str, rule: str) -> None:
    traits = EstimatorTraits(needs_peers=True)
    assert_contract(advantage_checks(minus_mean, traits=traits))
    with np.errstate(invalid="ignore"):
        assert rule in broken(advantage_checks(partial(minus_mean, wrong=wrong), traits=traits))


def test_spanning_the_step_is_allowed_by_declaration_and_by_default() -> None:
    estimator = partial(minus_mean, wrong="over the step")
    assert_contract(advantage_checks(estimator, traits=OWN_TRAITS))


ITEM = RewardRequest(prompt="1+1=", response="2", answer="2", metadata={"level": [1]})
WRONG = "tests.fakes.wrong_rewards"


def tried(name: str, *, timeout_s: float = 20.0) -> str:
    """What a reward breaks of its contract."""
    with RewardRunner(name, timeout_s=timeout_s) as runner:
        return broken(reward_checks(runner, item=ITEM))


@pytest.mark.parametrize("name", [*BUILTIN_REWARDS, f"{WRONG}.exact", f"{WRONG}.exact_async"])
def test_a_reward_that_keeps_the_contract_passes(name: str) -> None:
    assert tried(name) == ""


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("sign", "at least as much as an empty one"),
        ("nan", "must be finite"),
        ("empty", "IndexError"),
        ("parts", "same named parts"),
        ("drawn", "two calls"),
        ("metadata", "leaves metadata alone"),
        ("metadata_async", "metadata was {'level': [1]} and is {}; work on a copy"),
        ("text", "a reward is a finite number"),
        ("exits", "its process ended with exit code 0"),
    ],
)
def test_a_wrong_reward_breaks_its_rule(wrong: str, rule: str) -> None:
    assert rule in tried(f"{WRONG}.{wrong}")


def test_a_reward_that_hangs_is_ended_at_its_limit() -> None:
    told = tried(f"{WRONG}.hangs", timeout_s=0.5)
    assert "with the key reward, within 0.5 s" in told
    assert "response ' ': the call took longer than 0.5 s" not in told, "the first that hangs ends a check"
    assert "response '': the call took longer than 0.5 s" in told
    assert "leaves metadata alone" not in told, "the right response does not hang"


def test_every_failure_is_told_at_once_and_user_errors_name_their_line() -> None:
    def fails() -> None:
        raise KeyError("lost")

    def breaks() -> None:
        raise ContractError("got 3")

    checks = [Check(rule="a", run=fails), Check(rule="b", run=lambda: None), Check(rule="c", run=breaks)]
    with pytest.raises(ContractError, match=r"2 of 3 checks failed") as error:
        assert_contract(checks)
    assert "KeyError: 'lost'" in str(error.value)
    assert "test_plugin_contracts.py:" in str(error.value)
    assert "got 3" in str(error.value)
    assert [bool(reason) for _, reason in run_checks(checks)] == [True, False, True]
