"""What is forked from the server of a run, and how it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from rollout.fork_server import ENGINE_SERVER, LEARNER_SERVER, python
from tests.fakes.process_life import is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, os, sys, time
from rollout import fork_server

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
    fork_server.OF_ENGINES = ("wave", "torch")
    fork_server.begin_imports()
    fork_server.begin_imports()
    os.environ["CHANGED"], os.environ["OMP_NUM_THREADS"] = "after the start", "3"
    del os.environ["REMOVED"]
    process = fork_server.ForkContext().Process(target=report, args=(sys.argv[1],))
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
from rollout import fork_server

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
        fork_server.begin_imports()
        fork_server.begin_imports()
        process = fork_server.ForkContext().Process(target=report, args=(sys.argv[2],))
        process.start()
    else:
        environ = {**os.environ, "TMPDIR": sys.argv[2], "VALUE": "of the server"}
        fork_server.OF_ENGINES = ("wave",)
        server = fork_server.RunServers(Path(sys.argv[2]), environ, preload=("preloaded", "numpy.random"))
        server.begin_engines({"VALUE": "of engines"})
        print(json.dumps(server.addresses), flush=True)
        sys.stdin.readline()
        server.close()
        print("closed", flush=True)
    time.sleep(60)
"""


SLOWLY = """
import os, pathlib, time
if os.environ.get("SLOW"):
    pathlib.Path(os.environ["TMPDIR"], "imports").touch()
    time.sleep(600)
"""


