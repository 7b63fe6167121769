"""Policy losses, one value per token: pure functions of `LossInputs`, in float32; the caller sums weight x loss.

The loss NAME is the function `NAME_loss`. It takes, as keyword arguments, the keys that
`trainer.config.algorithm.LOSSES` names for it; a user's own takes `algorithm.loss_args`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from trainer.config.algorithm import is_own, load_own, loss_traits

if TYPE_CHECKING:
    from trainer.config.algorithm import AlgorithmConfig, KlEstimator


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before `exp`: e^20 is far outside any clip range but still finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The loss tokens of one micro-batch, sequence after sequence. A sequence is always whole in one micro-batch.

    Example:
        two sequences of 2 and 1 loss tokens: sequence_L = [0, 0, 1], num_sequences = 2
    """

    logprobs_L: Tensor
    """float32, of the policy being trained, with gradient."""
    old_logprobs_L: Tensor
    """float32, of the policy that the trust region is around: the one that sampled, unless a correction replaced it."""
    advantages_L: Tensor
    """float32"""
    sequence_L: Tensor
    """int64, ascending: which sequence the token is of. A sequence may have no loss token."""
    num_sequences: int
    selected_L: Tensor | None = None
    """bool: tokens chosen for their covariance over the whole step (`trainer.algorithms.token_weights`); only the
    losses clip_cov and kl_cov need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """Sums over tokens of a loss call, as 0-d tensors without gradient; divide by the number of tokens for means."""

    ratio_sum: Tensor
    """Of pi / pi_old, per token also where the loss uses the ratio of the sequence."""
    ratio_max: Tensor
    """0 if there is no token."""
    clipped_low: Tensor
    """Tokens with a negative advantage whose update the loss cut (CISPO: tokens whose weight was raised)."""
    clipped_high: Tensor
    """Tokens with a positive advantage whose update the loss cut (CISPO: tokens whose weight was lowered)."""
    clipped_dual: Tensor
    """Tokens whose gradient the dual clip cut (advantage < 0)."""


def ratio_and_log(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """(pi / pi_old, its logarithm), both float32[L]; beyond +-20 the logarithm is constant and has no gradient."""
    # float32: a bfloat16 log-prob near -10 is rounded by 0.03, which is a 3% error of the ratio.
    log_ratio_L = log_ratio(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_L.exp(), log_ratio_L


def log_ratio(inputs: LossInputs) -> Tensor:
    """log pi - log pi_old, not clamped: float32[L], or float64 if the inputs are."""
    return at_least_float32(inputs.logprobs_L) - at_least_float32(inputs.old_logprobs_L)


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision becomes float32; float64 stays, so that gradients can be checked numerically."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def sequence_mean(values_L: Tensor, inputs: LossInputs) -> Tensor:
    """Mean over the loss tokens of each sequence, given back to each of its tokens (float32[L]), as `sequence_sum`."""
    return sequence_sum(values_L, inputs) / sequence_sum(torch.ones_like(values_L), inputs)


def sequence_sum(values_L: Tensor, inputs: LossInputs) -> Tensor:
    """Sum over the loss tokens of each sequence, given back to each of its tokens. No gradient; independent of the
    other sequences, so the same bits on every split of a step.

    Returns:
        float32[L]
    """
    boundaries = torch.arange(inputs.num_sequences + 1, device=inputs.sequence_L.device)
    # Not index_add: its atomic additions on a GPU have no fixed order.
    offsets = torch.searchsorted(inputs.sequence_L, boundaries)
    # unsafe: no check of the offsets, which would wait for the device; they are right by construction.
    sums_N = torch.segment_reduce(values_L.detach(), "sum", offsets=offsets, unsafe=True, initial=0)
    return sums_N[inputs.sequence_L]


@torch.no_grad()
def loss_stats(
    inputs: LossInputs, *, low: Tensor | None = None, high: Tensor | None = None, dual: Tensor | None = None
) -> LossStats:
    """Statistics of a loss whose update was cut at `low`, `high` and `dual` (bool[L]; None: nowhere)."""
    ratio_L, _ = ratio_and_log(inputs)
    none = ratio_L.new_zeros(())
    return LossStats(
        ratio_sum=ratio_L.sum(),
        ratio_max=ratio_L.max() if ratio_L.numel() > 0 else none,
        clipped_low=none if low is None else low.sum().float(),
        clipped_high=none if high is None else high.sum().float(),
        clipped_dual=none if dual is None else dual.sum().float(),
    )


def policy_loss(inputs: LossInputs, *, config: AlgorithmConfig) -> tuple[Tensor, LossStats]:
    """The loss that `config.loss` names: (float32[L], stats).

    Raises:
        ConfigurationError: the path of a user's loss leads to none.
        ValueError: no such loss, or a user's loss gave something else, or a loss without gradient.
    """
    traits = loss_traits(config.loss)
    if is_own(config.loss):
        return _own_loss(inputs, config)
    keys = (key for key in traits.keys if key not in traits.selects)
    return globals()[f"{config.loss}_loss"](inputs, **{key: getattr(config, key) for key in keys})


def _own_loss(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, LossStats]:
    """The user's loss, called as `loss(inputs, **args)`, with the form of its result checked."""
    key, args = "algorithm.loss", config.loss_args
    name = f"{key}={config.loss}"
    given: object = load_own(config.loss, key=key, args=args)(inputs, **args)
    kind = type(given).__name__
    expected = f"{name} must give (loss per token, LossStats)"
    pair = cast("tuple[object, ...]", given) if isinstance(given, tuple) else ()
    if len(pair) != 2:
        raise ValueError(f"{expected}, got an object of type {kind}; see docs/add_a_loss.md")
    loss_L, stats = pair
    if not isinstance(loss_L, Tensor) or not isinstance(stats, LossStats):
        got = f"({type(loss_L).__name__}, {type(stats).__name__})"
        raise ValueError(f"{expected}, got {got}; `loss_stats(inputs)` makes the stats of a loss without clip")
    shape, dtype = inputs.logprobs_L.shape, torch.promote_types(inputs.logprobs_L.dtype, torch.float32)
    if loss_L.shape != shape or loss_L.dtype != dtype:
        raise ValueError(
            f"{name} must give one {dtype} per loss token, shape {list(shape)}, got {loss_L.dtype} of shape "
            f"{list(loss_L.shape)}; do not average, algorithm.loss_aggregation does"
        )
    if torch.is_grad_enabled() and inputs.logprobs_L.requires_grad and not loss_L.requires_grad:
        raise ValueError(f"{name} gave a loss without gradient; compute it from inputs.logprobs_L, without detach()")
    return loss_L, stats


