"""Fork servers of a run: they import large libraries once, for the processes of the run on this host.

    driver ── starts ──> server of engines ──────── forks ──> engine actors, and the engine process of each
                                 └─ forks ──> server of learners ── forks ──> learner ranks, rollout workers

Imports take longer than all else in a start with warm caches. The second server is forked before vLLM is imported,
which changes torch's compiler. Ray starts `main` for each actor, which asks a server for a fork. Where there is none
(another host of a joined cluster, devices that may not be forked), actors are interpreters of their own, and an engine
has its own server. A server that ends, for example because the system refuses a fork, takes along what it forked.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from importlib import import_module
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rollout.processes import is_running, kill_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


OF_ENGINES = ("rollout.engine.preload",)
"""What only engines import."""
ENGINE_SERVER, LEARNER_SERVER = "_TANDEM_ENGINE_SERVER", "_TANDEM_LEARNER_SERVER"
"""In the environment of a run's processes: `pid:socket`, the id of the process that `RunServers` started."""
JOB_ID = "01000000"
"""Ray's, of the first job of a cluster."""
_STREAMS = (1, 2)
_OOM_SCORE = Path("/proc/self/oom_score_adj")


class ForkedProcess(ForkServerProcess):
    """Has what its parent has at the start, as a spawned process would, and not what the server has: environment,
    limit of open files, place among those that the kernel kills for memory, priority, stdout and stderr. It is killed
    with its parent, and with the server."""

    _streams: list[Any]

    def start(self) -> None:
        self._environment, self._niceness = dict(os.environ), os.getpriority(os.PRIO_PROCESS, 0)
        self._max_files, self._oom_score = resource.getrlimit(resource.RLIMIT_NOFILE)[0], ""
        with contextlib.suppress(OSError):  # not every container has it
            self._oom_score = _OOM_SCORE.read_text()
        super().start()

    def __getstate__(self) -> dict[str, Any]:  # on its way to the server
        return {**self.__dict__, "_streams": [reduction.DupFd(stream) for stream in _STREAMS]}

    def run(self) -> None:
        gc.freeze()  # what was imported is there for good; to look through it takes a third of a second
        gc.enable()
        for stream, sent in zip(_STREAMS, self._streams, strict=True):
            given = sent.detach()
            os.dup2(given, stream)
            os.close(given)
        with contextlib.suppress(PermissionError):  # the server may have a lower priority
            os.setpriority(os.PRIO_PROCESS, 0, self._niceness)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most = hard if hard != resource.RLIM_INFINITY and not 0 <= self._max_files <= hard else self._max_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        with contextlib.suppress(OSError):
            _OOM_SCORE.write_text(self._oom_score)
        _die_with_the_server()
        threading.Thread(target=_die_with_the_parent, daemon=True).start()
        # Only what differs changes: code that sets the process's title looks for it next to the original environment.
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update({name: v for name, v in self._environment.items() if os.environ.get(name) != v})
        tempfile.tempdir = None  # of the server's environment
        _reseed()
        take_num_threads()
        super().run()


def _reseed() -> None:
    """What is drawn without a seed differs between forks. Python does this itself."""
    numpy_random: Any = sys.modules.get("numpy.random")
    torch: Any = sys.modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None:
        torch.default_generator.seed()


