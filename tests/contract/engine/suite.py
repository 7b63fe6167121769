"""What every `Engine` must do. A subclass has a fixture `engine` and defines how its weights change.

The engines under test emit letters: under version `v` every sampled token lies in `letters(v)`, and the letters of
neighbouring versions are disjoint. So a token itself proves which version sampled it.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.errors import EngineDead
from rollout.types import SamplingParams, TokenChunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Container, Iterator, Sequence

    from rollout.engine.interface import Engine, EngineTimes, InFlight

PROMPT = np.array([3, 4, 5], np.int32)


@dataclass(frozen=True)
class Response:
    """All chunks of one completion, joined."""

    chunks: list[TokenChunk]

    @property
    def tokens(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> np.ndarray:
        return np.concatenate([chunk.logprobs for chunk in self.chunks])

    @property
    def labels(self) -> list[int]:
        """The version of every token."""
        return [version for chunk in self.chunks for version in chunk.versions.tolist()]

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason


async def collect(engine: Engine, request_id: str, params: SamplingParams, prompt: np.ndarray = PROMPT) -> Response:
    return Response([chunk async for chunk in engine.generate(request_id, prompt, params)])


class EngineContract:
    stream_interval: int
    max_model_len: int
    stop_token: int
    """The end token of the model."""
    extra_stop_token: int
    """Of `EngineSpec.stop_token_ids`."""
    long_tokens: int = 300
    """Length of an response that is long enough to commit in its middle."""
    num_commits: int = 10

    def letters(self, version: int) -> Container[int]:
        """Tokens that the weights of `version` can sample. Disjoint for neighbouring versions."""
        raise NotImplementedError

    async def commit(self, engine: Engine, version: int, *, outcome: str = "ok") -> None:
        """Commit the weights of `version`; `outcome` is what the workers response: ok, failed, dirty, or ok and weights
        that sample nothing but `stop_token` ("ends") or `extra_stop_token` ("stops")."""
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        """The text that the engine looks for stop strings in; at least two characters per letter."""
        raise NotImplementedError

    def end_of(self, tokens: list[int], stop: str) -> int:
        """Tokens of the shortest beginning whose text holds `stop`."""
        return next(n for n in range(1, len(tokens) + 1) if stop in self.decode(tokens[:n]))

    async def kill(self, engine: Engine) -> None:
        raise NotImplementedError

    def begin(self, engine: Engine, request_id: str, **params: Any) -> asyncio.Future[Response]:
        """A response of `long_tokens`, unless `params` ask for another."""
        sampling = SamplingParams(**({"max_tokens": self.long_tokens, "seed": 1} | params))
        return asyncio.ensure_future(collect(engine, request_id, sampling))

    async def short(self, engine: Engine, request_id: str, **params: Any) -> Response:
        return await asyncio.wait_for(self.begin(engine, request_id, max_tokens=5, **params), 30)

    def assert_idle(self, engine: Engine) -> None:
        assert engine.status().running == engine.status().unstarted == 0

    def assert_labels(self, response: Response, *versions: int) -> None:
        """Also that all of `versions` and no others sampled it, if they are given."""
        tokens, labels = response.tokens, response.labels
        assert len(tokens) == len(labels)
        wrong = [(i, t, v) for i, (t, v) in enumerate(zip(tokens, labels, strict=True)) if t not in self.letters(v)]
        assert not versions or set(labels) == set(versions)
        assert not wrong, f"{len(wrong)} tokens carry the wrong version, first (index, token, label): {wrong[:5]}"

    async def test_chunks_are_bounded_and_only_the_last_has_a_reason(self, engine: Engine) -> None:
        num_tokens = 2 * self.stream_interval + 3
        response = await collect(engine, "chunks", SamplingParams(max_tokens=num_tokens, seed=1))
        sizes = [len(chunk.token_ids) for chunk in response.chunks]
        assert sizes == [self.stream_interval, self.stream_interval, 3]
        assert [chunk.finish_reason for chunk in response.chunks] == [None, None, "length"]
        for chunk in response.chunks:
            assert chunk.token_ids.dtype == np.int32
            assert chunk.logprobs.dtype == np.float32
            assert len(chunk.logprobs) == len(chunk.token_ids) == len(chunk.versions)
        assert (response.logprobs <= 0).all()

    async def test_the_load_counts_the_requests_that_are_inside_and_for_how_long_there_are_any(
        self, engine: Engine
    ) -> None:
        def times() -> EngineTimes:
            found = engine.load().times
            assert found is not None
            return found

        assert (engine.load().running, engine.load().waiting) == (0, 0)
        before = times()
        running = [self.begin(engine, f"load-{i}") for i in range(3)]
        async with asyncio.timeout(60):
            while engine.load().running < 3:
                assert not all(task.done() for task in running)
                await asyncio.sleep(0)
        during = times()
        await asyncio.gather(*running)
        load, after = engine.load(), times()
        assert (load.running, load.waiting) == (0, 0)
        assert load.kv_usage_frac in (None, 0.0)
        assert before.busy_s <= during.busy_s < after.busy_s
        assert after.busy_s - before.busy_s <= after.up_s - before.up_s
        await asyncio.sleep(0.05)
        later = times()
        assert later.busy_s == after.busy_s, "it had nothing to do"
        assert later.up_s > after.up_s and later.began_at == before.began_at

    async def test_every_token_carries_the_version_that_sampled_it(self, engine: Engine) -> None:
        first = engine.version
        params = [
            {
                "max_tokens": self.long_tokens + i,
                "temperature": i % 2,
                "seed": i,
                "stop": ("never said",) * (i % 4 == 3),
            }
            for i in range(32)
        ]
        running = asyncio.gather(*(self.begin(engine, f"label-{i}", **one) for i, one in enumerate(params)))
        for version in range(first + 1, first + 1 + self.num_commits):
            await self.wait_for_tokens(engine, 32 * self.long_tokens // (2 * self.num_commits))
            await self.commit(engine, version)
            assert engine.version == version
        responses = await asyncio.wait_for(running, 60)
        for i, response in enumerate(responses):
            assert len(response.tokens) == self.long_tokens + i, "a commit lost or added tokens"
            assert response.finish_reason == "length"
            self.assert_labels(response)
        assert len({v for a in responses for v in a.labels}) > 3, "the commits did not fall into the responses"

    @contextmanager
    def in_flight(self, engine: Engine, policy: InFlight) -> Iterator[None]:
        """What happens to running requests at the commits of this block."""
        spec = engine._spec
        engine._spec = replace(spec, in_flight=policy)
        try:
            yield
        finally:
            engine._spec = spec

    async def test_recomputed_requests_continue_under_the_new_version(self, engine: Engine) -> None:
        running = asyncio.gather(*(self.begin(engine, f"recompute-{i}", seed=i) for i in range(4)))
        first = engine.version
        with self.in_flight(engine, "recompute"):
            for version in (first + 1, first + 2):
                await self.wait_for_tokens(engine, self.long_tokens)
                await self.commit(engine, version)
        for response in await asyncio.wait_for(running, 60):
            assert (len(response.tokens), response.finish_reason) == (self.long_tokens, "length")
            self.assert_labels(response, first, first + 1, first + 2)

    async def test_aborted_requests_come_back_at_the_commit_with_the_tokens_they_had(self, engine: Engine) -> None:
        running = asyncio.gather(*(self.begin(engine, f"given-back-{i}", seed=i) for i in range(4)))
        first = engine.version
        with self.in_flight(engine, "abort"):
            await self.wait_for_tokens(engine, 40)
            await self.commit(engine, first + 1)
        for response in await asyncio.wait_for(running, 30):
            assert response.finish_reason == "abort"
            assert 0 < len(response.tokens) < self.long_tokens
            self.assert_labels(response, first)
        after = await self.short(engine, "after-the-abort")
        assert set(after.labels) == {first + 1}
        self.assert_idle(engine)

    async def wait_for_tokens(self, engine: Engine, num_tokens: int) -> None:
        """Until the running requests generated `num_tokens` more, or nothing runs."""
        target = engine.status().generated_tokens + num_tokens
        for _ in range(2000):
            if engine.status().generated_tokens >= target:
                return
            await asyncio.sleep(0.001)

    async def wait_for_pause(self, engine: Engine) -> None:
        async with asyncio.timeout(10):
            while not engine.status().paused_s:
                await asyncio.sleep(0)

    async def test_requests_that_wait_at_the_gate_start_under_the_new_version(self, engine: Engine) -> None:
        version = engine.version + 1
        committing = asyncio.ensure_future(self.commit(engine, version))
        await self.wait_for_pause(engine)
        response = await self.short(engine, "at-the-gate")
        await committing
        self.assert_labels(response, version)

    @pytest.mark.parametrize("outcome", ["ends", "stops"])
    async def test_the_end_token_is_part_of_the_completion(self, engine: Engine, outcome: str) -> None:
        token = self.stop_token if outcome == "ends" else self.extra_stop_token
        await self.commit(engine, engine.version + 1, outcome=outcome)
        response = await collect(engine, "stop", SamplingParams(max_tokens=50, seed=1))
        assert (response.finish_reason, response.tokens[-1], response.tokens.count(token)) == ("stop", token, 1)
        assert len(response.labels) == len(response.logprobs) == len(response.tokens)
        onward = await collect(engine, "no-stop", SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
        assert (onward.finish_reason, len(onward.tokens)) == ("length", 50)
        await self.commit(engine, engine.version + 1)

    async def test_the_token_that_completes_a_stop_string_is_the_last_one(self, engine: Engine) -> None:
        params = SamplingParams(max_tokens=100, seed=1)
        free = await collect(engine, "free", params)
        assert free.finish_reason == "length"
        stop = self.decode(free.tokens[50:54])[1:-1]
        num_tokens = self.end_of(free.tokens, stop)
        response = await collect(engine, "ended", replace(params, stop=("never said", stop)))
        assert (response.tokens, response.finish_reason) == (free.tokens[:num_tokens], "stop")
        assert response.logprobs.tobytes() == free.logprobs[:num_tokens].tobytes()
        self.assert_labels(response)
        self.assert_idle(engine)
        # An end token is no reason to look for no text, and the other way round.
        onward = await collect(engine, "onward", replace(params, stop=(stop,), ignore_eos=True))
        assert (onward.tokens, onward.finish_reason) == (response.tokens, "stop")

    @pytest.mark.parametrize("num_new", [1, 2, 20])
    async def test_a_stop_string_that_begins_in_the_prefix_of_a_response_ends_it(
        self, engine: Engine, num_new: int
    ) -> None:
        prefix = (await collect(engine, "before", SamplingParams(max_tokens=37, seed=1))).tokens
        prompt, params = np.array([*PROMPT, *prefix], np.int32), SamplingParams(max_tokens=90, seed=2)
        free = (await collect(engine, "free", params, prompt)).tokens
        stop = self.decode(prefix[-3:])[1:] + self.decode(free[:num_new])[:-1]
        alone = await collect(engine, "alone", replace(params, stop=(stop,)), prompt)
        assert len(alone.tokens) > num_new, "the text of the prompt is none of the response"
        onward = replace(params, stop=(stop,), num_prefix_tokens=len(prefix))
        response = await collect(engine, "onward", onward, prompt)
        assert (response.tokens, response.finish_reason) == (free[:num_new], "stop")
        assert len(response.logprobs) == num_new
        self.assert_labels(response)
        self.assert_idle(engine)

    async def test_abort_ends_the_stream_with_what_it_has(self, engine: Engine) -> None:
        chunks = []
        async with aclosing(engine.generate("abort-me", PROMPT, SamplingParams(max_tokens=10_000, seed=1))) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                await engine.abort("abort-me")
        response = Response(chunks)
        assert response.finish_reason == "abort"
        assert self.stream_interval <= len(response.tokens) < 10_000
        self.assert_labels(response)
        await engine.abort("never-heard-of")

    async def test_an_abort_leaves_what_was_not_read_yet_as_it_is(self, engine: Engine) -> None:
        """As everywhere that aborts go to a stream that is busy with something else: an engine that falls asleep."""
        params = SamplingParams(max_tokens=10_000, seed=1)
        async with aclosing(engine.generate("unread", PROMPT, params)) as stream:
            chunks = [await anext(stream)]
            await asyncio.sleep(0.2)
            await engine.abort("unread")
            chunks += [chunk async for chunk in stream]
        response = Response(chunks)
        assert response.finish_reason == "abort"
        assert len(response.tokens) == len(response.logprobs) >= self.stream_interval
        assert np.all(response.logprobs <= 0)
        self.assert_labels(response)

    async def test_a_closed_stream_frees_its_request(self, engine: Engine) -> None:
        stream = engine.generate("closed-early", PROMPT, SamplingParams(max_tokens=10_000, seed=1))
        await anext(stream)
        assert engine.status().running == 1
        await stream.aclose()
        self.assert_idle(engine)
        again = await collect(engine, "closed-early", SamplingParams(max_tokens=3, seed=1))
        assert len(again.tokens) == 3

    async def test_a_running_id_and_an_overlong_prompt_are_refused(self, engine: Engine) -> None:
        async with aclosing(engine.generate("twice", PROMPT, SamplingParams(max_tokens=10_000, seed=1))) as stream:
            await anext(stream)
            with pytest.raises(ValueError, match="already running"):
                await collect(engine, "twice", SamplingParams(max_tokens=3))
        with pytest.raises(ValueError, match=str(self.max_model_len)):
            overlong = np.full(self.max_model_len + 1, 5, np.int32)
            await collect(engine, "overlong", SamplingParams(max_tokens=3), overlong)
        self.assert_idle(engine)

    async def test_a_refused_commit_keeps_the_version_and_generation(self, engine: Engine) -> None:
        before = engine.version
        running = self.begin(engine, "refused")
        await self.wait_for_tokens(engine, 1)
        await self.commit(engine, before + 1, outcome="failed")
        response = await asyncio.wait_for(running, 30)
        assert engine.version == before
        self.assert_labels(response, before)
        assert engine.status().paused_s == 0

    async def test_a_mixture_stays_paused_until_a_commit_repairs_it(self, engine: Engine) -> None:
        before = engine.version
        running = self.begin(engine, "mixture")
        await self.wait_for_tokens(engine, 1)
        await self.commit(engine, before + 1, outcome="dirty")
        await asyncio.sleep(0.05)
        settled = engine.status().generated_tokens
        await asyncio.sleep(0.05)
        assert engine.status().paused_s > 0
        assert engine.status().generated_tokens == settled
        assert not running.done()
        await self.commit(engine, before + 1)
        response = await asyncio.wait_for(running, 30)
        assert response.labels == sorted(response.labels)
        assert set(response.labels) <= {before, before + 1}
        self.assert_labels(response)

    async def test_a_commit_ends_well_when_its_caller_goes_away(self, engine: Engine) -> None:
        version = engine.version + 1
        running = self.begin(engine, "caller")
        await self.wait_for_tokens(engine, 1)
        committing = asyncio.ensure_future(self.commit(engine, version))
        await self.wait_for_pause(engine)
        committing.cancel()
        self.assert_labels(await asyncio.wait_for(running, 30))
        assert engine.version == version
        assert engine.status().paused_s == 0

    @pytest.fixture
    async def sleeper(self) -> AsyncIterator[Engine]:
        """Another engine, started with `EngineSpec.sleep_level`."""
        pytest.skip("this engine cannot sleep on this device")
        yield

    async def test_an_engine_without_a_sleep_level_refuses_to_sleep(self, engine: Engine) -> None:
        with pytest.raises(ValueError, match="sleep_level"):
            await engine.sleep()
        assert len((await self.short(engine, "awake")).tokens) == 5

    async def test_a_sleep_that_arrives_during_a_commit_waits_for_its_end(self, sleeper: Engine) -> None:
        order: list[str] = []

        async def noting(name: str, doing: Awaitable[None]) -> None:
            await asyncio.wait_for(doing, 10)
            order.append(name)

        before = sleeper.version
        running = self.begin(sleeper, "before", max_tokens=10_000)
        await self.wait_for_tokens(sleeper, 1)
        committing = asyncio.ensure_future(noting("commit", self.commit(sleeper, before + 1)))
        await self.wait_for_pause(sleeper)
        await noting("sleep", sleeper.sleep())
        await committing
        assert order == ["commit", "sleep"]
        response = await asyncio.wait_for(running, 30)
        assert response.finish_reason == "abort"
        self.assert_labels(response)
        await self.assert_asleep_until_committed(sleeper, before + 2)

    async def test_a_commit_that_arrives_while_the_engine_falls_asleep_wakes_it(self, sleeper: Engine) -> None:
        before = sleeper.version
        falling_asleep = asyncio.ensure_future(sleeper.sleep())
        await asyncio.sleep(0)
        await asyncio.wait_for(self.commit(sleeper, before + 1), 10)
        assert falling_asleep.done()
        response = await self.short(sleeper, "woken")
        self.assert_labels(response, before + 1)

    async def test_a_refused_commit_leaves_a_sleeping_engine_asleep(self, sleeper: Engine) -> None:
        before = sleeper.version
        await sleeper.sleep()
        await sleeper.sleep()
        await self.commit(sleeper, before + 1, outcome="failed")
        assert sleeper.version == before
        await self.assert_asleep_until_committed(sleeper, before + 2)

    async def test_a_sleep_goes_to_its_end_when_its_caller_goes_away(self, sleeper: Engine) -> None:
        before = sleeper.version
        falling_asleep = asyncio.ensure_future(sleeper.sleep())
        await asyncio.sleep(0)
        falling_asleep.cancel()
        await self.assert_asleep_until_committed(sleeper, before + 1)

    async def assert_asleep_until_committed(self, engine: Engine, version: int) -> None:
        waiting = self.begin(engine, f"waits-for-{version}", max_tokens=5)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert engine.status().unstarted == 1
        await asyncio.wait_for(self.commit(engine, version), 10)
        response = await asyncio.wait_for(waiting, 30)
        self.assert_labels(response, version)
        assert engine.status().paused_s == 0

    async def test_zz_a_dead_engine_tells_everyone(self, engine: Engine) -> None:
        """Last on purpose: the engine may be shared by the whole module."""
        running = (self.begin(engine, f"dying-{i}", max_tokens=10_000) for i in range(3))
        ends = asyncio.gather(*running, return_exceptions=True)
        await self.wait_for_tokens(engine, 1)
        await self.kill(engine)
        assert [type(end) for end in await asyncio.wait_for(ends, 30)] == [EngineDead] * 3
        late = (
            self.begin(engine, "late"),
            engine.call_workers("x", timeout_s=1.0),
            engine.commit(99, "x", timeout_s=1.0),
        )
        for call in late:
            with pytest.raises(EngineDead):
                await call
        assert engine.status().is_dead
