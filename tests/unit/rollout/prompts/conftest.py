"""A character tokenizer with a chat template that shows its structure, a spec, and rows in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.prompts.datasets import DatasetSpec
from rollout.prompts.prompt_source import PromptSet, load_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
