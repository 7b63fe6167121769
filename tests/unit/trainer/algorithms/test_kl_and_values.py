"""KL estimators and the critic's loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.algorithms.losses import kl_penalty, value_loss

ESTIMATORS = ("k1", "k2", "k3", "k1_straight_through", "k3_straight_through")


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [0.5, -0.5], [1, 1]),
        ("k2", [0.125, 0.125], [0.5, -0.5]),
        ("k3", [0.1065307, 0.1487213], [1 - np.exp(-0.5), 1 - np.exp(0.5)]),
        ("k1_straight_through", [0.5, -0.5], [0.5, -0.5]),
        ("k3_straight_through", [0.1065307, 0.1487213], [0.5, -0.5]),
    ],
)
def test_kl_estimates_equal_the_closed_form(estimator: str, values: list[float], gradients: list[float]) -> None:
    reference_L = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    logprobs_L = (reference_L + torch.tensor([0.5, -0.5])).requires_grad_()
    kl_L = kl_penalty(logprobs_L, reference_L, estimator)  # type: ignore[arg-type]
    kl_L.sum().backward()
    np.testing.assert_allclose(kl_L.detach().numpy(), values, atol=1e-6)
    np.testing.assert_allclose(logprobs_L.grad.numpy(), gradients, atol=1e-9)  # pyright: ignore


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_straight_through_gradient_is_that_of_the_exact_kl(estimator: str) -> None:
    """Expectation over the vocabulary with the policy's own probabilities: value and gradient of KL(pi || ref)."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    logp, ref = logits.log_softmax(0), reference.log_softmax(0)
    exact = (logp.exp() * (logp - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = (logp.exp().detach() * kl_penalty(logp, ref, f"{estimator}_straight_through")).sum()  # type: ignore[arg-type]
    (got,) = torch.autograd.grad(estimate, logits)
    assert estimate.item() == pytest.approx(exact.item(), abs=1e-9)
    torch.testing.assert_close(got, expected)


def test_kl_is_finite_where_the_policies_are_far_apart() -> None:
    for estimator in ESTIMATORS:
        leaf_L = torch.tensor([-500.0, 0.0], requires_grad=True)
        kl_L = kl_penalty(leaf_L, torch.tensor([0.0, -500.0]), estimator)  # type: ignore[arg-type]
        kl_L.sum().backward()
        assert torch.isfinite(kl_L).all() and torch.isfinite(leaf_L.grad).all(), estimator  # pyright: ignore


def test_unknown_kl_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="must be k1, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "gradient"),
    [
        (0.5, 0.2, 1.0, 0.2, 0.18, 0.0),  # the clipped value .4 is further from the return
        (0.5, 0.2, 1.0, None, 0.125, -0.5),
        (0.3, 0.2, 1.0, 0.2, 0.245, -0.7),
        (-0.5, 0.2, 1.0, 0.2, 1.125, -1.5),  # moved away from the return: the plain square is larger, and pulls back
        (0.5, 0.9, 0.0, 0.2, 0.245, 0.0),
    ],
)
def test_value_loss_equals_the_closed_form(
    value: float, old: float, target: float, clip: float | None, loss: float, gradient: float
) -> None:
    leaf_L = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old_L, returns_L = torch.tensor([old], dtype=torch.float64), torch.tensor([target], dtype=torch.float64)
    loss_L, cut_L = value_loss(leaf_L, old_L, returns_L, clip=clip)
    loss_L.sum().backward()
    assert loss_L.item() == pytest.approx(loss, abs=1e-9)
    assert leaf_L.grad.item() == pytest.approx(gradient, abs=1e-9)  # pyright: ignore
    assert cut_L.item() == (gradient == 0)


@pytest.mark.parametrize("seed", range(4))
def test_kl_estimates_of_random_tokens_equal_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours, reference = rng.normal(-2, 1, (2, 37))
    d = ours - reference
    k3, squares = np.exp(-d) - 1 + d, d**2 / 2
    expected = {"k1": (d, 1 + 0 * d), "k2": (squares, d), "k3": (k3, 1 - np.exp(-d))}
    expected |= {"k1_straight_through": (d, d), "k3_straight_through": (k3, d)}
    for estimator in ESTIMATORS:
        leaf_L = torch.from_numpy(ours).requires_grad_()
        kl_L = kl_penalty(leaf_L, torch.from_numpy(reference), estimator)  # type: ignore[arg-type]
        (grad_L,) = torch.autograd.grad(kl_L.sum(), leaf_L)
        np.testing.assert_allclose(kl_L.detach().numpy(), expected[estimator][0], atol=1e-12)
        np.testing.assert_allclose(grad_L.numpy(), expected[estimator][1], atol=1e-12)


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4])
def test_k3_of_policies_that_hardly_differ_is_half_the_square_in_float32(scale: float) -> None:
    ours_L = scale * torch.linspace(-1, 1, 1001)
    kl_L = kl_penalty(ours_L, torch.zeros_like(ours_L), "k3")
    assert (kl_L >= 0).all()
    assert kl_L.double().mean().item() == pytest.approx(scale**2 / 6, rel=0.01)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_value_losses_of_random_tokens_equal_numpy(seed: int, clip: float | None) -> None:
    values, old, returns = np.random.default_rng(seed).normal(size=(3, 37))
    near = values if clip is None else old + np.clip(values - old, -clip, clip)
    plain, clipped = (values - returns) ** 2 / 2, (near - returns) ** 2 / 2
    leaf_L = torch.from_numpy(values).requires_grad_()
    loss_L, cut_L = value_loss(leaf_L, torch.from_numpy(old), torch.from_numpy(returns), clip=clip)
    (grad_L,) = torch.autograd.grad(loss_L.sum(), leaf_L)
    np.testing.assert_allclose(loss_L.detach().numpy(), np.maximum(plain, clipped), atol=1e-12)
    np.testing.assert_array_equal(cut_L.numpy(), clipped > plain)
    np.testing.assert_allclose(grad_L.numpy(), np.where(clipped > plain, 0.0, values - returns), atol=1e-12)
    assert cut_L.any() == (clip is not None)
