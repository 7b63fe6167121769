"""vLLM's schedulers, with the log-probs of a step in one array.

vLLM gives every token three arrays of its own: to make, to pack and to unpack them takes more time than anything else
in a step of a small model with hundreds of requests. Here the first output of a step carries the log-probs of all its
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM

NO_TOKENS, NO_RANKS = np.empty((0, 1), np.int32), np.empty(0, np.int32)


class _TakenLogprobs:
    """Stands for the log-probs of a step while vLLM takes those of each request."""

    def __init__(self, logprobs: LogprobsLists) -> None:
        self._logprobs = logprobs
        self._rows: list[int] = []

    def slice_request(self, req_idx: int, num_positions: int) -> None:
        """As that of `LogprobsLists`, which knows where the tokens of a request are that was given several."""
        starts = self._logprobs.cu_num_generated_tokens
        start = req_idx if starts is None else starts[req_idx]
        self._rows.extend(range(start, start + num_positions))

    def of_sampled_tokens(self) -> np.ndarray:
        """float32[P], in the order in which they were taken; vLLM puts the sampled token first in its position."""
        return self._logprobs.logprobs[self._rows, 0]


class SendsStepLogprobs:
    """Comes before a scheduler of vLLM among the bases of a class."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        update: Any = super().update_from_output  # pyright: ignore[reportAttributeAccessIssue]
        if model_runner_output.logprobs is None:
            return update(scheduler_output, model_runner_output)
        step: Any = _TakenLogprobs(model_runner_output.logprobs)
        found = update(scheduler_output, replace(model_runner_output, logprobs=step))
        taken_P = step.of_sampled_tokens()
        if len(taken_P):
            (outputs,) = (one.outputs for one in found.values() if one.outputs)  # this process has one client
            outputs[0].new_logprobs = LogprobsLists(NO_TOKENS, taken_P, NO_RANKS, None)
        return found


class StepLogprobsScheduler(SendsStepLogprobs, Scheduler): ...


class AsyncStepLogprobsScheduler(SendsStepLogprobs, AsyncScheduler): ...


def send_step_logprobs(config: VllmConfig) -> None:
    """Have the engine of this configuration do so; what it sends needs `receive_step_logprobs`."""
    scheduler = config.scheduler_config
    chosen = AsyncStepLogprobsScheduler if scheduler.async_scheduling else StepLogprobsScheduler
    scheduler.scheduler_cls = f"{chosen.__module__}.{chosen.__qualname__}"


def receive_step_logprobs(llm: AsyncLLM) -> None:
    """Give every request's output its log-probs, as a list[float], where vLLM would have a list of its own objects."""
    client: Any = llm.engine_core
    states, receive = llm.output_processor.request_states, client.get_output_async

    async def get_output_async() -> EngineCoreOutputs:
        received = await receive()
        hand_out(received.outputs, states)
        return received

    client.get_output_async = get_output_async


def hand_out(outputs: Sequence[EngineCoreOutput], states: Mapping[str, Any]) -> None:
    """Append the log-probs that the first of a step's outputs carries to those of the requests that they are of."""
    if not outputs or outputs[0].new_logprobs is None:
        return
    logprobs, outputs[0].new_logprobs = outputs[0].new_logprobs.logprobs.tolist(), None
    start = 0
    for one in outputs:
        end = start + len(one.new_token_ids)
        if (state := states.get(one.request_id)) is not None:  # otherwise it was aborted
            state.logprobs_processor.logprobs.extend(logprobs[start:end])
        start = end
    if start != len(logprobs):
        raise RuntimeError(
            f"a step of the engine brought {start} tokens with {len(logprobs)} log-probs; expected as many"
        )
