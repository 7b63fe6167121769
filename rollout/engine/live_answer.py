"""One answer inside vLLM: where its tokens come from, their labels, and where it ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.engine.outputs import known_finish_reason, sampled_logprobs
from rollout.engine.stops import StopWatch

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from rollout.engine.chunks import ChunkBuilder
    from rollout.types import FinishReason, SamplingParams


@dataclass(slots=True)
class LiveAnswer:
    """A request inside the engine."""

    queue: RequestOutputCollector
    chunks: ChunkBuilder
    border: StopWatch | None = None
    """For stop strings that begin before what vLLM generates, which it does not see; None once there can be none."""

    def take(self, completion: Any) -> FinishReason | None:
        """Add vLLM's new tokens, up to a stop string across the border. The reason if the answer ends there."""
        token_ids, logprobs = completion.token_ids, sampled_logprobs(completion)
        reason = completion.finish_reason
        finish = None if reason is None else known_finish_reason(reason)
        end = None if self.border is None else self.border.end(token_ids)
        if end is not None:
            token_ids, logprobs, finish = token_ids[:end], logprobs[:end], "stop"
        elif self.border is not None and self.border.is_past_prefix:
            self.border = None
        self.chunks.add(token_ids, logprobs)
        return finish


def border_watch(tokenizer: Any, token_ids: np.ndarray, params: SamplingParams) -> StopWatch | None:
    """What finds stop strings that begin in the prefix of an answer that goes on here; None where there can be none.

    Args:
        token_ids: int32[T], the prompt and that prefix.

    Raises:
        ValueError: there are stop strings, and no tokenizer (None) to find them with.
    """
    if not params.stop:
        return None
    if tokenizer is None:
        raise ValueError(f"stop strings {params.stop} need text; give the engine EngineSpec.tokenizer")
    if not params.num_prefix_tokens:
        return None
    return StopWatch(partial(tokenizer.decode, clean_up_tokenization_spaces=False), token_ids, params)
