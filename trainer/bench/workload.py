"""What every mode of a benchmark has to do alike: model shape, prompts, and how long each answer is.

Lengths are drawn for every answer, from a seed and the prompt's number, and written into the data set, so they cannot
depend on the mode, the engine or the weights.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.builtin.tokenizer import build_tokenizer
from weight_sync.bench.shapes import Architecture, architecture

if TYPE_CHECKING:
    from pathlib import Path

LENGTH_COLUMN = "response_tokens"
"""Column of the data set: tokens of each answer to this prompt."""
NUM_PROMPTS = 4096
"""Rows of the data set; a run that needs more begins again."""
TINY_SHAPE = Architecture(
    name="tiny", model_type="qwen2", hidden=64, layers=2, heads=2, kv_heads=2, head_dim=32, intermediate=128, vocab=128,
    has_qkv_bias=True, max_positions=4096,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step's worth of work, and its distribution of lengths: Pareto of shape 1, cut at `max_response_tokens`.

    Example:
        workload("w1", is_tiny=False).lengths_of(17)
    """

    name: str
    shape: str
    """Of the model: a name in `weight_sync.bench.shapes`, or "tiny"."""
    dtype: str
    prompt_tokens: int
    min_response_tokens: int
    max_response_tokens: int
    """Equal to the minimum: all answers have that length."""
    groups_per_step: int
    group_size: int
    micro_batch_tokens: int
    activation_checkpointing: bool
    seed: int = 1
    lengths_per: str = "response"
    """Files of figures that lack it were measured with one length for all answers to a prompt, which is easier where
    generation and learning overlap."""

    def lengths_of(self, index: int) -> list[int]:
        """Tokens of each answer to prompt number `index`."""
        uniform = np.random.default_rng([self.seed, index]).random(self.group_size)  # [0, 1): 1 - uniform is never 0
        drawn = (self.min_response_tokens / (1.0 - uniform)).astype(np.int64)
        return [int(length) for length in np.minimum(drawn, self.max_response_tokens)]

    def lengths(self, num_prompts: int) -> list[int]:
        """Of all answers to the first so many prompts, which come round again after `NUM_PROMPTS`."""
        return [length for index in range(num_prompts) for length in self.lengths_of(index % NUM_PROMPTS)]

    def architecture(self) -> Architecture:
        """Raises ValueError if there is no such shape."""
        return TINY_SHAPE if self.shape == TINY_SHAPE.name else architecture(self.shape)


_W1 = Workload(
    name="w1",
    shape="qwen2.5-7b",
    dtype="bfloat16",
    prompt_tokens=512,
    min_response_tokens=256,
    max_response_tokens=4096,
    groups_per_step=32,
    group_size=8,
    micro_batch_tokens=16384,
    # Without it, the activations of 16,384 tokens of this shape alone take more than 100 GiB.
    activation_checkpointing=True,
)
WORKLOADS = {
    "w1": _W1,
    "w1-heavy": replace(_W1, name="w1-heavy", max_response_tokens=16384, micro_batch_tokens=512 + 16384),
    "uniform": replace(_W1, name="uniform", max_response_tokens=256),
}


def workload(name: str, *, is_tiny: bool, shape: str = _W1.shape) -> Workload:
    """
    Args:
        is_tiny: the same distribution scaled down, for a model that trains on a CPU: shows that it works, not how fast.
        shape: another model for the same prompts and lengths; a tiny workload has its own.

    Raises:
        ValueError: no such workload or shape.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    chosen = WORKLOADS[name]
    if not is_tiny:
        named = name if shape == _W1.shape else f"{name} ({shape})"
        return replace(chosen, name=named, shape=architecture(shape).name)
    shortest, scale = 8, 32
    return replace(
        chosen,
        name=f"{name} (tiny)",
        shape=TINY_SHAPE.name,
        dtype="float32",
        prompt_tokens=16,
        min_response_tokens=shortest,
        max_response_tokens=chosen.max_response_tokens // scale,
        groups_per_step=8,
        group_size=4,
        micro_batch_tokens=max(1024, 16 + chosen.max_response_tokens // scale),
        activation_checkpointing=False,
    )


def write_inputs(work: Workload, folder: Path) -> tuple[Path, Path]:
    """(model directory without weights, data set) in `folder`, written anew."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    model.mkdir(parents=True, exist_ok=True)
    # No end token anywhere: nothing but its budget ends an answer.
    config = {**work.architecture().config(work.dtype), "bos_token_id": None, "eos_token_id": None}
    (model / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    with prompts.open("w", encoding="utf-8") as file:
        for index in range(NUM_PROMPTS):
            row = {"prompt": _text(work, index), "answer": "", LENGTH_COLUMN: work.lengths_of(index)}
            file.write(json.dumps(row) + "\n")
    return model, prompts


def run_config(work: Workload, model: Path, prompts: Path, *, device: str) -> dict[str, Any]:
    """A whole configuration for `python -m trainer --config-dir`; a mode adds its devices. No CPU compiles."""
    dtypes = {"rollout_dtype": work.dtype, "compute_dtype": work.dtype}
    long_s = 3600.0  # what bounds a run here is the deadline of the benchmark
    return {
        "defaults": [{"device": "auto"}, {"algorithm": "grpo"}, {"correction": "none"}, {"mode": "async"}, "_self_"],
        "name": "bench",
        "model": {"path": str(model), **dtypes},
        "task": {
            "name": work.name,
            "train_path": str(prompts),
            "eval_path": "",
            "max_prompt_tokens": work.prompt_tokens,
            "overlong_prompts": "error",
            "shuffle": False,
            "agent": "trainer.bench.agent.forced_lengths",
            "agent_timeout_s": long_s,
            "reward": {"name": "zero"},
        },
        "rollout": {
            "group_size": work.group_size,
            "max_response_tokens": work.max_response_tokens,
            "request_timeout_s": long_s,
            "enforce_eager": work.shape == TINY_SHAPE.name,
            "kv_cache_gib": 0.25,
        },
        "learner": {
            "max_tokens_per_micro_batch": work.micro_batch_tokens,
            "activation_checkpointing": work.activation_checkpointing,
            "compile": device != "cpu" and work.shape != TINY_SHAPE.name,
        },
        "trainer": {
            "groups_per_step": work.groups_per_step,
            "eval_every": 0,
            "eval_at_start": False,
            "eval_at_end": False,
        },
        "checkpoint": {"every_steps": 0, "save_at_end": False, "export_hf": False},
        "telemetry": {"progress": "plain", "tensorboard": False},
    }


def attention_tokens(work: Workload, num_prompts: int) -> float:
    """Mean length of the sequence that a token stands in: sum of squares over sum, prompts included; of the first
    `num_prompts`."""
    whole = np.array(work.lengths(num_prompts), np.float64) + work.prompt_tokens
    return float((whole**2).sum() / whole.sum())


def _text(work: Workload, index: int) -> str:
    """A character per token. No two prompts begin alike, so that a prefix cache helps within a group only."""
    rng = np.random.default_rng([work.seed, index, 1])
    letters = rng.choice(list(string.ascii_letters), work.prompt_tokens)
    return f"{index:06d}"[: work.prompt_tokens] + "".join(letters[6:])
