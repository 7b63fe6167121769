"""What comes out of `AsyncLLM`, read the same way for every version of vLLM that we support."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from rollout.types import FinishReason


class Fence:
    """Looks like one (empty) engine output to AsyncLLM's output handler, and tells when the handler came to it."""

    engine_index = 0
    scheduler_stats = None
    timestamp = 0.0
    weight_version = None

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    @property
    def outputs(self) -> list[Any]:
        self.reached.set()
        return []


async def next_output(queue: RequestOutputCollector) -> Any:
    """Of one request. One that is there already costs no turn of the event loop."""
    return queue.get_nowait() or await queue.get()


def sampled_logprobs(completion: Any) -> list[float]:
    """The sampled token's log-prob per new token: vLLM puts it first in its position.

    An abort, which has no new tokens, carries all log-probs so far in 0.25.1, which slices them with `[-0:]`. They
    stand behind those of tokens that nobody had read when it came, since outputs that wait are merged.
    """
    num_tokens, logprobs = len(completion.token_ids), completion.logprobs
    if not num_tokens or logprobs is None:
        return []
    starts = logprobs.start_indices[:num_tokens] if completion.finish_reason == "abort" else logprobs.start_indices
    return [logprobs.logprobs[start] for start in starts]


def known_finish_reason(reason: str | None) -> FinishReason:
    match reason:
        case "stop" | "length" | "abort":
            return reason
        case _:
            raise RuntimeError(f"engine ended a request with {reason!r}; known are stop, length and abort")
