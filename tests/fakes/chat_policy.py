"""A policy that chats: a tokenizer with a token per character, a template like Qwen's, and a scripted
engine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from rollout.engine.interface import EngineSpec
from rollout.types import Prompt, SamplingParams, TokenChunk, join_chunks
from tests.fakes.chat_tokenizer import END, chat_tokenizer
from tests.fakes.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerFast

    from rollout.types import Turn

BEGIN = "<|im_start|>assistant\n"
TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | map(attribute='function.name') | join(', ') }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'refused' %}{{ raise_exception('there is no such role') }}
{%- elif message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content.split('</think>')[-1] }}{{ message.tool_calls | tojson if message.tool_calls }}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if quiet %}hush {% endif %}{% endif %}"""


def by_turn(*answers: str) -> Callable[[str], str]:
    """The first answer in the first turn of a conversation, and so on."""
    return lambda asked: answers[asked.count(BEGIN) - 1]


class ChatPolicy:
    """`generate` is a `Generate` on one engine.

    Args:
        says: what the policy says to a conversation, given as text; it includes `END`.
    """

    def __init__(
        self, says: Callable[[str], str], *, token_s: float = 0.0, tokenizer: PreTrainedTokenizerFast | None = None
    ) -> None:
        self.tokenizer = chat_tokenizer(TEMPLATE) if tokenizer is None else tokenizer
        self.asked: list[str] = []
        self.max_tokens: list[int] = []
        self.has_begun = asyncio.Event()
        self._says, self._numbers = says, count()
        self.engine = ScriptedEngine(
            EngineSpec(model="scripted", stop_token_ids=(self.tokenizer.eos_token_id,)),
            script=self._script,
            decode=self.tokenizer.decode,
            token_s=token_s,
        )

    async def start(self) -> ChatPolicy:
        await self.engine.start()
        return self

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(list(token_ids))

    def prompt(self, text: str = "2+3?", answer: str = "5") -> Prompt:
        asked = f"<|im_start|>user\n{text}{END}\n{BEGIN}"
        return Prompt(prompt_id="p", token_ids=np.array(self.ids(asked), np.int32), text=asked, answer=answer)

    async def generate(
        self, token_ids: np.ndarray, max_tokens: int, *, stop: str | Sequence[str] | None = None
    ) -> TokenChunk:
        self.asked.append(self.text(token_ids))
        self.max_tokens.append(max_tokens)
        self.has_begun.set()
        params = SamplingParams(max_tokens=max_tokens, stop=tuple(stop or ()))
        async with aclosing(self.engine.generate(str(next(self._numbers)), token_ids, params)) as stream:
            chunks = [chunk async for chunk in stream]
        return join_chunks(chunks, chunks[-1].finish_reason)

    def spoken(self, turns: Sequence[Turn]) -> str:
        """All tokens as text, what was sampled in braces; a line `---` where a new sequence begins."""
        parts = []
        for turn in turns:
            parts.append("---\n" if turn.begins_anew else "")
            parts.append(self.text(turn.token_ids[~turn.is_generated]))
            if turn.is_generated.any():
                parts.append("{" + self.text(turn.token_ids[turn.is_generated]) + "}")
        return "".join(parts)

    def _script(self, prompt: np.ndarray, position: int, version: int) -> tuple[int, float]:
        return self.ids(self._says(self.text(prompt)))[position], -0.5 - version