def ppo_clip_loss(
    inputs: LossInputs, *, clip_ratio_low: float, clip_ratio_high: float, dual_clip: float | None = None
) -> tuple[Tensor, LossStats]:
    """Clipped surrogate: max(-A r, -A clip(r, 1 - low, 1 + high)), and at most -A c where A < 0.

    PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7); separate bounds as in DAPO (Yu et al. 2025, arXiv:2503.14476,
    eq. 10); dual clip of Ye et al. (2020, arXiv:1912.09729, eq. 5).

    Args:
        dual_clip: c > 1, or None for no dual clip.

    Example:
        log-ratio 0.5 and advantage 1 with clip_ratio_high 0.28 give -1.28.
    """
    ratio_L, _ = ratio_and_log(inputs)
    loss_L, low_L, high_L = clipped_surrogate(
        ratio_L, inputs.advantages_L, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high
    )
    if dual_clip is None:
        return loss_L, loss_stats(inputs, low=low_L, high=high_L)
    bound_L = -inputs.advantages_L * dual_clip
    is_dual_L = (inputs.advantages_L < 0) & (bound_L < loss_L)
    return torch.where(is_dual_L, bound_L, loss_L), loss_stats(inputs, low=low_L, high=high_L, dual=is_dual_L)


def clipped_surrogate(
    ratio_L: Tensor, advantages_L: Tensor, *, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) for any ratio.

    Returns:
        (loss float32[L], where the lower bound cut the gradient bool[L], where the upper bound did bool[L]).
    """
    plain_L = -advantages_L * ratio_L
    clipped_L = -advantages_L * ratio_L.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    is_cut_L, is_negative_L = clipped_L > plain_L, advantages_L < 0
    return torch.maximum(plain_L, clipped_L), is_cut_L & is_negative_L, is_cut_L & ~is_negative_L


def reinforce_loss(inputs: LossInputs) -> tuple[Tensor, LossStats]:
    """Policy gradient -A log pi (Williams 1992). Blind to the age of a sample: only right where pi = pi_old."""
    return -inputs.advantages_L * at_least_float32(inputs.logprobs_L), loss_stats(inputs)


def importance_sampling_loss(inputs: LossInputs) -> tuple[Tensor, LossStats]:
    """Policy gradient corrected for the age of the sample: -A r, unbiased and without a bound on its variance."""
    ratio_L, _ = ratio_and_log(inputs)
    return -inputs.advantages_L * ratio_L, loss_stats(inputs)


def cispo_loss(inputs: LossInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, LossStats]:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: the weight is clipped, so no token loses its gradient.

    CISPO (MiniMax-M1 2025, arXiv:2506.13585, eq. 4 and 5).

    Example:
        old log-prob -1.5, new -1, advantage 1 and clip_ratio_high 0.28 give 1.28.
    """
    ratio_L, _ = ratio_and_log(inputs)
    ratio_L = ratio_L.detach()
    low, high = 1.0 - clip_ratio_low, 1.0 + clip_ratio_high
    loss_L = -ratio_L.clamp(low, high) * inputs.advantages_L * at_least_float32(inputs.logprobs_L)
    return loss_L, loss_stats(inputs, low=ratio_L < low, high=ratio_L > high)


