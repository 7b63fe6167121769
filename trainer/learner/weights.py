"""A model's files, and the part of them that one rank loads."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.errors import ModelError
from trainer.learner.lora import checkpoint_name, is_adapter
from weight_sync.errors import PlanMismatch
from weight_sync.publish.shards import checkpoint_views, local_part, persistent_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from trainer.config.schema import ModelConfig
    from weight_sync.publish.shards import SavedTensor


SAFETENSORS = "*.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BIN_FILES = "pytorch_model*.bin"
HUB_PATTERNS = ["*.json", SAFETENSORS, "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py"]
_NUMBERED = re.compile(r"(.+)-\d+-of-(\d+)\.safetensors")
_OPTIONAL = re.compile(r"(^|\.)lm_head\.weight$|\.inv_freq$")
"""Tensors that a model may do without: an output matrix that is tied or would be a critic's, and what is computed."""

log = logging.getLogger(__name__)


def is_random_init(model: ModelConfig, path: str | Path) -> bool:
    """Whether the weights of the model at `path` are drawn from the seed: `model.random_weights` is about `model.path`
    and no other model."""
    return model.random_weights and Path(path).expanduser() == Path(model.path).expanduser()


def check_weights(directory: Path, *, is_random_init: bool) -> None:
    """Raises ModelError if a directory has no weights that we can read, or damaged ones; or with `is_random_init` if it
    has some, which would not be read."""
    if has_weights(directory) == is_random_init:
        if is_random_init:
            raise ModelError(
                f"{directory} has weights, which model.random_weights=true would not read; set it to false to train "
                "them, or give a directory with a config and no weights"
            )
        found = sorted(path.name for path in directory.iterdir())[:8]
        raise ModelError(
            f"{directory} has no weights (found {found}); allowed: {SAFETENSORS} and {BIN_FILES}: finish the "
            "download, name another directory, or let model.random_weights=true draw those of model.path from the "
            "seed (for tests and benchmarks)"
        )


def has_weights(directory: Path) -> bool:
    """Whether a model can be read from there. Raises ModelError if its files are damaged."""
    return checkpoint_files(directory) is not None or any(directory.glob(BIN_FILES))


def checkpoint_files(directory: Path) -> dict[str, Path] | None:
    """Tensor name -> safetensors file; None if the directory holds no safetensors. Without an index, of all of them.
    Raises ModelError if the index names a file that is missing, a numbered file is missing, a file cannot be read, or
    two hold a tensor of one name."""
    index_path, single = directory / INDEX_FILE, directory / "model.safetensors"
    if index_path.is_file():
        return _indexed(index_path)
    paths = [single] if single.is_file() else sorted(directory.glob(SAFETENSORS))
    files: dict[str, Path] = {}
    for path in paths:
        with open_tensors(path) as reader:
            names = reader.keys()
        if twice := files.keys() & names:
            name = min(twice)
            raise ModelError(
                f"{files[name]} and {path.name} both hold {name}, and no {INDEX_FILE} says which one counts; leave the "
                "files of one model there"
            )
        files |= dict.fromkeys(names, path)
    for stem, total in sorted({(m[1], int(m[2])) for path in paths if (m := _NUMBERED.fullmatch(path.name))}):
        have = [path for path in paths if re.fullmatch(rf"{re.escape(stem)}-\d+-of-0*{total}\.safetensors", path.name)]
        if len(have) != total:
            raise ModelError(
                f"{directory} has {len(have)} of the {total} files {stem}-*-of-*.safetensors; finish the download"
            )
    return files if paths else None


def resolve_model_dir(path: str, *, key: str) -> Path:
    """A local directory with a config.json; a hub name is downloaded into (or found in) the hub cache. `key` names the
    model in the configuration, for messages. Raises ModelError if there is no such directory or hub model."""
    local = Path(path).expanduser()
    if not local.is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ModelError(f"{key} {path!r} is not a directory; give a Hugging Face model directory or hub name")
        local = _download(path, key=key)
    if not (local / "config.json").is_file():
        found = sorted(p.name for p in local.iterdir())[:8]
        raise ModelError(
            f"{key} {path!r} has no config.json (found {found}); give a Hugging Face model directory: "
            "config.json, tokenizer files and safetensors"
        )
    return local


