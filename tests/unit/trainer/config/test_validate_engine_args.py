"""Engine arguments that would take from under a run what it stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_config import engine_args
from tests.unit.trainer.config.test_validate import config_with
from trainer.config.rules import REFUSED_ENGINE_ARGS, check_combinations

if TYPE_CHECKING:
    from trainer.errors import Problem


def problems_with(**arguments: Any) -> list[Problem]:
    return check_combinations(config_with(rollout__engine_args=arguments))


@pytest.mark.parametrize(
    ("argument", "value", "instead"),
    [
        ("tensor_parallel_size", 2, "rollout.tensor_parallel_size"),
        ("pipeline_parallel_size", 2, "rollout.tensor_parallel_size"),
        ("seed", 1, "seed"),
        ("max_num_seqs", 8, "rollout.max_num_seqs"),
        ("enable_lora", True, "model.lora.rank"),
        ("enable_sleep_mode", True, "mode.name"),
        ("data_parallel_size", 2, "rollout.num_replicas"),
    ],
)
def test_what_has_a_key_of_its_own_is_refused_with_its_name(argument: str, value: object, instead: str) -> None:
    (problem,) = problems_with(**{argument: value})
    assert (problem.key, problem.got) == ("rollout.engine_args", f"{argument}: {value}")
    assert problem.do == f"use {instead}" and problem.also == (instead,)


@pytest.mark.parametrize(
    ("argument", "value", "why"),
    [
        ("logprobs_mode", "raw_logprobs", "correction"),
        ("worker_extension_cls", "mine.Extension", "weight sync"),
        ("skip_tokenizer_init", False, "tokens"),
        ("load_format", "auto", "weight sync"),
        ("enable_eplb", True, "expert"),
        ("hf_overrides", {"rope_theta": 1}, "config.json"),
        ("logits_processors", ["mine:Mask"], "distribution"),
        ("distributed_executor_backend", "ray", "mp, uni"),
    ],
)
def test_what_the_run_relies_on_is_refused_with_the_reason(argument: str, value: object, why: str) -> None:
    (problem,) = problems_with(**{argument: value})
    assert why in problem.allowed and problem.do == "leave it out"


def test_every_wrong_argument_is_named_and_any_other_passes() -> None:
    assert [p.got for p in problems_with(seed=1, load_format="auto", enforce_eager=True)] == [
        "seed: 1", "load_format: auto", "enforce_eager: True",
    ]  # fmt: skip
    free = {"quantization": "fp8", "kv_cache_dtype": "fp8", "max_num_batched_tokens": 4096, "async_scheduling": False}
    free |= {"distributed_executor_backend": "mp"}
    assert problems_with(**free) == []


def test_a_step_has_room_for_a_token_of_every_sequence() -> None:
    (problem,) = problems_with(max_num_batched_tokens=255)
    assert problem.got == "max_num_batched_tokens: 255" and "rollout.max_num_seqs=256" in problem.allowed
    assert problems_with(max_num_batched_tokens=256) == []


def test_whatever_a_run_sets_for_its_engines_is_refused_unless_it_is_theirs_to_choose() -> None:
    specs = [EngineSpec(model="m", extension="a.B", sleep_level=1, lora_rank=8), EngineSpec(model="m", device="cuda")]
    ours = {name for spec in specs for name in engine_args(spec)}
    of_the_user = {"kv_cache_memory_bytes", "distributed_executor_backend"}
    assert ours - REFUSED_ENGINE_ARGS.keys() == of_the_user
