"""Checkpoints of the learner: directories, and the shards in them.

    checkpoints/step_50.tmp/       begin(): the learner ranks write their shards here
    checkpoints/step_50/           commit(): driver state and a manifest are added, everything is synced, then renamed
    checkpoints/step_50.deleted/   prune(): about to be deleted
    checkpoints/abandoned/         abandon(): what a run that resumed from an older checkpoint left; never deleted

A directory named `step_N` is written completely before it gets that name; one without its manifest is damaged.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import pickle
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.errors import CheckpointError
from trainer.files import replace_directory, sync
from trainer.learner.fsdp import local_tensor, sharded_like
from trainer.learner.offload import BLOCK_BYTES, host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future as TorchFuture

    from trainer.learner.optimizer import ShardedOptimizer
    from weight_sync.device.base import Backend


MANIFEST_FILE = "complete.json"
STATE_FILE = "driver.json"
LEARNER = "learner"
"""The directory of the learner's shards."""
ABANDONED = "abandoned"
DELETED = ".deleted"
HASHED_BYTES = 16 << 20
"""Files up to this size are also checked by sha256; larger ones by size alone, which catches truncation for free."""

_STEP_NAME = re.compile(r"step_(\d+)")


def begin(directory: Path, step: int) -> Path:
    """An empty `step_N.tmp` in `directory`; leftovers of an interrupted save of the same step are removed."""
    tmp = directory / f"step_{step}.tmp"
    if tmp.exists():
        shutil.rmtree(tmp)
    tmp.mkdir(parents=True)
    return tmp


def remove_unfinished(directory: Path) -> None:
    """What saves that were killed have left. Not while one is in progress."""
    for path in directory.glob("step_*.tmp"):
        shutil.rmtree(path)


def commit(tmp: Path, extra_state: Mapping[str, Any]) -> Path:
    """Add the driver's JSON-able state and the manifest, sync, and rename to `step_N`, which is complete from then on.

    An earlier `step_N` (of a resumed run that made the same steps again) is replaced. Raises CheckpointError if `tmp`
    did not come from `begin`, or the state is not JSON-able.
    """
    if not tmp.name.endswith(".tmp") or not _STEP_NAME.fullmatch(tmp.name.removesuffix(".tmp")) or not tmp.is_dir():
        raise CheckpointError(f"{tmp} is not a started checkpoint; commit takes the directory that begin returned")
    try:
        state = json.dumps(extra_state, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"driver state of {tmp} is not JSON-able: {error}") from error
    (tmp / STATE_FILE).write_text(state)
    files = {path.relative_to(tmp).as_posix(): _describe(path) for path in sorted(tmp.rglob("*")) if path.is_file()}
    (tmp / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=1))
    for path in (*tmp.rglob("*"), tmp):  # directories, too: their entries are what leads to the files
        sync(path)
    final = tmp.with_name(tmp.name.removesuffix(".tmp"))
    replace_directory(tmp, final)
    return final


def find_latest(directory: Path) -> Path | None:
    """The checkpoint with the highest step in `directory` (`run_dir/checkpoints`); None if there is none.

    It may be damaged, also by the loss of its manifest, which `verify` reports; no older one replaces it silently.
    """
    return max(_steps(directory), key=step_of, default=None)


def locate(given: Path) -> Path:
    """`given` if it is a checkpoint, else the newest one in it: a run directory or its `checkpoints`. Raises
    CheckpointError if it is neither."""
    path = given.expanduser().resolve()
    if not path.is_dir():
        raise CheckpointError(f"{given} is not a directory; give RUN_DIR/checkpoints/step_N or a run directory")
    if path.name.startswith("step_") or (path / MANIFEST_FILE).exists():
        return path
    for directory in (path / "checkpoints", path):
        if (latest := find_latest(directory)) is not None:
            return latest
    raise CheckpointError(
        f"{given} holds no checkpoint; give RUN_DIR/checkpoints/step_N or a run directory that has one"
    )


def older_complete(path: Path) -> Path | None:
    """The newest complete checkpoint next to `path` with a lower step; None if there is none."""
    if not _STEP_NAME.fullmatch(path.name):
        return None
    return max((one for one in _complete(path.parent) if step_of(one) < step_of(path)), key=step_of, default=None)


def step_of(path: Path) -> int:
    """N of `step_N`. Raises CheckpointError for any other name."""
    match = _STEP_NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint; expected a directory named step_N")
    return int(match[1])


