"""A 7B shape, and a configuration and a device for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import Qwen2Config

from trainer.config.schema import ModelConfig, RunConfig
from trainer.tools.memory_plan import GIB, Device, Workload, model_shape
from trainer.tools.run_plan import plan_run

if TYPE_CHECKING:
    from trainer.tools.memory_plan import ModelShape
    from trainer.tools.run_plan import RunPlan

QWEN_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
NUM_7B = 7_615_616_512
BIG = Device(name="accelerator", total_bytes=80 * GIB, is_shared=False)


@pytest.fixture(scope="session")
def shape_7b(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    directory = tmp_path_factory.mktemp("qwen")
    QWEN_7B.save_pretrained(directory)
    return model_shape(ModelConfig(), str(directory))


def config(**sections: dict[str, Any]) -> RunConfig:
    base = RunConfig()
    base = replace(
        base,
        learner=replace(base.learner, num_ranks=4, activation_checkpointing=True),
        rollout=replace(base.rollout, num_replicas=4, group_size=16),
    )
    return replace(base, **{name: replace(getattr(base, name), **keys) for name, keys in sections.items()})


def planned(cfg: RunConfig, shape: ModelShape, device: Device = BIG, **workload: Any) -> RunPlan:
    known = Workload(**({"prompt_tokens": 100.0} | workload))
    return plan_run(cfg, shape, device, critic=None, workload=known)
