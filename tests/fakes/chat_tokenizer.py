"""Tokenizers with a token per character, and chat templates such as Qwen models have."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"
SPECIAL = ("<unk>", "<|im_start|>", END)
PLAIN = """{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Reads messages alone."""
THINKING = (
    """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}"""
    + PLAIN
    + """
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}"""
)
"""Shows tools, and reads `enable_thinking`."""


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate([*SPECIAL, "\n", *map(chr, range(32, 127))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token=END, additional_special_tokens=[SPECIAL[1]]
    )
    fast.chat_template = template
    return fast
