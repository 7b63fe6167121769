"""The processes of an engine: how they are forked, found and ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from rollout.engine.vllm_process import engine_pids, shut_down
from tests.fakes.process_life import is_running, wait_until
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


ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
import json, os, sys, time
from rollout.engine import vllm_process

def report(path):
    import torch
    found = {"pid": os.getpid(), "server": os.getppid(), "changed": os.environ.get("CHANGED"),
             "removed": "REMOVED" in os.environ, "was_there": "wave" in was_there, "threads": torch.get_num_threads()}
    with open(path + ".part", "w") as file:
        json.dump(found, file)
    os.rename(path + ".part", path)
    time.sleep(600)

was_there = set(sys.modules)  # in the new process this line runs before anything else of this file is needed

if __name__ == "__main__":
    vllm_process.PRELOAD = ("wave", "torch")
    vllm_process.begin_imports()
    vllm_process.begin_imports()
    os.environ["CHANGED"], os.environ["OMP_NUM_THREADS"] = "after the start", "3"
    del os.environ["REMOVED"]
    process = vllm_process.EngineContext().Process(target=report, args=(sys.argv[1],))
    process.start()
    process.join()
"""


def test_a_forked_process_has_the_imports_of_the_server_and_the_environment_of_its_parent(tmp_path: Path) -> None:
    """In an interpreter of its own: a process has one fork server for its whole life."""
    program, report = tmp_path / "program.py", tmp_path / "report"
    program.write_text(PROGRAM)
    folders = {"TMPDIR": tmp_path / "tmp", "VLLM_RPC_BASE_PATH": tmp_path / "sockets"}
    for folder in folders.values():
        folder.mkdir()
    changes = {"PYTHONPATH": str(ROOT), "REMOVED": "1", "OMP_NUM_THREADS": "1"}
    changes |= {name: str(folder) for name, folder in folders.items()}
    owner = subprocess.Popen([sys.executable, str(program), str(report)], env={**os.environ, **changes})
    try:
        wait_until(report.exists, within_s=60.0, what="the forked process reported nothing")
        found = json.loads(report.read_text())
        server, forked = psutil.Process(found["server"]), psutil.Process(found["pid"])
        assert server.pid != owner.pid
        assert found["was_there"], "the server had not imported it before the fork"
        assert (found["changed"], found["removed"], found["threads"]) == ("after the start", False, 3)
    finally:
        owner.kill()
    owner.wait()
    left = (server, forked)
    wait_until(lambda: not any(map(is_running, left)), within_s=60.0, what="a child outlived the owner of its server")
    assert list((tmp_path / "tmp").iterdir()) == [], "what a killed process leaves is in the folder of the run"
    assert len(list((tmp_path / "sockets").iterdir())) == 1


RUN = """
import json, os, sys, tempfile, time
from pathlib import Path
from rollout.engine import vllm_process

def report(path):
    print("printed by the engine", flush=True)
    found = {"pid": os.getpid(), "server": os.getppid(), "was_there": "wave" in was_there, "value": os.environ["VALUE"],
             "session": os.getsid(0), "temporary": tempfile.gettempdir(), "niceness": os.nice(0)}
    with open(path + ".part", "w") as file:
        json.dump(found, file)
    os.rename(path + ".part", path)
    time.sleep(600)

was_there = set(sys.modules)

if __name__ == "__main__":
    if sys.argv[1] == "actor":
        os.nice(5)
        vllm_process.begin_imports()
        vllm_process.begin_imports()
        process = vllm_process.EngineContext().Process(target=report, args=(sys.argv[2],))
        process.start()
    else:
        vllm_process.PRELOAD = ("wave", "preloaded")
        folder = {"TMPDIR": sys.argv[2], "VALUE": "of the server"}
        server = vllm_process.RunServer(Path(sys.argv[2]), {**os.environ, **folder})
        print(json.dumps(server.address), flush=True)
        sys.stdin.readline()
        server.close()
        print("closed", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """`run(*arguments, **environment)` -> a process of RUN with a file for what it prints."""
    program, started = tmp_path / "run.py", list[subprocess.Popen[str]]()
    program.write_text(RUN)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "preloaded.py").write_text("import tempfile\nprint('noise', tempfile.gettempdir())\n")

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(program), *arguments],
            env={**os.environ, "PYTHONPATH": f"{tmp_path / 'modules'}:{ROOT}", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_the_server_of_a_run_forks_the_engines_of_all_its_actors_until_the_run_ends(tmp_path: Path, run: Any) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    driver = run("driver", str(scratch))
    address = json.loads(driver.stdout.readline())

    def engine_of_new_actor(name: str, **environment: str) -> tuple[Any, dict[str, Any]]:
        report = tmp_path / name
        actor = run("actor", str(report), VALUE=name, TANDEM_ENGINE_SERVER=address, **environment)
        wait_until(report.exists, within_s=60.0, what="the forked process reported nothing")
        found = json.loads(report.read_text())
        assert (found["was_there"], found["value"], found["temporary"]) == (True, name, str(scratch))
        assert found["niceness"] == min(os.nice(0) + 5, 19)
        assert actor.stdout.readline() == "printed by the engine\n", "an error is looked for in what its actor printed"
        return actor, found

    (killed, first), (_, second) = engine_of_new_actor("first"), engine_of_new_actor("second")
    server = psutil.Process(first["server"])
    assert server.pid == second["server"] == int(address.partition(":")[0])
    assert server.pid == first["session"], "Ctrl-C in a terminal does not reach it"
    killed.kill()
    left = psutil.Process(first["pid"])
    wait_until(lambda: not is_running(left), within_s=60.0, what="an engine outlived its actor")
    assert (scratch / "engines.log").read_text() == f"noise {scratch}\n"
    assert is_running(psutil.Process(second["pid"])) and is_running(server)
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "closed\n"
    assert not is_running(server)
    left = psutil.Process(second["pid"])
    wait_until(lambda: not is_running(left), within_s=60.0, what="an engine outlived the server")


def test_a_killed_driver_takes_the_server_along_and_an_actor_without_one_has_its_own(tmp_path: Path, run: Any) -> None:
    driver = run("driver", str(tmp_path))
    address = json.loads(driver.stdout.readline())
    server = psutil.Process(int(address.partition(":")[0]))
    driver.kill()
    wait_until(lambda: not is_running(server), within_s=60.0, what="the server outlived its driver")
    report = tmp_path / "report"
    actor = run("actor", str(report), VALUE="mine", TANDEM_ENGINE_SERVER=address)
    wait_until(report.exists, within_s=60.0, what="the forked process reported nothing")
    own = psutil.Process(json.loads(report.read_text())["server"])
    assert own.ppid() == actor.pid


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
