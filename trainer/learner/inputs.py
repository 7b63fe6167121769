"""A `MicroBatch` as tensors on the learner's device.

Shape legend: `T` packed tokens, `L` loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms.losses import LossInputs

if TYPE_CHECKING:
    from trainer.data.batch import MicroBatch
    from trainer.learner.attention import PackedLayout

LayoutFn = Callable[[np.ndarray, torch.device], "PackedLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInputs:
    """What one forward needs. The logits of token t come from position t - 1, so `source_L = positions_of_loss - 1`."""

    token_ids_1T: Tensor
    """int64"""
    position_ids_1T: Tensor
    """int64, restarts at 0 in every sequence."""
    layout: PackedLayout
    source_L: Tensor
    """int64: packed position whose hidden state predicts the loss token."""
    target_L: Tensor
    """int64: the loss token itself."""

    @staticmethod
    def of(batch: MicroBatch, *, device: torch.device, layout: LayoutFn) -> PackedInputs:
        """Raises ValueError if a first token of a sequence carries loss: nothing predicts it."""
        cu_seqlens = batch.cu_seqlens
        lengths = np.diff(cu_seqlens)
        if len(lengths) == 0 or lengths.min() < 1 or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(batch.token_ids):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the {len(batch.token_ids)} tokens, got {cu_seqlens.tolist()[:20]}"
            )
        if batch.loss_mask[cu_seqlens[:-1]].any():
            raise ValueError("loss_mask is True on the first token of a sequence, which nothing predicts; mask it out")
        loss_positions = np.flatnonzero(batch.loss_mask)
        positions = np.arange(len(batch.token_ids)) - np.repeat(cu_seqlens[:-1].astype(np.int64), lengths)
        return PackedInputs(
            token_ids_1T=to_device(batch.token_ids.astype(np.int64), device).unsqueeze(0),
            position_ids_1T=to_device(positions, device).unsqueeze(0),
            layout=layout(cu_seqlens, device),
            source_L=to_device(loss_positions - 1, device),
            target_L=to_device(batch.token_ids[loss_positions].astype(np.int64), device),
        )


def loss_inputs(batch: MicroBatch, logprobs_L: Tensor) -> LossInputs:
    """The batch's loss tokens beside their log-probs under the policy being trained, on the device of those."""
    mask, device = batch.loss_mask, logprobs_L.device
    num_sequences = len(batch.cu_seqlens) - 1
    sequence_T = np.repeat(np.arange(num_sequences), np.diff(batch.cu_seqlens))
    selected = batch.cov_selected
    return LossInputs(
        logprobs_L=logprobs_L,
        old_logprobs_L=to_device(batch.behaviour_logprobs[mask], device),
        advantages_L=to_device(batch.advantages[mask], device),
        sequence_L=to_device(sequence_T[mask], device),
        num_sequences=num_sequences,
        selected_L=None if selected is None else to_device(selected[mask], device),
    )


def token_ages(batch: MicroBatch, *, step: int, device: torch.device) -> Tensor:
    """Version that step `step` starts with minus the version that sampled the token: int64[L], >= 0.

    Raises:
        ValueError: a token is younger than the weights that are trained on it.
    """
    age_L = step - batch.versions[batch.loss_mask].astype(np.int64)
    if age_L.size and age_L.min() < 0:
        raise ValueError(
            f"a token was sampled by version {step - int(age_L.min())}, but step {step} trains version {step}; "
            "engines can only have versions that the learner has made"
        )
    return to_device(age_L, device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to `device`. The array is made writable first (Ray hands out read-only ones, about which torch warns)."""
    owned = array if array.flags.writeable else array.copy()
    return torch.from_numpy(np.ascontiguousarray(owned)).to(device, non_blocking=True)
