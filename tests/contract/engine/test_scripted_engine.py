from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from rollout.engine.interface import Engine, EngineSpec
from rollout.types import SamplingParams
from tests.contract.engine.suite import EngineContract, collect
from tests.fakes.scripted_engine import ScriptedEngine
from weight_sync.messages import Reply, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Container, Sequence

    from rollout.engine.interface import SleepLevel

STOP, EXTRA_STOP = 7, 8
ENDING: dict[int, int] = {}
"""Version -> the only token that it samples."""


def script(prompt: object, position: int, version: int) -> tuple[int, float]:
    return ENDING.get(version, 10 + 10 * (version % 2) + position % 10), -0.25


def workers(method: str, args: tuple[object, ...]) -> list[bytes]:
    version, outcome = args
    if outcome in ("ends", "stops"):
        assert isinstance(version, int)
        ENDING[version] = STOP if outcome == "ends" else EXTRA_STOP
    reply = Reply(ok=outcome in ("ok", "ends", "stops"), dirty=outcome == "dirty")
    return [encode(reply)]


class TestScriptedEngine(EngineContract):
    stream_interval = 16
    max_model_len = 20_000
    stop_token = STOP
    extra_stop_token = EXTRA_STOP
    long_tokens = 1000

    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        ENDING.clear()
        engine = self.make()
        await engine.start()
        yield engine
        await engine.close()

    @pytest.fixture
    async def sleeper(self) -> AsyncIterator[Engine]:
        ENDING.clear()
        engine = self.make(sleep_level=2)
        await engine.start()
        yield engine
        await engine.close()

    def make(self, *, sleep_level: SleepLevel | None = None) -> ScriptedEngine:
        spec = EngineSpec(
            model="scripted",
            stream_interval=self.stream_interval,
            max_model_len=self.max_model_len,
            stop_token_ids=(STOP, EXTRA_STOP),
            sleep_level=sleep_level,
        )
        return ScriptedEngine(spec, script=script, workers=workers, decode=self.decode, worker_s=0.005)

    def letters(self, version: int) -> Container[int]:
        return {ENDING[version]} if version in ENDING else range(10 + 10 * (version % 2), 20 + 10 * (version % 2))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token:03d}" for token in tokens)

    async def commit(self, engine: Engine, version: int, *, outcome: str = "ok") -> None:
        await asyncio.sleep(0)
        await engine.commit(version, "set_letters", version, outcome, timeout_s=5.0)

    async def kill(self, engine: Engine) -> None:
        assert isinstance(engine, ScriptedEngine)
        await engine.die("killed by the test")


async def test_an_engine_without_text_refuses_stop_strings() -> None:
    engine = ScriptedEngine(EngineSpec(model="scripted"))
    await engine.start()
    with pytest.raises(ValueError, match="need text"):
        await collect(engine, "a", SamplingParams(max_tokens=3, stop=("x",)))
    assert engine.status().running == 0
