"""Data sets become prompts: every format gives the same prompts, and every defect a message that helps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollout.errors import DataError
from rollout.prompts import render_prompts
from rollout.prompts.arithmetic import operand_pairs
from rollout.prompts.datasets import DatasetSpec, check_overlap
from rollout.prompts.prompt_source import PromptSet, load_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence


BOS = 1
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "2", "level": 1, "extra": {"truth": "two"}},
    {"prompt": "2+2=", "answer": "4", "level": 2, "extra": {"truth": "four"}},
    {"prompt": "30+3=", "answer": "33", "level": 3, "extra": {"truth": "more"}},
]
BASE = DatasetSpec(
    path="builtin:arithmetic",
    reader="auto",
    split="train",
    prompt_column="prompt",
    answer_column="answer",
    answer_required=True,
    reward_column="",
    reward_column_required=True,
    rewards_with_answer=frozenset(),
    apply_chat_template=False,
    system_prompt="",
    dedup=True,
    max_prompt_tokens=64,
    overlong_prompts="filter",
    max_operand=9,
)
Load = Callable[..., PromptSet]


def spec(**changes: Any) -> DatasetSpec:
    return replace(BASE, **changes)


def write_jsonl(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class CharTokenizer:
    """One token per character, a BOS in front, `<role>content` per message and `<assistant>` at the end."""

    chat_template: str | None = "roles"

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        start = [BOS] if add_special_tokens else []
        return {"input_ids": [start + [ord(c) for c in one] for one in text]}

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        assert not tokenize
        if any(m["role"] not in ("system", "user", "assistant") for m in conversation):
            raise ValueError("unexpected role")
        turns = "".join(f"<{m['role']}>{m['content']}" for m in conversation)
        given = "".join(f"<{name}={value}>" for name, value in kwargs.items())
        return given + turns + ("<assistant>" if add_generation_prompt else "")


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture
def load(tmp_path: Path, tokenizer: CharTokenizer) -> Load:
    """What becomes of `rows` in a.jsonl, or of the data set at `path`."""

    def loaded(rows: Sequence[Any] = ROWS, **changes: Any) -> PromptSet:
        path = write_jsonl(tmp_path / "a.jsonl", rows) if "path" not in changes else changes["path"]
        return load_prompts(spec(**{**changes, "path": str(path)}), tokenizer)

    return loaded


Logs = pytest.LogCaptureFixture


def write_parquet(path: Path, rows: Sequence[Any]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def write_saved(path: Path, rows: Sequence[Any]) -> str:
    import datasets

    splits = {"train": datasets.Dataset.from_list(list(rows)), "validation": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(splits).save_to_disk(str(path))
    return str(path)


WRITERS = {"a.jsonl": write_jsonl, "a.parquet": write_parquet, "saved": write_saved}


def answers(loaded: PromptSet) -> list[str]:
    return [prompt.answer for prompt in loaded.prompts]


# Formats


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_prompts(tmp_path: Path, load: Load, name: str) -> None:
    loaded = load(path=WRITERS[name](tmp_path / name, ROWS))
    assert [p.text for p in loaded.prompts] == ["1+1=", "2+2=", "30+3="]
    assert answers(loaded) == ["2", "4", "33"]
    last = loaded.prompts[2]
    assert (last.token_ids.tolist(), last.token_ids.dtype) == ([1, *map(ord, "30+3=")], "int32")
    assert last.metadata == {"level": 3, "extra": {"truth": "more"}}
    assert len({p.prompt_id for p in loaded.prompts}) == 3


def test_a_directory_of_files_is_read_in_order_of_names(tmp_path: Path, load: Load) -> None:
    write_jsonl(tmp_path / "part-1.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "part-0.jsonl", ROWS[:1])
    read = [(p.prompt_id, p.answer) for p in load(path=tmp_path).prompts]
    assert read == [("part-0/1", "2"), ("part-1/1", "4"), ("part-1/2", "33")]


def test_files_that_differ_in_their_suffix_alone_have_ids_with_it(tmp_path: Path, load: Load) -> None:
    for name, row in zip(("a.jsonl", "a.ndjson", "a.jsonl.ndjson"), ROWS, strict=True):
        write_jsonl(tmp_path / name, [row])
    ids = {p.answer: p.prompt_id for p in load(path=tmp_path).prompts}
    assert ids == {"2": "a.jsonl/1", "4": "a.ndjson/1", "33": "a.jsonl.ndjson/1"}


def test_a_hub_style_directory_is_read_through_datasets(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repo" / "data").mkdir(parents=True)
    write_parquet(tmp_path / "repo" / "data" / "train-00000-of-00001.parquet", ROWS)
    write_parquet(tmp_path / "repo" / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    assert answers(load(path=tmp_path / "repo", split="test")) == ["2"]
    with pytest.raises(DataError, match="no split 'dev'; its splits are test, train"):
        load(path=tmp_path / "repo", split="dev")


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path: Path, load: Load) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1", "answer": "2"}\r\n\r\n')
    assert load(path=tmp_path / "b.jsonl").prompts[0].text == "1"


# The builtin additions


@pytest.mark.parametrize(("max_operand", "num_held_out"), [(9, 10), (49, 250), (69, 490), (99, 500), (200, 500)])
def test_splits_are_disjoint_complete_and_closed_under_commutation(max_operand: int, num_held_out: int) -> None:
    """A tenth is held out, at most 500."""
    train, test = (operand_pairs(split, max_operand=max_operand) for split in ("train", "test"))
    assert sorted(train + test) == list(product(range(max_operand + 1), repeat=2))
    assert {(b, a) for a, b in test} == set(test)
    assert len(test) == num_held_out


def test_the_held_out_set_never_changes() -> None:
    """Accuracies of different runs and releases can be compared only as long as this holds."""
    assert operand_pairs("test", max_operand=49)[:6] == [(0, 0), (0, 2), (0, 18), (0, 21), (0, 30), (1, 2)]


def test_builtin_arithmetic_is_a_data_set_like_any_other(load: Load) -> None:
    (first, *_) = load(path="builtin:arithmetic", split="test").prompts
    a, b = first.text.removesuffix("=").split("+")
    assert int(first.answer) == int(a) + int(b)
    for size in (8, 1000):
        with pytest.raises(DataError, match=f"must be 9 to 999, got {size}"):
            load(path="builtin:arithmetic", max_operand=size)


# From rows to prompts

MESSAGES = [{"role": "user", "content": "1+1?"}]
SYSTEM = {"role": "system", "content": "Be brief."}
TEMPLATED, BRIEF = {"apply_chat_template": True}, {"system_prompt": "Be brief."}


@pytest.mark.parametrize(
    ("prompt", "changes", "text", "messages"),
    [
        ("1+1?", {}, "1+1?", []),
        ("1+1?", TEMPLATED, "<user>1+1?<assistant>", MESSAGES),
        ("1+1?", TEMPLATED | BRIEF, "<system>Be brief.<user>1+1?<assistant>", [SYSTEM, *MESSAGES]),
        (MESSAGES, {}, "<user>1+1?<assistant>", MESSAGES),
        (MESSAGES, BRIEF, "<system>Be brief.<user>1+1?<assistant>", [SYSTEM, *MESSAGES]),
        (MESSAGES, {"keep_messages": False}, "<user>1+1?<assistant>", []),
    ],
)
def test_chat_templates_bring_their_own_special_tokens_and_agents_get_the_messages(
    load: Load, prompt: Any, changes: Any, text: str, messages: Any
) -> None:
    (loaded,) = load([{"prompt": prompt, "answer": 2}], **{"keep_messages": True, **changes}).prompts
    has_bos = text == "1+1?"
    assert (loaded.text, list(loaded.messages)) == (text, messages)
    assert loaded.token_ids.tolist() == ([1] if has_bos else []) + [ord(c) for c in text]


def test_rows_of_both_kinds_keep_their_order_over_several_calls_of_the_tokenizer(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_prompts, "ROWS_AT_ONCE", 3)
    loaded = load([{"prompt": MESSAGES if number % 3 else str(number), "answer": number} for number in range(8)])
    expected = ["<user>1+1?<assistant>" if number % 3 else str(number) for number in range(8)]
    assert answers(loaded) == [str(number) for number in range(8)]
    assert [prompt.text for prompt in loaded.prompts] == expected
    starts = [[] if number % 3 else [1] for number in range(8)]
    tokens = [start + [ord(c) for c in text] for start, text in zip(starts, expected, strict=True)]
    assert [prompt.token_ids.tolist() for prompt in loaded.prompts] == tokens


def test_a_dotted_column_reaches_into_a_struct(tmp_path: Path, load: Load) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    assert answers(load(path=path, answer_column="extra.truth")) == ["two", "four", "more"]


def test_overlong_prompts_are_dropped_and_counted(load: Load, caplog: Logs) -> None:
    loaded = load(max_prompt_tokens=5)
    assert (len(loaded.prompts), loaded.num_overlong) == (2, 1)
    assert "dropped 1 of 3 prompts over task.max_prompt_tokens=5" in caplog.text


def test_missing_answers_are_fine_only_where_none_is_needed(load: Load, caplog: Logs) -> None:
    assert answers(load([{"prompt": "say hello"}], answer_required=False)) == [""]
    assert "every answer is empty" in caplog.text


def bad_message(role: object) -> dict[str, object]:
    return {"prompt": [{"role": role, "content": "x"}], "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([], {}, "has no rows"),
        ([{"question": "1+1", "answer": "2"}], {}, "line 1: no column 'prompt'; the columns are: question, ans"),
        ([{"answer": "2"}] * 2, {}, "line 1: no column 'prompt'"),
        ([ROWS[0], {"prompt": "3"}], {}, "line 2: no column 'answer'; the columns are: prompt; set task.answer_column"),
        ([{"prompt": 7, "answer": "2"}], {}, "line 1: column 'prompt' holds int 7; a prompt is a string or a list"),
        ([{"prompt": None, "answer": "2"}], {}, "column 'prompt' holds NoneType"),
        ([{"prompt": [], "answer": "2"}], {}, "holds no message"),
        ([{"prompt": ["hi"], "answer": "2"}], {}, "message 0 of column 'prompt' is 'hi'; each message is"),
        ([ROWS[0], {"prompt": "1\ud83d=", "answer": "2"}], {}, r"line 2: column 'prompt' holds '\\ud83d', half a surr"),
        ([{"prompt": [{"role": "user", "content": "\udc00"}], "answer": "2"}], {}, r"line 1: .* '\\udc00', half a"),
        ([bad_message(3)], {}, "message 0 .*each message is"),
        ([bad_message("narrator")], {}, r"template refused the messages \(roles: narrator\): unexpected role"),
        ([bad_message("system")], {"system_prompt": "x"}, "have a system message"),
        ([ROWS[0]], {"system_prompt": "x"}, "task.system_prompt is set, but this prompt is a plain string"),
        ([{"prompt": "1", "answer": [2]}], {}, "column 'answer' holds list .*an answer is a string or a finite number"),
        ([ROWS[0], {"prompt": "1", "answer": float("nan")}], {}, "line 2: column 'answer' holds float nan"),
        ([{"prompt": "1", "answer": True}], {}, "column 'answer' holds bool True"),
        ([{"prompt": "1", "answer": None}], {}, "column 'answer' holds NoneType"),
        ([{"prompt": "a", "answer": "1", "level": 3}], {"reward_column": "level"}, "'level' holds int 3; it names"),
        (ROWS, {"reward_column": "kind"}, r"no column 'kind'; the columns are: .*; set task.reward.column"),
        (["text"], {}, "line 1: got a JSON str; each line must be one JSON object"),
        (ROWS, {"max_prompt_tokens": 3}, r"all 3 prompts are longer than .*=3 \(the shortest has 5 tokens\)"),
        (ROWS, {"max_prompt_tokens": 5, "overlong_prompts": "error"}, r"1 of 3 prompts .* a/3 \(6 tokens\); raise the"),
        (ROWS, {"reader": "parquet"}, "is not a readable Parquet file"),
        (ROWS, {"reader": "csv"}, "unknown reader 'csv'; allowed: auto, arithmetic, jsonl, parquet, hf"),
        (ROWS, {"reader": "arithmetic"}, "makes its own data and cannot read"),
        (ROWS, {"path": "builtin:arithmetic", "split": "dev"}, "its splits are 'train' and 'test'"),
        (ROWS, {"path": "builtin:arithmetics"}, "no data set 'builtin:arithmetics'; the only built-in one is"),
    ],
)  # fmt: skip
def test_defects_are_refused_with_a_message_that_helps(load: Load, rows: Any, changes: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(rows, **changes)


GOOD_LINE = b'{"prompt": "1", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD_LINE + b'\n{"prompt": \n', "b.jsonl, line 3: not valid JSON"),
        (GOOD_LINE + b'{"prompt": "\xff"}\n', "b.jsonl, line 2: not UTF-8"),
        (GOOD_LINE + b'{"answer": 1' + b"0" * 5000 + b"}\n", "line 2: cannot be read .* 5001 digits"),
        (b'{"prompt": ' + b"[" * 100_000, "line 1: cannot be read .* nest less deeply"),
    ],
)
def test_damaged_files_are_refused_with_the_line(tmp_path: Path, load: Load, content: bytes, message: str) -> None:
    (tmp_path / "b.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(path=tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("path", "reader", "message"),
    [
        ("trian.jsonl", "auto", r"trian\.jsonl' does not exist; did you mean .*/train\.jsonl\?"),
        ("no/a.parquet", "auto", r"its directory .*/no does not exist either"),
        *(("nothing", reader, "does not exist") for reader in ("jsonl", "parquet", "hf")),
        (".", "auto", "mixes JSONL and Parquet"),
        ("a.txt", "auto", r"cannot tell how to read .*'\.txt'; known: \.jsonl"),
        ("empty", "jsonl", r"holds no \.jsonl"),
        ("old", "auto", r"cannot load .*old': RuntimeError: Dataset scripts are no longer supported"),
    ],
)
def test_paths_that_name_nothing_or_are_unclear_are_refused(
    tmp_path: Path, load: Load, path: str, reader: str, message: str
) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_parquet(tmp_path / "a.parquet", ROWS)
    (tmp_path / "a.txt").write_text("1+1=")
    for name in ("empty", "old"):
        (tmp_path / name).mkdir()
    (tmp_path / "old" / "old.py").write_text("raise SystemExit\n")
    with pytest.raises(DataError, match=message):
        load(path=f"{tmp_path}/{path}", reader=reader)


def test_a_hub_name_that_cannot_be_reached_is_a_data_error(tmp_path: Path) -> None:
    """In a process of its own: `datasets` reads its offline switch and cache directory when it is imported."""
    code = (
        "from rollout.errors import DataError\n"
        "from tests.unit.rollout.prompts.test_datasets import CharTokenizer, load_prompts, spec\n"
        "try: load_prompts(spec(path='nobody/nothing:main'), CharTokenizer())\n"
        "except DataError as error: print(error)\n"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=root, timeout=120, check=False
    )
    assert "cannot load Hugging Face data set 'nobody/nothing:main'" in done.stdout, done.stderr
    assert "check the name (owner/name, or owner/name:config), the network" in done.stdout


def test_a_tokenizer_without_a_chat_template_is_refused_for_chat_prompts(load: Load, tokenizer: CharTokenizer) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="the model's tokenizer has none"):
        load(apply_chat_template=True)


# Rewards of rows


def test_a_row_may_name_its_own_reward(load: Load) -> None:
    rows = [
        {"prompt": "a", "answer": "1", "judged": {"by": "math"}},
        {"prompt": "b", "judged": {"by": "my.haiku"}},
        {"prompt": "c", "answer": "3", "judged": {"by": None}},
        {"prompt": "d", "answer": "4"},
        {"prompt": "e", "answer": "5", "judged": {"by": ""}},
    ]
    loaded = load(rows, reward_column="judged.by", rewards_with_answer=frozenset({"math"}))
    assert [p.reward for p in loaded.prompts] == ["math", "my.haiku", "", "", ""]
    assert answers(loaded) == ["1", "", "3", "4", "5"]
    assert {p.reward for p in load(rows, answer_required=False).prompts} == {""}
    # Which rewards need an answer is asked for every row.
    with pytest.raises(DataError, match=r"line 2: no column 'answer'"):
        load(rows, reward_column="judged.by", rewards_with_answer=frozenset({"math", "my.haiku"}))


def test_held_out_data_needs_no_reward_column(load: Load, caplog: Logs) -> None:
    assert {p.reward for p in load(reward_column="kind", reward_column_required=False).prompts} == {""}
    assert "has no column 'kind': task.reward.name scores all its responses" in caplog.text


# Duplicates

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


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [1, 2, 4, 5, 8, 9, 10]),
        ({"reward_column": "by"}, [1, 2, 4, 5, 7, 8, 9, 10]),
        ({"dedup": False}, list(range(1, 11))),
    ],
)
def test_of_rows_that_repeat_an_earlier_one_the_first_stays_and_the_others_are_counted_and_logged(
    load: Load, caplog: Logs, changes: Any, kept: list[int]
) -> None:
    loaded = load(REPEATED, answer_required=False, **changes)
    assert [prompt.metadata["id"] for prompt in loaded.prompts] == kept
    assert [prompt.prompt_id for prompt in loaded.prompts] == [f"a/{number}" for number in kept]
    assert loaded.num_duplicates == 10 - len(kept)
    said = f"dropped {10 - len(kept)} of 10 rows whose prompt and answer are those of an earlier row (task.dedup)"
    assert (said in caplog.text) == (len(kept) < 10)


def test_repetitions_in_any_order_of_keys_are_dropped_and_do_not_change_the_fingerprint(load: Load) -> None:
    rows = [{"prompt": [message], "answer": "2"} for message in (MESSAGES[0], dict(reversed(MESSAGES[0].items())))]
    once, twice = load(rows[:1]), load(rows)
    assert (once.num_duplicates, twice.num_duplicates) == (0, 1)
    assert once.fingerprint == twice.fingerprint


# Overlap of training and held-out data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Of each split one file, as data sets of the hub have them; a link to one, and one more data set."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train-0.jsonl", ROWS[:2])
    write_jsonl(folder / "test-0.jsonl", ROWS[2:])
    (tmp_path / "link.jsonl").symlink_to(folder / "test-0.jsonl")
    (tmp_path / "many").mkdir()
    for number in range(5):
        write_jsonl(tmp_path / "many" / f"{number}.jsonl", ROWS)
    return folder


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        ({"path": "data"}, {"path": "data", "split": "test"}, r"both read \S*/test-0.jsonl, \S*/train-0.jsonl: files"),
        ({"path": "data", "reader": "jsonl"}, {"path": "data", "reader": "jsonl", "split": "test"},
         "no splits, so task.train_split=train and task.eval_split=test do not tell them apart.*set task.reader=hf"),
        ({"path": "data"}, {"path": "data/test-0.jsonl"}, r"both read \S*/data/test-0\.jsonl: "),
        ({"path": "data"}, {"path": "link.jsonl"}, r"both read \S*/data/test-0\.jsonl: "),
        ({"path": "many"}, {"path": "many", "split": "test"}, r"both read (\S+, ){2}\S+ and 2 more: "),
        ({"path": "data"}, {"path": "data/trian-0.jsonl"}, r"does not exist; did you mean .*train-0\.jsonl"),
        # One file for both, and one directory with one split, are a choice.
        ({"path": "data/train-0.jsonl"}, {"path": "data/train-0.jsonl", "split": "test"}, None),
        ({"path": "data"}, {"path": "data/../data"}, None),
        ({"path": "data/train-0.jsonl"}, {"path": "data/test-0.jsonl", "split": "test"}, None),
        ({"path": "data", "reader": "hf"}, {"path": "data", "reader": "hf", "split": "test"}, None),
        ({"path": "data/train-0.jsonl"}, {"path": "builtin:arithmetic"}, None),
        ({"path": "owner/name:config"}, {"path": "owner/name:config", "split": "test"}, None),
    ],
)  # fmt: skip
def test_held_out_prompts_come_from_files_of_their_own_unless_someone_wants_otherwise(
    data: Path, monkeypatch: pytest.MonkeyPatch, train: Any, held_out: Any, message: str | None
) -> None:
    monkeypatch.chdir(data.parent)
    if message is None:
        check_overlap(spec(**train), spec(**held_out))
    else:
        with pytest.raises(DataError, match=message):
            check_overlap(spec(**train), spec(**held_out))


def test_the_hf_reader_finds_the_splits_of_a_directory_as_the_message_promises(
    data: Path, tokenizer: CharTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    splits = [spec(path=str(data), split=split, reader="hf") for split in ("train", "test")]
    assert [len(load_prompts(one, tokenizer).prompts) for one in splits] == [2, 1]
