from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.learner.logprobs import selected_logprobs


def _reference(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax((hidden @ weight.T) / temperature, dim=-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_chunks_equal_the_full_softmax_with_gradients(temperature: float, chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (11, 19))
    target, direction = torch.randint(0, 19, (11,), generator=generator), torch.randn(11, generator=generator)
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            logp, entropy = selected_logprobs(h, w, target, temperature=temperature, chunk_tokens=chunk_tokens)
        else:
            logp, entropy = _reference(h, w, target, temperature)
        (logp * direction).sum().backward()
        results.append((logp.detach(), entropy.detach(), h.grad, w.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_products_are_reduced_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).bfloat16() for n in (5, 3000))
    target = torch.arange(5)
    logp, entropy = selected_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=2)
    logits = (hidden @ weight.T).double()
    expected = torch.log_softmax(logits, -1)
    torch.testing.assert_close(logp.double(), expected[torch.arange(5), target], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-5)


def test_no_loss_token_still_joins_the_graph() -> None:
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(5, 8, requires_grad=True)
    logp, _ = selected_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), temperature=1.0, chunk_tokens=4)
    logp.sum().backward()
    assert weight.grad is not None and weight.grad.eq(0).all()


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_entropy_gradient_passes_the_numerical_check(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in (6, 9))
    target = torch.randint(0, 9, (6,), generator=generator)

    def both(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return selected_logprobs(h, w, target, temperature=0.7, chunk_tokens=chunk_tokens, entropy_has_grad=True)

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_entropy_gradient_equals_the_full_softmax_in_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (11, 19))
    target, direction = torch.randint(0, 19, (11,), generator=generator), torch.randn(2, 11, generator=generator)
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            both = selected_logprobs(h, w, target, temperature=0.6, chunk_tokens=4, entropy_has_grad=True)
        else:
            both = _reference(h, w, target, 0.6)
        (torch.stack(both) * direction).sum().backward()
        results.append((h.grad, w.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", ["logprobs", "entropy"])
def test_one_output_may_stay_unused(used: str) -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    target = torch.tensor([0, 4, 2])
    logp, entropy = selected_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=2, entropy_has_grad=True)
    (got,) = torch.autograd.grad((logp if used == "logprobs" else entropy).sum(), hidden)
    (expected,) = torch.autograd.grad(_reference(hidden, weight, target, 1.0)[used == "entropy"].sum(), hidden)
    torch.testing.assert_close(got, expected)


def test_without_the_bonus_the_entropy_carries_no_gradient() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    logp, entropy = selected_logprobs(hidden, weight, torch.zeros(3, dtype=torch.long), temperature=1.0, chunk_tokens=2)
    assert logp.requires_grad and not entropy.requires_grad


class Shapes(TorchDispatchMode):
    """Of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_frozen_output_matrix_costs_no_gradient(is_trained: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (11, 19))
    grads = []
    for trained in (True, is_trained):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        logp, _ = selected_logprobs(h, w, torch.arange(11), temperature=0.6, chunk_tokens=4)
        with Shapes() as shapes:
            logp.sum().backward()
        assert ((19, 8) in shapes.seen) is trained
        assert (w.grad is not None) is trained
        grads.append(h.grad)
    assert grads[0].equal(grads[1])
