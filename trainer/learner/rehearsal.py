"""The micro-batch with which a learner rehearses before there is anything to learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.config.loss_keys import SELECTING_LOSSES
from trainer.data.batch import MicroBatch

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig


def largest_micro_batch(cfg: RunConfig) -> MicroBatch:
    """As large as one can be: sequences of the longest prompt and answer, the last one cut to what is left.

    Its loss is 0 whatever the model says, because no token has weight.
    """
    prompt = cfg.task.max_prompt_tokens
    longest = prompt + cfg.rollout.max_response_tokens
    num_tokens = max(longest, cfg.learner.max_tokens_per_micro_batch)
    starts = np.arange(0, num_tokens, longest)
    if num_tokens - starts[-1] < 2:  # a sequence has a token to predict, and one to predict it from
        starts, num_tokens = starts[:-1], int(starts[-1])
    bounds = np.append(starts, num_tokens)
    mask = np.arange(num_tokens) - np.repeat(starts, np.diff(bounds)) >= prompt
    mask[-1] = True  # the sequence that is cut has a loss token, too
    zeros = np.zeros(num_tokens, np.float32)
    return MicroBatch(
        cu_seqlens=bounds.astype(np.int32),
        token_ids=np.zeros(num_tokens, np.int32),
        loss_mask=mask,
        behaviour_logprobs=zeros,
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=zeros,
        loss_weights=zeros,
        cov_selected=np.zeros(num_tokens, np.bool_) if cfg.algorithm.loss in SELECTING_LOSSES else None,
    )
