"""How `VllmEngine` drives vLLM through commits and sleep, and what happens to requests; vLLM is a stand-in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.request_state import MAX_READMISSIONS, ActiveRequest
from rollout.engine.vllm_engine import VllmEngine
from rollout.errors import EngineDead
from rollout.types import SamplingParams
from tests.contract.engine.suite import Response, collect
from weight_sync.messages import Reply, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PROMPT = np.array([3, 4, 5], np.int32)
MOMENTS = ("pause keep", "ws_commit", "forget", "resume", "abort")
"""What a commit waits for, in this order. Requests are taken out as `forget` begins, where vLLM's process drops them;
their streams notice as `abort` ends."""


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
    """Of a request inside; counts the tokens that it was given."""

    def __init__(self, queue: Collector) -> None:
        self.queue = queue
        self.num_tokens = 0
        self.is_prefilling = True
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: self.num_tokens)

    def put(self, token_ids: list[int], finish: str | None) -> None:
        self.num_tokens += len(token_ids)
        one = SimpleNamespace(token_ids=token_ids, logprobs=[-1.0] * len(token_ids), finish_reason=finish)
        self.queue.put(SimpleNamespace(outputs=[one], finished=finish is not None))


class FakeLlm:
    """As much of `AsyncLLM` as requests, commits and sleep touch. It gives tokens when the test says so."""

    def __init__(self) -> None:
        self.errored = False
        self.entered: list[tuple[str, str]] = []
        """(id, cache salt) of every request that was put in, in order."""
        self.log: list[str] = []
        """Each step as it begins and as it ends."""
        self.at: dict[str, Callable[[], Awaitable[None]]] = {}
        """What else happens at a step."""
        self.replies: list[Reply] = []
        """Of the workers; then they agree."""
        self.output_handler: asyncio.Task[None] | None = None
        self.states: dict[str, State] = {}
        self.computed = set[str]()
        """What the engine process has."""
        self.output_processor = SimpleNamespace(request_states=self.states)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 128)
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=lambda mode, **_: self._reach(f"pause {mode}"),
            resume_scheduler_async=lambda: self._reach("resume"),
            abort_requests_async=self._forget,
            outputs_queue=SimpleNamespace(put_nowait=lambda barrier: barrier.outputs),  # it is empty
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
        await self._reach(method)
        return [encode(self.replies.pop(0) if self.replies else Reply(ok=True))]

    async def sleep(self, *, level: int) -> None:
        await self._reach(f"sleep {level}")

    async def wake_up(self, *, tags: list[str]) -> None:
        await self._reach(f"wake {tags[0]}")

    def give(self, request_id: str, num_tokens: int, finish: str | None = None) -> None:
        (key,) = [key for key in self.states if key.startswith(f"{request_id}-")]
        state = self.states.pop(key) if finish else self.states[key]
        state.put([7] * num_tokens, finish)

    def shutdown(self) -> None:
        self.log.append("shutdown")

    async def _reach(self, step: str) -> None:
        self.log.append(f"{step}<")
        await asyncio.sleep(0)
        if step in self.at:
            await self.at[step]()
        self.log.append(f"{step}>")


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.vllm_engine.vllm_sampling", lambda *_: None)


def started(**spec: Any) -> tuple[VllmEngine, FakeLlm]:
    engine, llm = VllmEngine(EngineSpec(model="fake", stream_interval=4, **spec)), FakeLlm()
    engine._llm = llm  # type: ignore[assignment]
    return engine, llm


async def sent(engine: VllmEngine, llm: FakeLlm, *names: str) -> list[asyncio.Task[Response]]:
    """The responses of requests that are inside."""
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


async def ended(task: asyncio.Task[Response]) -> Response:
    return await asyncio.wait_for(task, 10)


async def hang() -> None:
    await asyncio.Event().wait()


# Requests without a token at a commit


async def test_requests_without_a_token_enter_again_in_their_order_after_the_pause_and_the_others_stay() -> None:
    """A thousand streams take many milliseconds to notice; the engine process computes none of them as it resumes."""
    engine, llm = started()
    seen: list[str] = []

    async def resume() -> None:
        seen.append(f"resume with {sorted(llm.computed)}")

    async def abort() -> None:
        seen.append("abort while paused" if engine.status().paused_s else "abort")
        assert len(llm.entered) == 3, "no stream has noticed yet"

    llm.at.update(resume=resume, abort=abort)
    tasks = await sent(engine, llm, "has-tokens", "second", "third")
    llm.give("has-tokens", 2)
    await commit(engine)
    assert seen == ["resume with ['has-tokens-1']", "abort"]
    await until(lambda: len(llm.states) == 3)
    first = [(name, "v0") for name in ("has-tokens", "second", "third")]
    assert llm.entered == [*first, ("second", "v1"), ("third", "v1")]
    for name, _ in first:
        llm.give(name, 3, "length")
    assert [(await ended(task)).labels for task in tasks] == [[0, 0, 1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert not engine._requests.running


async def test_a_prompt_that_takes_longer_than_the_time_between_commits_is_computed_in_the_end() -> None:
    engine, llm = started()
    (task,) = await sent(engine, llm, "long")
    for version in range(1, MAX_READMISSIONS + 4):
        await commit(engine, version)
        await until(lambda: len(llm.states) == 1)
    llm.give("long", 2, "length")
    assert (await ended(task)).labels == [MAX_READMISSIONS + 3] * 2
    assert llm.entered == [("long", f"v{version}") for version in range(MAX_READMISSIONS + 1)]
    assert not engine._requests._num_readmissions


@pytest.mark.parametrize(
    ("policy", "is_refused", "has_unread_token", "labels"),
    [
        ("keep", False, True, [0, 1]),  # an unread first token is a token
        ("keep", True, False, [0]),  # the workers refused the new weights
        ("recompute", False, False, [1]),  # this and "abort" leave no cache behind
        ("abort", False, False, [1]),
    ],
)
async def test_nothing_is_taken_out_where_no_old_cache_can_be_read(
    policy: Any, is_refused: bool, has_unread_token: bool, labels: list[int]
) -> None:
    engine, llm = started(in_flight=policy)

    async def give_late() -> None:
        if has_unread_token:
            llm.give("stays", 1)

    llm.at["pause keep"] = give_late
    (task,) = await sent(engine, llm, "stays")
    llm.replies.append(Reply(ok=not is_refused))
    await commit(engine)
    llm.give("stays", 1, "length")
    assert (await ended(task)).labels == labels
    assert llm.entered == [("stays", "v0")]


async def test_a_request_that_came_while_the_weights_were_a_mixture_begins_after_the_commit_that_repairs_them() -> None:
    engine, llm = started()
    llm.replies.append(Reply(ok=False, dirty=True))
    await commit(engine, 1)
    (task,) = await sent(engine, llm, "early")
    await commit(engine, 2)
    await until(lambda: llm.entered == [("early", "v0"), ("early", "v2")])
    llm.give("early", 1, "length")
    assert (await ended(task)).labels == [2]


async def test_outputs_on_their_way_count_for_the_old_version() -> None:
    """AsyncLLM's handler takes outputs from a queue, in order, and counts their tokens per request."""
    engine, llm = started()
    queue: asyncio.Queue[Any] = asyncio.Queue()
    llm.engine_core.outputs_queue = queue
    inside: Any = Collector("inside")
    engine._requests.enter("r", live := ActiveRequest(inside, 0, 4))
    engine._requests.enter("finished", ActiveRequest(Collector("gone"), 0, 4))  # type: ignore[arg-type]
    state = llm.states["inside"] = State(inside)

    async def handle() -> None:
        while True:
            for _ in (await queue.get()).outputs:
                await asyncio.sleep(0.005)
                state.num_tokens += 1

    anything: Any = llm
    queue.put_nowait(SimpleNamespace(outputs=[0] * 5))
    handler = asyncio.create_task(handle())
    assert await engine._count_tokens(anything, 5.0) == [("r", live, 5)]
    handler.cancel()
    with pytest.raises(TimeoutError, match="drain of outputs"):  # an error, and not a wrong label
        await engine._count_tokens(anything, 0.05)


