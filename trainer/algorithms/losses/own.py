"""A policy loss of the user, by dotted path. Shape legend: `L` loss tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from trainer.algorithms.losses.inputs import LossInputs, LossStats
from trainer.config.own_function import load_own

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "algorithm.loss"


def own_loss(inputs: LossInputs, *, path: str, args: Mapping[str, float]) -> tuple[Tensor, LossStats]:
    """The loss at `path`, called as `loss(inputs, **args)`, with the form of its result checked.

    Returns:
        (loss float32[L], stats), as the built-in losses give them.

    Raises:
        ConfigurationError: as `load_own`.
        ValueError: it gave something else, or a loss without gradient; the message names it.
    """
    given = load_own(path, key=KEY, args=args)(inputs, **args)
    name, expected, kind = f"{KEY}={path}", "must give (loss per token, LossStats)", type(given).__name__
    pair = cast("tuple[object, ...]", given) if isinstance(given, tuple) else ()
    if len(pair) != 2:
        raise ValueError(f"{name} {expected}, got an object of type {kind}; see docs/add_a_loss.md")
    loss_L, stats = pair
    if not isinstance(loss_L, Tensor) or not isinstance(stats, LossStats):
        got = f"({type(loss_L).__name__}, {type(stats).__name__})"
        raise ValueError(f"{name} {expected}, got {got}; `loss_stats(inputs)` makes the stats of a loss without clip")
    expected_shape, expected_dtype = inputs.logprobs_L.shape, _dtype(inputs)
    if loss_L.shape != expected_shape or loss_L.dtype != expected_dtype:
        raise ValueError(
            f"{name} must give one {expected_dtype} per loss token, shape {list(expected_shape)}, got {loss_L.dtype} "
            f"of shape {list(loss_L.shape)}; do not average, algorithm.aggregation does"
        )
    if torch.is_grad_enabled() and inputs.logprobs_L.requires_grad and not loss_L.requires_grad:
        raise ValueError(f"{name} gave a loss without gradient; compute it from inputs.logprobs_L, without detach()")
    return loss_L, stats


def _dtype(inputs: LossInputs) -> torch.dtype:
    return torch.promote_types(inputs.logprobs_L.dtype, torch.float32)