def verify(path: Path) -> None:
    """Check every file of a checkpoint against its manifest. Raises CheckpointError, which names the first file that is
    missing, truncated or altered."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist; give a directory like run_dir/checkpoints/step_50")
    manifest = path / MANIFEST_FILE
    try:
        files: dict[str, dict[str, Any]] = json.loads(manifest.read_text())["files"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {path} is not complete: it has no {MANIFEST_FILE}; use another one"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{manifest} is damaged ({error!r}); use another checkpoint") from error
    has_shards = any(name.startswith(f"{LEARNER}/") for name in files)
    if STATE_FILE not in files or ((path / LEARNER).exists() and not has_shards):
        raise CheckpointError(
            f"{manifest} is damaged: it must list {STATE_FILE} and the files in {LEARNER}/, and lists "
            f"{', '.join(files) or 'none'}; use another checkpoint"
        )
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint file {file} is missing; use another checkpoint")
        found = _describe(file)
        if found != expected:
            what = "truncated" if found["bytes"] < expected["bytes"] else "altered"
            raise CheckpointError(
                f"checkpoint file {file} is {what}: {found['bytes']} bytes, expected {expected['bytes']} and the "
                "digest of its manifest; use another checkpoint, or set checkpoint.resume=never with a new run_dir"
            )


def read_state(path: Path) -> dict[str, Any]:
    """The driver state of a complete checkpoint, after `verify`. Raises CheckpointError."""
    verify(path)
    return json.loads((path / STATE_FILE).read_text())


def prune(directory: Path, *, keep_last: int, keep_every: int = 0) -> list[Path]:
    """Delete complete checkpoints (others may be in progress), and what an earlier `prune` left; returns the former.

    Args:
        keep_last: the newest so many stay, >= 1; those that `keep_every` keeps count among them.
        keep_every: steps that are divisible by it stay, however old; 0 for none.

    Raises:
        OSError: the first of those met; everything else has been deleted.
    """
    if keep_last < 1 or keep_every < 0:
        raise ValueError(
            f"keep_last must be >= 1 (the newest checkpoint is never deleted) and keep_every >= 0, got {keep_last} "
            f"and {keep_every}"
        )
    old = _complete(directory)[:-keep_last]
    doomed = [path for path in old if not keep_every or step_of(path) % keep_every]
    errors: list[OSError] = []
    for path in doomed:
        try:
            path.rename(_free_name(path.with_name(path.name + DELETED)))  # half-deleted, it must not count as complete
        except OSError as error:
            errors.append(error)
    for path in directory.glob(f"step_*{DELETED}*"):
        try:
            shutil.rmtree(path)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return doomed


def abandon(directory: Path, *, resumed_from: Path) -> list[Path]:
    """Move what does not lead to the checkpoint `resumed_from` to `directory/abandoned`; returns where it is now.
    Otherwise `find_latest` would resume from the abandoned branch, and `prune` delete the new one for it."""
    steps = _steps(directory)
    own = next((path for path in steps if path.samefile(resumed_from)), None)  # a link may have another name
    left = [path for path in steps if own is None or step_of(path) > step_of(own)]
    moved = [_free_name(directory / ABANDONED / path.name) for path in left]
    for path, target in zip(left, moved, strict=True):
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    return moved


def _free_name(path: Path) -> Path:
    """`step_N`, or `step_N.2` and so on if there is one already."""
    others = (path.with_name(f"{path.name}.{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], others) if not name.exists())


def _steps(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _STEP_NAME.fullmatch(path.name)), key=step_of)


def _complete(directory: Path) -> list[Path]:
    return [path for path in _steps(directory) if (path / MANIFEST_FILE).is_file()]


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > HASHED_BYTES:
        return {"bytes": size}
    return {"bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def learner_state(
    optimizers: Mapping[str, ShardedOptimizer],
    *,
    step: int,
    host_view: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> dict[str, Tensor]:
    """What a checkpoint holds of the learner, by name: tensors that share memory with it, and counters.

    Args:
        optimizers: everything that is trained, by a prefix of its names in the checkpoint ("" for the policy).
        host_view: where the bytes of a tensor can be read, if not in the tensor (`CpuOffload.host_view`).
    """
    counters = {f"{prefix}num_updates": torch.tensor(one.num_updates) for prefix, one in optimizers.items()}
    tensors = {name: host_view(tensor) for name, tensor in _tensors(optimizers).items()}
    return tensors | counters | {"step": torch.tensor(step)}


def save_sharded(path: Path, state: Mapping[str, Tensor], *, group: ProcessGroup | None = None) -> None:
    """Collective, in the default group if none is given. Write a `learner_state` to `path/learner`; `path` exists
    (`checkpoint.begin`). Raises CheckpointError if the files cannot be written, with `path` and the reason."""
    try:
        save(dict(state), storage_writer=_Writer(path / LEARNER), process_group=group)
    except (CheckpointException, RuntimeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written: {_reason(error)}") from error


class BackgroundSave:
    """Writes a copy of the learner's state in a thread while training continues. One at a time.

    The copy is in host memory, which is allocated at the first save and kept, page-locked where that is faster.
    """

    def __init__(self, backend: Backend, *, timeout_s: float) -> None:
        """`timeout_s` is the deadline of each exchange between the ranks' threads."""
        self._backend, self._timeout_s = backend, timeout_s
        self._copy: dict[str, Tensor] = {}
        self._written: Future[None] | None = None

    @functools.cached_property
    def _group(self) -> ProcessGroup:
        """Not the default one, whose collectives the training uses meanwhile. Of host memory: so is the copy."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        return group

    def begin(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Collective. Returns as soon as the copy is taken; the state may change then. Waits for an earlier write."""
        self.wait()
        group = self._group
        local = {name: local_tensor(tensor) for name, tensor in state.items()}
        if not self._copy:
            sizes, is_pinned = [one.nbytes for one in local.values()], self._backend.torch_device != "cpu"
            memory = host_memory(sizes, block_bytes=BLOCK_BYTES, is_pinned=is_pinned)
            self._copy = {
                name: sharded_like(state[name], one.view(local[name].dtype).view(local[name].shape))
                for name, one in zip(local, memory, strict=True)
            }
        for name, tensor in local.items():
            local_tensor(self._copy[name]).copy_(tensor, non_blocking=True)
        self._backend.synchronize()
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written = thread.submit(save_sharded, path, self._copy, group=group)
        thread.shutdown(wait=False)  # it ends with the write

    def wait(self) -> None:
        """Until all ranks have written, from any thread. Raises CheckpointError as `save_sharded`."""
        if self._written is not None:
            self._written.result()


