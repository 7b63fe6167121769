"""Data sets as plain rows: readers of JSONL, Parquet and Hugging Face data, columns, duplicates, overlap.

`render_prompts.py` turns rows into prompts. Only the reader that needs a heavy library imports it.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rollout.errors import DataError
from rollout.prompts.arithmetic import operand_pairs, question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollout.types import Prompt


FILE_READERS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
"""Suffix -> its reader. Files have no splits: a reader of files reads all that its path names."""

ReaderName = Literal["auto", "arithmetic", "jsonl", "parquet", "hf"]

BUILTIN_ARITHMETIC = "builtin:arithmetic"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """One data set and how its rows become prompts: the plain values of the `task` section of the config."""

    path: str
    """A file, a directory of files, a directory written by `save_to_disk`, a hub name (`owner/name` or
    `owner/name:config`), or `builtin:arithmetic`."""
    reader: ReaderName
    split: str
    """Hugging Face and builtin data sets only."""
    prompt_column: str
    """A column; `a.b` reaches into a struct column `a`."""
    answer_column: str
    answer_required: bool
    """Whether a row without an answer and without its own reward is an error."""
    reward_column: str
    """Names the reward of a row; null, empty and missing leave it to the task."""
    reward_column_required: bool
    """Whether a data set without any such column is an error."""
    rewards_with_answer: frozenset[str]
    """Names of rewards that compare with an answer."""
    apply_chat_template: bool
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the chat template shows."""
    system_prompt: str
    dedup: bool
    """Keep only the first of several rows with the same prompt, answer and reward."""
    max_prompt_tokens: int
    overlong_prompts: Literal["error", "filter"]
    max_operand: int
    """builtin:arithmetic only."""
    keep_messages: bool = False
    """Keep the chat messages of prompts: as much memory again as their text."""

    @property
    def used_reader(self) -> str:
        """`auto` goes by the suffix of the path, then by what a directory contains; else by a Hugging Face name."""
        return _resolve(self.path) if self.reader == "auto" else self.reader


class Row(NamedTuple):
    """One raw row. `row_id` is stable as long as the data set is; `where` is for messages, e.g. `a.jsonl, line 3`."""

    row_id: str
    where: str
    columns: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """See `get_column`."""
        return get_column(self.columns, name)

    def error(self, text: str) -> DataError:
        return DataError(f"{self.where}: {text}")

    def lacks(self, name: str, setting: str) -> DataError:
        """The error for a missing column, which `setting` names."""
        existing = ", ".join(self.columns) if self.columns else "none"
        return self.error(f"no column {name!r}; the columns are: {existing}; set {setting}")

    def holds(self, name: str, wanted: str) -> DataError:
        """The error for a column of the wrong type."""
        value = self.get(name)
        return self.error(f"column {name!r} holds {type(value).__name__} {value!r:.80}; {wanted}")


def read_rows(spec: DatasetSpec) -> list[Row]:
    """All rows in the order of the data set. Raises DataError if it is missing, unreadable or empty, or lacks the
    split."""
    readers: dict[str, Callable[[DatasetSpec], Iterator[Row]]] = {
        "arithmetic": _read_arithmetic,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "hf": _read_hugging_face,
    }
    reader = spec.used_reader
    if reader not in readers:
        raise DataError(f"unknown reader {reader!r}; allowed: auto, {', '.join(readers)}; set task.reader")
    rows = list(readers[reader](spec))
    if not rows:
        raise DataError(f"data set {spec.path!r} has no rows (read as {reader}); give one with at least one prompt")
    return rows


def reader_of_suffix(path: str) -> str | None:
    """The reader that `auto` takes for the suffix alone; None if that does not decide it."""
    return FILE_READERS.get(Path(path).suffix)


def _resolve(given: str) -> str:
    if given == BUILTIN_ARITHMETIC:
        return "arithmetic"
    if given.startswith("builtin:"):
        raise DataError(f"there is no data set {given!r}; the only built-in one is {BUILTIN_ARITHMETIC!r}")
    if (by_suffix := reader_of_suffix(given)) is not None:
        return by_suffix
    path = Path(given).expanduser()
    if path.is_dir():
        kinds = {FILE_READERS[p.suffix] for p in path.iterdir() if p.suffix in FILE_READERS}
        if len(kinds) > 1:
            raise DataError(f"directory {given!r} mixes JSONL and Parquet files; set task.reader to one of them")
        return kinds.pop() if kinds else "hf"
    if path.is_file():
        raise DataError(
            f"cannot tell how to read {given!r} by its suffix {path.suffix!r}; known: {', '.join(FILE_READERS)}; "
            "rename it, or set task.reader to jsonl or parquet"
        )
    if given.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(given):
        raise _missing(given)
    return "hf"


