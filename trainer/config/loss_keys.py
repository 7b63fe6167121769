"""The policy losses and aggregations there are, which keys of `algorithm` each of them reads, and what ratio it holds.

The schema takes the names from here; validation refuses keys that the chosen loss does not read, and corrections that
do not fit its ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trainer.config.own_function import is_own

if TYPE_CHECKING:
    from collections.abc import Mapping

LossName = Literal[
    "ppo_clip", "reinforce", "importance_sampling", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov",
    "dppo_tv", "dppo_kl", "dro",
]  # fmt: skip

AggregationName = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]

_RATIO_BOUNDS = ("clip_low", "clip_high")

LOSS_KEYS: Mapping[LossName, tuple[str, ...]] = {
    "ppo_clip": (*_RATIO_BOUNDS, "clip_dual"),
    "reinforce": (),
    "importance_sampling": (),
    "gspo": _RATIO_BOUNDS,
    "gmpo": _RATIO_BOUNDS,
    "cispo": _RATIO_BOUNDS,
    "sapo": ("sapo_tau_positive", "sapo_tau_negative"),
    "clip_cov": (*_RATIO_BOUNDS, "cov_frac", "cov_min", "cov_max"),
    "kl_cov": ("cov_frac", "cov_kl_coef"),
    "dppo_tv": ("dppo_threshold",),
    "dppo_kl": ("dppo_threshold",),
    "dro": ("dro_beta",),
}
"""Keys that only some losses read; those that are not here, every loss reads."""

RatioLevel = Literal["token", "sequence_mean"]

LOSS_RATIOS: Mapping[LossName, RatioLevel | None] = {
    "ppo_clip": "token",
    "reinforce": None,
    "importance_sampling": "token",
    "gspo": "sequence_mean",
    "gmpo": "sequence_mean",
    "cispo": None,
    "sapo": None,
    "clip_cov": "token",
    "kl_cov": "token",
    "dppo_tv": "token",
    "dppo_kl": "token",
    "dro": None,
}
"""The ratio that a loss is proportional to, at least where it cuts nothing; None: it has none, or bounds it itself."""

UNBOUNDED_LOSSES: tuple[LossName, ...] = ("importance_sampling",)
"""Losses that hold a ratio and nothing that keeps it near 1."""

SELECTING_LOSSES: tuple[LossName, ...] = ("clip_cov", "kl_cov")
"""Losses that treat tokens differently which are chosen over the whole step."""

LOSSES_WITHOUT_RATIO: tuple[LossName, ...] = ("reinforce", "dro")
"""Losses whose gradient is not weighted by the ratio of the policy to the old one."""


def held_ratio(loss: str) -> RatioLevel | None:
    """See `LOSS_RATIOS`; a loss of the user, by dotted path, is taken to hold the ratio of the token.

    Raises:
        ValueError: no such loss.
    """
    if is_own(loss):
        return "token"
    for name, level in LOSS_RATIOS.items():
        if name == loss:
            return level
    raise ValueError(_unknown(loss))


def read_keys(loss: str) -> tuple[str, ...]:
    """Keys of the table that `loss` reads; a loss of the user, by dotted path, reads none of them.

    Raises:
        ValueError: no such loss.
    """
    if is_own(loss):
        return ()
    for name, keys in LOSS_KEYS.items():
        if name == loss:
            return keys
    raise ValueError(_unknown(loss))


def _unknown(loss: str) -> str:
    return f"algorithm.loss must be one of {', '.join(LOSS_KEYS)}, or a dotted path, got {loss!r}"


def unread_keys(loss: str) -> list[str]:
    """Keys of other losses that `loss` does not read, in the order of the table."""
    read = read_keys(loss)
    return [key for key in dict.fromkeys(k for keys in LOSS_KEYS.values() for k in keys) if key not in read]
