"""What a run has on this host before Ray: a temporary directory, and the server that its processes are forked from."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_config import engine_environ
from rollout.fork_server import SERVER_VAR, RunServer
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
PRELOAD = (
    "rollout.engine.preload",  # first, since the environment is the engines'
    "rollout.worker.actor",
    "trainer.learner.fit",
    "trainer.learner.lora",
    "trainer.learner.policy",
)
"""What the actors of a run import."""


class Scratch:
    """Made by `begin`, early, since the server then imports for seconds; removed by `close`."""

    def __init__(self) -> None:
        self._end, self._server = contextlib.ExitStack(), contextlib.ExitStack()
        self.is_begun, self.forks = False, False
        """`forks`: Ray's actors are forked from the server of the run."""
        self.run_id, self.path = "", Path()
        self.env: dict[str, str] = {}
        """Of every process of the run."""

    def begin(self, cfg: RunConfig, backend: Backend) -> None:
        """Blocks for milliseconds. Closes what was begun before. A run on a joined cluster needs nothing."""
        self.close()
        if cfg.ray.address != "local":
            return
        _sweep()
        self.is_begun, self.run_id = True, uuid.uuid4().hex
        os.environ[RUN_ID_VAR] = self.run_id  # inherited by everything that is started from here on
        self.path, lock = _make()
        self._end.callback(os.close, lock)
        self._end.callback(shutil.rmtree, self.path, ignore_errors=True)
        inside = {"VLLM_RPC_BASE_PATH": str(self.path), "TMPDIR": str(self.path)}  # a killed vLLM leaves its sockets
        self.env = {**inside, "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "inductor")}  # outlives the run
        self.forks = backend.capabilities().forks
        if self.forks:
            # Not with the directory that outlives the run, which an import makes: the run may not begin.
            server = RunServer(self.path, {**_engine_environment(cfg, backend), **inside}, preload=PRELOAD)
            self._server.callback(server.close)
            os.environ[SERVER_VAR] = server.address
            self._server.callback(os.environ.pop, SERVER_VAR, None)

    def end_server(self) -> None:
        """Ends all that was forked. Idempotent."""
        self._server.close()

    def close(self) -> None:
        """Idempotent."""
        self.end_server()
        self._end.close()
        self.is_begun = False


def _engine_environment(cfg: RunConfig, backend: Backend) -> dict[str, str]:
    """What any engine of the run finds when it imports its libraries."""
    env = merge_env(backend.process_env("engine"), cfg.device.env, dict(os.environ))
    ours = {name: value for name, value in environment().items() if name == "PYTHONPATH"}
    return engine_environ(
        EngineSpec(
            model="",
            device=backend.name,
            tensor_parallel_size=cfg.rollout.tensor_parallel_size,
            num_threads=cfg.device.cpu_threads,
            enforce_eager=cfg.rollout.enforce_eager,
            env={**env, **ours},
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


def _sweep() -> None:
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
