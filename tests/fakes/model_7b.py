"""A 7B model as plans see it: its shape, a configuration and a device for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import Qwen2Config

from trainer.config.schema import RunConfig
from trainer.driver.memory_plan import GIB, Device
from trainer.tools.run_plan import plan_run

if TYPE_CHECKING:
    from trainer.driver.memory_plan import ModelShape
    from trainer.tools.run_plan import RunPlan

QWEN_7B = Qwen2Config(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip
NUM_7B = 7_615_616_512
BIG = Device(name="accelerator", total_bytes=80 * GIB, is_shared=False)


def config(**sections: dict[str, Any]) -> RunConfig:
    base = RunConfig()
    base = replace(
        base,
        learner=replace(base.learner, num_ranks=4, activation_checkpointing=True, max_tokens_per_micro_batch=16384),
        rollout=replace(base.rollout, num_replicas=4, group_size=16),
    )
    return replace(base, **{name: replace(getattr(base, name), **keys) for name, keys in sections.items()})


def planned(
    cfg: RunConfig, shape: ModelShape, device: Device = BIG, *, prompt_tokens: float = 100.0, **given: Any
) -> RunPlan:
    return plan_run(cfg, shape, device, prompt_tokens=prompt_tokens, **given)
