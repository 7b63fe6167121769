"""Requests that have no token at a commit: `VllmEngine` takes them out of vLLM, here a stand-in, and in again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.request_state import MAX_READMISSIONS
from rollout.engine.vllm_engine import VllmEngine
from rollout.errors import EngineDead
from rollout.types import SamplingParams
from tests.contract.engine.suite import Answer, collect
from weight_sync.wire import Reply, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PROMPT = np.array([3, 4, 5], np.int32)
MOMENTS = ("pause", "workers", "forget", "resume", "abort")
"""What a commit waits for, in this order. Requests are taken out as `forget` begins, where vLLM's process drops them;
their streams hear of it as `abort` ends."""


class Collector:
    """One slot, as in vLLM: an error takes the place of what is there."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._slot: Any = None
        self._ready = asyncio.Event()

    def put(self, output: Any) -> None:
        if self._slot is None or isinstance(output, Exception):
            self._slot = output
            self._ready.set()

    def get_nowait(self) -> Any:
        output, self._slot = self._slot, None
        self._ready.clear()
        if isinstance(output, Exception):
            raise output
        return output

    async def get(self) -> Any:
        while self._slot is None:
            await self._ready.wait()
        return self.get_nowait()


class State:
    """Of a request inside; knows how many tokens it was given."""

    def __init__(self, queue: Collector) -> None:
        self.queue = queue
        self.num_tokens = 0
        self.is_prefilling = True
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: self.num_tokens)

    def put(self, token_ids: list[int], finish: str | None) -> None:
        self.num_tokens += len(token_ids)
        logprobs = SimpleNamespace(start_indices=range(len(token_ids)), logprobs=[-1.0] * len(token_ids))
        one = SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason=finish)
        self.queue.put(SimpleNamespace(outputs=[one], finished=finish is not None))


class QueueingLlm:
    """As much of `AsyncLLM` as requests and commits touch. It gives tokens when the test says so."""

    def __init__(self) -> None:
        self.errored = False
        self.entered: list[tuple[str, str]] = []
        """(id, cache salt) of every request that was put in, in order."""
        self.at: dict[str, Callable[[], Awaitable[None]]] = {}
        """What else happens at a moment."""
        self.reply = Reply(ok=True)
        self.states: dict[str, State] = {}
        self.computed = set[str]()
        """What the engine process has."""
        self.output_processor = SimpleNamespace(request_states=self.states)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 128)
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=lambda **_: self._reach("pause"),
            resume_scheduler_async=lambda: self._reach("resume"),
            abort_requests_async=self._forget,
            outputs_queue=SimpleNamespace(put_nowait=lambda fence: fence.outputs),
            resources=SimpleNamespace(engine_manager=None),
        )

    async def add_request(self, request_id: str, prompt: Any, *_: Any, **__: Any) -> Collector:
        self.entered.append((request_id, prompt["cache_salt"]))
        queue = Collector(f"{request_id}-{len(self.entered)}")
        self.states[queue.request_id] = State(queue)
        self.computed.add(queue.request_id)
        return queue

    async def abort(self, request_id: str | list[str], internal: bool = False) -> None:
        if internal:
            await self._reach("abort")
        asked = {request_id} if isinstance(request_id, str) else set(request_id)
        for key in [key for key in self.states if (key if internal else key.rpartition("-")[0]) in asked]:
            self.states.pop(key).put([], "abort")

    async def _forget(self, inner_ids: list[str]) -> None:
        assert inner_ids
        await self._reach("forget")
        self.computed.difference_update(inner_ids)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[bytes]:
        await self._reach("workers")
        return [encode(self.reply)]

    def give(self, request_id: str, num_tokens: int, finish: str | None = None) -> None:
        (key,) = [key for key in self.states if key.startswith(f"{request_id}-")]
        state = self.states.pop(key) if finish else self.states[key]
        state.put([7] * num_tokens, finish)

    def shutdown(self) -> None: ...

    async def _reach(self, moment: str) -> None:
        await asyncio.sleep(0)
        if moment in self.at:
            await self.at[moment]()


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.vllm_engine.vllm_sampling", lambda *_: None)


def started(**spec: Any) -> tuple[VllmEngine, QueueingLlm]:
    engine, llm = VllmEngine(EngineSpec(model="queueing", stream_interval=4, **spec)), QueueingLlm()
    engine._llm = llm  # type: ignore[assignment]
    return engine, llm


async def sent(engine: VllmEngine, llm: QueueingLlm, *names: str) -> list[asyncio.Task[Answer]]:
    """The answers of requests that are inside."""
    params = SamplingParams(max_tokens=10, seed=1)
    tasks = [asyncio.create_task(collect(engine, name, params, PROMPT)) for name in names]
    await until(lambda: len(llm.states) == len(names))
    return tasks


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0)


