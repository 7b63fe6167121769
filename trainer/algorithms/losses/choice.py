"""From the name of a loss in the configuration to the function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.clipped import (
    cispo_loss,
    dro_loss,
    importance_sampling_loss,
    ppo_clip_loss,
    reinforce_loss,
    sapo_loss,
)
from trainer.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss
from trainer.algorithms.losses.own import own_loss
from trainer.algorithms.losses.sequence import gmpo_loss, gspo_loss
from trainer.algorithms.losses.trust_region import dppo_loss
from trainer.config.own_function import is_own

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.losses.inputs import LossInputs, LossStats
    from trainer.config.schema.algorithm import AlgorithmConfig


def policy_loss(inputs: LossInputs, *, config: AlgorithmConfig) -> tuple[Tensor, LossStats]:
    """The loss that `config.loss` names: (float32[L], stats). It reads the keys of `trainer.config.loss_keys`.

    A name with a dot is the path of a user's own loss, which gets `config.loss_args`.
    """
    low, high = config.clip_low, config.clip_high
    match config.loss:
        case "ppo_clip":
            return ppo_clip_loss(inputs, clip_low=low, clip_high=high, clip_dual=config.clip_dual)
        case "reinforce":
            return reinforce_loss(inputs)
        case "importance_sampling":
            return importance_sampling_loss(inputs)
        case "gspo":
            return gspo_loss(inputs, clip_low=low, clip_high=high)
        case "gmpo":
            return gmpo_loss(inputs, clip_low=low, clip_high=high)
        case "cispo":
            return cispo_loss(inputs, clip_low=low, clip_high=high)
        case "sapo":
            return sapo_loss(inputs, tau_positive=config.sapo_tau_positive, tau_negative=config.sapo_tau_negative)
        case "clip_cov":
            return clip_cov_loss(inputs, clip_low=low, clip_high=high)
        case "kl_cov":
            return kl_cov_loss(inputs, kl_coef=config.cov_kl_coef)
        case "dppo_tv":
            return dppo_loss(inputs, divergence="tv", threshold=config.dppo_threshold)
        case "dppo_kl":
            return dppo_loss(inputs, divergence="kl", threshold=config.dppo_threshold)
        case "dro":
            return dro_loss(inputs, beta=config.dro_beta)
        case path if is_own(path):
            return own_loss(inputs, path=path, args=config.loss_args)
        case _:
            raise ValueError(f"algorithm.loss {config.loss!r} has no function; add a case to policy_loss")
