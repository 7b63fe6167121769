"""A vLLM worker extension for tests: weights drawn anew at each commit, so that a token tells of the whole cache."""

from __future__ import annotations

import torch

from tests.fakes.letter_extension import LetterExtension
from weight_sync.wire import Reply, encode


class NoiseExtension(LetterExtension):
    @torch.no_grad()
    def te_noise(self, seed: int) -> bytes:
        generator = torch.Generator().manual_seed(seed)
        for param in self.model_runner.model.parameters():
            if param.dim() > 1:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
        return encode(Reply(ok=True))
