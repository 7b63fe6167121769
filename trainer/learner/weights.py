"""Filling a sharded model: every rank reads only its own rows, from safetensors or from the seed."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.learner.errors import ModelError
from trainer.learner.lora import checkpoint_name, is_adapter
from trainer.learner.model_files import open_tensors
from weight_sync.checkpoint_names import checkpoint_views, persistent_buffers
from weight_sync.errors import PlanMismatch
from weight_sync.layout import chunk_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from safetensors import safe_open
    from transformers import PreTrainedModel

    from weight_sync.checkpoint_names import SavedTensor


log = logging.getLogger(__name__)

_NOT_MISSED = re.compile(r"(^|\.)lm_head\.weight$|\.inv_freq$")
"""Tensors that a model may do without: an output matrix that is tied or would be a critic's, and what is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRows:
    """The part of a parameter that this rank holds."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    stop: int
    tensor: torch.Tensor
    """[stop - start, ...], shares memory with the model."""


def local_rows(model: nn.Module) -> Iterator[LocalRows]:
    """This rank's rows of every parameter and persistent buffer, tied ones once; adapters are not among them.

    Raises ModelError for a sharding other than by rows.
    """
    for raw_name, param in (*model.named_parameters(), *persistent_buffers(model)):
        if is_adapter(raw_name):
            continue
        name = checkpoint_name(raw_name)
        shape, rows = tuple(param.shape), param.shape[0] if param.ndim else 1
        if not isinstance(param, DTensor):
            yield LocalRows(name=name, shape=shape, start=0, stop=rows, tensor=param.detach())
            continue
        (placement,) = param.placements
        match placement:
            case Replicate():
                start, stop = 0, rows
            case Shard(dim=0):
                start, stop = chunk_rows(rows, param.device_mesh.size(), param.device_mesh.get_local_rank())
            case _:
                raise ModelError(f"{name} is sharded as {placement}; only rows (dimension 0) are supported")
        yield LocalRows(name=name, shape=shape, start=start, stop=stop, tensor=param.to_local().detach())


def load_rows(model: nn.Module, files: dict[str, Path]) -> bool:
    """Copy this rank's rows out of the files, cast to the parameter's dtype. Of fused experts: its own experts.

    Tensors that the model has no place for are warned of.

    Returns:
        False, with nothing copied, if the names differ from those that the model saves: such a checkpoint needs
        transformers' own conversion (old names).

    Raises:
        ModelError: a tensor has another shape, or a file is damaged.
    """
    rows = {part.name: part for part in local_rows(model)}
    try:
        views = checkpoint_views(model, {name: part.shape for name, part in rows.items()})
    except PlanMismatch:
        return False
    if any(view.name not in files for view in views):
        return False
    by_file: dict[Path, list[SavedTensor]] = {}
    for view in views:
        by_file.setdefault(files[view.name], []).append(view)
    for path, wanted in by_file.items():
        with open_tensors(path) as reader:
            for view in wanted:
                _read_into(rows[view.param], view, reader, path)
    _tell_unread(files, read={view.name for view in views})
    return True


def _tell_unread(files: dict[str, Path], *, read: set[str]) -> None:
    unread = sorted(name for name in files.keys() - read if not _NOT_MISSED.search(name))
    if unread:
        log.warning(
            "%d tensors in %s are not trained, the model that its config.json describes has no place for them: %s; "
            "look whether config and weights belong together",
            len(unread), files[unread[0]].parent, ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else ""),
        )  # fmt: skip


def _read_into(part: LocalRows, view: SavedTensor, reader: safe_open, path: Path) -> None:
    source = reader.get_slice(view.name)
    if tuple(source.get_shape()) != view.shape:
        raise ModelError(
            f"{path}: {view.name} has shape {tuple(source.get_shape())}, the model's config.json asks for "
            f"{view.shape}; config and weights belong to different models"
        )
    start, stop = view.held_rows(part.start, part.stop)
    if start < stop:
        # A scalar has no rows to slice.
        values = source[start:stop] if view.shape else reader.get_tensor(view.name)
        view.view(part.tensor, start=part.start).copy_(values)


def copy_rows(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy this rank's rows out of whole tensors on the CPU (the slow way in, for checkpoints that need conversion)."""
    for part in local_rows(model):
        if part.name not in state:
            raise ModelError(f"the checkpoint has no tensor for {part.name}; config and weights do not belong together")
        part.tensor.copy_(state[part.name][part.start : part.stop])


def init_rows(model: PreTrainedModel, *, seed: int, device: torch.device) -> None:
    """Fill the model from the seed: normal matrices, norms of one, biases of zero. Buffers stay as they are.

    Every rank draws the whole parameter on `device`, one at a time, and keeps its rows: the result does not depend on
    the number of ranks, and no rank ever holds more than one whole parameter. Generators of different devices give
    different numbers, so `device` is the one that computes, wherever the rows are kept: a reference that is kept on
    the host is the first policy all the same.
    """
    std = getattr(model.config.get_text_config(), "initializer_range", None)
    std = 0.02 if std is None else float(std)
    buffers = {name for name, _ in persistent_buffers(model)}
    for index, part in enumerate(local_rows(model)):
        if part.name in buffers:
            continue
        if len(part.shape) == 1:
            part.tensor.fill_(0.0 if part.name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + index)
        whole = torch.empty(part.shape, device=device, dtype=torch.float32).normal_(0.0, std, generator=generator)
        part.tensor.copy_(whole[part.start : part.stop])
