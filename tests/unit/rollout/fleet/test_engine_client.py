"""What is told of an engine that ended, as the rollout worker hears it through Ray."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayError, RayTaskError

from rollout.errors import EngineDead
from rollout.fleet.engine_client import RayEngineClient, is_actor_lost
from rollout.types import SamplingParams


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


async def test_what_an_engine_refuses_is_told_in_its_own_words() -> None:
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