def sapo_loss(inputs: LossInputs, *, sapo_tau_positive: float, sapo_tau_negative: float) -> tuple[Tensor, LossStats]:
    """-A (4 / tau) sigmoid(tau (r - 1)): a gate that closes smoothly where PPO's clip cuts.

    SAPO (Gao et al. 2025, arXiv:2511.20347). At r = 1 its slope is 1, as that of r.

    Args:
        sapo_tau_positive: temperature where A > 0.
        sapo_tau_negative: temperature elsewhere; a larger one lets bad tokens fade out sooner.

    Example:
        log-ratio 0.5, tau 1 and advantage 1 give -2.6268890.
    """
    ratio_L, _ = ratio_and_log(inputs)
    tau_L = torch.where(inputs.advantages_L > 0, torch.full_like(ratio_L, sapo_tau_positive), sapo_tau_negative)
    gate_L = torch.sigmoid(tau_L * (ratio_L - 1.0)) * (4.0 / tau_L)
    return -inputs.advantages_L * gate_L, loss_stats(inputs)


def dro_loss(inputs: LossInputs, *, dro_beta: float) -> tuple[Tensor, LossStats]:
    """-A log pi + beta / 2 (log r)^2: a policy gradient held near pi_old by a square instead of a clip.

    DRO (Richemond et al. 2024, arXiv:2405.19107): the gradient of its 1/2 (reward - value - beta log r)^2
    with respect to the policy, over beta, with A in place of reward - value; per token instead of per response.
    """
    logprobs_L = at_least_float32(inputs.logprobs_L)
    return -inputs.advantages_L * logprobs_L + 0.5 * dro_beta * log_ratio(inputs).square(), loss_stats(inputs)


def clip_cov_loss(inputs: LossInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, LossStats]:
    """The PPO clip loss, and 0 on selected tokens: Clip-Cov of Cui et al. (2025, arXiv:2505.22617, section 4). Raises
    ValueError if no selection was given."""
    selected_L = _selection(inputs)
    ratio_L, _ = ratio_and_log(inputs)
    loss_L, low_L, high_L = clipped_surrogate(
        ratio_L, inputs.advantages_L, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high
    )
    is_negative_L = inputs.advantages_L < 0
    stats = loss_stats(inputs, low=low_L | (selected_L & is_negative_L), high=high_L | (selected_L & ~is_negative_L))
    return loss_L.masked_fill(selected_L, 0.0), stats


