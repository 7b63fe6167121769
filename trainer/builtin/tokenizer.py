"""The tokenizer of `builtin:tiny`: one token per printable ASCII character."""

from __future__ import annotations

import string
from typing import Any

PAD, UNK, EOS = "<pad>", "<unk>", "<eos>"
SPECIAL_TOKENS = (PAD, UNK, EOS)
CHARACTERS = tuple(c for c in map(chr, range(32, 127)) if c in string.printable)
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
VOCABULARY_SIZE = 128
"""Rows of the embedding; the few above `len(VOCABULARY)` are never produced by the tokenizer."""
PAD_ID, EOS_ID = VOCABULARY[PAD], VOCABULARY[EOS]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer() -> Any:
    """A fast Hugging Face tokenizer (needs no file and no torch)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNK, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(text: str) -> list[int]:
    """Token ids of `text` without importing a tokenizer library; unknown characters become `<unk>`."""
    return [VOCABULARY.get(character, VOCABULARY[UNK]) for character in text]
