"""A tokenizer that brings its own code: a Python file, and a vocabulary that only this file can read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY_FILE = "letters.tiktoken"
END_ID = 0
CODE_FILE = "tokenization_letters.py"
CODE = '''
from pathlib import Path

from transformers import PreTrainedTokenizer


class LettersTokenizer(PreTrainedTokenizer):
    """A token per letter."""

    vocab_files_names = {"letters_file": "letters.tiktoken"}

    def __init__(self, letters_file, **kwargs):
        self._letters = ["<end>", *Path(letters_file).read_text()]
        super().__init__(eos_token="<end>", **kwargs)

    @property
    def vocab_size(self):
        return len(self._letters)

    def get_vocab(self):
        return {letter: number for number, letter in enumerate(self._letters)}

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._letters.index(token)

    def _convert_id_to_token(self, index):
        return self._letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
'''
CHAT_TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
"""It knows the role `tool`."""


def save_own_tokenizer(path: Path) -> Path:
    """Its end token is `END_ID`; letters are those of ASCII that can be printed."""
    path.mkdir(exist_ok=True)
    (path / CODE_FILE).write_text(CODE)
    (path / VOCABULARY_FILE).write_text("".join(map(chr, range(32, 127))))
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_letters.LettersTokenizer", None]},
        "tokenizer_class": "LettersTokenizer",
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
