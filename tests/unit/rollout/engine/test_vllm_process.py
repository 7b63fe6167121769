"""The processes of an engine: how they are found and ended."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from rollout.engine.vllm_process import engine_pids, shut_down
from weight_sync.vllm import compat as vllm_compat

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
        manager = SimpleNamespace(processes=[SimpleNamespace(pid=self.pid, join=self._join)])
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))

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


def test_workers_that_outlive_the_end_of_their_engine_are_reported(
    llm: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.engine.vllm_process._END_TIMEOUT_S", 0.3)
    first, *workers = engine_pids(llm)
    assert (first, sorted(workers)) == (llm.pid, sorted(worker.pid for worker in llm.workers))
    shut_down(llm)
    assert f"engine processes {workers} still run" in caplog.text


def test_vllm_gets_the_context_once_and_its_own_function_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def own() -> str:
        calls.append("vllm")
        return "spawn"

    utils = SimpleNamespace(get_mp_context=own)
    monkeypatch.setattr(vllm_compat, "import_module", lambda _name: utils)
    vllm_compat.start_engines_in("first")
    vllm_compat.start_engines_in("second")
    assert (utils.get_mp_context(), calls) == ("second", ["vllm"])
    vllm_compat.start_engines_in(None)
    assert utils.get_mp_context() == "spawn"
