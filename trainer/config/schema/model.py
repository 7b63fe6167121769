"""`model`: the policy, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.field import key

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    rank: int = key(
        0,
        "Rank of LoRA adapters: only they are trained and synchronised, the model itself stays as it is. 0 trains all "
        "weights. Engines know 1, 8, 16, 32, 64, 128, 256, 320 and 512.",
        ge=0,
        le=512,
    )
    alpha: float = key(32.0, "What an adapter adds is multiplied by `alpha / rank`.", gt=0)
    target_modules: str = key(
        "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj",
        "Linear layers of the decoder blocks that get adapters, by their last name, joined by `+`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: str = key(
        "builtin:tiny",
        "Hugging Face model directory or hub name. `builtin:tiny` is a small Qwen2 that is made and warm-started "
        "on first use and cached in the user cache directory.",
        is_path=True,
    )
    tokenizer_path: str = key("", "Directory or hub name of the tokenizer; empty means `model.path`.", is_path=True)
    random_weights: bool = key(
        False,
        "Draw the weights from `seed`: `model.path` has a config and no weights. For tests and benchmarks.",
    )
    trust_remote_code: bool = key(False, "Run Python code that comes with the model or tokenizer.")
    rollout_dtype: DType = key("bfloat16", "Type of the weights in the engine, and of what weight sync moves.")
    compute_dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16", "Type of the learner's forward and backward; masters stay float32."
    )
    lora: LoraConfig = key(factory=LoraConfig, doc="Train adapters on a frozen model.")
