"""Further evaluation sets are read as they say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rollout.errors import DataError
from tests.fakes.chat_tokenizer import PLAIN, chat_tokenizer
from trainer.config.compose import load_config
from trainer.driver.datasets import DataSets, load_data
from trainer.driver.preflight import log_inputs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "test.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    rows = [{"question": f"{n}+5=", "solution": {"final": str(n + 5)}} for n in range(6)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    return tmp_path


def load(sets: str, *overrides: str) -> DataSets:
    paths = ["task.train_path=train.jsonl", "task.eval_path=test.jsonl"]
    cfg = load_config(["device=cpu", "trainer.eval_temperature=1", *paths, f"task.eval_sets={sets}", *overrides])
    data = load_data(cfg, chat_tokenizer(PLAIN))
    log_inputs(cfg, data)
    return data


COLUMNS = "prompt_column: question, answer_column: solution.final"


def test_a_set_is_read_as_it_says_and_otherwise_as_the_task_does(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    other_set, few_set = (f"path: other.jsonl, {COLUMNS}, {more}" for more in ("samples: 8", "size: 2"))
    sums_set = "path: 'builtin:arithmetic', split: train, size: 5"
    sets = f"{{other: {{{other_set}}}, few: {{{few_set}}}, sums: {{{sums_set}}}}}"
    main, other, few, sums = load(sets, "trainer.eval_samples=3").evaluation
    assert [(one.name, len(one.prompts), one.num_samples) for one in (main, other, few, sums)] == [
        ("", 1, 3),
        ("other", 6, 8),
        ("few", 2, 3),
        ("sums", 5, 3),
    ]
    assert [(p.text, p.answer) for p in other.prompts[:2]] == [("0+5=", "5"), ("1+5=", "6")]
    assert "1 training prompts, 1 held out, other 6, few 2, sums 5" in caplog.text
    assert "rows of task.eval_sets.other.path that were left out: 1 that repeat" in caplog.text


def test_what_is_wrong_with_a_set_is_told_with_its_name(files: Path) -> None:
    with pytest.raises(DataError, match=r"task\.eval_sets\.other: other\.jsonl, line 1: no column 'prompt'"):
        load("{other: {path: other.jsonl}}")


def test_a_set_that_holds_training_files_is_refused(files: Path) -> None:
    (files / "data").mkdir()
    for name in ("a", "b"):
        (files / "data" / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    sets = "{whole: {path: data, split: dev}}"
    message = (
        r"task\.train_path=data and task\.eval_sets\.whole\.path=data both read .* task\.eval_sets\.whole\.split=dev"
    )
    with pytest.raises(DataError, match=message):
        load(sets, "task.train_path=data")
