"""Where a model lies, and which of its files hold weights. Imports without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from trainer.learner.errors import ModelError

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

SAFETENSORS = "*.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BIN_FILES = "pytorch_model*.bin"
HUB_PATTERNS = ["*.json", SAFETENSORS, "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py"]
_NUMBERED = re.compile(r"(.+)-\d+-of-(\d+)\.safetensors")


def is_drawn(model: ModelConfig, path: str | Path) -> bool:
    """Whether the weights of the model at `path` are drawn from the seed: `model.random_weights` speaks of `model.path`
    and of no other model."""
    return model.random_weights and Path(path).expanduser() == Path(model.path).expanduser()


def check_weights(directory: Path, *, is_drawn: bool) -> None:
    """Whether a directory has what it is named for: weights, or with `is_drawn` a config alone.

    Raises:
        ModelError: it has no weights that we can read, or has some that would not be read; or they are damaged.
    """
    if has_weights(directory) == is_drawn:
        if is_drawn:
            raise ModelError(
                f"{directory} has weights, which model.random_weights=true would not read; set it to false to train "
                "them, or give a directory with a config and no weights"
            )
        found = sorted(path.name for path in directory.iterdir())[:8]
        raise ModelError(
            f"{directory} has no weights (found {found}); allowed are {SAFETENSORS} and {BIN_FILES}: finish the "
            "download, name another directory, or let model.random_weights=true draw those of model.path from the "
            "seed (for tests and benchmarks)"
        )


def has_weights(directory: Path) -> bool:
    """Whether a model can be read from there. Raises ModelError if its files are damaged."""
    return checkpoint_files(directory) is not None or any(directory.glob(BIN_FILES))


def checkpoint_files(directory: Path) -> dict[str, Path] | None:
    """Tensor name -> safetensors file; None if the directory holds no safetensors.

    Without an index, tensors are looked for in all of them.

    Raises:
        ModelError: the index names a file that is missing, a numbered file is missing, a file cannot be read, or two
            hold a tensor of one name.
    """
    index_path, single = directory / INDEX_FILE, directory / SINGLE_FILE
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
    _check_numbers(paths)
    return files if paths else None


def resolve_model_dir(path: str, *, key: str) -> Path:
    """A local directory with a config.json; a hub name is downloaded into (or found in) the hub cache. `key` is what
    names it in the configuration, for messages.

    Raises:
        ModelError: there is no such directory or hub model.
    """
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


def _check_numbers(paths: list[Path]) -> None:
    """Raises ModelError if one of several numbered files is missing."""
    series = {(found[1], int(found[2])) for path in paths if (found := _NUMBERED.fullmatch(path.name))}
    for stem, total in sorted(series):
        have = [path for path in paths if re.fullmatch(rf"{re.escape(stem)}-\d+-of-0*{total}\.safetensors", path.name)]
        if len(have) != total:
            raise ModelError(
                f"{have[0].parent} has {len(have)} of the {total} files {stem}-*-of-*.safetensors; finish the download"
            )


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
