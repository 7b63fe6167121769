"""What is told of an engine that ended, as the rollout worker hears it through Ray."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayTaskError

from rollout.actor import RayEngine
from rollout.errors import EngineDead
from rollout.types import SamplingParams


class Dying:
    """An engine's actor whose streams end with what Ray makes of its error."""

    @property
    def generate_group(self) -> Dying:
        return self

    async def _fail(self) -> Any:
        cause = EngineDead("engine is dead: its process ended")
        raise RayTaskError("generate_group", "Traceback (most recent call last): ...", cause).as_instanceof_cause()
        yield

    def remote(self, *_: object) -> Any:
        return self._fail()


async def test_the_reason_is_the_engines_own_and_no_traceback() -> None:
    engine = RayEngine("replica_0", Dying(), sender="w")
    with pytest.raises(EngineDead) as caught:
        async for _ in engine.stream_group(["a"], [np.array([1], np.int32)], [SamplingParams(max_tokens=1)]):
            pass
    assert str(caught.value) == "replica_0: engine is dead: its process ended"
