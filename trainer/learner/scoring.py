"""Passes over a micro-batch without gradient. Shape legend: `T` packed tokens, `L` loss tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.learner.inputs import PackedInputs
from trainer.learner.parallel import end_forward

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.data.batch import MicroBatch
    from trainer.learner.inputs import LayoutFn
    from trainer.learner.model import PolicyModel, PolicyOutput


@torch.no_grad()
def score(policy: PolicyModel, batch: MicroBatch, *, layout: LayoutFn, device: torch.device) -> PolicyOutput:
    """The policy's output for the loss tokens. Collective."""
    output = policy(PackedInputs.of(batch, device=device, layout=layout))
    end_forward(policy)
    return output


def over_tokens(values_L: Tensor, batch: MicroBatch) -> np.ndarray:
    """Values of the loss tokens at their places on the host: float32[T], 0 outside `loss_mask`."""
    out_T = np.zeros(len(batch.token_ids), np.float32)
    out_T[batch.loss_mask] = values_L.detach().cpu().numpy()
    return out_T