def load_sharded(path: Path, optimizers: Mapping[str, ShardedOptimizer]) -> int:
    """Collective. Fill weights and optimizers in place; returns the step of the checkpoint. Raises CheckpointError if
    files are missing or damaged, or belong to a model with other parameters."""
    counters = {f"{prefix}num_updates": torch.tensor(0) for prefix in optimizers} | {"step": torch.tensor(0)}
    _load(path, _tensors(optimizers) | counters, is_alone=False)
    for prefix, optimizer in optimizers.items():
        optimizer.set_num_updates(int(counters[f"{prefix}num_updates"]))
    return int(counters["step"])


def load_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill whole tensors on the host, by parameter name, cast to their dtype; others are not read. Needs no process
    group, and in memory one saved shard at a time. Raises CheckpointError as `load_sharded`."""
    _load(path, {f"model.{name}": tensor for name, tensor in weights.items()}, is_alone=True)


def _load(path: Path, tensors: dict[str, Tensor], *, is_alone: bool) -> None:
    """Fill `tensors` in place; collective unless this process `is_alone`."""
    directory = path / LEARNER
    if not (directory / ".metadata").is_file():
        raise CheckpointError(f"checkpoint file {directory / '.metadata'} is missing; use another checkpoint")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # even where it is asked for
            load(tensors, checkpoint_id=directory, no_dist=is_alone)
    except (CheckpointException, RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"checkpoint {directory} cannot be loaded: {_reason(error)}; it is damaged, or model.path is another model "
            "than the one that was saved, or the critic is"
        ) from error


def _reason(error: BaseException) -> str:
    """One line of what went wrong. A CheckpointException holds an error and a traceback for each rank; an error of the
    file system comes first, then the last line, which names what did not fit."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    for cause in (error, *(failure[0] for failure in failures)):
        if (refusal := _refusal(cause)) is not None:
            return str(refusal.strerror)
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:600]


def _refusal(error: BaseException | None) -> OSError | None:
    """The error of the file system that an error began with."""
    while error is not None and not (isinstance(error, OSError) and error.strerror):
        error = error.__cause__ or error.__context__
    return error


class _Writer(FileSystemWriter):
    """Raises what the disk refused a write with. torch 2.13 raises an error of its archive instead, and what a rank
    tells the others has no context.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            if (refusal := _refusal(error)) is None:
                raise
            raise refusal from None


def _tensors(optimizers: Mapping[str, ShardedOptimizer]) -> dict[str, Tensor]:
    # What is frozen (the base below LoRA adapters, the reference) is read from model.path again.
    return {
        f"{prefix}{kind}.{name}": tensor
        for prefix, optimizer in optimizers.items()
        for kind, tensors in (("model", optimizer.weights()), ("optimizer", optimizer.state()))
        for name, tensor in tensors.items()
    }
