"""A character tokenizer with a chat template that shows its structure, and a spec with everything set."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.prompts.datasets import DatasetSpec

if TYPE_CHECKING:
    from collections.abc import Callable

BOS = 1


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
def make_spec() -> Callable[..., DatasetSpec]:
    base = DatasetSpec(
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
    return lambda **changes: replace(base, **changes)
