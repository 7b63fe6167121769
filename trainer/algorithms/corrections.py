"""Off-policy corrections: which old policy the loss compares with, and how much each sampled token still counts.

One pipeline for every published recipe. An objective chooses the old policy, and with it the ratio
rho = pi_learner / pi_engine of every token. Three independent actions look at that ratio, so their order does not
matter: `clamp` bounds the importance weight (TIS), `mask` takes tokens out (MIS, IcePop), `reject` takes whole
responses out.

With `bypass` the ratio is inside the loss already, so the weight is only the factor by which the actions changed it.
That replaces the ratio by the clamped one only if the loss is proportional to what is clamped: a clamp is refused with
every other loss (`trainer.config.algorithm.LOSSES`). With `decoupled` and `loglinear` the weight is the ratio that is
left, of any level:

    bypass       loss(pi / engine)   x  keep clamp(rho) / rho     rho = pi / engine
    decoupled    loss(pi / proximal) x  keep clamp(rho)           rho = proximal / engine
    loglinear    loss(pi / approx)   x  keep clamp(rho)           rho = approx / engine

The proximal policy is the learner's before the first update of the step, and so is the one that `loglinear`
interpolates from: over all updates of a batch neither they nor the engine's log-probs move. In the first update it is
the policy being trained, without gradient, which costs no forward pass. With one update per batch pi / proximal is
therefore 1, where no bound of a loss can act, and `decoupled` takes losses without one.

Loss weights are divided by the counts of the whole step before any of this, and stay: what is masked or rejected
contributes 0 and does not shrink the denominator, so the gradient of the rest does not depend on it, nor on how a step
is split. Shape legend: `L` loss tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.algorithms.losses import MAX_LOG_RATIO, LossInputs, at_least_float32, sequence_mean, sequence_sum

if TYPE_CHECKING:
    from trainer.config.algorithm import CorrectionConfig, Level, Metric


@torch.no_grad()
def correct(
    inputs: LossInputs, *, age_L: Tensor, config: CorrectionConfig, proximal_L: Tensor | None = None
) -> tuple[LossInputs, Tensor, Tensor, dict[str, Tensor]]:
    """Apply the pipeline of the module's description: the loss becomes loss(inputs) x weight.

    TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". MIS: Liu et al.
    2025, "When Speed Kills Stability". IcePop: Ling Team 2025, arXiv:2510.18855. Decoupled objective: Hilton et al.
    2022, arXiv:2110.00641, and AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.2. Log-linear: A-3PO,
    arXiv:2512.06547.

    Args:
        inputs: with the log-probs of the engine as old log-probs.
        age_L: int64, >= 0: version that the learner starts the step with minus the version that sampled the token.
        proximal_L: log-probs of the learner before the first update of the step, float32[L]; None in that update, where
            they are those of `inputs`. `bypass` needs none.

    Returns:
        (inputs with the old policy that the objective chose,
        weight float32[L], no gradient goes through it,
        keep float32[L]: 0 on tokens that carry no loss at all, be it policy loss or entropy bonus, 1 elsewhere,
        sums over the loss tokens, 0-d tensors: of the importance weights keep x clamp(rho) `weight` and `weight_sq`,
        with their largest `weight_max`; tokens `clamped` (out of the bounds of `clamp`), `masked` and `rejected`; and
        the distance of the learner's policy to the one that sampled, of tokens sampled at the version that the step
        starts with (`fresh`: the same weights, other kernels) and at older ones (`stale`: what was learned since, and
        that mismatch on top): `_tokens`, `_abs` (of |log ratio|, nats) and `_kl` (k3, never negative)).

    Example:
        decoupled, ratios [.4, .8, 6], mask.lower .5, mask.upper 5: weights [0, .8, 0]  (IcePop)
    """
    engine_L, current_L = at_least_float32(inputs.old_logprobs_L), at_least_float32(inputs.logprobs_L)
    old_L = _old_logprobs(inputs, proximal_L, age_L=age_L, config=config)
    is_bypass = config.objective == "bypass"
    log_ratio_L = (current_L if is_bypass else at_least_float32(old_L)) - engine_L
    ratio_L = measure(log_ratio_L, inputs, metric="ratio", level=config.level)
    clamped_L = ratio_L.clamp(config.clamp.lower, config.clamp.upper) if config.clamp.is_active else ratio_L
    mask, reject = config.mask, config.reject
    is_masked_L = is_rejected_L = torch.zeros_like(ratio_L, dtype=torch.bool)
    if mask.is_active:
        values_L = measure(log_ratio_L, inputs, metric=mask.metric, level=config.level)
        is_masked_L = _outside(values_L, mask.lower, mask.upper)
    if reject.is_active:
        values_L = measure(log_ratio_L, inputs, metric=reject.metric, level=reject.level)
        is_rejected_L = _outside(values_L, reject.lower, reject.upper)
        is_rejected_L = sequence_sum(is_rejected_L.to(log_ratio_L.dtype), inputs) > 0
    keep_L = (~(is_masked_L | is_rejected_L)).to(ratio_L.dtype)
    weight_L = keep_L * clamped_L
    sums = {
        "weight": weight_L.sum(),
        "weight_sq": weight_L.square().sum(),
        "weight_max": weight_L.max() if weight_L.numel() > 0 else weight_L.new_zeros(()),
        "clamped": (clamped_L != ratio_L).sum().float(),
        "masked": is_masked_L.sum().float(),
        "rejected": is_rejected_L.sum().float(),
        **_mismatch("fresh", current_L - engine_L, age_L == 0),
        **_mismatch("stale", current_L - engine_L, age_L > 0),
    }
    # x / x is exactly 1, so where nothing acts the loss keeps its bits.
    factor_L = keep_L * (clamped_L / ratio_L) if is_bypass else weight_L
    return replace(inputs, old_logprobs_L=old_L), factor_L, keep_L, sums


def measure(log_ratio_L: Tensor, inputs: LossInputs, *, metric: Metric, level: Level) -> Tensor:
    """How far every token, or its response, is from the policy that sampled it.

    With r = exp(log_ratio), kept within e^-20 and e^20: "ratio" r; "k1" -log r; "k2" (log r)^2 / 2; "k3" r - 1 - log r
    (Schulman 2020, as estimates of KL(engine || learner)); "tv" |r - 1| / 2, whose mean is the total variation.
    A response has the sum ("sequence") or the mean ("sequence_mean") over its loss tokens; of ratios the product or the
    geometric mean.

    Returns:
        float32[L]; tokens of one response share its value.
    """
    if metric == "ratio":
        return _at_level(log_ratio_L, inputs, level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    log_ratio_L = log_ratio_L.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match metric:
        case "k1":
            values_L = -log_ratio_L
        case "k2":
            values_L = 0.5 * log_ratio_L.square()
        case "k3":
            values_L = k3(log_ratio_L)
        case "tv":
            values_L = 0.5 * torch.expm1(log_ratio_L).abs()
        case _:
            raise ValueError(f"a correction's metric must be ratio, k1, k2, k3 or tv, got {metric!r}")
    return _at_level(values_L, inputs, level)


def k3(log_ratio_L: Tensor) -> Tensor:
    """r - 1 - log r >= 0, without the cancellation of r - 1 near r = 1."""
    return (torch.expm1(log_ratio_L) - log_ratio_L).clamp_min(0.0)


def _old_logprobs(inputs: LossInputs, proximal_L: Tensor | None, *, age_L: Tensor, config: CorrectionConfig) -> Tensor:
    start_L = inputs.logprobs_L.detach() if proximal_L is None else proximal_L
    match config.objective:
        case "bypass":
            return inputs.old_logprobs_L
        case "decoupled":
            return start_L
        case "loglinear":
            # A token d versions old is d steps from the engine's policy and one from the proximal one, which A-3PO puts
            # a step before the current: 1/d of the way remains. Without an age the current policy is the proximal one.
            engine_L, start_L = at_least_float32(inputs.old_logprobs_L), at_least_float32(start_L)
            share_L = 1.0 / age_L.clamp_min(1).to(start_L.dtype)
            return torch.where(age_L > 0, start_L + share_L * (engine_L - start_L), start_L)
        case _:
            raise ValueError(
                f"algorithm.correction.objective must be bypass, decoupled or loglinear, got {config.objective!r}"
            )


def _at_level(values_L: Tensor, inputs: LossInputs, level: Level) -> Tensor:
    match level:
        case "token":
            return values_L
        case "sequence":
            return sequence_sum(values_L, inputs)
        case "sequence_mean":
            return sequence_mean(values_L, inputs)
        case _:
            raise ValueError(f"a correction's level must be token, sequence or sequence_mean, got {level!r}")


def _outside(values_L: Tensor, lower: float | None, upper: float | None) -> Tensor:
    is_outside_L = torch.zeros_like(values_L, dtype=torch.bool)
    if lower is not None:
        is_outside_L |= values_L < lower
    if upper is not None:
        is_outside_L |= values_L > upper
    return is_outside_L


def _mismatch(name: str, log_ratio_L: Tensor, is_counted_L: Tensor) -> dict[str, Tensor]:
    # The clamp as everywhere: one impossible token must not turn a mean into infinity.
    counted_L = torch.where(is_counted_L, log_ratio_L.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)
    return {
        f"{name}_tokens": is_counted_L.sum().float(),
        f"{name}_abs": counted_L.abs().sum(),
        f"{name}_kl": k3(counted_L).sum(),
    }