def open_tensors(path: Path) -> safe_open:
    """Raises ModelError if the file is damaged."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read ({error}); it is damaged or truncated, download it again") from error


def _indexed(index_path: Path) -> dict[str, Path]:
    directory = index_path.parent
    try:
        weight_map: dict[str, str] = json.loads(index_path.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ModelError(f"{index_path} is not a safetensors index ({error!r}); download the model again") from error
    missing = sorted({f for f in weight_map.values() if not (directory / f).is_file()})
    if missing:
        raise ModelError(f"{index_path} names {missing[0]} ({len(missing)} files missing); download the model again")
    return {name: directory / file for name, file in weight_map.items()}


def _download(name: str, *, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        local = Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
        if not any(local.glob(SAFETENSORS)):
            local = Path(snapshot_download(name, allow_patterns=[*HUB_PATTERNS, BIN_FILES]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{key} {name!r} is neither a directory here nor a model the hub gives us ({type(error).__name__}: "
            f"{error}); check the name, or download it and give its directory"
        ) from error
    return local


class OwnPart(NamedTuple):
    """The part of a parameter that this rank holds."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    box: tuple[slice, ...]
    """Of the whole, by dimension: its rows, and with tensor parallelism its columns."""
    tensor: torch.Tensor
    """Shares memory with the model."""

    @property
    def first_row(self) -> int:
        return self.box[0].start if self.box else 0


def own_parts(model: nn.Module) -> Iterator[OwnPart]:
    """This rank's part of every parameter, then every persistent buffer, tied ones once; adapters are not among
    them."""
    for name, param in (*model.named_parameters(), *persistent_buffers(model)):
        if not is_adapter(name):
            part = local_part(param)
            yield OwnPart(checkpoint_name(name), tuple(param.shape), part.box, part.tensor)


def load_rows(model: nn.Module, files: dict[str, Path]) -> bool:
    """Copy this rank's part out of the files, cast to the parameter's dtype. Of fused experts: its own experts. A
    warning names tensors that the model has no place for. Raises ModelError if a tensor has another shape, or a file is
    damaged.

    Returns:
        False, with nothing copied, if the names differ from those that the model saves: such a checkpoint needs
        transformers' own conversion (old names).
    """
    rows = {part.name: part for part in own_parts(model)}
    try:
        views = checkpoint_views(model, {name: part.shape for name, part in rows.items()})
    except PlanMismatch:
        return False
    if any(view.name not in files for view in views):
        return False
    for path in {files[view.name]: None for view in views}:
        with open_tensors(path) as reader:
            for view in views:
                if files[view.name] == path:
                    _read_into(rows[view.param], view, reader, path)
    unread = sorted(name for name in files.keys() - {view.name for view in views} if not _OPTIONAL.search(name))
    if unread:
        log.warning(
            "%d tensors in %s are not trained, the model that its config.json describes has no place for them: %s; "
            "check that config and weights belong together",
            len(unread), files[unread[0]].parent, ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else ""),
        )  # fmt: skip
    return True


def _read_into(part: OwnPart, view: SavedTensor, reader: safe_open, path: Path) -> None:
    source = reader.get_slice(view.name)
    if tuple(source.get_shape()) != view.shape:
        raise ModelError(
            f"{path}: {view.name} has shape {tuple(source.get_shape())}, the model's config.json asks for "
            f"{view.shape}; config and weights belong to different models"
        )
    box = part.box
    if not view.is_whole:
        start, stop = view.held_rows(box[0].start, box[0].stop)
        if start == stop:  # an expert of another rank
            return
        box = (slice(start, stop),)
    target = view.view(part.tensor, start=part.first_row)
    if target.numel():
        # A scalar has no rows to slice.
        target.copy_(source[box] if view.shape else reader.get_tensor(view.name))


def init_weights(model: PreTrainedModel, *, seed: int, device: torch.device) -> None:
    """Fill the model from the seed: normal matrices, norms of one, biases of zero. Buffers stay unchanged.

    Every rank draws the whole parameter, one at a time, and keeps its part: the number of ranks does not matter.
    `device` is the one that computes, wherever the parts are kept: generators of different devices differ.
    """
    std = getattr(model.config.get_text_config(), "initializer_range", None)
    std = 0.02 if std is None else float(std)
    buffers = {name for name, _ in persistent_buffers(model)}
    for index, part in enumerate(own_parts(model)):
        if part.name in buffers:
            continue
        if len(part.shape) == 1:
            part.tensor.fill_(0.0 if part.name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + index)
        whole = torch.empty(part.shape, device=device, dtype=torch.float32).normal_(0.0, std, generator=generator)
        part.tensor.copy_(whole[part.box])
