"""The tokenizer that worker, engine and agent share with the driver."""

from __future__ import annotations

from typing import Any


def load_tokenizer(path: str, *, trust_remote_code: bool) -> Any:
    """A Hugging Face tokenizer of a directory or hub name. Takes seconds, transformers included.

    With `trust_remote_code` its own class is imported where it has one; without, a class of transformers may read the
    same files in another way.

    Raises:
        OSError, ValueError: it cannot be had, or needs code that is not trusted.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
