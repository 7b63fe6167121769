"""The real vLLM engine on CPU: the engine contract, log-probs against Hugging Face, and reproducibility."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import Qwen2ForCausalLM

from rollout.engine.vllm_config import vllm_sampling
from rollout.engine.vllm_engine import VllmEngine
from rollout.errors import EngineDead
from rollout.types import SamplingParams
from tests.contract.engine.suite import EngineContract, Response, collect
from tests.fakes.tiny_vllm import EXTRA_STOP, STOP, make_spec, random_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Container, Sequence
    from pathlib import Path

    from rollout.engine.interface import Engine

pytestmark = pytest.mark.timing

ENDING: dict[int, int] = {}
"""Version -> the only token that it samples."""
ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm_model: Path) -> AsyncIterator[Engine]:
    ENDING.clear()
    engine = VllmEngine(make_spec(vllm_model))
    assert list(await engine.start()) == ["imports", "processes and model", "warm-up"]
    assert engine._stop_token_ids == [STOP, EXTRA_STOP]
    (pid,) = await engine.call_workers("te_pid", timeout_s=10.0)
    process = psutil.Process(pid)
    yield engine
    await engine.close()
    await engine.close()
    process.wait(30.0)  # one that vLLM had to kill is on its way out


@ONE_LOOP
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    engine: Engine, vllm_model: Path, temperature: float
) -> None:
    """Reference: Hugging Face forward in float32, log-softmax after temperature."""
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=i, ignore_eos=True) for i in range(8)]
    responses = await asyncio.gather(*[collect(engine, f"hf-{i}", p, random_prompt(i)) for i, p in enumerate(params)])
    model = Qwen2ForCausalLM.from_pretrained(vllm_model, dtype=torch.float32)
    for i, response in enumerate(responses):
        prompt = random_prompt(i)
        ids = torch.tensor([[*prompt.tolist(), *response.tokens]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / (temperature or 1.0), -1)
        picked = expected.gather(1, torch.tensor(response.tokens)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(response.logprobs, picked, atol=1e-3)
        if temperature == 0.0:
            assert response.tokens == logits.argmax(-1).tolist()
    if temperature:
        assert len({t for a in responses for t in a.tokens}) > 20


@ONE_LOOP
async def test_a_seeded_request_repeats_bit_for_bit_under_any_load(engine: Engine) -> None:
    """Same seed alone, and among 40 others that come and go: same tokens, and log-probs equal in every bit."""

    async def ask(name: str) -> Response:
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=7, ignore_eos=True)
        return await collect(engine, name, params, random_prompt(7))

    async def load(i: int) -> None:
        params = SamplingParams(max_tokens=5 + 7 * (i % 9), temperature=float(i % 3), seed=100 + i, ignore_eos=True)
        await asyncio.sleep(0.002 * i)
        await collect(engine, f"load-{i}", params, random_prompt(100 + i, 3 + i))

    alone = await ask("alone")
    for repeat in range(3):
        others = [asyncio.ensure_future(load(i)) for i in range(40)]
        await asyncio.sleep(0.02)
        busy = await ask(f"busy-{repeat}")
        await asyncio.gather(*others)
        assert busy.tokens == alone.tokens
        assert busy.logprobs.tobytes() == alone.logprobs.tobytes()


@ONE_LOOP
async def test_an_error_in_a_worker_reaches_the_caller_and_leaves_the_engine_alive(engine: Engine) -> None:
    with pytest.raises(Exception, match="raised in the worker"):
        await engine.call_workers("te_raise", timeout_s=10.0)
    assert await engine.call_workers("te_pid", timeout_s=10.0)
    assert engine.status().paused_s == 0


@ONE_LOOP
async def test_an_engine_that_is_not_asked_to_count_says_only_how_many_requests_it_has(engine: Engine) -> None:
    params = SamplingParams(max_tokens=1000, seed=0, ignore_eos=True)
    task = asyncio.ensure_future(collect(engine, "counted", params, random_prompt(0)))
    async with asyncio.timeout(60):
        while not engine.load().running:
            await asyncio.sleep(0.005)
    load = engine.load()
    assert (load.running, load.waiting, load.kv_usage_frac, load.num_preemptions) == (1, 0, None, None)
    assert len((await task).tokens) == 1000


@ONE_LOOP
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (np.array([3, 128], np.int32), "token id 128, must be >= 0 and < 128"),
        (np.array([3, -1], np.int32), "token id -1"),
        (np.array([3.0, 4.0]), "integers in one row, got float64"),
        (np.array([[3, 4]], np.int32), "integers in one row"),
    ],
    ids=["above", "below", "floats", "two rows"],
)
async def test_a_prompt_that_the_model_cannot_take_is_refused_and_the_engine_goes_on(
    engine: Engine, bad: np.ndarray, words: str
) -> None:
    """vLLM ends at the first two, and stops to take requests at the others."""
    params = SamplingParams(max_tokens=3, seed=0, ignore_eos=True)
    async with asyncio.timeout(60):
        with pytest.raises(ValueError, match=words):
            await collect(engine, "bad", params, bad)
        good = await collect(engine, "bad", params, np.array([3, 127], np.int32))
    assert len(good.tokens) == 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(vllm_model: Path) -> AsyncIterator[VllmEngine]:
    """One request at a time: the others wait inside vLLM. Its last test ends it."""
    engine = VllmEngine(make_spec(vllm_model, max_num_seqs=1))
    await engine.start()
    yield engine
    await engine.close()


async def one_runs_and_one_waits(engine: VllmEngine, round_: int, prompt: np.ndarray) -> list[asyncio.Task[Response]]:
    """The responses of both. The first is long enough for whatever the test does in its middle."""
    lengths = {f"runs-{round_}": 2000, f"waits-{round_}": 4}
    tasks = []
    for name, length in lengths.items():
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        tasks.append(asyncio.ensure_future(collect(engine, name, params, prompt)))
        async with asyncio.timeout(60):
            while (s := engine.status()).running == s.unstarted or len(engine._requests.running) < len(tasks):
                await asyncio.sleep(0.001)
    status = engine.status()
    assert (status.running, status.unstarted) == (2, 1)
    return tasks


@pytest.mark.full
@ONE_LOOP
async def test_a_request_that_waits_inside_during_a_commit_reads_no_cache_of_older_weights(narrow: VllmEngine) -> None:
    """Its first tokens are those of a request that comes after the commit, bit for bit, and not those of the old cache.
    What ran at the commit has the prompt that both share, in the cache of the old weights."""
    prompt = random_prompt(3, 600)  # more than a block of the cache
    await narrow.commit(1, "te_noise", 1, timeout_s=60.0)
    for policy in ("keep", "recompute"):
        narrow._spec = replace(narrow._spec, in_flight=policy)
        version = narrow.version + 1
        runs, waits = await one_runs_and_one_waits(narrow, version, prompt)
        await narrow.commit(version, "te_noise", version, timeout_s=60.0)
        assert not runs.done()
        response = await asyncio.wait_for(waits, 60)
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        fresh = await collect(narrow, "fresh", params, prompt)
        assert response.tokens == fresh.tokens
        assert response.logprobs.tobytes() == fresh.logprobs.tobytes()
        assert response.labels == fresh.labels == [version] * 4
        assert set((await runs).labels) == {version - 1, version}
    narrow._spec = replace(narrow._spec, in_flight="abort")
    responses = asyncio.gather(*await one_runs_and_one_waits(narrow, 0, prompt))
    await narrow.commit(narrow.version + 1, "te_noise", 0, timeout_s=60.0)
    runs_until, waits_until = await asyncio.wait_for(responses, 60)
    assert runs_until.finish_reason == waits_until.finish_reason == "abort"
    assert runs_until.tokens and not waits_until.tokens


@pytest.mark.full
@ONE_LOOP
async def test_an_error_in_the_output_handler_of_vllm_is_the_death_of_the_engine(
    narrow: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("no such token")

    assert narrow._llm is not None
    (pid,) = await narrow.call_workers("te_pid", timeout_s=10.0)
    tasks = await one_runs_and_one_waits(narrow, 0, random_prompt(4))
    monkeypatch.setattr(narrow._llm.output_processor, "process_outputs", fail)
    for task in tasks:
        with pytest.raises(EngineDead, match="IndexError: no such token"):
            await asyncio.wait_for(task, 60)
    with pytest.raises(EngineDead, match="IndexError: no such token"):
        await collect(narrow, "later", SamplingParams(max_tokens=3))
    async with asyncio.timeout(60):
        while psutil.pid_exists(pid):
            await asyncio.sleep(0.05)


def test_no_text_is_made_where_no_stop_string_is_looked_for() -> None:
    assert not vllm_sampling(SamplingParams(max_tokens=1), [STOP]).detokenize
    assert vllm_sampling(SamplingParams(max_tokens=1, stop=("x",)), [STOP]).detokenize


@ONE_LOOP
class TestVllmEngine(EngineContract):
    stream_interval = 16
    max_model_len = 4096
    stop_token = STOP
    extra_stop_token = EXTRA_STOP
    long_tokens = 600
    num_commits = 15

    @pytest_asyncio.fixture(loop_scope="module", autouse=True)
    async def letters_first(self, engine: Engine) -> None:
        """The random weights of the checkpoint have no letters."""
        if engine.version == 0:
            await self.commit(engine, 1)

    def letters(self, version: int) -> Container[int]:
        low = 20 + 30 * (version % 2)
        return {ENDING[version]} if version in ENDING else range(low, low + 30)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token:02x}" for token in tokens)

    async def commit(self, engine: Engine, version: int, *, outcome: str = "ok") -> None:
        low = 20 + 30 * (version % 2)
        high, reply = low + 30, outcome
        if outcome in ("ends", "stops"):
            low = ENDING[version] = STOP if outcome == "ends" else EXTRA_STOP
            high, reply = low + 1, "ok"
        result = await engine.commit(version, "te_commit", low, high, reply, timeout_s=20.0)
        assert len(result.results) == 1
        assert 0 < result.pause_s < 20

    async def kill(self, engine: Engine) -> None:
        with pytest.raises(TimeoutError, match="te_sleep"):
            await engine.call_workers("te_sleep", 30.0, timeout_s=0.5)
