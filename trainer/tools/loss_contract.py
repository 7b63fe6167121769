"""The contract of a user's loss, as checks that can be run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms.losses import MAX_LOG_RATIO, LossInputs, LossStats
from trainer.tools.plugin_contracts import Check, checks_of, expect

LossFn = Callable[[LossInputs], tuple[Tensor, LossStats]]

_LENGTHS = (3, 1, 0, 7, 5)
"""Loss tokens of the sequences of a trial: ragged, with a sequence of one token and one of none."""
_SEEDS = (0, 1, 2)
_SPLITS = (((0,), (1, 2), (3, 4)), ((4, 2, 0, 3, 1),), ((3,), (0, 4), (2,), (1,)))
"""Sequences of the trial in other orders and over other numbers of micro-batches."""


def loss_checks(loss: LossFn, *, selects: bool = False) -> list[Check]:
    """The contract of a loss whose numbers are bound. `selects`: it gets tokens chosen for their covariance, which only
    clip_cov and kl_cov do in a run."""
    trials = [_trial(seed, selects=selects) for seed in _SEEDS]
    every = [*trials, _per_token(trials[0])]
    return checks_of(loss, {
        "gives (one float32 per loss token, LossStats)": (_form, every),
        "values and gradients are finite": (_finite, every),
        "stays finite where the policies are e^300 apart": (_finite, [_absurd(selects)]),
        "a micro-batch without a loss token gives no loss": (_empty, trials[:1]),
        "gradients reach the log-probs and nothing else": (_gradient_path, every),
        "two calls give the same bits and leave the inputs alone": (_repeatable, every),
        "a sequence has the same loss in any order and any micro-batch": (_splits, every),
        "a good token becomes likelier and a bad one rarer": (_direction, trials),
        "statistics are those of the tokens, and add up over micro-batches": (_stats, every),
    })  # fmt: skip


def _trial(seed: int, *, selects: bool) -> LossInputs:
    """Random inputs; advantages are one per sequence, as with rewards of the outcome."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(_LENGTHS)
    old = -rng.exponential(1.5, num_tokens) - 0.02
    new = np.minimum(old + rng.normal(0, 0.4, num_tokens), -0.001)
    per_sequence = rng.permutation([1.0, -1.0, 0.5, -0.7, 1.3])
    return LossInputs(
        logprobs_L=torch.tensor(new, dtype=torch.float32),
        old_logprobs_L=torch.tensor(old, dtype=torch.float32),
        advantages_L=torch.tensor(np.repeat(per_sequence, _LENGTHS), dtype=torch.float32),
        sequence_L=torch.tensor(np.repeat(np.arange(len(_LENGTHS)), _LENGTHS)),
        num_sequences=len(_LENGTHS),
        selected_L=torch.tensor(rng.random(num_tokens) < 0.3) if selects else None,
    )


def _per_token(trial: LossInputs) -> LossInputs:
    """With an advantage per token, as a critic gives them, some of them 0."""
    return replace(trial, advantages_L=torch.arange(len(trial.advantages_L)) % 5 * 0.5 - 1.0)


def _absurd(selects: bool) -> LossInputs:
    log_ratios = torch.tensor([300.0, -300.0, 300.0, -300.0])
    return LossInputs(
        logprobs_L=log_ratios - 301.0,
        old_logprobs_L=torch.full((4,), -301.0),
        advantages_L=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        sequence_L=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
        selected_L=torch.tensor([True, False, True, False]) if selects else None,
    )


def _call(loss: LossFn, inputs: LossInputs) -> tuple[Tensor, Tensor, LossStats]:
    """(loss, gradient of its sum by the log-probs, stats) of the right form."""
    leaf_L = inputs.logprobs_L.detach().clone().requires_grad_()
    given = loss(replace(inputs, logprobs_L=leaf_L))
    is_pair = isinstance(given, tuple) and len(given) == 2
    expect(is_pair, f"expected (loss, LossStats), got a {type(given).__name__}")
    loss_L, stats = given
    kinds = f"({type(loss_L).__name__}, {type(stats).__name__})"
    expect(isinstance(loss_L, Tensor) and isinstance(stats, LossStats), f"expected (Tensor, LossStats), got {kinds}")
    expect(
        loss_L.shape == leaf_L.shape and loss_L.dtype == torch.float32,
        f"expected float32 of shape {list(leaf_L.shape)}, one loss per token, got {loss_L.dtype} of shape "
        f"{list(loss_L.shape)}; do not average, the aggregation does",
    )
    no_gradient = "the loss has no gradient; compute it from inputs.logprobs_L without detach() or no_grad()"
    expect(loss_L.requires_grad, no_gradient)
    (grad_L,) = torch.autograd.grad(loss_L.sum(), leaf_L, retain_graph=True, allow_unused=True)
    expect(grad_L is not None, "the loss does not depend on inputs.logprobs_L")
    return loss_L, grad_L, stats


def _form(loss: LossFn, inputs: LossInputs) -> None:
    _, _, stats = _call(loss, inputs)
    for field in fields(stats):
        value = getattr(stats, field.name)
        is_kept = isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
        expect(is_kept, f"LossStats.{field.name} must be a 0-d tensor without gradient, got {value!r:.80}")


def _finite(loss: LossFn, inputs: LossInputs) -> None:
    loss_L, grad_L, _ = _call(loss, inputs)
    for name, values_L in (("loss", loss_L.detach()), ("gradient", grad_L)):
        message = f"the {name} is {values_L.tolist()}; bound the log-ratio, as ratio_and_log does"
        expect(bool(torch.isfinite(values_L).all()), message)


