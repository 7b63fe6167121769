"""The order in which `VllmEngine` asks vLLM to pause, sleep, wake and resume, on a stand-in that only takes notes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_engine import VllmEngine
from rollout.errors import EngineDead
from weight_sync.wire import Reply, encode

WORK_S = 0.02


class NotingLlm:
    """As much of `AsyncLLM` as commits and sleep touch."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.errored = False
        self.replies: list[Reply] = []
        self.fails_at = ""
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=self._pause,
            resume_scheduler_async=lambda: self._note("resume"),
            outputs_queue=self,
            resources=SimpleNamespace(engine_manager=None),
        )
        self.output_processor = SimpleNamespace(request_states={})

    async def _pause(self, *, mode: str, clear_cache: bool) -> None:
        await self._note(f"pause {mode}")

    async def sleep(self, *, level: int) -> None:
        await self._note(f"sleep {level}")

    async def wake_up(self, *, tags: list[str]) -> None:
        await self._note(f"wake {tags[0]}")

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[bytes]:
        await self._note(method)
        return [encode(self.replies.pop(0) if self.replies else Reply(ok=True))]

    def put_nowait(self, fence: Any) -> None:
        """The queue of outputs is empty: a fence is reached at once."""
        assert fence.outputs == []

    def shutdown(self) -> None:
        self.log.append("shutdown")

    async def _note(self, word: str) -> None:
        self.log.append(f"{word}<")
        await asyncio.sleep(WORK_S)
        if word == self.fails_at:
            raise RuntimeError(f"{word} failed")
        self.log.append(f"{word}>")


def started(**spec: Any) -> tuple[VllmEngine, NotingLlm]:
    engine, llm = VllmEngine(EngineSpec(model="noting", **{"sleep_level": 2, **spec})), NotingLlm()
    engine._llm = llm  # type: ignore[assignment]
    return engine, llm


def whole(*words: str) -> list[str]:
    """Each step begins after the one before it has ended."""
    return [f"{word}{mark}" for word in words for mark in "<>"]


COMMIT = ("pause keep", "ws_commit", "resume")
SLEEP = ("pause abort", "sleep 2")
WAKE = ("pause keep", "wake weights", "ws_commit", "wake kv_cache", "resume")


async def test_a_sleep_that_arrives_during_a_commit_waits_for_its_end() -> None:
    engine, llm = started()
    committing = asyncio.create_task(engine.commit(1, "ws_commit", timeout_s=5.0))
    await asyncio.sleep(WORK_S / 2)
    await asyncio.wait_for(engine.sleep(), 10)
    await asyncio.wait_for(committing, 10)
    assert llm.log == whole(*COMMIT, *SLEEP)


async def test_a_commit_that_arrives_during_a_sleep_waits_and_wakes() -> None:
    engine, llm = started()
    sleeping = asyncio.create_task(engine.sleep())
    await asyncio.sleep(WORK_S / 2)
    await asyncio.wait_for(engine.commit(1, "ws_commit", timeout_s=5.0), 10)
    await asyncio.wait_for(sleeping, 10)
    assert llm.log == whole(*SLEEP, *WAKE)
    assert engine.version == 1
    assert engine.status().paused_s == 0


@pytest.mark.parametrize(
    ("level", "sleep", "wake"),
    [
        (0, ["pause abort"], ["pause keep", "ws_commit", "resume"]),
        (1, ["pause abort", "sleep 1"], list(WAKE)),
    ],
)
async def test_shallower_sleep_gives_less_back(level: int, sleep: list[str], wake: list[str]) -> None:
    engine, llm = started(sleep_level=level)
    await engine.sleep()
    await engine.commit(1, "ws_commit", timeout_s=5.0)
    assert llm.log == whole(*sleep, *wake)
    assert (engine.version, engine.status().paused_s) == (1, 0)


async def test_a_commit_that_fails_in_sleep_leaves_the_engine_paused_and_the_next_one_wakes_it() -> None:
    engine, llm = started()
    llm.replies.append(Reply(ok=False))
    await engine.sleep()
    await engine.commit(1, "ws_commit", timeout_s=5.0)
    assert llm.log == whole(*SLEEP, "pause keep", "wake weights", "ws_commit")
    assert engine.version == 0
    assert engine.status().paused_s > 0
    await engine.commit(2, "ws_commit", timeout_s=5.0)
    assert llm.log[-10:] == whole(*WAKE)
    assert engine.status().paused_s == 0


@pytest.mark.parametrize("step", SLEEP)
async def test_an_engine_that_fails_half_way_into_sleep_is_dead(step: str) -> None:
    """Its scheduler stands still and its memory may be gone: requests must not wait for it."""
    engine, llm = started()
    llm.fails_at = step
    with pytest.raises(RuntimeError, match="failed"):
        await engine.sleep()
    with pytest.raises(EngineDead, match="did not fall asleep"):
        await engine.commit(1, "ws_commit", timeout_s=5.0)
    await engine.close()
    assert llm.log[-1] == "shutdown"
