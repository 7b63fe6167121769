"""What a rollout worker learns through Ray of an engine that ended, and what it sends."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayError, RayTaskError

from rollout.errors import EngineDead
from rollout.fleet.engine_client import RayEngineClient, is_actor_lost
from rollout.types import SamplingParams, TokenChunk


class Failing:
    """An engine's actor whose streams end with what Ray makes of `cause`, or with an error of Ray's own."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause
        self.abort = self

    @property
    def generate_group(self) -> Failing:
        return self

    async def _fail(self) -> Any:
        if isinstance(self._cause, RayError):
            raise self._cause
        raise RayTaskError(
            "generate_group", "Traceback (most recent call last): ...", self._cause
        ).as_instanceof_cause()
        yield

    def remote(self, *_: object) -> Any:
        return self._fail()


async def failure(cause: Exception) -> Exception:
    engine = RayEngineClient("replica_0", Failing(cause), sender="w")
    with pytest.raises(type(cause)) as caught:
        async for _ in engine.stream_group(["a"], [np.array([1], np.int32)], [SamplingParams(max_tokens=1)]):
            pass
    return caught.value


async def test_the_reason_is_the_engines_own_and_no_traceback() -> None:
    error = await failure(EngineDead("engine is dead: its process ended"))
    assert str(error) == "replica_0: engine is dead: its process ended"


async def test_what_an_engine_refuses_is_reported_in_its_own_words() -> None:
    error = await failure(ValueError("prompt has token id 128"))
    assert type(error) is ValueError
    assert str(error) == "prompt has token id 128"
    assert str(pickle.loads(pickle.dumps(error))) == "prompt has token id 128"


GONE = [ActorDiedError(), OutOfMemoryError("the node runs low on memory\nmore"), NodeDiedError("the node died")]


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
async def test_an_engine_is_dead_however_ray_ended_it(error: RayError) -> None:
    """The memory monitor has an error of its own."""
    engine = RayEngineClient("replica_0", Failing(error), sender="w")
    with pytest.raises(EngineDead, match=f"replica_0: {str(error).splitlines()[0]}"):
        async for _ in engine.stream_group(["a"], [np.array([1], np.int32)], [SamplingParams(max_tokens=1)]):
            pass
    assert is_actor_lost(error)
    assert not is_actor_lost(RayTaskError("generate_group", "Traceback ...", error).as_instanceof_cause())


class Streaming:
    """An engine's actor that sends one chunk per request and then waits; notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, name))

    def _call(self, name: str, *args: Any) -> Any:
        self.calls.append((name, args[0]))
        self.args = args
        return self._stream(len(args[0])) if name == "generate_group" else None

    async def _stream(self, num_requests: int) -> Any:
        async def chunks() -> list[tuple[int, TokenChunk]]:
            empty = np.empty(0, np.int32)
            last = TokenChunk(token_ids=empty, logprobs=empty, versions=empty, finish_reason="stop")
            return [(index, last if index == 0 else replace(last, finish_reason=None)) for index in range(num_requests)]

        yield chunks()
        await asyncio.Event().wait()


async def test_requests_travel_in_one_call_equal_prompts_once_and_so_do_their_aborts() -> None:
    actor = Streaming()
    engine = RayEngineClient("replica_0", actor, sender="w")
    prompts = [np.array([1, 2]), np.array([1, 2]), np.array([3])]
    async with aclosing(engine.stream_group(["a", "b", "c"], prompts, [SamplingParams(max_tokens=1)] * 3)) as stream:
        assert [(await anext(stream))[0] for _ in range(3)] == [0, 1, 2]
        sent = actor.args[1]
    assert [tokens.tolist() for tokens in sent] == [[1, 2], [1, 2], [3]]
    assert len(pickle.dumps(sent)) < len(pickle.dumps(prompts)), "equal prompts are one object"
    engine.abort(["d", "e"])
    ids = [["w/a", "w/b", "w/c"], ["w/b", "w/c"], ["w/d", "w/e"]]
    assert actor.calls == list(zip(["generate_group", "abort", "abort"], ids, strict=True))