def _empty(loss: LossFn, trial: LossInputs) -> None:
    loss_L, _, stats = _call(loss, _part(trial, (_LENGTHS.index(0),)))
    message = f"its sum is {loss_L.sum().item()}, ratio_sum {stats.ratio_sum}, ratio_max {stats.ratio_max}"
    expect(bool(loss_L.sum() == 0 and stats.ratio_sum == 0 and stats.ratio_max == 0), message)


def _gradient_path(loss: LossFn, inputs: LossInputs) -> None:
    """Nothing would train a parameter of the loss's own."""
    leaf_L = inputs.logprobs_L.detach().clone().requires_grad_()
    loss_L, _ = loss(replace(inputs, logprobs_L=leaf_L))
    todo, seen, found = [loss_L.grad_fn], set[object](), False
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            message = f"the gradient also reaches a tensor of shape {list(variable.shape)} that is no input"
            expect(variable is leaf_L, message)
            found = True
        todo.extend(following for following, _ in node.next_functions)
    expect(found, "the gradient does not reach inputs.logprobs_L")


def _repeatable(loss: LossFn, inputs: LossInputs) -> None:
    before = [value.clone() for value in _tensors(inputs)]
    first, second = _call(loss, inputs), _call(loss, inputs)
    message = "the second call gave other numbers; use no randomness and keep no state between calls"
    expect(torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]), message)
    expect(all(map(torch.equal, before, _tensors(inputs))), "an input was changed in place")


def _splits(loss: LossFn, inputs: LossInputs) -> None:
    whole_L, whole_grad_L, _ = _call(loss, inputs)
    for members in (members for parts in _SPLITS for members in parts):
        index = _tokens_of(inputs, members)
        part_L, grad_L, _ = _call(loss, _part(inputs, members))
        for name, got, expected in (("loss", part_L, whole_L[index]), ("gradient", grad_L, whole_grad_L[index])):
            expect(
                torch.allclose(got, expected, rtol=1e-5, atol=1e-7),
                f"the {name} of the sequences {list(members)} is {_short(got)} alone and {_short(expected)} next to "
                "others; look only at a token and its own sequence",
            )


def _direction(loss: LossFn, inputs: LossInputs) -> None:
    """At ratio 1 the loss is a policy gradient: its gradient is against the advantage."""
    selected_L = None if inputs.selected_L is None else torch.zeros_like(inputs.selected_L)
    on_policy = replace(inputs, old_logprobs_L=inputs.logprobs_L.detach(), selected_L=selected_L)
    _, grad_L, _ = _call(loss, on_policy)
    for gradient, advantage in zip(grad_L.tolist(), inputs.advantages_L.tolist(), strict=True):
        expect(
            gradient * advantage < 0,
            f"at ratio 1 a token of advantage {advantage:g} has gradient {gradient:g}; the sign must be that of "
            "-advantage: a loss is minimised",
        )


def _stats(loss: LossFn, inputs: LossInputs) -> None:
    _, _, stats = _call(loss, inputs)
    log_ratios = (inputs.logprobs_L - inputs.old_logprobs_L).tolist()
    ratios = [math.exp(min(max(x, -MAX_LOG_RATIO), MAX_LOG_RATIO)) for x in log_ratios]
    _expect_close("ratio_sum", stats.ratio_sum, sum(ratios))
    _expect_close("ratio_max", stats.ratio_max, max(ratios))
    for name in ("clipped_low", "clipped_high", "clipped_dual"):
        parts = [getattr(_call(loss, _part(inputs, (i,)))[2], name).item() for i in range(inputs.num_sequences)]
        value = getattr(stats, name).item()
        message = f"{name} must count tokens, 0 to {len(ratios)}, got {value:g}"
        expect(0 <= value <= len(ratios) and value == round(value), message)
        _expect_close(name, getattr(stats, name), sum(parts))


def _expect_close(name: str, got: Tensor, expected: float) -> None:
    message = f"{name} is {got.item():g}, expected {expected:g}; `loss_stats(inputs, low=.., high=..)` counts"
    expect(math.isclose(got.item(), expected, rel_tol=1e-4, abs_tol=1e-6), message)


def _part(inputs: LossInputs, members: Sequence[int]) -> LossInputs:
    """Some of the sequences as a separate micro-batch, in this order."""
    index = _tokens_of(inputs, members)
    counts = torch.tensor([int((inputs.sequence_L == i).sum()) for i in members])
    return LossInputs(
        logprobs_L=inputs.logprobs_L[index],
        old_logprobs_L=inputs.old_logprobs_L[index],
        advantages_L=inputs.advantages_L[index],
        sequence_L=torch.repeat_interleave(torch.arange(len(members)), counts),
        num_sequences=len(members),
        selected_L=None if inputs.selected_L is None else inputs.selected_L[index],
    )


def _tokens_of(inputs: LossInputs, members: Sequence[int]) -> Tensor:
    return torch.cat([torch.nonzero(inputs.sequence_L == i).squeeze(1) for i in members])


def _tensors(inputs: LossInputs) -> list[Tensor]:
    values = (getattr(inputs, field.name) for field in fields(inputs))
    return [value for value in values if isinstance(value, Tensor)]


def _short(values_L: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values_L.tolist()) + "]"
