"""One trajectory of an agent that speaks to the policy through OpenAI's API: its conversations, token by token.

A request that repeats a conversation and adds messages to it continues its tokens. Anything else, history that was
rewritten or a question on the side, is a conversation of its own, and a token sequence of its own in the trajectory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.agent.openai_protocol import Answer, ApiError, assistant_message, normal, says_the_same
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.rendering import TemplateError, TooLong

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.agent.loop import Generate
    from rollout.agent.openai_protocol import ChatRequest
    from rollout.rendering import ChatTemplateRenderer, RenderOptions
    from rollout.types import Prompt, TokenChunk, Turn


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """`messages` are those that `ledger` holds the tokens of. The policy spoke last; both are empty until it did."""

    options: RenderOptions
    ledger: TrajectoryBuilder = field(default_factory=lambda: TrajectoryBuilder(np.empty(0, np.int32)))
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    said: set[int] = field(default_factory=set)
    """Indices of the messages that the policy sampled."""
    last_ids: list[int] = field(default_factory=list)
    """What it said last; never empty once it spoke."""
    is_busy: bool = False
    """The policy is about to answer in it."""

    def is_continued_by(self, request: ChatRequest) -> bool:
        if self.is_busy or not self.last_ids or self.options != request.options:
            return False
        known = len(self.messages)
        return known < len(request.messages) and all(
            says_the_same(ours, theirs) if index in self.said else ours == theirs
            for index, (ours, theirs) in enumerate(zip(self.messages, request.messages[:known], strict=True))
        )

    def add(
        self,
        context: np.ndarray,
        completion: TokenChunk,
        *,
        asked: Sequence[Mapping[str, Any]],
        said: Mapping[str, Any],
    ) -> None:
        """What was asked and what the policy said, as tokens and as messages: all of it, or none."""
        self.ledger.add_context(context)
        self.ledger.add_generated(completion)
        self.last_ids = completion.token_ids.tolist()
        self.messages = [*asked, said]
        self.said.add(len(asked))


class Session:
    """
    Args:
        max_tokens: of each conversation, after as many tokens as the prompt has.
        give_up: called once, when the trajectory has failed whatever its agent does now. Does not wait.
    """

    def __init__(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        generate: Generate,
        template: ChatTemplateRenderer,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._prompt, self._most_tokens = prompt, len(prompt.token_ids) + max_tokens
        self._generate, self._template, self._give_up = generate, template, give_up
        self._conversations: list[_Conversation] = []
        self._generating: set[asyncio.Task[TokenChunk]] = set()
        self._is_closed = self._ran_out_of_room = self._ran_out_of_time = False
        self._failure: Exception | None = None
        self._num_answers = 0

    @property
    def ran_out_of_room(self) -> bool:
        """Whether the last answer was cut off, or refused, because its conversation was full. An agent that goes on
        with less history has room again."""
        return self._ran_out_of_room

    @property
    def ran_out_of_time(self) -> bool:
        """Whether a generation took too long."""
        return self._ran_out_of_time

    @property
    def failure(self) -> Exception | None:
        """What the engines raised."""
        return self._failure

    async def answer(self, request: ChatRequest) -> Answer:
        """An answer that is given up, by cancellation, leaves its conversation as it was.

        Raises:
            ApiError: the chat template refuses the messages, there is no room for an answer, or the session has ended.
            Exception: of the engines.
        """
        self._refuse_if_over()
        conversation, context = self._place(request)
        conversation.is_busy = True
        try:
            return await self._speak(conversation, context, request)
        finally:
            conversation.is_busy = False

    async def close(self) -> None:
        """Ends what is still generated; later requests are refused."""
        self._is_closed = True
        tasks = list(self._generating)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def turns(self) -> tuple[Turn, ...]:
        """Conversation by conversation, in the order in which they began. Of one that the policy said nothing in there
        is no turn; with none at all, the prompt is the only turn."""
        turns: list[Turn] = []
        for conversation in self._conversations:
            if not conversation.last_ids:
                continue
            first, *others = conversation.ledger.turns()
            opening = first.token_ids[~first.is_generated]
            # Only the first sequence may be the one of the prompt.
            begins_anew = bool(turns) or not np.array_equal(opening, self._prompt.token_ids)
            turns += [replace(first, begins_anew=begins_anew), *others]
        return tuple(turns) or TrajectoryBuilder(self._prompt.token_ids).turns()

    def _refuse_if_over(self) -> None:
        if self._is_closed or self._ran_out_of_time or self._failure is not None:
            raise _ended()

    def _place(self, request: ChatRequest) -> tuple[_Conversation, np.ndarray]:
        """The longest conversation that the request continues, else another one; and the tokens, int32[T], of what is
        new in it."""
        known = [one for one in self._conversations if one.is_continued_by(request)]
        num_used = 0
        try:
            if known:
                conversation = max(known, key=lambda one: len(one.messages))
                new = request.messages[len(conversation.messages) :]
                num_used = len(conversation.ledger.token_ids())
                most = max(0, self._most_tokens - num_used)
                tokens = self._template.render_next_turn(conversation.last_ids, new, request.options, max_tokens=most)
            else:
                conversation = _Conversation(options=request.options)
                tokens = self._template.render(request.messages, request.options, max_tokens=self._most_tokens)
                self._conversations.append(conversation)
        except TemplateError as error:
            raise ApiError(str(error)) from error
        except TooLong as error:
            raise self._no_room(f"more than {num_used + error.num_tokens}") from error
        return conversation, np.array(tokens, np.int32)

    async def _speak(self, conversation: _Conversation, context: np.ndarray, request: ChatRequest) -> Answer:
        asked = np.concatenate([conversation.ledger.token_ids(), context])
        left = self._room(len(asked))
        max_tokens = left if request.max_tokens is None else min(left, request.max_tokens)
        completion = await self._generated(asked, max_tokens, request)
        message = self._message(completion, request)
        if len(completion.token_ids):
            conversation.add(context, completion, asked=request.messages, said=normal(message))
        if completion.finish_reason == "abort":
            self._ran_out_of_time = True
            self._end()
            raise _ended("the generation took too long; ")
        self._ran_out_of_room = completion.finish_reason == "length" and max_tokens == left
        return self._answer(completion, message, request, num_prompt_tokens=len(asked))

    async def _generated(self, asked: np.ndarray, max_tokens: int, request: ChatRequest) -> TokenChunk:
        """In a task of its own, so that closing ends the generation, and not the request that waits for it."""

        async def generate() -> TokenChunk:
            return await self._generate(asked, max_tokens, stop=request.stop)

        task = asyncio.create_task(generate())
        self._generating.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            ours = asyncio.current_task()
            if self._is_closed and not (ours is not None and ours.cancelling()):
                raise _ended() from None
            raise
        except Exception as error:
            self._failure = error
            self._end()
            raise
        finally:
            self._generating.discard(task)

    def _end(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._give_up()

    def _room(self, num_used: int) -> int:
        """Tokens that are left for an answer."""
        left = self._most_tokens - num_used
        if left < 1:
            raise self._no_room(str(num_used))
        return left

    def _no_room(self, num_tokens: str) -> ApiError:
        """For a conversation of so many tokens."""
        self._ran_out_of_room = True
        # Clients know the case by this code, or by the beginning of the text.
        return ApiError(
            f"This model's maximum context length is {self._most_tokens} tokens, its answer included; the messages "
            f"have {num_tokens}. Send fewer, or end the trajectory",
            code="context_length_exceeded",
        )

    def _message(self, completion: TokenChunk, request: ChatRequest) -> dict[str, Any]:
        text = self._template.text(completion.token_ids.tolist(), spelled_out=False)
        for stop in request.stop or ():
            text = text.partition(stop)[0]  # it is part of the turn, and not of what OpenAI's API returns
        self._num_answers += 1
        prefix = f"call_{self._num_answers}_"
        return assistant_message(text, call_prefix=prefix, reads_calls=bool(request.options.tools))

    def _answer(
        self, completion: TokenChunk, message: Mapping[str, Any], request: ChatRequest, *, num_prompt_tokens: int
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


def _ended(why: str = "") -> ApiError:
    return ApiError(f"{why}this trajectory has ended", status=404, code="trajectory_ended")
