"""The label boundary of a commit, with a stand-in for AsyncLLM's output path that is slow on purpose."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.request_state import ActiveRequest
from rollout.engine.vllm_engine import VllmEngine


class SlowOutputPath:
    """Like AsyncLLM: one handler takes outputs from a queue, in order, and counts their tokens per request."""

    def __init__(self) -> None:
        self.errored = False
        self.num_tokens = 0
        state = SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda: self.num_tokens))
        self.output_processor = SimpleNamespace(request_states={"inner-id": state})
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())

    async def handle(self) -> None:
        while True:
            output = await self.engine_core.outputs_queue.get()
            for _ in output.outputs:
                await asyncio.sleep(0.005)
                self.num_tokens += 1


def make_engine(llm: SlowOutputPath) -> tuple[VllmEngine, ActiveRequest]:
    engine = VllmEngine(EngineSpec(model="m"))
    queue: Any = SimpleNamespace(request_id="inner-id")
    gone: Any = SimpleNamespace(request_id="finished-id")
    live = ActiveRequest(queue, 0, 4)
    engine._requests.enter("r", live)
    engine._requests.enter("finished", ActiveRequest(gone, 0, 4))
    return engine, live


async def test_outputs_on_their_way_count_for_the_old_version() -> None:
    llm: Any = SlowOutputPath()
    engine, live = make_engine(llm)
    for num_tokens in (2, 3):
        llm.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=[0] * num_tokens))
    handler = asyncio.create_task(llm.handle())
    assert await engine._count_tokens(llm, 5.0) == [("r", live, 5)]
    handler.cancel()


async def test_an_output_path_that_stands_still_is_an_error_and_not_a_wrong_label() -> None:
    llm: Any = SlowOutputPath()
    engine, _ = make_engine(llm)
    with pytest.raises(TimeoutError, match="drain of outputs"):
        await engine._count_tokens(llm, 0.05)