# Aborts, deaths and closed streams at every moment of a commit


@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_abort_ends_a_request_at_every_moment_of_a_commit(moment: str) -> None:
    engine, llm = started()
    llm.at[moment] = lambda: engine.abort("aborted")
    (task,) = await sent(engine, llm, "aborted")
    await commit(engine)
    response = await ended(task)
    assert (response.tokens, response.finish_reason) == ([], "abort")
    assert not llm.states and not engine._requests.running


@pytest.mark.parametrize("moment", MOMENTS)
async def test_streams_learn_of_the_death_of_the_engine_at_every_moment_of_a_commit(moment: str) -> None:
    engine, llm = started()

    async def die() -> None:
        engine._die("killed by the test")
        await hang()  # the dead do not respond

    llm.at[moment] = die
    (task,) = await sent(engine, llm, "dying")
    for waiting in (commit(engine), ended(task)):
        with pytest.raises(EngineDead, match="killed by the test"):
            await waiting
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
    assert (await ended(again)).labels == [1]


@pytest.mark.parametrize("moment", ["forget", "abort"])
async def test_an_abort_that_hangs_is_the_death_of_the_engine(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.vllm_engine._ABORT_TIMEOUT_S", 0.05)
    engine, llm = started()
    llm.at[moment] = hang
    (task,) = await sent(engine, llm, "waiting")
    for waiting, error in ((commit(engine), TimeoutError), (ended(task), EngineDead)):
        with pytest.raises(error, match="abort did not end"):
            await waiting
    await engine.close()


async def test_the_id_of_a_request_is_taken_while_it_is_outside() -> None:
    engine, llm = started()

    async def refuse() -> None:
        with pytest.raises(ValueError, match="already running"):
            await collect(engine, "taken", SamplingParams(max_tokens=3), PROMPT)

    llm.at["resume"] = refuse
    (task,) = await sent(engine, llm, "taken")
    await commit(engine)
    await until(lambda: len(llm.entered) == 2)
    llm.give("taken", 1, "length")
    assert (await ended(task)).labels == [1]


async def test_a_resume_that_fails_is_tried_again_and_leaves_no_request_outside() -> None:
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
    await ended(task)


async def test_a_mixture_that_no_commit_repairs_is_the_death_of_the_engine() -> None:
    engine, llm = started(pause_limit_s=0.0)
    llm.replies.append(Reply(ok=False, dirty=True))
    await commit(engine)
    await until(lambda: engine.status().is_dead)
    with pytest.raises(EngineDead, match="its weights are a mixture of versions and no commit repaired them"):
        await commit(engine)
    await engine.close()


async def test_an_error_of_one_request_is_its_own() -> None:
    engine, llm = started()
    bad, good = await sent(engine, llm, "bad", "good")
    llm.states["bad-1"].queue.put(IndexError("no such token"))
    with pytest.raises(IndexError, match="no such token"):
        await ended(bad)
    llm.give("good", 1, "length")
    assert (await ended(good)).finish_reason == "length"
    assert not llm.states


async def test_an_error_that_ends_the_output_handler_is_the_death_of_the_engine() -> None:
    engine, llm = started()
    tasks = await sent(engine, llm, "bad", "good")
    llm.errored = True
    for state in llm.states.values():
        state.queue.put(IndexError("no such token"))
    for waiting in (*map(ended, tasks), collect(engine, "later", SamplingParams(max_tokens=3), PROMPT)):
        with pytest.raises(EngineDead, match="IndexError: no such token"):
            await waiting
    await engine.close()
    assert llm.log == ["shutdown"], "its processes are ended"


# Sleep


def whole(*steps: str) -> list[str]:
    """Each step begins after the one before it has ended."""
    return [f"{step}{mark}" for step in steps for mark in "<>"]


COMMIT = ("pause keep", "ws_commit", "resume")
SLEEP = ("pause abort", "sleep 2")
WAKE = ("pause keep", "wake weights", "ws_commit", "wake kv_cache", "resume")


@pytest.mark.parametrize("sleep_first", [False, True])
async def test_a_sleep_and_a_commit_wait_for_each_other(sleep_first: bool) -> None:
    engine, llm = started(sleep_level=2)
    both = [engine.sleep(), commit(engine)] if sleep_first else [commit(engine), engine.sleep()]
    await asyncio.wait_for(asyncio.gather(*both), 10)
    assert llm.log == whole(*SLEEP, *WAKE) if sleep_first else whole(*COMMIT, *SLEEP)
    assert engine.version == 1


@pytest.mark.parametrize(
    ("level", "sleep", "wake"), [(0, ["pause abort"], COMMIT), (1, ["pause abort", "sleep 1"], WAKE), (2, SLEEP, WAKE)]
)
async def test_shallower_sleep_releases_less(level: Any, sleep: list[str], wake: list[str]) -> None:
    engine, llm = started(sleep_level=level)
    await engine.sleep()
    await commit(engine)
    assert llm.log == whole(*sleep, *wake)
    assert (engine.version, engine.status().paused_s) == (1, 0)


async def test_a_commit_that_fails_in_sleep_leaves_the_engine_paused_and_the_next_one_wakes_it() -> None:
    engine, llm = started(sleep_level=2)
    llm.replies.append(Reply(ok=False))
    await engine.sleep()
    await commit(engine)
    assert llm.log == whole(*SLEEP, "pause keep", "wake weights", "ws_commit")
    assert engine.version == 0 and engine.status().paused_s > 0
    await commit(engine, 2)
    assert llm.log[-10:] == whole(*WAKE)
    assert engine.status().paused_s == 0


async def test_an_engine_that_may_not_generate_is_not_stalled() -> None:
    """In the pause that a mixture leaves."""
    now = 0.0
    engine, llm = VllmEngine(EngineSpec(model="fake", stream_interval=4), clock=lambda: now), FakeLlm()
    engine._llm = llm  # type: ignore[assignment]
    (task,) = await sent(engine, llm, "waiting")
    now = 100.0
    assert engine.load().still_s == 100.0
    llm.replies.append(Reply(ok=False, dirty=True))
    await commit(engine)
    now = 200.0
    assert (engine.load().still_s, engine.load().paused_s) == (0.0, 100.0)
    await engine.close()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("step", SLEEP)
async def test_an_engine_that_fails_half_way_into_sleep_is_dead(step: str) -> None:
    """Its scheduler is stopped and its memory may be gone: requests must not wait for it."""
    engine, llm = started(sleep_level=2)

    async def fail() -> None:
        raise RuntimeError(f"{step} failed")

    llm.at[step] = fail
    with pytest.raises(RuntimeError, match="failed"):
        await engine.sleep()
    with pytest.raises(EngineDead, match="did not enter sleep mode"):
        await commit(engine)
    await engine.close()
    assert llm.log[-1] == "shutdown"


async def test_an_engine_that_ends_stops_listening_before_its_process_does() -> None:
    """Otherwise vLLM logs, now and then, that its output handler failed."""
    engine, llm = started()
    llm.output_handler = asyncio.ensure_future(hang())
    llm.shutdown = lambda: llm.log.append(f"shutdown, handler is {'done' if llm.output_handler.done() else 'running'}")
    await engine.close()
    assert llm.log == ["shutdown, handler is done"]