def kl_cov_loss(inputs: LossInputs, *, cov_kl_coef: float) -> tuple[Tensor, LossStats]:
    """-A r, and + cov_kl_coef |log r| on selected tokens: KL-Cov of Cui et al. (2025, arXiv:2505.22617, section 4).

    The distance |log r| stands for KL(pi_old || pi) as in the authors' implementation. It has no gradient where the
    policies agree: the penalty holds a token near the policy that sampled it, it does not stop the first step away.
    Raises ValueError if no selection was given.
    """
    selected_L = _selection(inputs)
    ratio_L, log_ratio_L = ratio_and_log(inputs)
    penalty_L = torch.where(selected_L, cov_kl_coef * log_ratio_L.abs(), 0.0)
    return -inputs.advantages_L * ratio_L + penalty_L, loss_stats(inputs)


def _selection(inputs: LossInputs) -> Tensor:
    if inputs.selected_L is None:
        raise ValueError(
            "LossInputs.selected_L is None; clip_cov and kl_cov need the tokens that "
            "trainer.algorithms.token_weights.select_tokens chose over the whole step"
        )
    return inputs.selected_L


def gspo_loss(inputs: LossInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, LossStats]:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) with s the geometric mean of the ratios of the sequence.

    GSPO-token (Zheng et al. 2025, arXiv:2507.18071, section 4.3): s_t = sg(s) pi_t / sg(pi_t), whose gradient with
    equal advantages is that of GSPO (section 4.1).

    Example:
        one sequence with log-ratios [.3, -.1, .2], advantage 1 and clip_ratio_high 4e-4 gives -1.0004 on every token.
    """
    ratio_L = _value_with_own_gradient(sequence_mean(log_ratio(inputs), inputs), inputs.logprobs_L)
    loss_L, low_L, high_L = clipped_surrogate(
        ratio_L, inputs.advantages_L, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high
    )
    return loss_L, loss_stats(inputs, low=low_L, high=high_L)


def gmpo_loss(inputs: LossInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, LossStats]:
    """-A times the geometric mean of the clipped ratios of the sequence; the bounds are of the log-ratio.

    GMPO (Zhao et al. 2025, arXiv:2507.20673): each token's log-ratio is clipped to [-low, high], only upwards
    where A > 0 and only downwards where A < 0, and clipped tokens have no gradient.
    """
    log_ratio_L = log_ratio(inputs).detach()
    is_negative_L = inputs.advantages_L < 0
    is_low_L, is_high_L = (
        is_negative_L & (log_ratio_L < -clip_ratio_low),
        ~is_negative_L & (log_ratio_L > clip_ratio_high),
    )
    kept_L = log_ratio_L.masked_fill(is_low_L, -clip_ratio_low).masked_fill(is_high_L, clip_ratio_high)
    logprobs_L = inputs.logprobs_L
    open_L = torch.where(is_low_L | is_high_L, logprobs_L.detach(), logprobs_L)
    loss_L = -inputs.advantages_L * _value_with_own_gradient(sequence_mean(kept_L, inputs), open_L)
    return loss_L, loss_stats(inputs, low=is_low_L, high=is_high_L)


def _value_with_own_gradient(log_value_L: Tensor, logprobs_L: Tensor) -> Tensor:
    """exp(log_value) as value, and as derivative by the token's own log-prob."""
    logprobs_L = at_least_float32(logprobs_L)
    value_L = log_value_L.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return value_L * (logprobs_L - logprobs_L.detach()).exp()


def dppo_tv_loss(inputs: LossInputs, *, dppo_threshold: float) -> tuple[Tensor, LossStats]:
    """-M A r, where M = 0 on tokens that are further than the threshold from pi_old and would move further still.

    DPPO (Qi et al. 2026, arXiv:2602.04879): M = 0 if the divergence of "this token or another" exceeds the threshold
    and (A > 0 and r > 1, or A < 0 and r < 1), else 1. Here the divergence is the total variation |pi - pi_old|.
    """
    with torch.no_grad():
        new_L, old_L = at_least_float32(inputs.logprobs_L), at_least_float32(inputs.old_logprobs_L)
        is_far_L = (new_L.exp() - old_L.exp()).abs() > dppo_threshold
    return _dppo_loss(inputs, is_far_L)