def take_num_threads() -> None:
    """As many threads of torch on the CPU as `OMP_NUM_THREADS` says now. OpenMP reads it when torch is imported, which
    the server did; Ray sets it with the first call of an actor."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(KeyError, ValueError, RuntimeError):  # RuntimeError: not positive
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


class ForkContext(ForkServerContext):
    """What vLLM takes for its `multiprocessing` context."""

    Process = ForkedProcess  # pyright: ignore[reportAssignmentType]


class RunServers:
    """Both servers of a run on this host, from one process that begins to import at once. The thread that makes it must
    live as long as the run.

    Args:
        folder: of their sockets and their log, which is deleted with the run. It has a short path, since that of a
            socket has at most 107 bytes. What is forked prints where its parent does.
        environ: the whole environment in which they begin to import.
        preload: modules for all; one that cannot be imported is left to those that need it.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str], *, preload: Sequence[str]) -> None:
        paths = [folder / "engines", folder / "learners"]
        # Ray reads these when it is imported, and never again. An actor looks from time to time whether the raylet is
        # there, which starts later; it watches this process instead. With the raylet `main` dies, and the actor.
        for_ray = {"RAY_JOB_ID": JOB_ID, "RAY_RAYLET_PID": str(os.getpid())}
        with contextlib.ExitStack() as stack:
            log_file = stack.enter_context((folder / "fork_server.log").open("wb"))
            listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in paths]
            for listener, path in zip(listeners, paths, strict=True):
                listener.bind(str(path))
                listener.listen()
            alive_r, self._alive_w = os.pipe()  # the servers end when our end is closed, so with this process
            stack.callback(os.close, alive_r)
            failed = stack.enter_context(contextlib.ExitStack())
            failed.callback(os.close, self._alive_w)
            fds = *(listener.fileno() for listener in listeners), alive_r
            program = f"serve({fds}, {[*preload]!r}, {[*OF_ENGINES]!r})"
            # In a session of its own: Ctrl-C in the terminal is for the driver. Unbuffered: what is in a buffer at a
            # fork, the new process would print as well.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", f"from rollout.fork_server import serve; {program}"],
                pass_fds=fds,
                env={**environ, **for_ray},
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            failed.pop_all()
        pid = self._process.pid
        self.addresses = {ENGINE_SERVER: f"{pid}:{paths[0]}", LEARNER_SERVER: f"{pid}:{paths[1]}"}
        """What their variables in the environment are for the processes of the run."""

    def begin_engines(self, variables: Mapping[str, str]) -> None:
        """The server of engines imports vLLM with these variables, and forks from then on. Call it once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, and what needs it notices
            self._process.stdin.write(json.dumps(dict(variables)).encode())
            self._process.stdin.close()

    def close(self) -> None:
        """Ends the servers, and what they have forked; that of learners ends a moment later."""
        self._process.kill()
        self._process.communicate()
        os.close(self._alive_w)


def serve(fds: tuple[int, int, int], preload: Sequence[str], of_engines: Sequence[str]) -> None:
    """The process of `RunServers`. Returns when the owner of the run has ended."""
    engines, learners, alive = fds
    kill_with_parent()  # while it imports, it does not look at `alive`
    if select.select([alive], [], [], 0)[0]:  # the owner ended before that
        return
    gc.disable()  # it would look through what was imported so far, again and again: a quarter of the time
    for name in preload:
        with contextlib.suppress(Exception):
            import_module(name)
    nothing = os.open(os.devnull, os.O_RDONLY)
    if os.fork() == 0:
        os.close(engines)
        os.dup2(nothing, 0)
        forkserver.main(learners, alive, [])
    else:
        os.close(learners)
        os.environ.update(json.load(sys.stdin))  # waits for `begin_engines`, or the end of the owner
        os.dup2(nothing, 0)
        forkserver.main(engines, alive, of_engines)


def use_server(variable: str) -> bool:
    """From now on this process forks from that server of the run, if there is one on this host; whether there is."""
    pid, _, address = os.environ.get(variable, "").partition(":")
    if not address or not Path(address).exists() or not _is_there(int(pid)):  # it is of another host, or was killed
        return False
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server.ensure_running is not resource_tracker.ensure_running:
        server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_WRONLY)
        server.ensure_running = resource_tracker.ensure_running
    return True


def begin_imports() -> None:
    """Use the run's server of engines, or start one, if there is none yet; does not wait for its imports. The socket of
    one's own is next to those of vLLM if the run places them: this process ends by a kill, and would leave one in the
    temporary directory."""
    if folder := os.environ.get("VLLM_RPC_BASE_PATH"):
        multiprocessing.current_process()._config["tempdir"] = folder  # pyright: ignore[reportAttributeAccessIssue]
    if not use_server(ENGINE_SERVER):
        multiprocessing.set_forkserver_preload([*OF_ENGINES])
        forkserver.ensure_running()


def _is_there(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return is_running(psutil.Process(pid))
    return False


def _die_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # it is ready when the kernel closes the parent's end of a pipe
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_the_server() -> None:
    kill_with_parent()
    # The server waits for the end of all processes that hold this pipe open: of its owner alone, from here on.
    alive_fd = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)  # pyright: ignore[reportAttributeAccessIssue]
    if alive_fd is not None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, alive_fd)
        os.close(nothing)


# --- Ray actors ---


def python(variable: str) -> str:
    """For a shell: runs a script as Python does, in a fork of that server."""
    # This very package, also where it is not installed; the script then has the path that Python gives it.
    found = f"sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r}); from rollout.fork_server import main"
    return shlex.join([sys.executable, "-P", "-c", f"import sys; {found}; del sys.path[0]; main({variable!r})"])


def main(variable: str) -> None:
    """The arguments of this program are a script and its own. This process waits for the forked one, and exits as it
    does; where there is no server, it becomes the script."""
    script = sys.argv[1:]
    if use_server(variable) and os.environ.get("RAY_JOB_ID", JOB_ID) == JOB_ID:
        kill_with_parent()
        process = ForkedProcess(target=_run, args=(script,))
        try:
            process.start()
        except (OSError, EOFError):  # the server has just been killed
            pass
        else:
            process.join()
            code = process.exitcode
            assert code is not None  # it has ended
            sys.exit(code if code >= 0 else 128 - code)
    os.execv(sys.executable, [sys.executable, *script])


def _run(script: Sequence[str]) -> None:
    os.setpgid(0, 0)  # Ray kills the group of an actor that ends
    sys.argv[:] = script
    multiprocessing.set_start_method(None, force=True)  # the default again
    multiprocessing.current_process().name = "MainProcess"
    sys.path.insert(0, str(Path(script[0]).parent))
    if (ray := sys.modules.get("ray._raylet")) is not None:
        ray.Config.initialize("")  # it read the environment of the server
    runpy.run_path(script[0], run_name="__main__")
