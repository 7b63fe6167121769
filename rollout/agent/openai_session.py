"""One trajectory of an agent that speaks to the policy through OpenAI's API: its conversations, token by token.

A request that repeats a conversation and adds messages to it continues its tokens. Anything else, history that was
rewritten or a question on the side, is a conversation of its own, and a token sequence of its own in the trajectory.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollout.agent.ledger import TokenLedger
from rollout.agent.openai_api import Answer, ApiError, assistant_message, normal, says_the_same
from rollout.agent.template import TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.agent.loop import Generate
    from rollout.agent.openai_api import ChatRequest
    from rollout.agent.template import ChatTemplate, Setting
    from rollout.types import Completion, Prompt, Turn

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """`messages` are those that `ledger` holds the tokens of; the policy spoke last, or is speaking (`is_busy`)."""

    ledger: TokenLedger
    setting: Setting
    messages: list[Mapping[str, Any]]
    said: set[int] = field(default_factory=set)
    """Indices of the messages that the policy sampled."""
    last_ids: list[int] = field(default_factory=list)
    """What it said last."""
    is_busy: bool = True

    def is_continued_by(self, request: ChatRequest) -> bool:
        if self.is_busy or not self.last_ids or self.setting != request.setting:
            return False
        known = len(self.messages)
        return known < len(request.messages) and all(
            says_the_same(ours, theirs) if index in self.said else ours == theirs
            for index, (ours, theirs) in enumerate(zip(self.messages, request.messages[:known], strict=True))
        )


class Session:
    """
    Args:
        max_tokens: of each conversation, after as many tokens as the prompt has.
    """

    def __init__(self, prompt: Prompt, max_tokens: int, *, generate: Generate, template: ChatTemplate) -> None:
        self._prompt, self._max_tokens = prompt, max_tokens
        self._generate, self._template = generate, template
        self._conversations: list[_Conversation] = []
        self._ended: Literal["open", "out_of_room", "out_of_time", "closed"] = "open"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_answers = 0

    @property
    def ran_out_of_room(self) -> bool:
        """Whether an answer was cut off, or refused, because its conversation was full."""
        return self._ended == "out_of_room"

    @property
    def ran_out_of_time(self) -> bool:
        """Whether a generation took too long."""
        return self._ended == "out_of_time"

    async def answer(self, request: ChatRequest) -> Answer:
        """
        Raises:
            ApiError: there is no room for an answer, or the session has ended.
            Exception: of the engines.
        """
        if self._ended in {"closed", "out_of_time"}:
            raise ApiError("this trajectory has ended", code="trajectory_ended")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            conversation = self._conversation_of(request)
            try:
                return await self._speak(conversation, request)
            finally:
                conversation.is_busy = False
        except TemplateError as error:
            raise ApiError(str(error)) from error
        finally:
            self._tasks.discard(task)

    async def close(self) -> None:
        """Ends what is still generated; later requests are refused."""
        if self._ended == "open":
            self._ended = "closed"
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def turns(self) -> tuple[Turn, ...]:
        """Conversation by conversation, in the order in which they began. Of one that the policy said nothing in there
        is no turn; with none at all, the prompt is the only turn."""
        turns: list[Turn] = []
        for conversation in self._conversations:
            if conversation.last_ids:
                turns += conversation.ledger.turns()
        return tuple(turns) or TokenLedger(self._prompt.token_ids).turns()

    def _conversation_of(self, request: ChatRequest) -> _Conversation:
        """The longest one that the request continues, with the tokens of its new messages; else another one."""
        known = [one for one in self._conversations if one.is_continued_by(request)]
        if not known:
            return self._begin(request)
        conversation = max(known, key=lambda one: len(one.messages))
        new = request.messages[len(conversation.messages) :]
        context = self._template.continuation(conversation.last_ids, new, request.setting)
        self._room(conversation.ledger.num_response_tokens + len(context))
        conversation.ledger.add_context(np.array(context, np.int32))
        conversation.messages += new
        conversation.is_busy = True
        return conversation

    def _begin(self, request: ChatRequest) -> _Conversation:
        opening = np.array(self._template.opening(request.messages, request.setting), np.int32)
        self._room(len(opening) - len(self._prompt.token_ids))
        ledger = TokenLedger(self._prompt.token_ids)
        # Two sequences may begin with the prompt; only the first needs no mark to be told from what goes before.
        if self._conversations or not np.array_equal(opening, self._prompt.token_ids):
            ledger.begin_anew(opening)
        found = _Conversation(ledger=ledger, setting=request.setting, messages=list(request.messages))
        self._conversations.append(found)
        return found

    def _room(self, num_used: int) -> int:
        """Tokens that are left for an answer."""
        left = self._max_tokens - num_used
        if left < 1:
            self._ended = "out_of_room"
            raise ApiError(
                f"the conversation has {num_used + len(self._prompt.token_ids)} tokens, and no answer fits behind them; "
                f"prompt and answers may have {self._max_tokens + len(self._prompt.token_ids)}",
                code="context_length_exceeded",
            )
        return left

    async def _speak(self, conversation: _Conversation, request: ChatRequest) -> Answer:
        ledger = conversation.ledger
        asked = ledger.token_ids()
        left = self._room(ledger.num_response_tokens)
        max_tokens = left if request.max_tokens is None else min(left, request.max_tokens)
        completion = await self._generate(asked, max_tokens, stop=request.stop)
        ledger.add_generated(completion)
        conversation.last_ids = completion.token_ids.tolist() or conversation.last_ids
        if completion.finish_reason == "abort":
            self._ended = "out_of_time"
            raise ApiError("the generation took too long; this trajectory has ended", code="trajectory_ended")
        if completion.finish_reason == "length" and max_tokens == left:
            self._ended = "out_of_room"
        message = self._message(completion, request)
        conversation.said.add(len(conversation.messages))
        conversation.messages.append(normal(message))
        return self._answer(completion, message, request, num_prompt_tokens=len(asked))

    def _message(self, completion: Completion, request: ChatRequest) -> dict[str, Any]:
        text = self._template.text(completion.token_ids.tolist(), spelled_out=False)
        for stop in request.stop or ():
            text = text.partition(stop)[0]  # it is part of the turn, and not of what OpenAI's API returns
        self._num_answers += 1
        prefix = f"call_{self._num_answers}_"
        return assistant_message(text, call_prefix=prefix, reads_calls=bool(request.setting.tools))

    def _answer(
        self, completion: Completion, message: Mapping[str, Any], request: ChatRequest, *, num_prompt_tokens: int
    ) -> Answer:
        logprobs = None
        if request.logprobs:
            pairs = zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True)
            logprobs = [(self._template.text([token]), logprob) for token, logprob in pairs]
        is_cut = completion.finish_reason == "length"
        return Answer(
            message=message,
            finish_reason="length" if is_cut else "tool_calls" if "tool_calls" in message else "stop",
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=len(completion.token_ids),
            logprobs=logprobs,
        )
