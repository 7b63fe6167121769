"""The tensors of one micro-batch: what a forward needs, and what a loss needs.

Where sequences share their prompt (`MicroBatch.prefix_lens`), the packed row holds it once and is shorter than the
batch: every matrix product, norm and head sees it once. What comes out is per loss token, as without sharing.

Shape legend: `T` tokens (of the row, or of the batch), `L` loss tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.algorithms.losses import LossInputs
from trainer.learner.attention import own_places, packed_rows, to_device
from trainer.learner.parallel import UlyssesLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trainer.data.batch import MicroBatch
    from trainer.learner.attention import LayoutFn, PackedLayout
    from trainer.learner.parallel import ContextGroup


class PackedInputs(NamedTuple):
    """What one forward needs. The logits of token t come from position t - 1, so `predict_pos_L` is one less than the
    positions of the loss tokens."""

    token_ids_1T: Tensor
    """int64"""
    position_ids_1T: Tensor
    """int64, restarts at 0 in every sequence; after a shared prefix, behind it."""
    layout: PackedLayout
    predict_pos_L: Tensor
    """int64: packed position whose hidden state predicts the loss token."""
    target_L: Tensor
    """int64: the loss token itself."""
    owner_L: np.ndarray | None = None
    """int64, of all loss tokens of the row: the rank of the group that has it, where ranks share the micro-batch."""

    @staticmethod
    def of(
        batch: MicroBatch, *, device: torch.device, layout: LayoutFn, group: ContextGroup | None = None
    ) -> PackedInputs:
        """With a `group`, this rank's slice of the row and the loss tokens that are predicted in it; with one for
        tensor parallelism, the row and this rank's slice of the loss tokens. Raises ValueError if a first token of a
        sequence carries loss: nothing predicts it."""
        cu_seqlens = batch.cu_seqlens
        lengths = np.diff(cu_seqlens)
        if len(lengths) == 0 or lengths.min() < 1 or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(batch.token_ids):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the {len(batch.token_ids)} tokens, got {cu_seqlens.tolist()[:20]}"
            )
        if batch.loss_mask[cu_seqlens[:-1]].any():
            raise ValueError("loss_mask is True on the first token of a sequence, which nothing predicts; mask it out")
        loss_positions = np.flatnonzero(batch.loss_mask)
        token_ids, predict_pos, target = batch.token_ids, loss_positions - 1, batch.token_ids[loss_positions]
        positions = np.arange(len(token_ids)) - np.repeat(cu_seqlens[:-1].astype(np.int64), lengths)
        rows = None if batch.prefix_lens is None else packed_rows(cu_seqlens, batch.prefix_lens)
        if rows is not None:
            own, _ = own_places(rows)
            token_ids, positions, predict_pos = token_ids[own], positions[own], rows[predict_pos]
        owner_L = None
        if group is not None and group.is_tensor_parallel:
            owner_L = np.arange(len(target)) * group.size // max(1, len(target))
            predict_pos, target = predict_pos[owner_L == group.rank], target[owner_L == group.rank]
        elif group is not None:
            num_tokens, part = len(token_ids), group.slice_of(len(token_ids))
            num_own = part.stop - part.start
            if padding := num_own * group.size - num_tokens:  # a sequence of its own
                token_ids, positions = np.pad(token_ids, (0, padding)), np.pad(positions, (0, padding))
                cu_seqlens = np.append(cu_seqlens, cu_seqlens[-1] + padding)
                rows = None if rows is None else np.append(rows, np.arange(num_tokens, num_tokens + padding))
            owner_L = predict_pos // num_own
            is_own = owner_L == group.rank
            token_ids, positions = token_ids[part], positions[part]
            predict_pos, target = predict_pos[is_own] - part.start, target[is_own]
        packed = layout(cu_seqlens, device, rows)
        return PackedInputs(
            token_ids_1T=to_device(token_ids.astype(np.int64), device).unsqueeze(0),
            position_ids_1T=to_device(positions, device).unsqueeze(0),
            layout=packed if group is None or group.is_tensor_parallel else UlyssesLayout(packed, group),
            predict_pos_L=to_device(predict_pos, device),
            target_L=to_device(target.astype(np.int64), device),
            owner_L=owner_L,
        )


def loss_inputs(batch: MicroBatch, logprobs_L: Tensor) -> LossInputs:
    """The batch's loss tokens and their log-probs under the policy being trained, on the device of those."""
    mask, device = batch.loss_mask, logprobs_L.device
    num_sequences = len(batch.cu_seqlens) - 1
    sequence_T = np.repeat(np.arange(num_sequences), np.diff(batch.cu_seqlens))
    selected = batch.cov_selected
    return LossInputs(
        logprobs_L=logprobs_L,
        old_logprobs_L=to_device(batch.behavior_logprobs[mask], device),
        advantages_L=to_device(batch.advantages[mask], device),
        sequence_L=to_device(sequence_T[mask], device),
        num_sequences=num_sequences,
        selected_L=None if selected is None else to_device(selected[mask], device),
    )


def token_ages(batch: MicroBatch, *, version: int, device: torch.device) -> Tensor:
    """The version that is trained minus the one that sampled the token: int64[L], >= 0. Raises ValueError if a token is
    younger than the weights that are trained on it."""
    age_L = version - batch.versions[batch.loss_mask].astype(np.int64)
    if age_L.size and age_L.min() < 0:
        raise ValueError(
            f"a token was sampled by version {version - int(age_L.min())}, but version {version} is trained; "
            "engines can only have versions that the learner has made"
        )
    return to_device(age_L, device)


def scatter_to_tokens(values_L: Tensor, batch: MicroBatch) -> np.ndarray:
    """Values of the loss tokens at their places on the host: float32[T], 0 outside `loss_mask`."""
    out_T = np.zeros(len(batch.token_ids), np.float32)
    out_T[batch.loss_mask] = values_L.detach().cpu().numpy()
    return out_T