def _missing(given: str) -> DataError:
    """Suggests similar names."""
    path = Path(given).expanduser()
    if path.parent.is_dir():
        names = [p.name for p in path.parent.iterdir()]
        near = [str(path.parent / n) for n in difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)]
        hint = f"did you mean {' or '.join(near)}?" if near else f"nothing in {path.parent} has a similar name"
    else:
        hint = f"its directory {path.parent} does not exist either"
    return DataError(f"data set {given!r} does not exist; {hint} (paths are relative to {Path.cwd()})")


def _files_of(given: str, reader: str) -> list[Path]:
    """The file, or those of the directory that this reader reads, by name."""
    path = Path(given).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise _missing(given)
    suffixes = [suffix for suffix, name in FILE_READERS.items() if name == reader]
    files = sorted(p for p in path.iterdir() if p.suffix in suffixes)
    if not files:
        raise DataError(f"directory {given!r} holds no {' or '.join(suffixes)} file; check the path")
    return files


def _labelled_files(spec: DatasetSpec, reader: str) -> list[tuple[Path, str]]:
    """Each with the prefix of its row ids: its name without suffix, or with it where names are not unique."""
    paths = _files_of(spec.path, reader)
    are_unique = len({path.stem for path in paths}) == len(paths)
    return [(path, path.stem if are_unique else path.name) for path in paths]


def _read_arithmetic(spec: DatasetSpec) -> Iterator[Row]:
    if spec.path != BUILTIN_ARITHMETIC:
        raise DataError(
            f"reader 'arithmetic' makes its own data and cannot read {spec.path!r}; "
            f"use {BUILTIN_ARITHMETIC!r} as the path, or task.reader=auto"
        )
    for a, b in operand_pairs(spec.split, max_operand=spec.max_operand):
        columns = {spec.prompt_column: question(a, b), spec.answer_column: str(a + b)}
        yield Row(f"arithmetic/{a}+{b}", f"{BUILTIN_ARITHMETIC}, {a}+{b}", columns)


def _read_jsonl(spec: DatasetSpec) -> Iterator[Row]:
    for path, label in _labelled_files(spec, "jsonl"):
        for number, text in _lines(path):
            where = f"{path}, line {number}"
            try:
                columns = json.loads(text)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where}: not valid JSON ({error.msg}, column {error.colno}); a .jsonl file holds one JSON object "
                    "per line"
                ) from error
            except (ValueError, RecursionError) as error:  # valid JSON, and more than Python reads
                raise DataError(
                    f"{where}: cannot be read ({error}); write an integer of thousands of digits as a string, and nest "
                    "less deeply"
                ) from error
            if not isinstance(columns, dict):
                raise DataError(f"{where}: got a JSON {type(columns).__name__}; each line must be one JSON object")
            yield Row(f"{label}/{number}", where, columns)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their numbers, from 1."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield number, text
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check that it is a readable file") from error


def _read_parquet(spec: DatasetSpec) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path, label in _labelled_files(spec, "parquet"):
        try:
            batches = [batch.to_pylist() for batch in pq.ParquetFile(path).iter_batches()]
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} is not a readable Parquet file: {error}; write it again, or set task.reader"
            ) from error
        for index, columns in enumerate(chain.from_iterable(batches)):
            yield Row(f"{label}/{index}", f"{path}, row {index}", columns)


def _read_hugging_face(spec: DatasetSpec) -> Iterator[Row]:
    if not Path(spec.path).expanduser().exists() and not _HUB_NAME.fullmatch(spec.path):
        raise _missing(spec.path)
    splits = _load_hugging_face(spec)
    if spec.split not in splits:
        raise DataError(
            f"data set {spec.path!r} has no split {spec.split!r}; its splits are {', '.join(sorted(splits))}; "
            "set task.train_split, task.eval_split or the split of task.eval_sets.NAME"
        )
    for index, columns in enumerate(splits[spec.split]):
        yield Row(f"{spec.split}/{index}", f"{spec.path}, {spec.split} row {index}", columns)


def _load_hugging_face(spec: DatasetSpec) -> dict[str, Any]:
    """Split name -> iterable of rows. A data set saved without splits counts as the wanted split."""
    import datasets
    from datasets.exceptions import DatasetsError

    path = Path(spec.path).expanduser()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(str(path))
            if not isinstance(loaded, datasets.DatasetDict):
                return {spec.split: loaded}
        elif path.is_dir():
            loaded = datasets.load_dataset(str(path))
        else:
            name, _, config = spec.path.partition(":")
            loaded = datasets.load_dataset(name, config if config else None)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        # OSError: connection to the hub, or no such file; ValueError: no such config; RuntimeError: a loading script,
        # which Datasets 4 and later do not run.
        raise DataError(
            f"cannot load Hugging Face data set {spec.path!r}: {type(error).__name__}: {error}; check the name "
            "(owner/name, or owner/name:config), the network, or give a local file or directory"
        ) from error
    return {str(name): rows for name, rows in loaded.items()}


