"""A fake engine error: log-probabilities that are misreported, to show what off-policy corrections are good for."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rollout.agent.loop import Generate, SingleTurnLoop

if TYPE_CHECKING:
    from rollout.types import Prompt, TokenChunk, Trajectory


class PerturbedLoop:
    """A single turn in which a `frac` of the recorded log-probs is off by normal noise of `std` nats; what was sampled
    stays as it is.

    The noise depends on prompt and response alone, so a synchronous run repeats itself. As an agent loop:
    `task.agent=scripts.perturbed_agent.PerturbedLoop task.agent_args.std=5 task.agent_args.frac=0.1`.
    """

    def __init__(self, std: float, frac: float = 1.0) -> None:
        self._loop = SingleTurnLoop()
        self._std, self._frac = std, frac

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        async def perturbed(token_ids: np.ndarray, max_tokens: int, *, stop: object = None) -> TokenChunk:
            completion = await generate(token_ids, max_tokens)
            text = token_ids.tobytes() + completion.token_ids.tobytes()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            rng, num_tokens = np.random.default_rng(seed), len(completion.logprobs)
            noise = rng.normal(0.0, self._std, num_tokens) * (rng.random(num_tokens) < self._frac)
            return replace(completion, logprobs=(completion.logprobs + noise).astype(np.float32))

        return await self._loop.run(prompt, max_tokens, perturbed)
