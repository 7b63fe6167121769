"""What the engine is started with, and which processes are then its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_process import _known, engine_config, engine_pids, shut_down

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENGINE = """
import subprocess, sys, time
workers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
print(*(worker.pid for worker in workers), flush=True)
time.sleep(60)
"""


class FakeLlm:
    """An `AsyncLLM` as far as its processes go; `shutdown` kills the engine's and none of its workers."""

    def __init__(self) -> None:
        self._engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True)
        assert self._engine.stdout is not None
        self.pid = self._engine.pid
        self.workers = [psutil.Process(int(pid)) for pid in self._engine.stdout.readline().split()]
        process = SimpleNamespace(pid=self.pid, join=self._engine.wait)
        self.engine_core = SimpleNamespace(
            resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
        )

    def shutdown(self) -> None:
        self._engine.kill()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self._engine.kill()
        self._engine.communicate()


@pytest.fixture
def llm() -> Iterator[Any]:
    fake = FakeLlm()
    yield fake
    fake.close()


def test_the_processes_of_an_engine_are_its_own_and_those_of_its_workers(llm: Any) -> None:
    first, *others = engine_pids(llm)
    assert first == llm.pid
    assert sorted(others) == sorted(worker.pid for worker in llm.workers)


def test_workers_that_outlive_the_end_of_their_engine_are_told(
    llm: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.engine.vllm_process._END_TIMEOUT_S", 0.3)
    left = engine_pids(llm)[1:]
    shut_down(llm)
    assert f"engine processes {left} still run" in caplog.text


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration is all that is read of the model."""
    path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "float32",
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM sets variables of this process when it makes a configuration."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def step_tokens(model_dir: Path, **changes: Any) -> int:
    spec = EngineSpec(model=str(model_dir), dtype="float32", enforce_eager=True, kv_cache_gib=0.125, **changes)
    config = engine_config(spec).scheduler_config
    assert config.max_num_seqs == spec.max_num_seqs
    return config.max_num_batched_tokens


@pytest.mark.usefixtures("environment")
def test_a_step_holds_a_token_of_every_sequence_or_what_the_user_says(model_dir: Path) -> None:
    assert step_tokens(model_dir) == 2048
    assert step_tokens(model_dir, max_num_seqs=3000) == 3000
    assert step_tokens(model_dir, engine_args={"max_num_batched_tokens": 512}) == 512


def test_end_tokens_that_the_model_cannot_sample_are_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    assert _known({7, 0, 127, 128, -1}, 128) == [0, 7, 127]
    assert "[-1, 128] are not in the model's vocabulary of 128" in caplog.text
    caplog.clear()
    assert _known({7, 0}, 128) == [0, 7]
    assert caplog.text == ""
