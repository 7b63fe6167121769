"""Keeps held-out prompts out of training where a path names more files than it seems to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import DataError
from rollout.prompts.files import FILE_READERS, files_of
from rollout.prompts.readers import resolve_reader

if TYPE_CHECKING:
    from rollout.prompts.readers import SourceSpec

_NUM_SHOWN = 3


def refuse_overlap(
    train: SourceSpec, held_out: SourceSpec, *, key: str = "task.eval_path", split_key: str = "task.eval_split"
) -> None:
    """Readers of files know no splits: a directory with `train-0.jsonl` and `test-0.jsonl` is read whole for both sets.

    One file for both, named twice, is a choice; so is one directory with the same split for both.

    Args:
        key, split_key: what names the path and the split of `held_out`.

    Raises:
        DataError: both sets read a file, and nobody has chosen that; or a path names nothing to read.
    """
    shared = sorted(_files(train) & _files(held_out))
    if not shared or _is_chosen(train, held_out):
        return
    names = ", ".join(str(path) for path in shared[:_NUM_SHOWN])
    more = f" and {len(shared) - _NUM_SHOWN} more" if len(shared) > _NUM_SHOWN else ""
    raise DataError(
        f"task.train_path={train.path} and {key}={held_out.path} both read {names}{more}: files have no "
        f"splits, so task.train_split={train.split} and {split_key}={held_out.split} do not tell them apart; name the "
        "file or directory of each, or set task.reader=hf, which finds the splits of a directory by the names of its "
        "files"
    )


def _files(spec: SourceSpec) -> set[Path]:
    """What a reader of files reads, links followed; empty for the other readers."""
    reader = resolve_reader(spec) if spec.reader == "auto" else spec.reader
    if reader not in FILE_READERS.values():
        return set()
    return {path.resolve() for path in files_of(spec.path, reader)}


def _is_chosen(train: SourceSpec, held_out: SourceSpec) -> bool:
    train_path, held_out_path = (Path(spec.path).expanduser().resolve() for spec in (train, held_out))
    return train_path == held_out_path and (train_path.is_file() or train.split == held_out.split)
