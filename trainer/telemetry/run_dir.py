"""The run directory, which one process owns at a time: paths, lock, configuration, and the JSON of its records."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import yaml

from trainer.config.field import value_text
from trainer.config.plain import dump_yaml, read_stored
from trainer.config.schema import all_keys
from trainer.errors import ConfigurationError, Problem
from trainer.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import TextIOWrapper

    from trainer.config.schema import RunConfig


logger = logging.getLogger(__name__)

LOCK = "owner.lock"


class RunDirLost(RuntimeError):
    """The run directory was removed, moved or taken over during the run."""


class RunDir:
    """Paths inside a run directory, and the lock that makes it ours. Made by `open_run_dir`."""

    def __init__(self, path: Path, lock: TextIOWrapper, *, is_new: bool = False) -> None:
        self.path = path
        self._is_new = is_new
        self.config = path / "config.yaml"
        self.environment = path / "environment.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.answers = path / "evaluations"
        self.trajectories = path / "trajectories"
        self.trace = path / "trace.json"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tb"
        self.wandb_run_id = path / "wandb_run_id"
        self.log = path / "log.txt"
        self.summary = path / "summary.json"
        self.export = path / "export"
        self._lock = lock

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml. A different one of an earlier process becomes config.N.yaml, and the log lists the
        changes. Raises ConfigurationError if it cannot be written; then a new directory is removed."""
        text = dump_yaml(config)
        try:
            if self.config.exists() and self.config.read_text(encoding="utf-8") != text:
                number = next(n for n in range(1, 10_000) if not (self.path / f"config.{n}.yaml").exists())
                kept = self.path / f"config.{number}.yaml"
                self.config.rename(kept)
                _log_changes(kept, config)
            write_atomically(self.config, text)
        except OSError as error:
            self.discard()
            raise ConfigurationError([cannot_be_written(self.path, error)]) from error

    def check(self) -> None:
        """Raises `RunDirLost` if the directory is gone, or not ours."""
        if not _is_at(self._lock, self.path / LOCK):
            what = "belongs to another process" if self.is_taken else "was removed or moved"
            raise RunDirLost(f"the run directory {self.path} {what} during the run")

    @property
    def is_taken(self) -> bool:
        """By another process: nothing more may be written there."""
        path = self.path / LOCK
        return path.exists() and not _is_at(self._lock, path)

    def discard(self) -> None:
        """Remove the directory of a refused run, if this process has made it."""
        if self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the lock. Idempotent; the end of the process does it too, even kill -9."""
        if self._lock.closed:
            return
        # Removed while still locked: a process that opened it meanwhile finds the name gone, and opens it again.
        if _is_at(self._lock, self.path / LOCK):
            with contextlib.suppress(OSError):  # the disk may be read-only by now; the lock goes with the descriptor
                (self.path / LOCK).unlink()
        self._lock.close()


def open_run_dir(config: RunConfig, *, clock: Callable[[], float] = time.time) -> RunDir:
    """Make the directory of this run if it is new, and lock it. Raises `ConfigurationError` if it cannot be written, or
    belongs to a running process."""
    path = Path(config.run_dir).absolute() if config.run_dir else _free_directory(config.name, clock)
    is_new, run_dir = not path.exists(), None
    try:
        path.mkdir(parents=True, exist_ok=True)
        run_dir = RunDir(path, _take_lock(path, clock), is_new=is_new)
        for name in ("trajectories", "evaluations", "checkpoints"):
            (path / name).mkdir(exist_ok=True)
    except OSError as error:
        if run_dir is not None:
            run_dir.close()
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise ConfigurationError([cannot_be_written(path, error)]) from error
    return run_dir


def cannot_be_written(path: Path, error: OSError) -> Problem:
    file = f" ({error.filename})" if error.filename else ""
    return Problem(
        key="run_dir",
        value=str(path),
        message=f"cannot be written: {error.strerror}{file}",
        hint="make room there, or choose another directory with run_dir=PATH",
    )


def changed_keys(file: Path, config: RunConfig) -> list[str] | None:
    """Since an earlier config.yaml, as "KEY: OLD -> NEW"; None if it cannot be read."""
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(data, dict):
        return None
    before, _ = read_stored(cast("dict[str, object]", data))
    # run_dir is this directory, under any path.
    keys = [path for path, key in all_keys().items() if not key.is_section and path != "run_dir"]
    values = {key: [attrgetter(key)(each) for each in (before, config)] for key in keys}
    return [f"{key}: {value_text(old)} -> {value_text(new)}" for key, (old, new) in values.items() if old != new]


def _log_changes(kept: Path, config: RunConfig) -> None:
    changes = changed_keys(kept, config)
    if changes is None:
        logger.warning("%s cannot be read, so what has changed since then is unknown", kept)
    elif changes:
        text = "the configuration has changed since the last start in this run directory (%s): %s"
        logger.warning(text, kept.name, "; ".join(changes))


def _free_directory(name: str, clock: Callable[[], float]) -> Path:
    """`runs/<name>/<time>`, and a number if two runs start within a second."""
    base = Path("runs").absolute() / name / time.strftime("%Y%m%d-%H%M%S", time.localtime(clock()))
    candidates = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def _take_lock(path: Path, clock: Callable[[], float]) -> TextIOWrapper:
    """The kernel frees the lock when its owner dies, so a left-over lock file blocks no one."""
    while True:
        lock = (path / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner_text(path)
            lock.close()
            problem = Problem(
                key="run_dir",
                value=str(path),
                message=f"is in use by {owner}",
                hint="wait for that run to end, stop it, or choose another directory with run_dir=PATH",
            )
            raise ConfigurationError([problem]) from None
        if _is_at(lock, path / LOCK):
            break
        lock.close()
    try:
        lock.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": clock()}, lock)
        lock.flush()
    except OSError:
        (path / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # of what it still holds
            lock.close()
        raise
    return lock


def _is_at(lock: TextIOWrapper, path: Path) -> bool:
    """Whether our locked file still has that name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    return False


def _owner_text(path: Path) -> str:
    try:
        owner = json.loads((path / LOCK).read_text(encoding="utf-8"))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
        return f"process {owner['pid']} on host {owner['host']} since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def encode_json(value: object) -> bytes:
    """`value` as JSON: dataclasses, numbers and arrays of numpy, and paths included.

    A number that is not finite becomes null: JSON has no NaN, and many readers stop at one. A metric without data is
    left out by its writer, so a `null` in a metrics line always means that a NaN or infinity was computed. A text that
    is not Unicode, as one with half of a surrogate pair, keeps that half as an escape. Raises `TypeError` for a type
    that JSON cannot hold.
    """
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return _ENCODER.encode(_escaped(msgspec.to_builtins(value, enc_hook=_plain)))


def to_jsonable(value: object) -> Any:
    """`value` as it reads back from `encode_json`."""
    return msgspec.json.decode(encode_json(value))


def _plain(value: object) -> object:
    match value:
        case np.generic() | np.ndarray():
            return value.tolist()
        case Path():
            return str(value)
        case Mapping():
            return dict(value)
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r:.80}; convert it to plain values first")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def _escaped(value: object) -> object:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_escaped(key): _escaped(item) for key, item in value.items()}
        case list() | tuple():
            return [_escaped(item) for item in value]
    return value
