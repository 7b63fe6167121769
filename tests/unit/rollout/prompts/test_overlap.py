"""Training and held-out prompts do not come from the same files, unless someone wants that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rollout.errors import DataError
from rollout.prompts.datasets import check_overlap
from rollout.prompts.prompt_source import load_prompts
from tests.unit.rollout.prompts.test_loading import ROWS, write_jsonl

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.rollout.prompts.test_loading import MakeSpec


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Of each split one file, as data sets of the hub have them."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train-0.jsonl", ROWS[:2])
    write_jsonl(folder / "test-0.jsonl", ROWS[2:])
    return folder


@pytest.mark.parametrize("reader", ["auto", "jsonl"])
def test_a_directory_that_is_read_whole_for_both_sets_is_refused(data: Path, make_spec: MakeSpec, reader: str) -> None:
    train, held_out = (make_spec(path=str(data), split=split, reader=reader) for split in ("train", "test"))
    with pytest.raises(DataError) as error:
        check_overlap(train, held_out)
    assert f"both read {data / 'test-0.jsonl'}, {data / 'train-0.jsonl'}: files have no splits" in str(error.value)
    assert "task.train_split=train and task.eval_split=test do not tell them apart" in str(error.value)
    assert "set task.reader=hf" in str(error.value)


def test_what_the_message_tells_to_do_works(
    data: Path, make_spec: MakeSpec, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    files = [make_spec(path=str(data / f"{split}-0.jsonl"), split=split) for split in ("train", "test")]
    splits = [make_spec(path=str(data), split=split, reader="hf") for split in ("train", "test")]
    for train, held_out in (files, splits):
        check_overlap(train, held_out)
        assert [len(load_prompts(spec, tokenizer).prompts) for spec in (train, held_out)] == [2, 1]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_held_out_file_in_the_directory_of_the_training_prompts_is_refused(
    data: Path, make_spec: MakeSpec, is_link: bool
) -> None:
    """Whatever the splits say."""
    held_out = data.parent / "held_out.jsonl" if is_link else data / "test-0.jsonl"
    if is_link:
        held_out.symlink_to(data / "test-0.jsonl")
    with pytest.raises(DataError, match=r"both read \S*/data/test-0\.jsonl: "):
        check_overlap(make_spec(path=str(data)), make_spec(path=str(held_out)))


def test_of_many_files_three_are_named(data: Path, make_spec: MakeSpec) -> None:
    for number in range(1, 4):
        write_jsonl(data / f"train-{number}.jsonl", ROWS)
    with pytest.raises(DataError, match=r"both read (\S+, ){2}\S+ and 2 more: "):
        check_overlap(make_spec(path=str(data)), make_spec(path=str(data), split="test"))


def test_one_file_for_both_and_one_directory_with_one_split_are_a_choice(data: Path, make_spec: MakeSpec) -> None:
    file, folder = str(data / "train-0.jsonl"), str(data)
    check_overlap(make_spec(path=file), make_spec(path=file, split="test"))
    check_overlap(make_spec(path=folder), make_spec(path=f"{folder}/../data"))


def test_other_data_sets_and_other_files_do_not_overlap(data: Path, make_spec: MakeSpec) -> None:
    file = make_spec(path=str(data / "train-0.jsonl"))
    check_overlap(file, make_spec(path=str(data / "test-0.jsonl"), split="test"))
    for path in ("builtin:arithmetic", "owner/name:config"):
        check_overlap(make_spec(path=path), make_spec(path=path, split="test"))
        check_overlap(file, make_spec(path=path))


def test_a_path_that_names_nothing_is_refused_as_by_its_reader(data: Path, make_spec: MakeSpec) -> None:
    with pytest.raises(DataError, match=r"does not exist; did you mean .*train-0\.jsonl"):
        check_overlap(make_spec(path=str(data)), make_spec(path=str(data / "trian-0.jsonl")))