MISSING = object()
"""Of `get_column`: there is no such column."""


def get_column(columns: Mapping[str, Any], name: str) -> Any:
    """The value of a column, `a.b` reaching into a struct; `MISSING` if there is none."""
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def numbers(prompts: Sequence[Prompt], name: str, *, setting: str) -> list[float | None]:
    """A column of the prompts' metadata as one finite number per prompt; None where the data set has null. Raises
    DataError for a missing column or anything else; `setting`: the configuration key that names the column."""
    return [_number(prompt, name, setting) for prompt in prompts]


def _number(prompt: Prompt, name: str, setting: str) -> float | None:
    value = get_column(prompt.metadata, name)
    if value is MISSING:
        existing = ", ".join(prompt.metadata) if prompt.metadata else "none"
        raise DataError(
            f"prompt {prompt.prompt_id}: no column {name!r}; the columns besides prompt and answer are: {existing}; "
            f"set {setting}"
        )
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer of more than 308 digits
            if math.isfinite(value):
                return float(value)
    raise DataError(
        f"prompt {prompt.prompt_id}: column {name!r} holds {type(value).__name__} {value!r:.80}; {setting} names a "
        "column of finite numbers"
    )


def drop_duplicates(rows: Sequence[Row], spec: DatasetSpec) -> list[Row]:
    """The first row of each prompt, answer and reward, compared as in the data set. Rows without a prompt stay, for
    `render` to refuse."""
    names = (spec.prompt_column, spec.answer_column, *([spec.reward_column] if spec.reward_column else []))
    kept: dict[object, Row] = {}
    for row in rows:
        values = [row.get(name) for name in names]
        # The type is part of the key: a missing answer is not the text "null".
        typed = [["missing"] if value is MISSING else [type(value).__name__, value] for value in values]
        digest = hashlib.blake2b(json.dumps(typed, sort_keys=True, default=repr).encode(), digest_size=16).digest()
        kept.setdefault(row.row_id if values[0] is MISSING else digest, row)
    return list(kept.values())


def drop_overlong(prompts: Sequence[Prompt], spec: DatasetSpec) -> tuple[Prompt, ...]:
    """The prompts of at most `spec.max_prompt_tokens` tokens. Raises DataError if all are too long, or one is and
    `spec.overlong_prompts` is "error"."""
    limit = f"task.max_prompt_tokens={spec.max_prompt_tokens}"
    kept = tuple(p for p in prompts if len(p.token_ids) <= spec.max_prompt_tokens)
    overlong = [p for p in prompts if len(p.token_ids) > spec.max_prompt_tokens]
    if overlong and spec.overlong_prompts == "error":
        shown = ", ".join(f"{p.prompt_id} ({len(p.token_ids)} tokens)" for p in overlong[:_NUM_SHOWN])
        more = ", ..." if len(overlong) > _NUM_SHOWN else ""
        raise DataError(
            f"{len(overlong)} of {len(prompts)} prompts are longer than {limit}: {shown}{more}; raise the limit, or "
            "set task.overlong_prompts=filter to drop them"
        )
    if not kept:
        shortest = min(len(p.token_ids) for p in prompts)
        raise DataError(
            f"all {len(prompts)} prompts are longer than {limit} (the shortest has {shortest} tokens); raise the limit"
        )
    return kept


def check_overlap(
    train: DatasetSpec, held_out: DatasetSpec, *, key: str = "task.eval_path", split_key: str = "task.eval_split"
) -> None:
    """Refuses files that both sets read by accident: readers of files know no splits, so a directory with
    `train-0.jsonl` and `test-0.jsonl` is read whole for both. The same file for both, or the same directory and split,
    is a choice.

    Args:
        key, split_key: of the path and the split of `held_out`, for the message.

    Raises:
        DataError: both sets read a file by accident, or a path names nothing to read.
    """
    shared = sorted(_files(train) & _files(held_out))
    first, second = (Path(spec.path).expanduser().resolve() for spec in (train, held_out))
    is_chosen = first == second and (first.is_file() or train.split == held_out.split)
    if not shared or is_chosen:
        return
    names = ", ".join(str(path) for path in shared[:_NUM_SHOWN])
    more = f" and {len(shared) - _NUM_SHOWN} more" if len(shared) > _NUM_SHOWN else ""
    raise DataError(
        f"task.train_path={train.path} and {key}={held_out.path} both read {names}{more}: files have no "
        f"splits, so task.train_split={train.split} and {split_key}={held_out.split} do not tell them apart; name the "
        "file or directory of each, or set task.reader=hf, which finds the splits of a directory by the names of its "
        "files"
    )


def _files(spec: DatasetSpec) -> set[Path]:
    """What a reader of files reads, links followed; empty for the other readers."""
    if (reader := spec.used_reader) not in FILE_READERS.values():
        return set()
    return {path.resolve() for path in _files_of(spec.path, reader)}
