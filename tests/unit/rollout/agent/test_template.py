"""Messages that fit are never taken for too long, whatever the tokenizer does with their characters."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout import rendering as module
from rollout.rendering import ChatTemplateRenderer, RenderOptions, TooLong

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS = ["to be or not to be " * 40, "=" * 600, " " * 600, "a1b2" * 200, "e\u0301e\u0301" * 200]
SHOWS_TEXT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def whole_text_at_once() -> Tokenizer:
    """Merges across words, as there are none: the longest tokens that there can be."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    return tokenizer


def bytes_of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def most_likely_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=60, show_progress=False, unk_token="<unk>")
    )
    return tokenizer


def known_words_without_spaces() -> Tokenizer:
    """Drops white space, and makes one token of all that is unknown in a word."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "to": 1, "be": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return tokenizer


TOKENIZERS = [whole_text_at_once, bytes_of_words, most_likely_pieces, known_words_without_spaces]


def texts() -> list[str]:
    draw = random.Random(0)
    pieces = ["to be or not to be ", "=" * 64, " " * 300, "a1b2" * 20, "e\u0301" * 30, "x", "\u00fc", "\n"]
    return ["".join(draw.choices(pieces, k=draw.randint(1, 60))) for _ in range(150)] + [" " * 100_000, "x" * 100_000]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_no_message_that_fits_is_refused(make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLACK", 64)
    fast = PreTrainedTokenizerFast(tokenizer_object=make())
    fast.chat_template = SHOWS_TEXT
    template, num_looked_at = ChatTemplateRenderer(fast), 0
    for text in texts():
        tokens = template.render([{"role": "user", "content": text}], RenderOptions())
        again = template.render([{"role": "user", "content": text}], RenderOptions(), max_tokens=len(tokens))
        assert again == tokens
        num_looked_at += len(text) > 4 * (2 * len(tokens) + 64)
    assert num_looked_at > 0


def test_a_message_that_is_dense_behind_its_beginning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=known_words_without_spaces())
    fast.chat_template = SHOWS_TEXT
    template, looked_at = ChatTemplateRenderer(fast), list[int]()
    ids_of = template._ids
    monkeypatch.setattr(template, "_ids", lambda text: looked_at.append(len(text)) or ids_of(text))
    with pytest.raises(TooLong, match="more than 1050 tokens"):
        template.render([{"role": "user", "content": " " * 10_000 + "to " * 100_000}], RenderOptions(), max_tokens=13)
    assert looked_at == [4200, 8400, 16800]
