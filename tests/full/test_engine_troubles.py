"""Real vLLM engines that do not start, or whose processes stop: what is reported."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from rollout.engine.vllm_engine import VllmEngine
from rollout.types import SamplingParams
from tests.fakes.own_tokenizer import END_ID, save_own_tokenizer
from tests.fakes.process_life import is_running, wait_until
from tests.fakes.tiny_vllm import STOP, make_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.engine.interface import EngineSpec

pytestmark = [pytest.mark.timing, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import asyncio, json, pickle, sys
from rollout.engine.vllm_engine import VllmEngine

async def main():
    engine = VllmEngine(pickle.loads(bytes.fromhex(sys.argv[1])))
    await engine.start()
    print(json.dumps(await engine.call_workers("te_pid", timeout_s=60.0)), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""
"""Starts an engine, prints the ids of its workers, and waits to be killed."""


def spec(model_dir: Path, **changes: object) -> EngineSpec:
    return make_spec(model_dir, **{"max_num_seqs": 8, "stream_interval": 4, **changes})


async def test_an_engine_that_does_not_start_reports_why(vllm_model: Path) -> None:
    """vLLM itself only reports: engine core initialization failed, see root cause above. The cause is looked up in what
    was printed, which goes to a file in an actor, and here by way of pytest."""
    with pytest.raises(RuntimeError, match="engine did not start: ValueError: To serve at least one request") as caught:
        await VllmEngine(spec(vllm_model, kv_cache_gib=0.001)).start()
    assert "max seq len (4096)" in str(caught.value)


async def test_an_engine_finds_end_token_and_texts_with_a_tokenizer_that_brings_its_own_code(
    vllm_model: Path, tmp_path: Path
) -> None:
    engine = VllmEngine(
        spec(vllm_model, tokenizer=str(save_own_tokenizer(tmp_path)), stop_token_ids=(), trust_remote_code=True)
    )
    try:
        await engine.start()
        assert engine._stop_token_ids == [END_ID, STOP]
    finally:
        await engine.close()


@pytest.mark.parametrize("forks", [True, False])
async def test_an_engine_is_forked_or_spawned_as_its_device_allows(vllm_model: Path, forks: bool) -> None:
    engine = VllmEngine(spec(vllm_model, forks=forks))
    await engine.start()
    try:
        (pid,) = await engine.call_workers("te_pid", timeout_s=60.0)
        core = psutil.Process(pid)
        assert (core.ppid() == os.getpid()) is not forks
        assert "EngineCore" in " ".join(core.cmdline()), "people look for it in ps"
        core.suspend()  # it does not heed a polite signal, so it is killed
    finally:
        await engine.close()
    assert not psutil.pid_exists(pid), "not even a zombie stays"


@pytest.fixture
def owner(vllm_model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts an engine of two workers."""
    (tmp_path / "owner.py").write_text(OWNER)
    process = subprocess.Popen(
        [
            sys.executable,
            str(tmp_path / "owner.py"),
            pickle.dumps(spec(vllm_model, tensor_parallel_size=2)).hex(),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    yield process
    process.kill()
    process.communicate()


def test_a_worker_that_hangs_does_not_outlive_the_kill_of_its_engine(owner: subprocess.Popen[str]) -> None:
    """It stands for one in a call to its device that never returns, which holds the memory that the next one needs."""
    assert owner.stdout is not None
    line = next((line for line in owner.stdout if line.startswith("[")), "")
    assert line, f"the engine did not start: exit code {owner.wait()}"
    workers = [psutil.Process(pid) for pid in json.loads(line)]
    engine = workers[0].parent()
    assert engine is not None
    workers[1].suspend()
    owner.kill()
    try:
        everyone = (engine, *workers)
        wait_until(lambda: not any(map(is_running, everyone)), within_s=30.0, what=f"one of {everyone} runs on")
    finally:
        for one in (engine, *workers):
            if is_running(one):
                one.kill()


async def test_an_engine_whose_process_is_stopped_reports_that_it_makes_no_progress(vllm_model: Path) -> None:
    engine = VllmEngine(spec(vllm_model))
    await engine.start()
    try:
        (pid,) = await engine.call_workers("te_pid", timeout_s=60.0)

        async def consume() -> None:
            params = SamplingParams(max_tokens=4000, temperature=1.0, seed=0, ignore_eos=True)
            for number in range(10**6):
                async for _ in engine.generate(f"r{number}", np.array([1, 2], np.int32), params):
                    pass

        running = asyncio.create_task(consume())
        async with asyncio.timeout(60.0):
            while not engine.status().generated_tokens:
                await asyncio.sleep(0.05)
        core = psutil.Process(pid)
        core.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(3.0)
            seen = engine.status().generated_tokens
            await asyncio.sleep(2.0)
            assert engine.status().generated_tokens == seen
            assert engine.load().still_s >= 2.0, "its event loop responds all the same"
        finally:
            core.send_signal(signal.SIGCONT)
        async with asyncio.timeout(60.0):
            while engine.status().generated_tokens == seen:
                await asyncio.sleep(0.05)
        assert engine.load().still_s < 2.0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert engine.load().still_s == 0.0, "nothing is asked of it"
        assert pid != os.getpid()
    finally:
        await engine.close()