async def commit(engine: VllmEngine, version: int = 1) -> None:
    await asyncio.wait_for(engine.commit(version, "ws_commit", timeout_s=5.0), 10)


async def test_requests_without_a_token_enter_again_in_their_order_and_the_others_stay() -> None:
    engine, llm = started()
    tasks = await sent(engine, llm, "has-tokens", "second", "third")
    llm.give("has-tokens", 2)
    await commit(engine)
    await until(lambda: len(llm.states) == 3)
    first = [(name, "v0") for name in ("has-tokens", "second", "third")]
    assert llm.entered == [*first, ("second", "v1"), ("third", "v1")]
    for name in ("has-tokens", "second", "third"):
        llm.give(name, 3, "length")
    answers = [await asyncio.wait_for(task, 10) for task in tasks]
    assert [answer.labels for answer in answers] == [[0, 0, 1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    assert not engine._requests.running


async def test_a_prompt_that_takes_longer_than_the_time_between_commits_is_computed_in_the_end() -> None:
    engine, llm = started()
    (task,) = await sent(engine, llm, "long")
    for version in range(1, MAX_READMISSIONS + 4):
        await commit(engine, version)
        await until(lambda: len(llm.states) == 1)
    llm.give("long", 2, "length")
    assert (await asyncio.wait_for(task, 10)).labels == [MAX_READMISSIONS + 3] * 2
    assert llm.entered == [("long", f"v{version}") for version in range(MAX_READMISSIONS + 1)]
    assert not engine._requests._num_readmissions


async def test_a_first_token_that_nobody_has_read_is_a_token() -> None:
    engine, llm = started()

    async def give_late() -> None:
        llm.give("unread", 1)

    llm.at["pause"] = give_late
    (task,) = await sent(engine, llm, "unread")
    await commit(engine)
    llm.give("unread", 1, "length")
    assert (await asyncio.wait_for(task, 10)).labels == [0, 1]
    assert llm.entered == [("unread", "v0")]


@pytest.mark.parametrize(("policy", "is_taken"), [("keep", False), ("recompute", True), ("abort", True)])
async def test_nothing_is_taken_out_where_no_old_cache_can_be_read(policy: Any, is_taken: bool) -> None:
    """`keep`: the workers refused the new weights. The others leave no cache behind them."""
    engine, llm = started(in_flight=policy)
    (task,) = await sent(engine, llm, "stays")
    llm.reply = Reply(ok=is_taken)
    await commit(engine)
    llm.give("stays", 2, "length")
    assert (await asyncio.wait_for(task, 10)).labels == [int(is_taken)] * 2
    assert llm.entered == [("stays", "v0")]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_abort_ends_it_at_every_moment_of_a_commit(moment: str) -> None:
    engine, llm = started()
    llm.at[moment] = lambda: engine.abort("aborted")
    (task,) = await sent(engine, llm, "aborted")
    await commit(engine)
    answer = await asyncio.wait_for(task, 10)
    assert (answer.tokens, answer.finish_reason) == ([], "abort")
    assert not llm.states and not engine._requests.running


async def test_an_abort_on_its_way_to_vllm_is_not_lost_when_the_request_is_taken_out() -> None:
    engine, llm = started()
    (task,) = await sent(engine, llm, "aborted")
    original = engine._requests.readmit_unstarted

    def take_out(states: Any) -> list[str]:
        assert engine._requests.note_abort("aborted"), "vLLM will be told in a moment"
        return original(states)

    engine._requests.readmit_unstarted = take_out  # type: ignore[method-assign]
    await commit(engine)
    assert (await asyncio.wait_for(task, 10)).finish_reason == "abort"
    assert not llm.states


@pytest.mark.parametrize("moment", MOMENTS)
async def test_its_stream_hears_of_the_death_of_the_engine_at_every_moment_of_a_commit(moment: str) -> None:
    engine, llm = started()

    async def die() -> None:
        engine._die("killed by the test")
        await asyncio.Event().wait()  # the dead do not answer

    llm.at[moment] = die
    (task,) = await sent(engine, llm, "dying")
    with pytest.raises(EngineDead, match="killed by the test"):
        await commit(engine)
    with pytest.raises(EngineDead, match="killed by the test"):
        await asyncio.wait_for(task, 10)
    await engine.close()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_stream_that_is_closed_at_any_moment_of_a_commit_leaves_nothing_behind(moment: str) -> None:
    engine, llm = started()

    async def close() -> None:
        task.cancel()

    llm.at[moment] = close
    (task,) = await sent(engine, llm, "closed")
    await commit(engine)
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
    assert not llm.states and not engine._requests.running
    assert engine.load().still_s == 0.0
    (again,) = await sent(engine, llm, "closed")
    llm.give("closed", 1, "length")
    assert (await asyncio.wait_for(again, 10)).labels == [1]


async def test_the_pause_ends_before_the_streams_of_those_that_were_taken_out_have_their_turns() -> None:
    """A thousand of them take many milliseconds. The engine process computes none of them when it resumes."""
    engine, llm = started()
    told: list[str] = []

    async def resume() -> None:
        told.append(f"resume with {sorted(llm.computed)}")

    async def abort() -> None:
        told.append("abort while paused" if engine.status().paused_s else "abort")
        assert len(llm.entered) == 3, "nobody has heard of it yet"

    llm.at.update(resume=resume, abort=abort)
    tasks = await sent(engine, llm, "has-tokens", "second", "third")
    llm.give("has-tokens", 1)
    await commit(engine)
    assert told == ["resume with ['has-tokens-1']", "abort"]
    await until(lambda: len(llm.entered) == 5)
    for name in ("has-tokens", "second", "third"):
        llm.give(name, 1, "length")
    assert [(await asyncio.wait_for(task, 10)).labels for task in tasks] == [[0, 1], [1], [1]]


@pytest.mark.parametrize("moment", ["forget", "abort"])
async def test_an_abort_that_does_not_end_is_the_death_of_the_engine(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.engine.vllm_engine._ABORT_TIMEOUT_S", 0.05)
    engine, llm = started()

    async def hang() -> None:
        await asyncio.Event().wait()

    llm.at[moment] = hang
    (task,) = await sent(engine, llm, "waiting")
    with pytest.raises(TimeoutError, match="abort did not end"):
        await commit(engine)
    with pytest.raises(EngineDead, match="abort did not end"):
        await asyncio.wait_for(task, 10)
    await engine.close()


async def test_its_id_is_taken_while_it_is_outside() -> None:
    engine, llm = started()

    async def refuse() -> None:
        with pytest.raises(ValueError, match="already running"):
            await collect(engine, "taken", SamplingParams(max_tokens=3), PROMPT)

    llm.at["resume"] = refuse
    (task,) = await sent(engine, llm, "taken")
    await commit(engine)
    await until(lambda: len(llm.entered) == 2)
    llm.give("taken", 1, "length")
    assert (await asyncio.wait_for(task, 10)).labels == [1]


async def test_what_came_in_while_the_weights_were_a_mixture_begins_after_the_commit_that_repairs_them() -> None:
    engine, llm = started()
    llm.reply = Reply(ok=False, dirty=True)
    await commit(engine, 1)
    (task,) = await sent(engine, llm, "early")
    llm.reply = Reply(ok=True)
    await commit(engine, 2)
    await until(lambda: len(llm.entered) == 2)
    assert llm.entered == [("early", "v0"), ("early", "v2")]
    llm.give("early", 1, "length")
    assert (await asyncio.wait_for(task, 10)).labels == [2]


async def test_an_error_that_ends_the_output_handler_is_the_death_of_the_engine() -> None:
    engine, llm = started()
    first, second = await sent(engine, llm, "first", "second")
    llm.errored = True
    for state in llm.states.values():
        state.queue.put(IndexError("no such token"))
    for task in (first, second):
        with pytest.raises(EngineDead, match="IndexError: no such token"):
            await asyncio.wait_for(task, 10)
    with pytest.raises(EngineDead, match="IndexError: no such token"):
        await collect(engine, "later", SamplingParams(max_tokens=3), PROMPT)
    assert engine._stopping, "its processes are ended"
    await engine.close()


async def test_an_error_of_one_request_is_its_own() -> None:
    engine, llm = started()
    bad, good = await sent(engine, llm, "bad", "good")
    llm.states["bad-1"].queue.put(ValueError("not this one"))
    with pytest.raises(ValueError, match="not this one"):
        await asyncio.wait_for(bad, 10)
    llm.give("good", 1, "length")
    assert (await asyncio.wait_for(good, 10)).finish_reason == "length"
    assert not llm.states


async def test_a_resume_that_fails_and_kills_nobody_leaves_nothing_outside() -> None:
    engine, llm = started(pause_limit_s=0.0)

    async def refuse() -> None:
        llm.at.clear()
        raise RuntimeError("the core refused")

    llm.at["resume"] = refuse
    (task,) = await sent(engine, llm, "waiting")
    with pytest.raises(RuntimeError, match="the core refused"):
        await commit(engine)
    await until(lambda: len(llm.entered) == 2 and bool(llm.computed))
    llm.give("waiting", 2, "length")
    await asyncio.wait_for(task, 5)
