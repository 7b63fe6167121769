"""The agent loop of a benchmark: responses of the lengths that the data set gives, whatever the policy samples."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import TYPE_CHECKING

from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.errors import AgentError

if TYPE_CHECKING:
    from rollout.agent.loop import AgentLoop, Generate
    from rollout.types import Prompt, Trajectory


def forced_lengths(*, column: str = "response_tokens") -> AgentLoop:
    """The factory for `task.agent`; `column` of the data set has the number of tokens of each response: a list, or one
    number for all."""
    return _ForcedLengths(column)


class _ForcedLengths:
    def __init__(self, column: str) -> None:
        self._column = column
        self._num_begun: Counter[str] = Counter()
        """By prompt. The responses of a group begin one after the other in one worker, so each has its own length."""

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        """Exactly so many tokens: an end token does not end the response, it continues after it.

        Rewarded with a number that depends on the sampled tokens alone and differs between responses, so that
        advantages are not all 0.

        Raises:
            AgentError: the column does not hold a length that fits.
        """
        given = prompt.metadata.get(self._column)
        lengths = given if isinstance(given, list | tuple) and given else [given]
        wanted = lengths[self._num_begun[prompt.prompt_id] % len(lengths)]
        self._num_begun[prompt.prompt_id] += 1
        if not isinstance(wanted, int) or not 1 <= wanted <= max_tokens:
            raise AgentError(f"column {self._column!r} must hold 1 to {max_tokens} tokens, got {wanted!r}")
        builder = TrajectoryBuilder(prompt.token_ids)
        while (left := wanted - builder.num_response_tokens) > 0:
            completion = await generate(builder.token_ids(), left)
            builder.add_generated(completion)
            if completion.finish_reason == "abort":
                return builder.finish("failed")
        response = builder.token_ids()[len(prompt.token_ids) :]
        builder.add_reward(zlib.crc32(response.tobytes()) % 1000 / 999)
        return builder.finish("completed")
