"""Model and optimizer as torch distributed checkpoints: every rank writes its own shards, any number of ranks reads."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainer.learner.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.learner.optim import ShardedAdamW

SHARDS_DIR = "learner"
"""Inside a checkpoint directory."""


def save_sharded(path: Path, *, model: nn.Module, optimizer: ShardedAdamW, step: int) -> None:
    """Collective. `path` exists (`checkpoint.begin`); the shards go to `path/learner`."""
    counters = {"step": torch.tensor(step), "num_updates": torch.tensor(optimizer.num_updates)}
    save(_tensors(model, optimizer) | counters, checkpoint_id=path / SHARDS_DIR)


def load_sharded(path: Path, *, model: nn.Module, optimizer: ShardedAdamW) -> int:
    """Collective. Fill model and optimizer in place; returns the step of the checkpoint.

    Raises:
        CheckpointError: files are missing or damaged, or belong to a model with other parameters.
    """
    directory = path / SHARDS_DIR
    if not (directory / ".metadata").is_file():
        raise CheckpointError(f"checkpoint file {directory / '.metadata'} is missing; use another checkpoint")
    counters = {"step": torch.tensor(0), "num_updates": torch.tensor(0)}
    try:
        load(_tensors(model, optimizer) | counters, checkpoint_id=directory)
    except (CheckpointException, RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
        # CheckpointException holds one error per rank; the first line names what did not fit.
        reason = " ".join(str(error).split())[:600]
        raise CheckpointError(
            f"checkpoint {directory} cannot be loaded: {reason}; it is damaged, or model.path is another model "
            "than the one that was saved"
        ) from error
    optimizer.set_num_updates(int(counters["num_updates"]))
    return int(counters["step"])


def _tensors(model: nn.Module, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    # What is frozen (the base below LoRA adapters) is read from model.path again.
    weights = {f"model.{name}": param.detach() for name, param in model.named_parameters() if param.requires_grad}
    moments = {f"optimizer.{name}": tensor for name, tensor in optimizer.state().items()}
    return weights | moments