def dppo_kl_loss(inputs: LossInputs, *, dppo_threshold: float) -> tuple[Tensor, LossStats]:
    """`dppo_tv_loss` with KL(pi_old || pi) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) as divergence."""

    def log_rest(logprobs_L: Tensor) -> Tensor:
        # Finite also where p rounds to 1: engines report log-probs of 0 there.
        return torch.log((-torch.expm1(logprobs_L)).clamp_min(torch.finfo(logprobs_L.dtype).eps))

    with torch.no_grad():
        new_L, old_L = at_least_float32(inputs.logprobs_L), at_least_float32(inputs.old_logprobs_L)
        rest_L = log_rest(old_L)
        is_far_L = old_L.exp() * (old_L - new_L) + rest_L.exp() * (rest_L - log_rest(new_L)) > dppo_threshold
    return _dppo_loss(inputs, is_far_L)


def _dppo_loss(inputs: LossInputs, is_far_L: Tensor) -> tuple[Tensor, LossStats]:
    ratio_L, _ = ratio_and_log(inputs)
    is_high_L = is_far_L & (inputs.advantages_L > 0) & (ratio_L > 1)
    is_low_L = is_far_L & (inputs.advantages_L < 0) & (ratio_L < 1)
    loss_L = (-inputs.advantages_L * ratio_L).masked_fill(is_high_L | is_low_L, 0.0)
    return loss_L, loss_stats(inputs, low=is_low_L, high=is_high_L)


def kl_penalty(logprobs_L: Tensor, reference_logprobs_L: Tensor, estimator: KlEstimator) -> Tensor:
    """One estimate per token of KL(policy || reference) (Schulman 2020, "Approximating KL divergence").

    With d = log pi - log pi_ref: "k1": d. "k2": d^2 / 2. "k3": exp(-d) - 1 + d. "k1_straight_through" and
    "k3_straight_through" have the value of k1 and k3 and the gradient of k2.

    Args:
        logprobs_L: of the policy being trained, float32[L], with gradient.
        reference_logprobs_L: float32[L].

    Returns:
        float32[L]

    Example:
        d = 0.5 gives 0.5 (k1), 0.125 (k2) and 0.1065307 (k3); d = -0.5 gives -0.5, 0.125 and 0.1487213.
    """
    difference_L = at_least_float32(logprobs_L) - at_least_float32(reference_logprobs_L)
    half_square_L = 0.5 * difference_L.square()
    # float32 exp overflows at 88; a token that the policy made e^20 times rarer than the reference is lost anyway.
    bounded_L = difference_L.clamp_min(-MAX_LOG_RATIO)
    # Not exp(-d) - 1: next to the 1 float32 has no digits left for a difference of 1e-4.
    k3_L = torch.expm1(-bounded_L) + bounded_L
    match estimator:
        case "k1":
            return difference_L
        case "k2":
            return half_square_L
        case "k3":
            return k3_L
        case "k1_straight_through":
            return _straight_through(difference_L, half_square_L)
        case "k3_straight_through":
            return _straight_through(k3_L, half_square_L)
        case _:
            raise ValueError(
                f"kl estimator must be k1, k2, k3, k1_straight_through or k3_straight_through, got {estimator!r}"
            )


def _straight_through(value_L: Tensor, gradient_L: Tensor) -> Tensor:
    return value_L.detach() + (gradient_L - gradient_L.detach())


def value_loss(
    values_L: Tensor, old_values_L: Tensor, returns_L: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2): the critic may not gain by leaving its old value.

    PPO with value clipping (Schulman et al. 2017, as released in baselines; Huang et al. 2022, "The 37 implementation
    details", 9).

    Args:
        values_L: of the critic being trained, float32[L], with gradient.
        old_values_L: when the advantages were computed, float32[L].
        clip: c > 0, or None for the plain square.

    Returns:
        (loss float32[L], where the clip cut the gradient bool[L]).

    Example:
        value .5, old value .2, return 1 and clip .2 give .18.
    """
    values_L, old_values_L = at_least_float32(values_L), at_least_float32(old_values_L)
    plain_L = 0.5 * (values_L - returns_L).square()
    if clip is None:
        return plain_L, torch.zeros_like(plain_L, dtype=torch.bool)
    near_L = torch.clamp(values_L, min=old_values_L - clip, max=old_values_L + clip)
    clipped_L = 0.5 * (near_L - returns_L).square()
    return torch.maximum(plain_L, clipped_L), clipped_L > plain_L
