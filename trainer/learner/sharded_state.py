"""Weights and optimizers as torch distributed checkpoints: every rank writes its shards, any number of ranks reads."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.learner.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from trainer.learner.optim import ShardedAdamW

SHARDS_DIR = "learner"
"""Inside a checkpoint directory."""


def save_sharded(
    path: Path,
    optimizers: Mapping[str, ShardedAdamW],
    *,
    step: int,
    readable: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> None:
    """Collective. `path` exists (`checkpoint.begin`); the shards go to `path/learner`.

    Args:
        optimizers: everything that is trained, by a prefix of its names in the checkpoint ("" for the policy).
        readable: where the bytes of a tensor can be read, if not in the tensor (`Offload.readable`).

    Raises:
        CheckpointError: the files cannot be written; names `path` and says why.
    """
    counters = {f"{prefix}num_updates": torch.tensor(one.num_updates) for prefix, one in optimizers.items()}
    tensors = {name: readable(tensor) for name, tensor in _tensors(optimizers).items()}
    try:
        save(tensors | counters | {"step": torch.tensor(step)}, checkpoint_id=path / SHARDS_DIR)
    except (CheckpointException, RuntimeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written: {_reason(error)}") from error


def load_sharded(path: Path, optimizers: Mapping[str, ShardedAdamW]) -> int:
    """Collective. Fill weights and optimizers in place; returns the step of the checkpoint.

    Raises:
        CheckpointError: files are missing or damaged, or belong to a model with other parameters.
    """
    counters = {f"{prefix}num_updates": torch.tensor(0) for prefix in optimizers} | {"step": torch.tensor(0)}
    _load(path, _tensors(optimizers) | counters, is_alone=False)
    for prefix, optimizer in optimizers.items():
        optimizer.set_num_updates(int(counters[f"{prefix}num_updates"]))
    return int(counters["step"])


def load_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill whole tensors on the host with what the policy's optimizer moves, by parameter name; others are not read.

    Not collective, and needs no process group. A tensor of another dtype than the saved one is filled with what
    `Tensor.to` would give; no more than one saved shard of one parameter is in memory beside `weights`.

    Raises:
        CheckpointError: as `load_sharded`.
    """
    _load(path, {f"model.{name}": tensor for name, tensor in weights.items()}, is_alone=True)


def _load(path: Path, tensors: dict[str, Tensor], *, is_alone: bool) -> None:
    """Fill `tensors` in place; collective unless this process `is_alone`."""
    directory = path / SHARDS_DIR
    if not (directory / ".metadata").is_file():
        raise CheckpointError(f"checkpoint file {directory / '.metadata'} is missing; use another checkpoint")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said even if it is asked for
            load(tensors, checkpoint_id=directory, no_dist=is_alone)
    except (CheckpointException, RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"checkpoint {directory} cannot be loaded: {_reason(error)}; it is damaged, or model.path is another model "
            "than the one that was saved, or the critic is"
        ) from error


def _reason(error: BaseException) -> str:
    """One line of what went wrong. A CheckpointException holds an error and a traceback for each rank; what the file
    system said comes first, then the last line, which names what did not fit."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    causes: list[BaseException | None] = [error, *(failure[0] for failure in failures)]
    for cause in causes:  # it grows
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if cause is not None:
            causes.append(cause.__cause__ or cause.__context__)
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:600]


def _tensors(optimizers: Mapping[str, ShardedAdamW]) -> dict[str, Tensor]:
    # What is frozen (the base below LoRA adapters, the reference) is read from model.path again.
    tensors: dict[str, Tensor] = {}
    for prefix, optimizer in optimizers.items():
        tensors |= {f"{prefix}model.{name}": tensor for name, tensor in optimizer.weights().items()}
        tensors |= {f"{prefix}optimizer.{name}": tensor for name, tensor in optimizer.state().items()}
    return tensors
