"""One trajectory of an agent that uses OpenAI's API: its conversations, token by token.

A request that repeats a conversation and adds messages to it continues its tokens. Anything else, such as history that
was rewritten or a side question, starts a conversation of its own: a separate token sequence of the trajectory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.agent.openai_protocol import ApiError, ChatResponse, assistant_message, normalize, same_message
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.rendering import TemplateError, TooLong

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.agent.loop import Generate
    from rollout.agent.openai_protocol import ChatRequest
    from rollout.rendering import ChatTemplateRenderer, RenderOptions
    from rollout.types import Prompt, TokenChunk, TrajectoryStatus, Turn


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """`builder` has the tokens of `messages`, of which the last is the policy's. Both are empty until it responds."""

    options: RenderOptions
    builder: TrajectoryBuilder = field(default_factory=lambda: TrajectoryBuilder(np.empty(0, np.int32)))
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    sampled: set[int] = field(default_factory=set)
    """Indices of the messages that the policy sampled."""
    last_ids: list[int] = field(default_factory=list)
    """Its last response; not empty once it has responded."""
    is_busy: bool = False
    """It is about to respond."""

    def is_continued_by(self, request: ChatRequest) -> bool:
        if self.is_busy or not self.last_ids or self.options != request.options:
            return False
        known = len(self.messages)
        return known < len(request.messages) and all(
            same_message(ours, theirs) if index in self.sampled else ours == theirs
            for index, (ours, theirs) in enumerate(zip(self.messages, request.messages[:known], strict=True))
        )


class Session:
    """
    Args:
        max_tokens: of each conversation, on top of the number of tokens of the prompt.
        stop: texts that end a response if its request names none.
        give_up: called once, as soon as the trajectory has failed whatever its agent does. Does not wait.
    """

    def __init__(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        generate: Generate,
        template: ChatTemplateRenderer,
        stop: Sequence[str] = (),
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._prompt, self._max_tokens = prompt, len(prompt.token_ids) + max_tokens
        self._generate, self._template, self._stop, self._give_up = generate, template, stop, give_up
        self._conversations: list[_Conversation] = []
        self._generating: set[asyncio.Task[TokenChunk]] = set()
        self._is_closed = self._is_out_of_time = self._is_out_of_room = False
        self._num_responses = 0
        self.failure: Exception | None = None
        """What the engines raised."""

    @property
    def status(self) -> TrajectoryStatus:
        """`failed`: a generation ran out of time. `truncated`: the last response was cut off, or refused, because its
        conversation was full; an agent that continues with less history has room again."""
        return "failed" if self._is_out_of_time else "truncated" if self._is_out_of_room else "completed"

    async def respond(self, request: ChatRequest) -> ChatResponse:
        """A response that is cancelled leaves its conversation as it was.

        Raises:
            ApiError: the chat template refuses the messages, there is no room for a response, or the session has ended.
            Exception: of the engines.
        """
        if self._is_closed:
            raise _ended()
        conversation, context = self._place(request)
        conversation.is_busy = True
        try:
            return await self._respond_in(conversation, context, request)
        finally:
            conversation.is_busy = False

    async def close(self) -> None:
        """Ends running generations; later requests are refused."""
        self._is_closed = True
        tasks = list(self._generating)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def turns(self) -> tuple[Turn, ...]:
        """Of all conversations with a response, in the order in which they began; without any, of the prompt alone."""
        turns: list[Turn] = []
        for first, *others in (one.builder.turns() for one in self._conversations if one.last_ids):
            # Only the first sequence may be the one of the prompt.
            is_prompt = not turns and np.array_equal(first.token_ids[~first.is_generated], self._prompt.token_ids)
            turns += [replace(first, begins_anew=not is_prompt), *others]
        return tuple(turns) or TrajectoryBuilder(self._prompt.token_ids).turns()

    def _place(self, request: ChatRequest) -> tuple[_Conversation, np.ndarray]:
        """The longest conversation that the request continues, else a new one; and its new tokens, int32[T]."""
        known = [one for one in self._conversations if one.is_continued_by(request)]
        num_used = 0
        try:
            if known:
                conversation = max(known, key=lambda one: len(one.messages))
                new = request.messages[len(conversation.messages) :]
                num_used = len(conversation.builder.token_ids())
                room = max(0, self._max_tokens - num_used)
                tokens = self._template.render_next_turn(conversation.last_ids, new, request.options, max_tokens=room)
            else:
                conversation = _Conversation(options=request.options)
                tokens = self._template.render(request.messages, request.options, max_tokens=self._max_tokens)
                self._conversations.append(conversation)
        except TemplateError as error:
            raise ApiError(str(error)) from error
        except TooLong as error:
            raise self._no_room(f"more than {num_used + error.num_tokens}") from error
        return conversation, np.array(tokens, np.int32)

    async def _respond_in(self, conversation: _Conversation, context: np.ndarray, request: ChatRequest) -> ChatResponse:
        asked = np.concatenate([conversation.builder.token_ids(), context])
        room = self._max_tokens - len(asked)
        if room < 1:
            raise self._no_room(str(len(asked)))
        max_tokens = room if request.max_tokens is None else min(room, request.max_tokens)
        chunk = await self._generated(asked, max_tokens, stop=request.stop)
        self._num_responses += 1
        token_ids = chunk.token_ids.tolist()
        message = assistant_message(
            self._template.text(token_ids, spelled_out=False),
            call_prefix=f"call_{self._num_responses}_",
            reads_calls=bool(request.tools),
            stop=self._stop if request.stop is None else request.stop,
        )
        if token_ids:  # tokens and messages together, or neither
            conversation.builder.add_context(context)
            conversation.builder.add_generated(chunk)
            conversation.last_ids = token_ids
            conversation.messages = [*request.messages, normalize(message)]
            conversation.sampled.add(len(request.messages))
        if chunk.finish_reason == "abort":
            self._is_out_of_time = True
            self._fail()
            raise _ended("the generation took too long; ")
        is_cut = chunk.finish_reason == "length"
        self._is_out_of_room = is_cut and max_tokens == room
        texts = [self._template.text([token]) for token in token_ids] if request.logprobs else []
        return ChatResponse(
            message=message,
            finish_reason="length" if is_cut else "tool_calls" if "tool_calls" in message else "stop",
            num_prompt_tokens=len(asked),
            num_completion_tokens=len(token_ids),
            logprobs=list(zip(texts, chunk.logprobs.tolist(), strict=True)) if request.logprobs else None,
        )

    async def _generated(self, asked: np.ndarray, max_tokens: int, *, stop: Any) -> TokenChunk:
        """In a separate task, so that closing ends the generation, and not the request that waits for it."""

        async def generate() -> TokenChunk:
            return await self._generate(asked, max_tokens, stop=stop)

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
            self.failure = error
            self._fail()
            raise
        finally:
            self._generating.discard(task)

    def _fail(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._give_up()

    def _no_room(self, num_tokens: str) -> ApiError:
        """For a conversation of so many tokens."""
        self._is_out_of_room = True
        # Clients recognize the case by this code, or by the beginning of the text.
        return ApiError(
            f"This model's maximum context length is {self._max_tokens} tokens, its response included; the messages "
            f"have {num_tokens}. Send fewer, or end the trajectory",
            code="context_length_exceeded",
        )


def _ended(why: str = "") -> ApiError:
    return ApiError(f"{why}this trajectory has ended", status=404, code="trajectory_ended")
