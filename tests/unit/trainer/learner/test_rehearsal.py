"""The micro-batch with which a learner rehearses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.config.schema import RunConfig
from trainer.learner.policy import largest_micro_batch


def config(*, limit: int, prompt: int, response: int, loss: str = "ppo_clip") -> RunConfig:
    cfg = RunConfig()
    return replace(
        cfg,
        task=replace(cfg.task, max_prompt_tokens=prompt),
        rollout=replace(cfg.rollout, max_response_tokens=response),
        learner=replace(cfg.learner, max_tokens_per_micro_batch=limit),
        algorithm=replace(cfg.algorithm, loss=loss),
    )


@pytest.mark.parametrize(
    ("limit", "lengths"),
    [
        (100, [30, 30, 30, 10]),
        (90, [30, 30, 30]),
        (92, [30, 30, 30, 2]),  # the shortest sequence that predicts a token
        (91, [30, 30, 30]),  # what is left is too short for one, and the longest are no longer for it
        (29, [30]),  # a sequence over the limit gets a micro-batch of its own
    ],
)
def test_it_is_as_large_as_one_can_be_and_made_of_the_longest_sequences(limit: int, lengths: list[int]) -> None:
    batch = largest_micro_batch(config(limit=limit, prompt=20, response=10))
    assert np.diff(batch.cu_seqlens).tolist() == lengths
    assert len(batch.token_ids) == sum(lengths)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        mask = batch.loss_mask[start:end]
        assert mask[-1]
        assert not mask[0]
        assert mask[:-1].sum() == max(0, end - start - 20 - 1)
    assert not batch.loss_weights.any()
    np.testing.assert_array_equal(batch.versions, np.where(batch.loss_mask, 0, -1))


def test_a_loss_that_selects_tokens_finds_its_selection() -> None:
    assert largest_micro_batch(config(limit=40, prompt=2, response=8)).cov_selected is None
    selected = largest_micro_batch(config(limit=40, prompt=2, response=8, loss="clip_cov")).cov_selected
    assert selected is not None
    assert len(selected) == 40
