"""The processes of an engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from rollout.engine.vllm_process import engine_pids, shut_down

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        process = SimpleNamespace(pid=self.pid, join=self._join)
        self.engine_core = SimpleNamespace(
            resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
        )

    def _join(self, timeout: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._engine.wait(timeout)

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
