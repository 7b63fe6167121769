"""Which token ids a model can take: the rows of its embedding.

Any other ends the engine, or leaves it hanging. vLLM itself looks only where it has a tokenizer, and ours have none
(`skip_tokenizer_init`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def foreign_token(token_ids: np.ndarray, vocab_size: int) -> int | None:
    """Of `token_ids` (int[T]) the one furthest above [0, vocab_size), or else below it; None if all are inside."""
    if not len(token_ids):
        return None
    highest, lowest = int(token_ids.max()), int(token_ids.min())
    if highest >= vocab_size:
        return highest
    return lowest if lowest < 0 else None


def check_token_ids(token_ids: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError unless these are integers in one row (int[T]), and the model has a row for each."""
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise ValueError(
            f"token ids must be integers in one row, got {token_ids.dtype} of shape {token_ids.shape}; an agent loop "
            "must give generate() an int32[T]"
        )
    token = foreign_token(token_ids, vocab_size)
    if token is not None:
        raise ValueError(
            f"prompt has token id {token}, must be >= 0 and < {vocab_size}, the vocabulary of the model; use the "
            "model's own tokenizer (an agent must too), or resize the embedding of the model"
        )
