"""Data sets become prompts: every format gives the same prompts, and every defect a message that helps."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollout.errors import DataError
from rollout.prompts import render_prompts as rendering
from rollout.prompts.prompt_source import load_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.prompts.datasets import DatasetSpec
    from rollout.prompts.prompt_source import PromptSet

    MakeSpec = Callable[..., DatasetSpec]

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "2", "level": 1, "extra": {"truth": "two"}},
    {"prompt": "2+2=", "answer": "4", "level": 2, "extra": {"truth": "four"}},
    {"prompt": "30+3=", "answer": "33", "level": 3, "extra": {"truth": "more"}},
]


def write_jsonl(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def write_saved(path: Path, rows: list[dict[str, Any]]) -> str:
    import datasets

    splits = {"train": datasets.Dataset.from_list(rows), "validation": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(splits).save_to_disk(str(path))
    return str(path)


WRITERS = {"a.jsonl": write_jsonl, "a.parquet": write_parquet, "saved": write_saved}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_prompts(tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, name: str) -> None:
    loaded = load_prompts(make_spec(path=WRITERS[name](tmp_path / name, ROWS)), tokenizer)
    assert [p.text for p in loaded.prompts] == ["1+1=", "2+2=", "30+3="]
    assert [p.answer for p in loaded.prompts] == ["2", "4", "33"]
    assert loaded.prompts[2].token_ids.tolist() == [1, *map(ord, "30+3=")]
    assert loaded.prompts[2].token_ids.dtype == "int32"
    assert loaded.prompts[2].metadata == {"level": 3, "extra": {"truth": "more"}}
    assert len({p.prompt_id for p in loaded.prompts}) == 3


def test_a_directory_of_files_is_read_in_order_of_names(tmp_path: Path, make_spec: MakeSpec, tokenizer: Any) -> None:
    write_jsonl(tmp_path / "part-1.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "part-0.jsonl", ROWS[:1])
    loaded = load_prompts(make_spec(path=str(tmp_path)), tokenizer)
    assert [(p.prompt_id, p.answer) for p in loaded.prompts] == [
        ("part-0/1", "2"),
        ("part-1/1", "4"),
        ("part-1/2", "33"),
    ]


def test_files_that_differ_in_their_suffix_alone_have_ids_with_it(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any
) -> None:
    for name, row in zip(("a.jsonl", "a.ndjson", "a.jsonl.ndjson"), ROWS, strict=True):
        write_jsonl(tmp_path / name, [row])
    loaded = load_prompts(make_spec(path=str(tmp_path)), tokenizer)
    ids = {p.answer: p.prompt_id for p in loaded.prompts}
    assert ids == {"2": "a.jsonl/1", "4": "a.ndjson/1", "33": "a.jsonl.ndjson/1"}


def test_a_hub_style_directory_is_read_through_datasets(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repo" / "data").mkdir(parents=True)
    write_parquet(tmp_path / "repo" / "data" / "train-00000-of-00001.parquet", ROWS)
    write_parquet(tmp_path / "repo" / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    loaded = load_prompts(make_spec(path=str(tmp_path / "repo"), split="test"), tokenizer)
    assert [p.answer for p in loaded.prompts] == ["2"]
    with pytest.raises(DataError, match="no split 'dev'; its splits are test, train"):
        load_prompts(make_spec(path=str(tmp_path / "repo"), split="dev"), tokenizer)


def test_builtin_arithmetic_is_a_data_set_like_any_other(make_spec: MakeSpec, tokenizer: Any) -> None:
    train, test = (load_prompts(make_spec(split=split), tokenizer).prompts for split in ("train", "test"))
    assert len(train) + len(test) == 100
    assert not {p.text for p in train} & {p.text for p in test}
    for prompt in (*train, *test):
        a, b = prompt.text.removesuffix("=").split("+")
        assert int(prompt.answer) == int(a) + int(b)


MESSAGES = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("prompt", "changes", "text", "has_bos"),
    [
        ("1+1?", {}, "1+1?", True),
        ("1+1?", {"apply_chat_template": True}, "<user>1+1?<assistant>", False),
        (
            "1+1?",
            {"apply_chat_template": True, "system_prompt": "Be brief."},
            "<system>Be brief.<user>1+1?<assistant>",
            False,
        ),
        (MESSAGES, {}, "<user>1+1?<assistant>", False),
        (MESSAGES, {"system_prompt": "Be brief."}, "<system>Be brief.<user>1+1?<assistant>", False),
    ],
)
def test_chat_templates_bring_their_own_special_tokens(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, prompt: Any, changes: Any, text: str, has_bos: bool
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": 2}])
    (loaded,) = load_prompts(make_spec(path=path, **changes), tokenizer).prompts
    assert loaded.text == text
    assert loaded.token_ids.tolist() == ([1] if has_bos else []) + [ord(c) for c in text]


@pytest.mark.parametrize(
    ("prompt", "changes", "messages"),
    [
        (MESSAGES, {}, MESSAGES),
        ("1+1?", {"apply_chat_template": True}, MESSAGES),
        (MESSAGES, {"system_prompt": "Be brief."}, [{"role": "system", "content": "Be brief."}, *MESSAGES]),
        ("1+1?", {}, []),
        (MESSAGES, {"keep_messages": False}, []),
    ],
)
def test_prompts_keep_what_the_chat_template_made_them_of_where_an_agent_reads_it(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, prompt: Any, changes: Any, messages: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": 2}])
    spec = make_spec(path=path, **{"keep_messages": True, **changes})
    (loaded,) = load_prompts(spec, tokenizer).prompts
    assert list(loaded.messages) == messages


def test_rows_of_both_kinds_keep_their_order_over_several_calls_of_the_tokenizer(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "ROWS_AT_ONCE", 3)
    rows = [{"prompt": MESSAGES if number % 3 else str(number), "answer": number} for number in range(8)]
    loaded = load_prompts(make_spec(path=write_jsonl(tmp_path / "a.jsonl", rows)), tokenizer).prompts
    assert [prompt.answer for prompt in loaded] == [str(number) for number in range(8)]
    expected = ["<user>1+1?<assistant>" if number % 3 else str(number) for number in range(8)]
    assert [prompt.text for prompt in loaded] == expected
    starts = [[] if number % 3 else [1] for number in range(8)]
    tokens = [start + [ord(c) for c in text] for start, text in zip(starts, expected, strict=True)]
    assert [prompt.token_ids.tolist() for prompt in loaded] == tokens


def test_a_dotted_column_reaches_into_a_struct(tmp_path: Path, make_spec: MakeSpec, tokenizer: Any) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    loaded = load_prompts(make_spec(path=path, answer_column="extra.truth"), tokenizer)
    assert [p.answer for p in loaded.prompts] == ["two", "four", "more"]


def test_overlong_prompts_are_dropped_and_counted(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with caplog.at_level(logging.WARNING):
        loaded = load_prompts(make_spec(path=path, max_prompt_tokens=5), tokenizer)
    assert (len(loaded.prompts), loaded.num_overlong) == (2, 1)
    assert "dropped 1 of 3 prompts over task.max_prompt_tokens=5" in caplog.text


def test_missing_answers_are_fine_only_where_none_is_needed(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "say hello"}])
    loaded = load_prompts(make_spec(path=path, answer_required=False), tokenizer)
    assert loaded.prompts[0].answer == ""
    assert "every answer is empty" in caplog.text


def bad_message(role: object) -> dict[str, object]:
    return {"prompt": [{"role": role, "content": "x"}], "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([], {}, "has no rows"),
        (
            [{"question": "1+1", "answer": "2"}],
            {},
            "line 1: no column 'prompt'; the columns are: question, answer; set",
        ),
        ([ROWS[0], {"prompt": "3"}], {}, "line 2: no column 'answer'; the columns are: prompt; set task.answer_column"),
        ([{"prompt": 7, "answer": "2"}], {}, "line 1: column 'prompt' holds a int; a prompt is a string or a list"),
        ([{"prompt": None, "answer": "2"}], {}, "column 'prompt' holds a NoneType"),
        ([{"prompt": [], "answer": "2"}], {}, "holds no message"),
        ([{"prompt": ["hi"], "answer": "2"}], {}, "message 0 of column 'prompt' is 'hi'; each message is"),
        ([ROWS[0], {"prompt": "1\ud83d=", "answer": "2"}], {}, r"line 2: column 'prompt' holds '\\ud83d', half a surr"),
        (
            [{"prompt": [{"role": "user", "content": "\udc00"}], "answer": "2"}],
            {},
            r"line 1: .* '\\udc00', half a surr",
        ),
        ([bad_message(3)], {}, "message 0 .*each message is"),
        ([bad_message("narrator")], {}, r"template refused the messages \(roles: narrator\): unexpected role"),
        ([bad_message("system")], {"system_prompt": "x"}, "bring their own system message"),
        ([ROWS[0]], {"system_prompt": "x"}, "task.system_prompt is set, but this prompt is a plain string"),
        ([{"prompt": "1", "answer": [2]}], {}, "column 'answer' holds list .*an answer is a string or a finite number"),
        ([ROWS[0], {"prompt": "1", "answer": float("nan")}], {}, "line 2: column 'answer' holds float nan"),
        ([{"prompt": "1", "answer": True}], {}, "column 'answer' holds bool True"),
        ([{"prompt": "1", "answer": None}], {}, "column 'answer' holds NoneType"),
        (["text"], {}, "line 1: got a JSON str; each line must be one JSON object"),
        (ROWS, {"max_prompt_tokens": 3}, r"all 3 prompts are longer than .*=3 \(the shortest has 5 tokens\)"),
        (ROWS, {"max_prompt_tokens": 5, "overlong_prompts": "error"}, r"1 of 3 prompts .* a/3 \(6 tokens\); raise the"),
        (ROWS, {"reader": "parquet"}, "is not a readable Parquet file"),
        (ROWS, {"reader": "csv"}, "unknown reader 'csv'; allowed: auto, arithmetic, jsonl, parquet, hf"),
        (ROWS, {"reader": "arithmetic"}, "makes its own data and cannot read"),
        (ROWS, {"path": "builtin:arithmetic", "split": "dev"}, "its splits are 'train' and 'test'"),
        (ROWS, {"path": "builtin:arithmetics"}, "no data set 'builtin:arithmetics'; the only built-in one is"),
    ],
)
def test_defects_are_refused_with_a_message_that_helps(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, rows: Any, changes: Any, message: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=message):
        load_prompts(make_spec(**({"path": path} | changes)), tokenizer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "1", "answer": "2"}\n\n{"prompt": \n', "a.jsonl, line 3: not valid JSON"),
        (b'{"prompt": "1", "answer": "2"}\n{"prompt": "\xff"}\n', "a.jsonl, line 2: not UTF-8"),
        (
            b'{"prompt": "1", "answer": "2"}\n{"answer": 1' + b"0" * 5000 + b"}\n",
            "line 2: cannot be read .* 5001 digits",
        ),
        (b'{"prompt": ' + b"[" * 100_000, "line 1: cannot be read .* nest less deeply"),
    ],
)
def test_damaged_files_are_refused_with_the_line(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, content: bytes, message: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_prompts(make_spec(path=str(tmp_path / "a.jsonl")), tokenizer)


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path: Path, make_spec: MakeSpec, tokenizer: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1", "answer": "2"}\r\n\r\n')
    assert load_prompts(make_spec(path=str(tmp_path / "a.jsonl")), tokenizer).prompts[0].text == "1"


def test_a_missing_file_suggests_names_that_are_near(tmp_path: Path, make_spec: MakeSpec, tokenizer: Any) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"tran\.jsonl' does not exist; did you mean .*/train\.jsonl\?"):
        load_prompts(make_spec(path=str(tmp_path / "tran.jsonl")), tokenizer)
    with pytest.raises(DataError, match=r"its directory .*/no does not exist either"):
        load_prompts(make_spec(path=str(tmp_path / "no" / "a.parquet")), tokenizer)
    for reader in ("jsonl", "parquet", "hf"):
        with pytest.raises(DataError, match="does not exist"):
            load_prompts(make_spec(path=str(tmp_path / "nothing"), reader=reader), tokenizer)


def test_directories_and_suffixes_that_are_unclear_are_refused(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any
) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_parquet(tmp_path / "a.parquet", ROWS)
    (tmp_path / "a.txt").write_text("1+1=")
    with pytest.raises(DataError, match="mixes JSONL and Parquet"):
        load_prompts(make_spec(path=str(tmp_path)), tokenizer)
    with pytest.raises(DataError, match=r"cannot tell how to read .*'\.txt'; known: \.jsonl"):
        load_prompts(make_spec(path=str(tmp_path / "a.txt")), tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no \.jsonl"):
        load_prompts(make_spec(path=str(tmp_path / "empty"), reader="jsonl"), tokenizer)


def test_a_data_set_that_is_a_loading_script_is_a_data_error(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "old.py").write_text("raise SystemExit\n")
    with pytest.raises(DataError, match=r"cannot load .*old': RuntimeError: Dataset scripts are no longer supported"):
        load_prompts(make_spec(path=str(tmp_path / "old")), tokenizer)


def test_a_hub_name_that_cannot_be_reached_is_a_data_error(tmp_path: Path) -> None:
    """In a process of its own: `datasets` reads its offline switch and cache directory when it is imported."""
    code = (
        "from rollout.errors import DataError\n"
        "from tests.unit.rollout.prompts.conftest import CharTokenizer, make_spec\n"
        "from rollout.prompts.prompt_source import load_prompts\n"
        "try: load_prompts(make_spec.__wrapped__()(path='nobody/nothing:main'), CharTokenizer())\n"
        "except DataError as error: print(error)\n"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        cwd=Path(__file__).parents[4],
        timeout=120,
    )
    assert "cannot load Hugging Face data set 'nobody/nothing:main'" in done.stdout, done.stderr
    assert "check the name (owner/name, or owner/name:config), the network" in done.stdout


def test_a_tokenizer_without_a_chat_template_is_refused_for_chat_prompts(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any
) -> None:
    tokenizer.chat_template = None
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match="the model's tokenizer has none"):
        load_prompts(make_spec(path=path, apply_chat_template=True), tokenizer)


def test_a_row_may_name_its_own_reward(tmp_path: Path, make_spec: MakeSpec, tokenizer: Any) -> None:
    rows = [
        {"prompt": "a", "answer": "1", "judged": {"by": "math"}},
        {"prompt": "b", "judged": {"by": "my.haiku"}},
        {"prompt": "c", "answer": "3", "judged": {"by": None}},
        {"prompt": "d", "answer": "4"},
        {"prompt": "e", "answer": "5", "judged": {"by": ""}},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    spec = make_spec(path=path, reward_column="judged.by", rewards_with_answer=frozenset({"math"}))
    prompts = load_prompts(spec, tokenizer).prompts
    assert [p.reward for p in prompts] == ["math", "my.haiku", "", "", ""]
    assert [p.answer for p in prompts] == ["1", "", "3", "4", "5"]
    assert [p.reward for p in load_prompts(make_spec(path=path, answer_required=False), tokenizer).prompts] == [""] * 5
    # Which rewards need an answer is asked for every row.
    with pytest.raises(DataError, match=r"line 2: no column 'answer'"):
        load_prompts(replace(spec, rewards_with_answer=frozenset({"math", "my.haiku"})), tokenizer)


def test_a_reward_column_that_no_row_has_is_refused_unless_the_data_is_held_out(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec(path=write_jsonl(tmp_path / "a.jsonl", ROWS), reward_column="kind")
    with pytest.raises(DataError, match=r"no column 'kind'; the columns are: .*; set task.reward.column"):
        load_prompts(spec, tokenizer)
    assert [p.reward for p in load_prompts(replace(spec, reward_column_required=False), tokenizer).prompts] == [""] * 3
    assert "has no column 'kind': all its answers are judged by task.reward.name" in caplog.text


def test_a_reward_that_is_no_name_is_refused(tmp_path: Path, make_spec: MakeSpec, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"line 1: column 'level' holds int 3; it names the reward of the row"):
        path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1", "level": 3}])
        load_prompts(make_spec(path=path, reward_column="level"), tokenizer)


REPEATED = [
    {"prompt": "1+1=", "answer": "2", "id": 1},
    {"prompt": "2+2=", "answer": "4", "id": 2},
    {"prompt": "1+1=", "answer": "2", "id": 3},
    {"prompt": "1+1=", "answer": "3", "id": 4},
    {"prompt": "1+1=", "answer": 2, "id": 5},
    {"prompt": "2+2=", "answer": "4", "id": 6},
    {"prompt": "1+1=", "answer": "2", "by": "math", "id": 7},
    {"prompt": "1+1=", "answer": None, "id": 8},
    {"prompt": "1+1=", "answer": "None", "id": 9},
    {"prompt": "1+1=", "id": 10},
]


def ids_of(loaded: PromptSet) -> list[object]:
    return [prompt.metadata["id"] for prompt in loaded.prompts]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [1, 2, 4, 5, 8, 9, 10]),
        ({"reward_column": "by"}, [1, 2, 4, 5, 7, 8, 9, 10]),
        ({"dedup": False}, list(range(1, 11))),
    ],
)
def test_of_rows_that_say_the_same_the_first_stays_and_the_others_are_counted_and_logged(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any, caplog: pytest.LogCaptureFixture, changes: Any, kept: list[int]
) -> None:
    spec = make_spec(path=write_jsonl(tmp_path / "a.jsonl", REPEATED), answer_required=False, **changes)
    loaded = load_prompts(spec, tokenizer)
    assert ids_of(loaded) == kept
    assert loaded.num_duplicates == 10 - len(kept)
    said = f"dropped {10 - len(kept)} of 10 rows whose prompt and answer are those of an earlier row (task.dedup)"
    assert (said in caplog.text) == (len(kept) < 10)
    # A resumed run finds the same prompts again.
    assert load_prompts(spec, tokenizer).fingerprint == loaded.fingerprint
    assert [prompt.prompt_id for prompt in loaded.prompts] == [f"a/{number}" for number in kept]


def test_messages_in_another_order_of_keys_say_the_same_and_a_row_without_a_prompt_is_still_refused(
    tmp_path: Path, make_spec: MakeSpec, tokenizer: Any
) -> None:
    rows = [{"prompt": [message], "answer": "2"} for message in (MESSAGES[0], dict(reversed(MESSAGES[0].items())))]
    assert load_prompts(make_spec(path=write_jsonl(tmp_path / "a.jsonl", rows)), tokenizer).num_duplicates == 1
    with pytest.raises(DataError, match="line 1: no column 'prompt'"):
        load_prompts(make_spec(path=write_jsonl(tmp_path / "b.jsonl", [{"answer": "2"}] * 2)), tokenizer)


def test_repetitions_do_not_change_the_fingerprint(tmp_path: Path, make_spec: MakeSpec, tokenizer: Any) -> None:
    once = load_prompts(make_spec(path=write_jsonl(tmp_path / "a.jsonl", REPEATED[:2])), tokenizer)
    twice = load_prompts(make_spec(path=write_jsonl(tmp_path / "a.jsonl", REPEATED[:3])), tokenizer)
    assert once.fingerprint == twice.fingerprint
    assert (once.num_duplicates, twice.num_duplicates) == (0, 1)
