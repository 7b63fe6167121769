"""A vLLM worker extension for tests: weights whose every output token shows which commit wrote them.

With embeddings of one and blocks that add nothing, the last hidden state is the same for every input, so the rows of
the output head alone decide what is sampled: rows `[low, high)` share all the probability, greedy takes the first.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from weight_sync.messages import Reply, encode
from weight_sync.vllm.cpu import keep_weights_addressable

keep_weights_addressable()


_LOGIT = 40.0
"""e**-40 of the probability is left for all other tokens."""


class LetterExtension:
    model_runner: Any

    @torch.no_grad()
    def te_commit(self, low: int, high: int, outcome: str) -> bytes:
        if outcome in ("ok", "dirty"):
            for name, param in self.model_runner.model.named_parameters():
                # Every weight is written: after sleep, one that is not would hold anything, NaN included.
                param.fill_(1.0 if "embed_tokens" in name or "norm" in name else 0.0)
                if "lm_head" in name:
                    param[low:high] = _LOGIT / param.shape[1]
        return encode(Reply(ok=outcome == "ok", dirty=outcome == "dirty"))

    @torch.no_grad()
    def te_noise(self, seed: int) -> bytes:
        """New random weights, so that a token depends on the whole cache."""
        generator = torch.Generator().manual_seed(seed)
        for param in self.model_runner.model.parameters():
            if param.dim() > 1:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
        return encode(Reply(ok=True))

    def te_sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def te_pid(self) -> int:
        return os.getpid()

    def te_raise(self) -> None:
        raise ValueError("raised in the worker")
