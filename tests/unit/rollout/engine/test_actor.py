"""The shell around an engine: streams of groups, aborts, and what it refuses to start."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.actor import EngineActor
from rollout.engine.interface import EngineSpec
from rollout.errors import EngineDead
from rollout.types import SamplingParams, TokenChunk
from tests.fakes.scripted_engine import ScriptedEngine
from weight_sync.device import DeviceError, get_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

ENVIRONMENT = {variable.name: variable.value for variable in get_backend("cpu").process_env("engine")}
PROMPT = np.array([1, 2], np.int32)


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """An actor that started has changed that of its process."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


async def started(**faults: object) -> tuple[EngineActor, ScriptedEngine]:
    engine = ScriptedEngine(
        EngineSpec(model="scripted", stream_interval=4, env=ENVIRONMENT),
        script=lambda prompt, position, version: (position, -float(len(prompt))),
    )
    actor = EngineActor(engine._spec, build=lambda _: engine)
    for name, value in faults.items():
        setattr(engine.faults, name, value)
    await actor.start()
    return actor, engine


def group(actor: EngineActor, **lengths: int) -> Any:
    params = [SamplingParams(max_tokens=length) for length in lengths.values()]
    return actor.generate_group(list(lengths), [PROMPT] * len(lengths), params)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OMP_NUM_THREADS": "1"}, "VLLM_CPU_OMP_THREADS_BIND should be 'nobind', it is not set"),
        ({**ENVIRONMENT, "OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS must be a whole number >= 1, got '0'"),
    ],
)
async def test_an_engine_whose_environment_is_wrong_is_not_started(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    engine: Any = SimpleNamespace(start=None)
    with pytest.raises(DeviceError, match=words):
        await EngineActor(EngineSpec(model="scripted", env=environment), build=lambda _: engine).start()


async def test_one_stream_gives_every_request_whole_and_in_order_whatever_its_prompt() -> None:
    actor, engine = await started()
    prompts, lengths = [PROMPT, PROMPT, np.arange(5, dtype=np.int32)], (3, 10, 17)
    params = [SamplingParams(max_tokens=length) for length in lengths]
    items = [chunks async for chunks in actor.generate_group(["a", "b", "c"], prompts, params)]
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        chunks = [chunk for chunks in items for number, chunk in chunks if number == index]
        assert np.concatenate([c.token_ids for c in chunks]).tolist() == list(range(length))
        assert {float(x) for c in chunks for x in c.logprobs} == {-float(len(prompt))}
        assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(items) < sum(map(len, items)), "chunks that are ready travel together"
    assert engine.status().generated_tokens == 30


async def test_a_dead_engine_ends_the_group_after_the_chunks_it_gave() -> None:
    actor, _ = await started(die_after_tokens=9)
    received = 0
    with pytest.raises(EngineDead):
        async for items in group(actor, a=100):
            received += sum(len(chunk.token_ids) for _, chunk in items)
    assert received == 8, "two whole chunks of 4 before the ninth token"


async def test_closing_a_group_stream_aborts_its_requests() -> None:
    actor, engine = await started()
    async with aclosing(group(actor, a=4000, b=4000)) as stream:
        await anext(stream)
    assert engine.status().running == engine.status().unstarted == 0


async def test_an_abort_that_comes_together_with_its_group_ends_it() -> None:
    """In the same turn of the event loop, as when Ray brings both at once."""
    actor, engine = await started()

    async def consume() -> list[TokenChunk]:
        return [chunk async for items in group(actor, a=4000, b=4000) for _, chunk in items]

    chunks, _ = await asyncio.gather(consume(), actor.abort(["a", "b", "unknown"]))
    assert [chunk.finish_reason for chunk in chunks] == ["abort", "abort"]
    assert engine.status().generated_tokens == 0
