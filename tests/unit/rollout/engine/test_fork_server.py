"""The fork server of engine processes, in an interpreter of its own: a process has one server for its whole life."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from weight_sync import vllm_compat

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
import json, os, sys, time
from rollout.engine import vllm_process as fork_server

def tell(path):
    import torch
    found = {"pid": os.getpid(), "server": os.getppid(), "changed": os.environ.get("CHANGED"),
             "removed": "REMOVED" in os.environ, "was_there": "wave" in was_there, "threads": torch.get_num_threads()}
    with open(path + ".part", "w") as file:
        json.dump(found, file)
    os.rename(path + ".part", path)
    time.sleep(60)

was_there = set(sys.modules)  # in the new process this line runs before anything else of this file is needed

if __name__ == "__main__":
    fork_server.PRELOAD = ("wave", "torch")
    fork_server.begin_imports()
    fork_server.begin_imports()
    os.environ["CHANGED"], os.environ["OMP_NUM_THREADS"] = "after the start", "3"
    del os.environ["REMOVED"]
    process = fork_server.EngineContext().Process(target=tell, args=(sys.argv[1],))
    process.start()
    process.join()
"""


def start(tmp_path: Path) -> subprocess.Popen[bytes]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folders = {"TMPDIR": tmp_path / "tmp", "VLLM_RPC_BASE_PATH": tmp_path / "sockets"}
    for folder in folders.values():
        folder.mkdir()
    return subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "told")],
        env={
            **os.environ,
            **{k: str(v) for k, v in folders.items()},
            "PYTHONPATH": str(ROOT),
            "REMOVED": "1",
            "OMP_NUM_THREADS": "1",
        },
    )


def told(tmp_path: Path) -> Mapping[str, Any]:
    path = tmp_path / "told"
    wait_until(path.exists, "the forked process told nothing")
    return json.loads(path.read_text())


def wait_until(is_so: Any, complaint: str) -> None:
    give_up = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up, complaint
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_forked_process_has_the_imports_of_the_server_and_the_environment_of_its_parent(tmp_path: Path) -> None:
    owner = start(tmp_path)
    try:
        found = told(tmp_path)
        assert found["server"] != owner.pid
        assert found["was_there"], "the server had not imported it before the fork"
        assert found["changed"] == "after the start"
        assert not found["removed"]
        assert found["threads"] == 3
    finally:
        owner.kill()
    owner.wait()
    wait_until(lambda: is_gone(found["server"]), "the server outlived its owner")
    wait_until(lambda: is_gone(found["pid"]), "what the server had forked outlived it")
    assert list((tmp_path / "tmp").iterdir()) == [], "what a killed process leaves lies in the folder of the run"
    assert len(list((tmp_path / "sockets").iterdir())) == 1


def test_vllm_is_given_the_context_once_and_its_own_function_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def own() -> str:
        asked.append("vllm")
        return "spawn"

    utils = SimpleNamespace(get_mp_context=own)
    monkeypatch.setattr(vllm_compat, "import_module", lambda _name: utils)
    vllm_compat.start_engines_in("first")
    vllm_compat.start_engines_in("second")
    assert utils.get_mp_context() == "second"
    assert asked == ["vllm"]
    vllm_compat.start_engines_in(None)
    assert utils.get_mp_context() == "spawn"
