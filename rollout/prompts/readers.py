"""Reads the rows of a data set: JSONL, Parquet, or a Hugging Face data set (saved directory or hub name).

A reader returns plain rows and knows nothing of tokenizers: `rendering.py` turns rows into prompts. Heavy libraries
are imported only by the reader that needs them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollout.errors import DataError
from rollout.prompts.arithmetic import operand_pairs, question
from rollout.prompts.files import FILE_READERS, files_of, missing, reader_of_suffix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ReaderName = Literal["auto", "arithmetic", "jsonl", "parquet", "hf"]

BUILTIN_ARITHMETIC = "builtin:arithmetic"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One data set and how its rows become prompts: the plain values of the `task` section of the config.

    Example:
        SourceSpec(path="data/math.jsonl", reader="auto", split="train", prompt_column="prompt",
                   answer_column="answer", answer_required=True, reward_column="", reward_column_required=False,
                   rewards_with_answer=frozenset(), apply_chat_template=True, system_prompt="", dedup=True,
                   max_prompt_tokens=512, overlong_prompts="filter", max_operand=49)
    """

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
    """Whether rows without an answer, and without a reward of their own, are an error (the reward compares with it)."""
    reward_column: str
    """Column that names the reward of a row, as `answer_column`; null, empty and not there leave it to the task."""
    reward_column_required: bool
    """Whether a data set in which no row has that column is an error."""
    rewards_with_answer: frozenset[str]
    """Names of rewards that compare with an answer."""
    apply_chat_template: bool
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the chat template shows."""
    system_prompt: str
    dedup: bool
    """Whether of rows with the same prompt, answer and reward only the first stays."""
    max_prompt_tokens: int
    overlong_prompts: Literal["error", "filter"]
    max_operand: int
    """builtin:arithmetic only."""
    keep_messages: bool = False
    """Whether prompts keep the chat messages that they were made of: as much memory again as their text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One raw row. `row_id` is stable as long as the data set is; `where` is for messages, e.g. `a.jsonl, line 3`."""

    row_id: str
    where: str
    columns: Mapping[str, Any]


def read_rows(spec: SourceSpec) -> list[Row]:
    """All rows of the data set, in its own order.

    Raises:
        DataError: the data set is missing, unreadable or empty, or has no such split.
    """
    readers: dict[str, Callable[[SourceSpec], list[Row]]] = {
        "arithmetic": _read_arithmetic,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "hf": _read_hugging_face,
    }
    kind = resolve_reader(spec) if spec.reader == "auto" else spec.reader
    if kind not in readers:
        raise DataError(f"unknown reader {kind!r}; allowed: auto, {', '.join(readers)}; set task.reader")
    rows = readers[kind](spec)
    if not rows:
        raise DataError(f"data set {spec.path!r} has no rows (read as {kind}); give one with at least one prompt")
    return rows


def resolve_reader(spec: SourceSpec) -> str:
    """Which reader `auto` means for a path: by its suffix, by what a directory holds, else a Hugging Face name."""
    if spec.path == BUILTIN_ARITHMETIC:
        return "arithmetic"
    if spec.path.startswith("builtin:"):
        raise DataError(f"there is no data set {spec.path!r}; the only built-in one is {BUILTIN_ARITHMETIC!r}")
    by_suffix = reader_of_suffix(spec.path)
    if by_suffix is not None:
        return by_suffix
    path = Path(spec.path).expanduser()
    if path.is_dir():
        kinds = {FILE_READERS[p.suffix] for p in path.iterdir() if p.suffix in FILE_READERS}
        if len(kinds) > 1:
            raise DataError(f"directory {spec.path!r} mixes JSONL and Parquet files; set task.reader to one of them")
        return kinds.pop() if kinds else "hf"
    if path.is_file():
        raise DataError(
            f"cannot tell how to read {spec.path!r} by its suffix {path.suffix!r}; known: {', '.join(FILE_READERS)}; "
            "rename it, or set task.reader to jsonl or parquet"
        )
    if spec.path.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(spec.path):
        raise missing(spec.path)
    return "hf"


def _read_arithmetic(spec: SourceSpec) -> list[Row]:
    if spec.path != BUILTIN_ARITHMETIC:
        raise DataError(
            f"reader 'arithmetic' makes its own data and cannot read {spec.path!r}; "
            f"use {BUILTIN_ARITHMETIC!r} as the path, or task.reader=auto"
        )
    pairs = operand_pairs(spec.split, max_operand=spec.max_operand)
    return [
        Row(
            row_id=f"arithmetic/{a}+{b}",
            where=f"{BUILTIN_ARITHMETIC}, {a}+{b}",
            columns={spec.prompt_column: question(a, b), spec.answer_column: str(a + b)},
        )
        for a, b in pairs
    ]


def _read_jsonl(spec: SourceSpec) -> list[Row]:
    rows: list[Row] = []
    for path, label in _labelled(files_of(spec.path, "jsonl")):
        for number, text in _lines(path):
            try:
                columns = json.loads(text)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not valid JSON ({error.msg}, column {error.colno}); "
                    "a .jsonl file holds one JSON object per line"
                ) from error
            except (ValueError, RecursionError) as error:  # valid JSON, and more than Python reads
                raise DataError(
                    f"{path}, line {number}: cannot be read ({error}); write an integer of thousands of digits as a "
                    "string, and nest less deeply"
                ) from error
            if not isinstance(columns, dict):
                raise DataError(
                    f"{path}, line {number}: got a JSON {type(columns).__name__}; each line must be one JSON object"
                )
            rows.append(Row(row_id=f"{label}/{number}", where=f"{path}, line {number}", columns=columns))
    return rows


def _labelled(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """With what the ids of their rows begin with: names without suffix, or with it where these are not unique."""
    stems = [path.stem for path in paths]
    are_unique = len(set(stems)) == len(stems)
    return [(path, path.stem if are_unique else path.name) for path in paths]


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


def _read_parquet(spec: SourceSpec) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[Row] = []
    for path, label in _labelled(files_of(spec.path, "parquet")):
        try:
            table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} is not a readable Parquet file: {error}; write it again, or set task.reader"
            ) from error
        for index, columns in enumerate(table.to_pylist()):
            rows.append(Row(row_id=f"{label}/{index}", where=f"{path}, row {index}", columns=columns))
    return rows


def _read_hugging_face(spec: SourceSpec) -> list[Row]:
    if not Path(spec.path).expanduser().exists() and not _HUB_NAME.fullmatch(spec.path):
        raise missing(spec.path)
    splits = _load_hugging_face(spec)
    if spec.split not in splits:
        raise DataError(
            f"data set {spec.path!r} has no split {spec.split!r}; its splits are {', '.join(sorted(splits))}; "
            "set task.train_split, task.eval_split or the split of task.eval_sets.NAME"
        )
    return [
        Row(row_id=f"{spec.split}/{index}", where=f"{spec.path}, {spec.split} row {index}", columns=columns)
        for index, columns in enumerate(splits[spec.split])
    ]


def _load_hugging_face(spec: SourceSpec) -> dict[str, Any]:
    """Split name -> iterable of rows. A data set saved without splits counts as the split that was asked for."""
    import datasets
    from datasets.exceptions import DatasetsError

    path = Path(spec.path).expanduser()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = datasets.load_from_disk(str(path))
            return _by_name(saved) if isinstance(saved, datasets.DatasetDict) else {spec.split: saved}
        if path.is_dir():
            return _by_name(datasets.load_dataset(str(path)))
        name, _, config = spec.path.partition(":")
        return _by_name(datasets.load_dataset(name, config if config else None))
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        # OSError covers the hub's connection and file-not-found errors; ValueError a missing or unknown config;
        # RuntimeError a data set that is a loading script, which Datasets 4 and later do not run.
        raise DataError(
            f"cannot load Hugging Face data set {spec.path!r}: {type(error).__name__}: {error}; check the name "
            "(owner/name, or owner/name:config), the network, or give a local file or directory"
        ) from error


def _by_name(splits: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): rows for name, rows in splits.items()}
