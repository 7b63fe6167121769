"""Built-in rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def arithmetic(*, prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    """1.0 if the response, without surrounding white space, is exactly the answer; else 0.0."""
    del prompt, metadata
    return 1.0 if response.strip() == answer.strip() else 0.0


def zero(*, prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    """0.0, whatever the response."""
    del prompt, response, answer, metadata
    return 0.0


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Soft overlong punishment (DAPO, eq. 13): 0 up to the buffer, then linear down to `-penalty` at `max_tokens`.

    Args:
        num_tokens: generated tokens of the response.
        max_tokens: the response limit; the buffer is its last `buffer_tokens`.
        buffer_tokens: 0 turns shaping off.

    Raises:
        ValueError: a buffer that is negative or longer than the response limit.

    Example:
        overlong_penalty(17_000, max_tokens=20_480, buffer_tokens=4_096, penalty=1.0)  # -0.150390625
    """
    if not 0 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"overlong buffer must be 0 to the response limit of {max_tokens} tokens, got {buffer_tokens}; "
            "set algorithm.overlong_buffer_tokens"
        )
    if buffer_tokens == 0:
        return 0.0
    num_over = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(max(num_over / buffer_tokens, 0.0), 1.0)
