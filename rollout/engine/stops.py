"""Which token of an answer completes a stop string. Pure: looks at tokens through a `decode` that it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from rollout.types import SamplingParams

    Decode = Callable[[Sequence[int]], str]
    """Tokens to text, special tokens spelled out."""

_BYTES_PER_CHARACTER = 4
_CONTEXT_TOKENS = 4
"""Decoded in front of the answer: some tokenizers drop the white space that a text begins with."""


class StopWatch:
    """Follows one answer token by token, from behind the tokens that it had when it came here.

    Args:
        decode: gives the text.
        token_ids: int32[T], what the engine continues; the last `params.num_prefix_tokens` belong to the answer.
        params: with at least one stop string.

    Example:
        watch = StopWatch(tokenizer.decode, prompt, SamplingParams(max_tokens=9, stop=("</search>",)))
        watch.end(new_tokens)  # 3: the third of them completes it; None: none does
    """

    def __init__(self, decode: Decode, token_ids: np.ndarray, params: SamplingParams) -> None:
        self._decode, self._stop = decode, params.stop
        # A token is at least a byte of the text, so no string is longer than this many tokens.
        self._window = _BYTES_PER_CHARACTER * max(map(len, params.stop))
        num_kept = min(params.num_prefix_tokens, self._window)
        self._tokens: list[int] = token_ids[-(num_kept + _CONTEXT_TOKENS) :].tolist()
        self._first = len(self._tokens) - num_kept
        """Where in `_tokens` the part of the answer begins that a match may begin in."""
        self._num_seen = 0

    @property
    def is_past_prefix(self) -> bool:
        """Whether no string can begin in what the answer had when it came here."""
        return self._num_seen >= self._window

    def end(self, token_ids: Sequence[int]) -> int | None:
        """How many of the next tokens the answer has, the completing one included; None if none completes a string."""
        for number, token_id in enumerate(token_ids, start=1):
            self._num_seen += 1
            self._tokens.append(token_id)
            self._first = max(self._first, len(self._tokens) - self._window)
            del self._tokens[: max(0, self._first - _CONTEXT_TOKENS)]
            self._first = min(self._first, _CONTEXT_TOKENS)
            text = self._decode(self._tokens)
            begin = len(self._decode(self._tokens[: self._first]))
            if any(text.find(stop, begin) >= 0 for stop in self._stop):
                return number
        return None
