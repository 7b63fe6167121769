"""Which requests an engine knows, and which of them are inside vLLM."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout.engine.live_answer import LiveAnswer
    from rollout.engine.load_meter import Activity


MAX_TIMES_OUT = 8
"""A request that was taken out so often stays in: one whose prompt takes longer than the time between two commits
would never have a token."""


class Roster:
    """A request is known from its call to its last chunk, and has to enter vLLM: again, whenever it was taken out.

    stay ─> outside ─ enter ─> inside ─ take_out ─> outside ...

    An abort reaches a request at every moment: inside by way of vLLM, and whatever enters is asked for earlier ones.
    """

    def __init__(self, activity: Activity) -> None:
        self.inside: dict[str, LiveAnswer] = {}
        """What was taken out is in here, too, until it is back: its stream must hear of the engine's death."""
        self._activity = activity
        self._outside, self._aborted = set[str](), set[str]()
        self._times_out = Counter[str]()

    @contextmanager
    def stay(self, request_id: str) -> Iterator[None]:
        """Around all of a request; it begins outside.

        Raises:
            ValueError: there is one with this id.
        """
        if request_id in self.inside or request_id in self._outside:
            raise ValueError(f"request {request_id!r} is already running; request ids must be unique per engine")
        self._outside.add(request_id)
        try:
            yield
        finally:
            self._outside.discard(request_id)
            self._aborted.discard(request_id)
            self._times_out.pop(request_id, None)
            if self.inside.pop(request_id, None) is not None and not self.inside:
                self._activity.end()

    def enter(self, request_id: str, live: LiveAnswer) -> bool:
        """vLLM has the request. False if it was aborted before, and vLLM must be told."""
        if not self.inside:
            self._activity.begin()
        self.inside[request_id] = live
        self._outside.discard(request_id)
        return request_id not in self._aborted

    def is_outside(self, request_id: str) -> bool:
        return request_id in self._outside

    def note_abort(self, request_id: str) -> bool:
        """Whether vLLM must be told. In any case it is remembered: the request may just be taken out."""
        if request_id in self.inside or request_id in self._outside:
            self._aborted.add(request_id)
        return request_id in self.inside

    def num_tokens(self, request_states: Mapping[str, Any]) -> list[tuple[str, LiveAnswer, int]]:
        """Of each request that vLLM has and can go on with: how many tokens it has been given so far.

        Args:
            request_states: of vLLM's output processor. Finished requests have left it; they get no more tokens.
        """
        found = [(key, live, request_states.get(live.queue.request_id)) for key, live in self.inside.items()]
        return [
            (key, live, state.detokenizer.num_output_tokens())
            for key, live, state in found
            if state is not None and state.detokenizer is not None
        ]

    def take_out_tokenless(self, request_states: Mapping[str, Any]) -> list[str]:
        """Requests without a token, oldest first, by the ids that vLLM has for them: it must abort these. Their streams
        find out by what that gives them, and enter again."""
        tokenless = {
            key: live
            for key, live, num_tokens in self.num_tokens(request_states)
            if not num_tokens and self._times_out[key] < MAX_TIMES_OUT
        }
        self._outside.update(tokenless)
        self._times_out.update(tokenless.keys())
        return [live.queue.request_id for live in tokenless.values()]
