"""What a run has on this host before Ray: a temporary directory, and servers that its processes are forked from."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_config import engine_environ
from rollout.fork_server import ENGINE_SERVER, LEARNER_SERVER, RunServers, python
from trainer.builtin.tiny_model import cache_dir
from trainer.driver.process_cleaner import RUN_ID_VAR
from trainer.subprograms import environment
from weight_sync.device import merge_env

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig
    from weight_sync.device.base import Backend


log = logging.getLogger(__name__)

SCRATCH_PREFIX = "tandem-ray-"
SCRATCH_LOCK = "lock"
"""The file in a scratch directory that its driver keeps locked."""
FALLBACK_TEMP_DIR = "/tmp"
MAX_TEMP_BYTES = 14
"""A socket's path has at most 107 bytes; our directory, Ray's session and the name take 93."""
PRELOAD = ("ray", "trainer.learner.fit", "trainer.learner.lora", "trainer.learner.policy", "rollout.worker.actor")
"""What learners and rollout workers import, and engines in part."""


class Scratch:
    """The temporary directory of a run, with the sockets of its fork servers. `begin` makes it and starts them, early,
    since they then import for seconds; `set_device` has engines import vLLM; `close` removes it and ends them."""

    def __init__(self) -> None:
        self._end, self._of_servers = contextlib.ExitStack(), contextlib.ExitStack()
        self._servers: RunServers | None = None
        self._environ: dict[str, str] = {}
        self.is_begun, self.run_id, self.path = False, "", Path()
        self.runtime_env: dict[str, Any] = {}
        """Ray's, of every actor; an engine starts as `engine_python` says."""

    def begin(self, cfg: RunConfig) -> None:
        """Blocks for milliseconds. Closes what was begun before. A run on a joined cluster needs nothing."""
        self.close()
        if cfg.ray.address != "local":
            return
        self.is_begun, self.run_id = True, uuid.uuid4().hex
        os.environ[RUN_ID_VAR] = self.run_id  # inherited by everything that is started from here on
        self._end.callback(os.environ.pop, RUN_ID_VAR, None)
        self.path, lock = _make()
        self._end.callback(os.close, lock)
        self._end.callback(shutil.rmtree, self.path, ignore_errors=True)
        inside = {"VLLM_RPC_BASE_PATH": str(self.path), "TMPDIR": str(self.path)}  # a killed vLLM leaves its sockets
        compiled = {"TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "inductor")}  # outlives the run
        self.runtime_env = {"env_vars": {**inside, **compiled}}
        # Without `compiled`: an import makes that directory, and the run may not begin.
        self._environ = {**os.environ, **cfg.device.env, **inside}
        self._environ |= {name: value for name, value in environment().items() if name == "PYTHONPATH"}
        self._servers = servers = RunServers(self.path, self._environ, preload=PRELOAD)
        self._of_servers.callback(servers.close)
        for name, address in servers.addresses.items():
            os.environ[name] = address
            self._of_servers.callback(os.environ.pop, name, None)
        self.runtime_env["py_executable"] = python(LEARNER_SERVER)

    def set_device(self, cfg: RunConfig, backend: Backend) -> None:
        """Ends the servers, which have not imported vLLM yet, if the processes of that device may not be forked. Does
        nothing before `begin`."""
        if self._servers is None:
            return
        if backend.capabilities().forks:
            fixed = ("PYTHONPATH", *self._servers.addresses, *self.runtime_env["env_vars"])
            of_engines = {name: value for name, value in _of_engines(cfg, backend).items() if name not in fixed}
            self._servers.begin_engines(
                {name: value for name, value in of_engines.items() if self._environ.get(name) != value}
            )
        else:
            self.end_servers()
            del self.runtime_env["py_executable"]

    def end_servers(self) -> None:
        """Ends all that was forked. Idempotent."""
        self._of_servers.close()
        self._servers = None

    def close(self) -> None:
        """Idempotent."""
        self.end_servers()
        self._end.close()
        self.is_begun = False


def engine_python() -> dict[str, str]:
    """As part of Ray's `runtime_env`."""
    return {"py_executable": python(ENGINE_SERVER)} if ENGINE_SERVER in os.environ else {}


def _of_engines(cfg: RunConfig, backend: Backend) -> dict[str, str]:
    """What any engine of the run finds when it imports its libraries."""
    return engine_environ(
        EngineSpec(
            model="",
            device=backend.name,
            tensor_parallel_size=cfg.rollout.tensor_parallel_size,
            num_threads=cfg.device.cpu_threads,
            enforce_eager=cfg.rollout.enforce_eager,
            env=merge_env(backend.process_env("engine"), cfg.device.env, dict(os.environ)),
        )
    )


def _home() -> str:
    """The temporary directory, unless it makes the paths of Ray's sockets too long."""
    home = tempfile.gettempdir()
    return home if len(os.fsencode(home)) <= MAX_TEMP_BYTES else FALLBACK_TEMP_DIR


def _make() -> tuple[Path, int]:
    """A new scratch directory and its lock, a descriptor: until we or the kernel close it, no run sweeps it."""
    path = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=_home()))
    lock = os.open(path / f"{SCRATCH_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (path / f"{SCRATCH_LOCK}.new").rename(path / SCRATCH_LOCK)  # it appears locked
    return path, lock


def sweep() -> None:
    """Remove scratch directories of runs that were killed together with their cleaner. A lock shows which: process ids
    mean nothing where containers or hosts share the directory."""
    for path in Path(_home()).glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, locked, or being swept
            lock = os.open(path / SCRATCH_LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.info("removing %s, left behind by a run that was killed", path)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
