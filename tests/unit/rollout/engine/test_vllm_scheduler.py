"""The log-probs of a step travel in one array, through vLLM's own messages, and reach the requests that they are of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from rollout.engine.vllm_scheduler import SendsStepLogprobs, hand_out

Taken = dict[str, tuple[int, list[int]]]
"""Request -> its index in the batch, and the tokens that it keeps of those that it was given."""


class BaseScheduler:
    """Takes tokens and log-probs of each request as vLLM does, in the order of the scheduler and not of the batch."""

    def __init__(self, taken: Taken) -> None:
        self._taken = taken

    def update_from_output(self, _: object, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        made = list[EngineCoreOutput]()
        for name, (index, tokens) in self._taken.items():
            logprobs = output.logprobs and output.logprobs.slice_request(index, len(tokens))
            if tokens:
                made.append(EngineCoreOutput(request_id=name, new_token_ids=tokens, new_logprobs=logprobs))
        return {0: EngineCoreOutputs(outputs=made)}


class Scheduler(SendsStepLogprobs, BaseScheduler): ...


def step(taken: Taken, logprobs: LogprobsLists | None) -> list[EngineCoreOutput]:
    """What arrives of one step."""
    output = ModelRunnerOutput(req_ids=list(taken), req_id_to_index={}, logprobs=logprobs)
    sent = Scheduler(taken).update_from_output(None, output)[0]
    assert output.logprobs is logprobs, "vLLM may keep it"
    return MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent)).outputs


def batch(values: list[list[float]], starts: list[int] | None = None) -> LogprobsLists:
    """The first of each position is that of the sampled token."""
    return LogprobsLists(
        np.zeros((len(values), 2), np.int32), np.array(values, np.float32), np.zeros(len(values), np.int32), starts
    )


def requests(*names: str) -> dict[str, Any]:
    return {name: SimpleNamespace(logprobs_processor=SimpleNamespace(logprobs=[-9.0])) for name in names}


def handed_out(states: dict[str, Any]) -> dict[str, list[float]]:
    return {name: state.logprobs_processor.logprobs for name, state in states.items()}


def test_each_request_gets_the_logprobs_of_its_own_tokens_after_those_that_it_has() -> None:
    received = step({"b": (1, [5]), "c": (2, []), "a": (0, [6])}, batch([[-1.0, -0.1], [-2.0, -0.2], [-3.0, -0.3]]))
    states = requests("a", "b", "c")
    hand_out(received, states)
    assert handed_out(states) == {"a": [-9.0, -1.0], "b": [-9.0, -2.0], "c": [-9.0]}
    assert all(one.new_logprobs is None for one in received), "vLLM would add its own objects"


def test_of_several_tokens_in_a_step_those_before_the_end_count_and_those_of_an_aborted_request_go_nowhere() -> None:
    values = [[-float(position), 0.0] for position in range(6)]
    received = step({"a": (0, [1, 2]), "gone": (1, [3]), "b": (2, [4, 5])}, batch(values, starts=[0, 3, 4]))
    states = requests("a", "b")
    hand_out(received, states)
    assert handed_out(states) == {"a": [-9.0, 0.0, -1.0], "b": [-9.0, -4.0, -5.0]}


@pytest.mark.parametrize("taken", [{}, {"a": (0, list[int]())}])
def test_a_step_without_tokens_brings_nothing(taken: Taken) -> None:
    states = requests("a")
    hand_out(step(taken, batch([[-1.0, 0.0]])), states)
    hand_out(step(taken, None), states)
    assert handed_out(states) == {"a": [-9.0]}


def test_a_step_with_another_number_of_logprobs_than_tokens_is_refused() -> None:
    (one,) = step({"a": (0, [1])}, batch([[-1.0, 0.0]]))
    assert one.new_logprobs is not None
    one.new_logprobs = one.new_logprobs._replace(logprobs=np.array([-1.0, -2.0], np.float32))
    with pytest.raises(RuntimeError, match="brought 1 tokens with 2 log-probs"):
        hand_out([one], requests("a"))
