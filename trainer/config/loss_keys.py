"""The policy losses and aggregations there are, and which keys of `algorithm` each of them reads.

One table: the schema takes the names from it, validation refuses keys that the chosen loss does not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

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

SELECTING_LOSSES: tuple[LossName, ...] = ("clip_cov", "kl_cov")
"""Losses that treat tokens differently which are chosen over the whole step."""

LOSSES_WITHOUT_RATIO: tuple[LossName, ...] = ("reinforce", "dro")
"""Losses whose gradient is not weighted by the ratio of the policy to the old one."""


def unread_keys(loss: LossName) -> list[str]:
    """Keys of other losses that `loss` does not read, in the order of the table."""
    return [key for key in dict.fromkeys(k for keys in LOSS_KEYS.values() for k in keys) if key not in LOSS_KEYS[loss]]
