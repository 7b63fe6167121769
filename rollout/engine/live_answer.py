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
    watch: StopWatch | None = None
    """For stop strings that vLLM does not end an answer at: those that begin before what it generates; with speculative
    decoding all, since 0.25.1 leaves what the same step drafted behind them. None once there can be none."""
    drafts: bool = False
    """Whether a step may give an answer several tokens."""

    def take(self, completion: Any) -> FinishReason | None:
        """Add vLLM's new tokens, up to a stop string that it left inside. The reason if the answer ends there."""
        token_ids, logprobs = completion.token_ids, sampled_logprobs(completion)
        reason = completion.finish_reason
        finish = None if reason is None else known_finish_reason(reason)
        end = None if self.watch is None else self.watch.end(token_ids)
        if end is not None:
            token_ids, logprobs, finish = token_ids[:end], logprobs[:end], "stop"
        elif self.watch is not None and self.watch.is_past_prefix and not self.drafts:
            self.watch = None
        self.chunks.add(token_ids, logprobs)
        return finish


def stop_watch(
    tokenizer: Any, token_ids: np.ndarray, params: SamplingParams, *, drafts: bool = False
) -> StopWatch | None:
    """What finds stop strings that vLLM does not end an answer at (see `LiveAnswer.watch`); None where there are none.

    Args:
        token_ids: int32[T], the prompt and the prefix of an answer that goes on here.

    Raises:
        ValueError: there are stop strings, and no tokenizer (None) to find them with.
    """
    if not params.stop:
        return None
    if tokenizer is None:
        raise ValueError(f"stop strings {params.stop} need text; give the engine EngineSpec.tokenizer")
    if not params.num_prefix_tokens and not drafts:
        return None
    return StopWatch(partial(tokenizer.decode, clean_up_tokenization_spaces=False), token_ids, params)
