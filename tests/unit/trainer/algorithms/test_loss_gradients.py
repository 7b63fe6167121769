"""Gradients of the losses against differences of their values, and keys that must matter wherever they are accepted.

Shape legend: `L` loss tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch

from tests.unit.trainer.algorithms.test_losses import config_for, random_inputs
from tests.unit.trainer.config.test_rules import config_with, keys_refused
from trainer.algorithms.corrections import correct
from trainer.algorithms.losses import kl_penalty, policy_loss, value_loss
from trainer.config.algorithm import LOSS_KEYS, CorrectionConfig, LossName, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.losses import LossInputs

LOSSES = get_args(LossName)
HELD_FIXED = ("cispo",)
"""Losses whose weight has no gradient by definition: their value says something else than their gradient."""
OF_A_SEQUENCE = ("gspo", "gmpo")
"""Losses whose token gradients are those of their own sequence's value; with one token in each they are the same."""
SELECTION_KEYS = {"cov_frac", "cov_min", "cov_max"}
"""Read by trainer.algorithms.token_weights, before there is a loss."""


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in HELD_FIXED])
def test_the_gradient_is_that_of_the_value(loss: str) -> None:
    lengths = (1,) * 14 if loss in OF_A_SEQUENCE else (3, 1, 0, 7, 5)
    config = config_for(loss, dual_clip=1.5) if loss == "ppo_clip" else config_for(loss)
    for seed in range(3):
        inputs = random_inputs(seed, lengths=lengths, per_turn=True)

        def value(logprobs_L: Tensor, inputs: LossInputs = inputs) -> Tensor:
            return policy_loss(replace(inputs, logprobs_L=logprobs_L), config=config)[0]

        leaf_L = inputs.logprobs_L.detach().clone().requires_grad_()
        assert leaf_L.dtype == torch.float64
        assert torch.autograd.gradcheck(value, (leaf_L,))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_a_kl_estimate_is_that_of_its_value(estimator: Any) -> None:
    rng = np.random.default_rng(1)
    ours_L, reference_L = (torch.from_numpy(rng.normal(-2, 0.5, 9)) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, reference_L, estimator), (ours_L.requires_grad_(),))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_of_the_value_loss_is_that_of_its_value(clip: float | None) -> None:
    rng = np.random.default_rng(2)
    values_L, old_L, returns_L = (torch.from_numpy(rng.normal(0, 0.5, 20)) for _ in range(3))
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, old_L, returns_L, clip=clip)[0], (values_L.requires_grad_(),)
    )


def corrected_gradient(inputs: LossInputs, ages: Tensor, objective: Objective, config: Any) -> np.ndarray:
    leaf_L = inputs.logprobs_L.detach().clone().requires_grad_()
    corrected, weight_L, *_ = correct(
        replace(inputs, logprobs_L=leaf_L), age_L=ages, config=CorrectionConfig(objective=objective)
    )
    loss_L, _ = policy_loss(corrected, config=config)
    (grad_L,) = torch.autograd.grad((loss_L * weight_L).sum(), leaf_L)
    return grad_L.numpy()


@pytest.mark.parametrize("objective", get_args(Objective))
def test_every_key_changes_the_gradient_under_every_objective_that_accepts_its_loss(objective: Objective) -> None:
    """Otherwise a key would be accepted, printed and without effect."""
    moved = {
        "clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "dual_clip": 1.01,
        "sapo_tau_positive": 2.0, "sapo_tau_negative": 2.0,
        "cov_kl_coef": 3.0, "dppo_threshold": 1e-6, "dro_beta": 2.0,
    }  # fmt: skip
    inputs = random_inputs(1, lengths=(1, 2, 9, 1, 4, 8, 1, 3, 2, 1, 6, 2), per_turn=True)
    ages = torch.from_numpy(np.random.default_rng(0).integers(1, 4, len(inputs.logprobs_L)))
    accepted = []
    for loss in LOSSES:
        keys = {"algorithm__loss": loss, "algorithm__correction__objective": objective, "mode__max_staleness": 3}
        if loss == "reinforce" or keys_refused(config_with(**keys)):
            continue
        accepted.append(loss)
        plain = corrected_gradient(inputs, ages, objective, config_for(loss))
        for key in set(LOSS_KEYS[loss]) - SELECTION_KEYS:
            changed = corrected_gradient(inputs, ages, objective, config_for(loss, **{key: moved[key]}))
            assert not np.array_equal(plain, changed), (loss, key)
    if objective == "decoupled":
        assert accepted == ["importance_sampling"]
    else:
        assert len(accepted) > 8
