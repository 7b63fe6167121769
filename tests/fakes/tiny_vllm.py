"""A tiny model for real vLLM engines on CPU, and how to start and ask them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rollout.engine.interface import EngineSpec

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.engine.vllm_engine import VllmEngine
    from weight_sync.messages import CommitResult

STOP, EXTRA_STOP = 1, 2


def save_model(path: Path) -> Path:
    """Random float32 weights, flat enough that sampling visits many tokens."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=STOP, bos_token_id=0,
        tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).float().save_pretrained(path)
    hex_tokenizer(config.vocab_size).save_pretrained(path)
    return path


def hex_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Every token is a number of two digits, without a space between them."""
    words = {f"{token:02x}": token for token in range(vocab_size)}
    tokenizer: Any = Tokenizer(models.WordLevel(words, unk_token="00"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="00", eos_token=f"{STOP:02x}")


def make_spec(model_dir: Path, **changes: object) -> EngineSpec:
    """Of an engine with `LetterExtension`."""
    values: dict[str, Any] = {
        "model": str(model_dir), "tokenizer": str(model_dir), "stop_token_ids": (EXTRA_STOP,), "dtype": "float32",
        "max_model_len": 4096, "max_num_seqs": 64, "kv_cache_gib": 0.125, "enforce_eager": True, "stream_interval": 16,
        "extension": "tests.fakes.letter_extension.LetterExtension",
    }  # fmt: skip
    return EngineSpec(**{**values, **changes})


def random_prompt(seed: int, num_tokens: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 128, num_tokens).astype(np.int32)


class EngineHandle:
    """A `ReplicaHandle` without Ray."""

    name = "r0"

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        return await self.engine.call_workers(method, *args, timeout_s=timeout_s)

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        return await self.engine.commit(version, method, *args, timeout_s=timeout_s)
