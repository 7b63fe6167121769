"""The run directory: where everything about one run is, owned by one process at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import json
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence, Set
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import yaml

from trainer.config.field import value_text
from trainer.config.plain import dump_yaml, read_stored
from trainer.config.schema import all_keys
from trainer.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import TextIOWrapper

    from trainer.config.schema import RunConfig


logger = logging.getLogger(__name__)

LOCK = "owner.lock"


class RunDirLost(RuntimeError):
    """The run directory was removed, moved or taken over while the run was going on."""


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
        """The resolved configuration. That of an earlier process stays as config.N.yaml if it was another, and the log
        says what has changed."""
        text = dump_yaml(config)
        if self.config.exists() and (earlier := self.config.read_text(encoding="utf-8")) != text:
            number = next(n for n in range(1, 10_000) if not (self.path / f"config.{n}.yaml").exists())
            kept = self.path / f"config.{number}.yaml"
            self.config.rename(kept)
            _log_changes(earlier, config, kept=kept)
        write_atomically(self.config, text)

    def check(self) -> None:
        """Raises `RunDirLost` if the directory is not there any more, or not ours."""
        if not _is_at(self._lock, self.path / LOCK):
            what = "belongs to another process" if self.is_taken else "was removed or moved"
            raise RunDirLost(f"the run directory {self.path} {what} while the run was going on")

    @property
    def is_taken(self) -> bool:
        """Whether another process has it now: nothing more may be written there."""
        path = self.path / LOCK
        return path.exists() and not _is_at(self._lock, path)

    def discard(self) -> None:
        """Remove the directory of a run that is refused, if this process has made it."""
        if self._is_new:
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Give the directory back. Idempotent; the end of the process does it too, even kill -9."""
        if self._lock.closed:
            return
        # Removed while still locked. Whoever opened it meanwhile finds that the name is gone, and opens it again.
        if _is_at(self._lock, self.path / LOCK):
            with contextlib.suppress(OSError):  # the disk may be read-only by now; the lock goes with the descriptor
                (self.path / LOCK).unlink()
        self._lock.close()


def open_run_dir(config: RunConfig, *, clock: Callable[[], float] = time.time) -> RunDir:
    """Make the directory of this run if it is new, and take its lock.

    Raises `ConfigurationError` if it cannot be written or belongs to a process that still runs.
    """
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
    """The run directory `path`, of whose files one could not be written."""
    file = f" ({error.filename})" if error.filename else ""
    return Problem(
        key="run_dir",
        value=str(path),
        message=f"cannot be written: {error.strerror}{file}",
        hint="make room there, or choose another directory with run_dir=PATH",
    )


def write_atomically(path: Path, content: str | bytes) -> None:
    """A reader sees the old file or the new one, never a part. Raises `OSError`; then the old file stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _log_changes(earlier: str, config: RunConfig, *, kept: Path) -> None:
    """Every key with another value than in the text of the `earlier` configuration, as one warning."""
    try:
        data = yaml.safe_load(earlier)
    except yaml.YAMLError:
        data = None
    if not isinstance(data, dict):
        logger.warning("%s cannot be read, so what has changed since is unknown", kept)
        return
    before, _ = read_stored(cast("dict[str, object]", data))
    # run_dir is this directory, under any path.
    keys = [path for path, key in all_keys().items() if not key.is_section and path != "run_dir"]
    values = {key: [attrgetter(key)(each) for each in (before, config)] for key in keys}
    changes = [f"{key}: {value_text(old)} -> {value_text(new)}" for key, (old, new) in values.items() if old != new]
    if changes:
        logger.warning("not configured as before in this run directory (%s): %s", kept.name, "; ".join(changes))


def _free_directory(name: str, clock: Callable[[], float]) -> Path:
    """`runs/<name>/<time>`, with a number behind it if two runs start within a second."""
    base = Path("runs").absolute() / name / time.strftime("%Y%m%d-%H%M%S", time.localtime(clock()))
    candidates = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def _take_lock(path: Path, clock: Callable[[], float]) -> TextIOWrapper:
    """The kernel frees the lock when its owner dies, so a lock file that is left over never blocks anyone."""
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
    """Whether the file we have locked is still the one of that name."""
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


def append_line(path: Path, line: bytes) -> None:
    """All of `line`, or nothing of it: behind half a line on a full disk the next one could not be read either.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        # Buffered: `write` and `close` write all of it or raise. A raw file may take a part of it, and say no more than
        # how much. What is longer than the buffer goes out in one call, so a reader sees no half line either.
        with path.open("ab") as file:
            file.write(line)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise


def to_jsonable(value: object) -> object:
    """`value` in the types of JSON: dict, list, str, int, float, bool, None.

    A number that is not finite becomes None: JSON has no NaN, and many readers stop at one. A metric without data is
    left out by its writer, so a `null` in a metrics line always means that a NaN or infinity was computed.
    Raises `TypeError` for a type that is not known.
    """
    match value:
        case None | bool() | str() | int():
            return value
        case float() | np.floating():
            number = float(value)
            return number if math.isfinite(number) else None
        case np.bool_() | np.integer():
            return value.item()
        case np.ndarray():
            return to_jsonable(value.tolist())
        case enum.Enum():
            return value.name
        case Path():
            return str(value)
        case Mapping():
            return {str(to_jsonable(key)): to_jsonable(item) for key, item in value.items()}
        case Set():
            return sorted((to_jsonable(item) for item in value), key=str)
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [to_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r:.80}; convert it to plain values first")
