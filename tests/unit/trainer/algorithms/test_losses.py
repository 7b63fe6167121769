from __future__ import annotations

import math

import pytest
import torch

from trainer.algorithms.losses import policy_loss, ppo_clip_loss, reinforce_loss
from trainer.config.schema.algorithm import AlgorithmConfig

CASES = [
    (0.5, 1.0, -1.28),
    (-0.5, 1.0, -0.6065307),
    (0.5, -1.0, 1.6487213),
    (-0.5, -1.0, 0.8),
    (3.0, -1.0, 10.0),
]
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 10.0}


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_ratio, advantages = torch.tensor([[c[0], c[1]] for c in CASES]).unbind(1)
    old = torch.full((len(CASES),), -2.0)
    return (old + log_ratio).requires_grad_(), old, advantages


def test_clipped_loss_equals_the_closed_form() -> None:
    loss_T, _ = ppo_clip_loss(*_inputs(), **CLIP)
    torch.testing.assert_close(loss_T, torch.tensor([c[2] for c in CASES]), rtol=1e-6, atol=0)


def test_gradient_vanishes_exactly_on_clipped_tokens() -> None:
    logprobs_T, old_T, advantages_T = _inputs()
    loss_T, _ = ppo_clip_loss(logprobs_T, old_T, advantages_T, **CLIP)
    loss_T.sum().backward()
    expected = torch.tensor([0.0, -math.exp(-0.5), math.exp(0.5), 0.0, 0.0])
    torch.testing.assert_close(logprobs_T.grad, expected)


def test_each_kind_of_clipping_is_counted_once() -> None:
    _, stats = ppo_clip_loss(*_inputs(), **CLIP)
    assert (stats.clipped_low.item(), stats.clipped_high.item(), stats.clipped_dual.item()) == (1, 1, 1)
    ratios = [math.exp(c[0]) for c in CASES]
    assert stats.ratio_sum.item() == pytest.approx(sum(ratios))
    assert stats.ratio_max.item() == pytest.approx(max(ratios))
    assert stats.kl_sum.item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios))


def test_without_dual_clip_a_bad_token_far_off_is_not_bounded() -> None:
    logprobs_T, old_T, advantages_T = _inputs()
    loss_T, stats = ppo_clip_loss(logprobs_T, old_T, advantages_T, clip_low=0.2, clip_high=0.28, clip_dual=None)
    assert loss_T[4].item() == pytest.approx(math.exp(3))
    assert stats.clipped_dual.item() == 0


def test_on_policy_all_losses_have_the_policy_gradient() -> None:
    torch.manual_seed(0)
    logprobs_T, advantages_T = torch.randn(7), torch.randn(7)
    for loss in (
        lambda x: ppo_clip_loss(x, logprobs_T, advantages_T, **CLIP),
        lambda x: reinforce_loss(x, logprobs_T, advantages_T, importance_ratio=True),
        lambda x: reinforce_loss(x, logprobs_T, advantages_T, importance_ratio=False),
    ):
        leaf = logprobs_T.clone().requires_grad_()
        loss(leaf)[0].sum().backward()
        torch.testing.assert_close(leaf.grad, -advantages_T)


def test_reinforce_with_ratio_corrects_for_the_age_of_the_sample() -> None:
    logprobs_T, old_T, advantages_T = _inputs()
    loss_T, _ = reinforce_loss(logprobs_T, old_T, advantages_T, importance_ratio=True)
    loss_T.sum().backward()
    expected = torch.tensor([-math.exp(c[0]) * c[1] for c in CASES])
    torch.testing.assert_close(loss_T.detach(), expected)
    torch.testing.assert_close(logprobs_T.grad, expected)


def test_bfloat16_inputs_are_compared_in_float32() -> None:
    logprobs_T, old_T = torch.tensor([-10.0]), torch.tensor([-10.01])
    loss_T, _ = ppo_clip_loss(logprobs_T, old_T, torch.ones(1), **CLIP)
    assert loss_T.dtype == torch.float32
    assert loss_T.item() == pytest.approx(-math.exp(0.01), rel=1e-5)


def test_absurd_ratio_stays_finite_and_no_token_gives_zeros() -> None:
    loss_T, stats = reinforce_loss(torch.zeros(1), torch.full((1,), -500.0), torch.ones(1), importance_ratio=True)
    assert torch.isfinite(loss_T).all() and torch.isfinite(stats.kl_sum)
    loss_T, stats = ppo_clip_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0), **CLIP)
    assert loss_T.sum().item() == 0 and stats.ratio_max.item() == 0


@pytest.mark.parametrize(("name", "first"), [("ppo_clip", -1.2), ("reinforce", -math.exp(0.5))])
def test_config_chooses_the_loss(name: str, first: float) -> None:
    loss_T, _ = policy_loss(*_inputs(), config=AlgorithmConfig(loss=name))
    assert loss_T[0].item() == pytest.approx(first)