@pytest.fixture
def launch() -> Iterator[Any]:
    """`launch(command, **how)` -> a process that is killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(command: list[str], **how: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, **how)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run(tmp_path: Path, launch: Any) -> Any:
    """`run(*arguments, **environment)` -> a process of RUN with a file for what it prints."""
    (program := tmp_path / "run.py").write_text(RUN)
    (modules := tmp_path / "modules").mkdir()
    noise = "import tempfile\nprint('noise', tempfile.gettempdir())\n"
    (modules / "preloaded.py").write_text(noise + SLOWLY)

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONPATH": f"{modules}:{ROOT}", **environment}
        return launch([sys.executable, str(program), *arguments], env=environ, stdout=subprocess.PIPE)

    return begin


def test_the_server_of_a_run_forks_the_engines_of_all_its_actors_until_the_run_ends(tmp_path: Path, run: Any) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    driver = run("driver", str(scratch))
    address = json.loads(driver.stdout.readline())[ENGINE_SERVER]

    def engine_of_new_actor(name: str, **environment: str) -> tuple[Any, dict[str, Any]]:
        report = tmp_path / name
        actor = run("actor", str(report), VALUE=name, TMPDIR=str(scratch), _TANDEM_ENGINE_SERVER=address, **environment)
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
    assert (scratch / "fork_server.log").read_text() == f"noise {scratch}\n"
    assert is_running(psutil.Process(second["pid"])) and is_running(server)
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "closed\n"
    assert not is_running(server)
    left = psutil.Process(second["pid"])
    wait_until(lambda: not is_running(left), within_s=60.0, what="an engine outlived the server")


def test_a_killed_driver_takes_the_server_along_and_an_actor_without_one_has_its_own(tmp_path: Path, run: Any) -> None:
    driver = run("driver", str(tmp_path))
    address = json.loads(driver.stdout.readline())[ENGINE_SERVER]
    server = psutil.Process(int(address.partition(":")[0]))
    driver.kill()
    wait_until(lambda: not is_running(server), within_s=60.0, what="the server outlived its driver")
    report = tmp_path / "report"
    actor = run("actor", str(report), VALUE="mine", _TANDEM_ENGINE_SERVER=address)
    wait_until(report.exists, within_s=60.0, what="the forked process reported nothing")
    own = psutil.Process(json.loads(report.read_text())["server"])
    assert own.ppid() == actor.pid


SCRIPT = """
import gc, json, multiprocessing, numpy, os, pathlib, resource, sys, tempfile, time
pathlib.Path(sys.argv[1]).write_text(json.dumps({
    "method": multiprocessing.get_start_method(), "process": multiprocessing.current_process().name,
    "temporary": tempfile.gettempdir(), "draw": numpy.random.rand(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "oom": int(open("/proc/self/oom_score_adj").read()),
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(), "arguments": sys.argv, "name": __name__,
    "was_there": [name for name in ("preloaded", "wave") if name in sys.modules], "value": os.environ["VALUE"],
    "first": sys.path[0], "collects": gc.isenabled(), "frozen": gc.get_freeze_count()}))
time.sleep(600) if sys.argv[2] == "wait" else sys.exit(int(sys.argv[2]))
"""


OOM_SCORE = Path("/proc/self/oom_score_adj")
OOM = max(700, int(OOM_SCORE.read_text()))
LIMITS = f"ulimit -Sn 500 && echo {OOM} > {OOM_SCORE}"


@pytest.fixture
def script(tmp_path: Path, launch: Any) -> Any:
    """`script(report, how it ends, **environment)` -> a process that runs SCRIPT as Ray runs that of an actor."""
    (folder := tmp_path / "scripts").mkdir()
    (path := folder / "worker.py").write_text(SCRIPT)

    def begin(report: Path, end: str, variable: str = ENGINE_SERVER, **environment: str) -> subprocess.Popen[str]:
        command = ["bash", "-c", f"{LIMITS} && exec {python(variable)} {path} {report} {end}"]
        environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | environment
        return launch(command, env=environ, cwd=folder, start_new_session=True)

    return begin


@pytest.mark.parametrize(
    ("variable", "imported"), [(ENGINE_SERVER, ["preloaded", "wave"]), (LEARNER_SERVER, ["preloaded"])]
)
def test_a_script_runs_in_a_fork_of_its_server_and_both_end_alike(
    variable: str, imported: list[str], tmp_path: Path, run: Any, script: Any
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    addresses = json.loads(run("driver", str(scratch)).stdout.readline())
    server = int(addresses[ENGINE_SERVER].partition(":")[0])
    report = tmp_path / "report"
    (temporary := tmp_path / "temporary").mkdir()
    assert script(report, "7", variable, VALUE="mine", TMPDIR=str(temporary), **addresses).wait(60) == 7
    found = json.loads(report.read_text())
    assert (found["was_there"], found["value"], found["name"]) == (imported, "mine", "__main__")
    assert (found["parent"] == server) == (variable == ENGINE_SERVER), "learners are forked before vLLM is imported"
    method = multiprocessing.get_context().get_start_method()
    assert (found["files"], found["oom"], found["method"], found["temporary"]) == (500, OOM, method, str(temporary))
    assert found["process"] == "MainProcess"
    assert found["collects"] and found["frozen"], "the collector runs, but not over what the server has imported"
    assert found["group"] == found["pid"], "Ray kills the group of an actor that ends"
    path = tmp_path / "scripts" / "worker.py"
    assert (found["arguments"], found["first"]) == ([str(path), str(report), "7"], str(path.parent))

    draws = {found["draw"]}
    for name in ("waits", "is_killed"):
        one = script(tmp_path / name, "wait", variable, VALUE="", **addresses)
        wait_until(
            lambda at=tmp_path / name: at.exists() and at.stat().st_size > 0, within_s=60.0, what="no script ran"
        )
        found = json.loads((tmp_path / name).read_text())
        draws.add(found["draw"])
        forked = psutil.Process(found["pid"])
        if name == "waits":
            one.kill()
            wait_until(lambda at=forked: not is_running(at), within_s=60.0, what="a fork outlived who waits for it")
        else:
            forked.kill()
            assert one.wait(60) == 128 + 9
    assert len(draws) == 3, "forks must not draw the same numbers"


def test_a_server_ends_with_a_driver_that_is_killed_while_it_imports(tmp_path: Path, run: Any) -> None:
    driver = run("driver", str(tmp_path), SLOW="1")
    server = psutil.Process(int(json.loads(driver.stdout.readline())[ENGINE_SERVER].partition(":")[0]))
    wait_until((tmp_path / "imports").exists, within_s=60.0, what="the server does not import")
    driver.kill()
    wait_until(lambda: not is_running(server), within_s=60.0, what="the server imports for nobody")


@pytest.mark.parametrize("why", ["there is none", "it was killed", "it alone was killed", "it was for another job"])
def test_without_a_server_a_script_has_an_interpreter_of_its_own(
    why: str, tmp_path: Path, run: Any, script: Any
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    environment = {"VALUE": "mine"}
    if why != "there is none":
        driver = run("driver", str(scratch))
        environment |= json.loads(driver.stdout.readline())
        if why == "it alone was killed":
            parent = psutil.Process(int(environment["_TANDEM_ENGINE_SERVER"].partition(":")[0]))
            wait_until(parent.children, within_s=60.0, what="there is no second server")
            (second,) = parent.children()
            second.kill()
            wait_until(lambda: not is_running(second), within_s=60.0, what="the server is still there")
        elif why == "it was killed":
            server = psutil.Process(int(environment["_TANDEM_ENGINE_SERVER"].partition(":")[0]))
            server.kill()
            wait_until(lambda: not is_running(server), within_s=60.0, what="the server is still there")
        else:
            environment["RAY_JOB_ID"] = "02000000"
    variable = LEARNER_SERVER if why == "it alone was killed" else ENGINE_SERVER
    one = script(tmp_path / "report", "7", variable, **environment)
    assert one.wait(60) == 7
    found = json.loads((tmp_path / "report").read_text())
    assert (found["pid"], found["was_there"], found["value"]) == (one.pid, [], "mine")


ACTORS = """
import json, os, sys, time
from pathlib import Path
import psutil, ray
from rollout.fork_server import LEARNER_SERVER, RunServers, python

if __name__ == "__main__":
    server = RunServers(Path(sys.argv[1]), os.environ, preload=("ray", "wave"))
    server.begin_engines({})
    os.environ.update(server.addresses)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=10**8,
             runtime_env={"py_executable": python(LEARNER_SERVER)}, _temp_dir=sys.argv[1],
             _system_config={"prestart_worker_first_driver": False})

    @ray.remote(num_cpus=0)
    class Actor:
        def where(self):
            parent = psutil.Process().parent().ppid()  # of the server that was forked
            return os.getpid(), parent == int(os.environ[LEARNER_SERVER].partition(":")[0]), "wave" in sys.modules

    actors = [Actor.remote() for _ in range(2)]
    found = ray.get([actor.where.remote() for actor in actors], timeout=60)
    ray.kill(actors[0])
    try:
        while True:
            ray.get(actors[0].where.remote(), timeout=60)
    except ray.exceptions.RayActorError:
        time.sleep(1)  # the raylet ends what the actor has left
        found.append(ray.get(actors[1].where.remote(), timeout=60))
    print(json.dumps(found), flush=True)
    time.sleep(60)
"""


def test_actors_of_real_ray_are_forks_of_the_server_and_end_one_by_one(tmp_path: Path) -> None:
    program = tmp_path / "actors.py"
    program.write_text(ACTORS)
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as scratch:  # a short path, for sockets
        driver = subprocess.Popen(
            [sys.executable, str(program), scratch],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert driver.stdout is not None
            first, second, again = json.loads(driver.stdout.readline())
        finally:
            driver.kill()
            driver.communicate()
        assert first[0] != second[0] and again == second, "the end of one actor ended the other"
        assert (first[1:], second[1:]) == ([True, True], [True, True])
        left = psutil.Process(second[0]) if psutil.pid_exists(second[0]) else None
        wait_until(lambda: left is None or not is_running(left), within_s=60.0, what="an actor outlived the driver")
