"""Estimates against closed forms, and against what a real learner allocates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV2Config, Gemma4TextConfig

from tests.fakes.learner import KINDS, process_group, run_config, save_tiny
from tests.fakes.model_7b import BIG, NUM_7B, QWEN_7B, config, planned
from trainer.config.schema import LoraConfig, ModelConfig, RunConfig
from trainer.learner.policy import PolicyTrainer
from trainer.tools.dry_run import format_plan
from trainer.tools.memory_plan import (
    GIB,
    Device,
    ModelShape,
    activation_bytes_per_block,
    gib,
    learner_items,
    min_bytes,
    model_shape,
    total,
)
from trainer.tools.run_plan import RunPlan, problems
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    from pathlib import Path


def sizes(found: RunPlan) -> dict[str, int]:
    return {item.name: item.nbytes for item in (*found.learner, *found.engine.items)}


def test_a_shape_is_read_from_the_config_alone(shape_7b: ModelShape) -> None:
    assert shape_7b.num_params == NUM_7B
    assert shape_7b.num_head_params == 152064 * 3584
    block = 2 * 3584 * 3584 + 2 * 3584 * 512 + (3584 + 2 * 512) + 3 * 3584 * 18944 + 2 * 3584
    assert (shape_7b.num_block_params, shape_7b.num_layers) == (block, 28)
    assert shape_7b.num_root_params == NUM_7B - 28 * block
    assert shape_7b.kv_bytes_per_token(tensor_parallel_size=1, dtype_bytes=2) == 2 * 28 * 4 * 128 * 2
    assert shape_7b.kv_bytes_per_token(tensor_parallel_size=8, dtype_bytes=2) == 2 * 28 * 1 * 128 * 2


def test_tied_weights_count_once_and_experts_by_what_a_token_visits(tmp_path: Path) -> None:
    for kind in ("qwen2", "qwen3_moe"):
        KINDS[kind]().save_pretrained(tmp_path / kind)
    tied = model_shape(ModelConfig(), AutoConfig.from_pretrained(tmp_path / "qwen2"))
    assert tied.num_head_params == 0
    assert model_shape(ModelConfig(), AutoConfig.from_pretrained(tmp_path / "qwen3_moe")).intermediate_size == 2 * 32


def test_state_of_a_rank_is_sixteen_bytes_per_parameter_over_the_ranks(shape_7b: ModelShape) -> None:
    got = sizes(planned(config(), shape_7b))
    assert got["masters (float32)"] == NUM_7B * 4 // 4
    assert got["moments (AdamW)"] == NUM_7B * 8 // 4
    assert got["gradients (float32)"] == NUM_7B * 4 // 4
    assert got["arenas of weight sync (2 slots)"] == 2 * NUM_7B * 2 // 4
    assert got["unsharded weights"] == 2 * (shape_7b.num_root_params + 2 * shape_7b.num_block_params)
    assert got["logits of a chunk"] == 3 * 4 * 1024 * 152064
    assert got["weights"] == NUM_7B * 2
    small = sizes(planned(config(), shape_7b, BIG._replace(total_bytes=1000 * GIB)))
    assert small["unsharded weights"] == 2 * NUM_7B, "a model that is small beside the device stays whole"


def test_every_switch_moves_its_part(shape_7b: ModelShape) -> None:
    got = sizes(planned(config(algorithm={"kl": replace(RunConfig().algorithm.kl, coef=0.1)}), shape_7b))
    assert got["reference"] == NUM_7B * 2 // 4
    offloaded = sizes(planned(config(learner={"cpu_offload": True}), shape_7b))
    assert not {"masters (float32)", "moments (AdamW)", "gradients (float32)"} & set(offloaded)
    assert offloaded["masters on their way to an arena"] == 64 * 2**20
    cfg = config()
    both = planned(cfg, shape_7b, critic=shape_7b)
    num_critic = NUM_7B - 152064 * 3584 + 3584 + 1
    assert (sizes(both)["critic"], sizes(both)["gradients of the critic"]) == (
        12 * num_critic // 4,
        4 * num_critic // 4,
    )
    with_three = sizes(planned(config(weight_sync={"num_slots": 3}), shape_7b))
    assert with_three["arenas of weight sync (3 slots)"] == 3 * NUM_7B * 2 // 4
    whole = sizes(planned(config(learner={"activation_checkpointing": False}), shape_7b))["activations"]
    again = sizes(planned(cfg, shape_7b))["activations"]
    per_block = activation_bytes_per_block(shape_7b, num_tokens=cfg.learner.max_tokens_per_micro_batch, compute_bytes=2)
    assert whole == 28 * per_block
    assert again == per_block + 28 * cfg.learner.max_tokens_per_micro_batch * 3584 * 2


def on_host(found: RunPlan) -> dict[str, int]:
    return {item.name: item.nbytes for item in found.host}


def test_what_leaves_a_device_is_found_in_host_memory(shape_7b: ModelShape) -> None:
    assert on_host(planned(config(), shape_7b)) == {}
    learner_keys = {"cpu_offload": True, "reference_cpu_offload": True}
    algorithm = {"kl": replace(RunConfig().algorithm.kl, coef=0.1)}
    cfg = config(learner=learner_keys, algorithm=algorithm, critic={"cpu_offload": True})
    num_critic = NUM_7B - 152064 * 3584 + 3584 + 1
    assert on_host(planned(cfg, shape_7b, critic=shape_7b)) == {
        "masters, moments and gradients": 16 * NUM_7B // 4,
        "reference": 2 * NUM_7B // 4,
        "critic with its gradients": 16 * num_critic // 4,
    }


def test_host_memory_is_asked_for_by_all_ranks_together(shape_7b: ModelShape) -> None:
    cfg = config(learner={"cpu_offload": True, "num_ranks": 2})

    def with_host(host_gib: int) -> RunPlan:
        return planned(cfg, shape_7b, host_bytes=host_gib * GIB)

    assert problems(with_host(114), cfg) == [], "7.6 billion x 16 bytes are 113.5 GiB"
    (problem,) = problems(with_host(113), cfg)
    assert (problem.key, problem.value) == ("learner.cpu_offload", "113.48 GiB for the memory of this host")
    assert str(problem).count("masters, moments and gradients") == 1
    text = format_plan(with_host(113), cfg)
    assert "2 ranks together" in text and "113.48 GiB of 113.00 GiB" in text
    assert problems(planned(cfg, shape_7b), cfg) == [], "somebody else's hosts may have any size"


def test_a_shared_device_holds_either_side_and_the_arena(shape_7b: ModelShape) -> None:
    cfg = config(
        mode={"name": "colocated", "in_flight": "abort"},
        weight_sync={"num_slots": 1, "commit": "inplace"},
        rollout={"num_replicas": 4},
    )
    found = planned(cfg, shape_7b)
    assert found.is_paired
    assert found.moved_bytes == 12 * NUM_7B // 4, "masters and two moments, no gradients"
    assert on_host(found) == {"the learner, while engines compute": found.moved_bytes}
    assert found.arena_bytes == 2 * NUM_7B // 4
    assert not found.engine.is_staged
    assert problems(found, cfg) == []
    words = format_plan(found, cfg)
    assert "4 x 1 = 4 of the same devices" in words and "Per device in the learner's turn" in words
    assert "arena of the learner" in words and "21.28 GiB per device" in words
    greedy = replace(cfg, rollout=replace(cfg.rollout, gpu_memory_utilization=0.99))
    (problem,) = problems(planned(greedy, shape_7b), greedy)
    assert problem.key == "rollout.gpu_memory_utilization" and "3.55 GiB of arena" in problem.value
    odd = replace(cfg, learner=replace(cfg.learner, num_ranks=3))
    assert [p.key for p in problems(planned(odd, shape_7b), odd)] == ["learner.num_ranks"]


def test_adapters_alone_are_trained_and_published(tmp_path: Path, shape_7b: ModelShape) -> None:
    pytest.importorskip("peft")
    QWEN_7B.save_pretrained(tmp_path)
    shape = model_shape(ModelConfig(lora=LoraConfig(rank=8)), AutoConfig.from_pretrained(tmp_path))
    # q, o: 2 x (in + out); k, v; gate, up, down.
    e, kv, i = 3584, 512, 18944
    assert shape.num_adapter_params == 28 * 8 * (2 * (e + e) + 2 * (e + kv) + 3 * (e + i))
    assert shape.num_params == NUM_7B
    got = sizes(planned(config(), shape))
    assert got["masters (float32)"] == shape.num_adapter_params * 4 // 4
    assert got["frozen weights"] == NUM_7B * 2 // 4
    assert got["unsharded gradients"] == 0


def test_the_cache_gets_what_weights_and_workspace_leave(shape_7b: ModelShape) -> None:
    cfg = config(rollout={"gpu_memory_utilization": 0.5, "max_num_seqs": 10, "max_model_len": 2048})
    found = planned(cfg, shape_7b).engine
    assert found.kv_bytes == 40 * GIB - 2 * NUM_7B - 2 * GIB
    assert found.kv_tokens == found.kv_bytes // (2 * 28 * 4 * 128 * 2)
    assert found.kv_demand == 20480
    assert found.is_staged
    tight = planned(config(rollout={"gpu_memory_utilization": 0.85}), shape_7b).engine
    assert not tight.is_staged, "12 GiB are left, the shadow would need 14.2"


def test_engine_arguments_that_change_what_is_counted_leave_nothing_sure(shape_7b: ModelShape) -> None:
    small = BIG._replace(total_bytes=16 * GIB)
    for given, is_refused in (({}, True), ({"quantization": "fp8"}, False), ({"kv_cache_dtype": "auto"}, True)):
        cfg = config(rollout={"engine_args": given}, learner={"num_ranks": 64, "max_tokens_per_micro_batch": 1024})
        found = planned(cfg, shape_7b, small)
        assert ("rollout.gpu_memory_utilization" in {p.key for p in problems(found, cfg)}) == is_refused
        assert ("Counted as without rollout.engine_args.quantization" in format_plan(found, cfg)) != is_refused


def test_an_engine_generates_no_more_at_once_than_the_requests_it_is_given(shape_7b: ModelShape) -> None:
    cfg = config(rollout={"max_num_seqs": 256, "max_concurrency": 8}, trainer={"groups_per_step": 4})
    found = planned(cfg, shape_7b)
    assert found.engine.kv_demand == 8 * found.engine.longest_tokens
    text = format_plan(found, cfg)
    assert "128 responses; the engines generate 32 at once" in text
    assert "Up to 4 responses are generated one after the other" in text


def test_blocks_that_differ_in_their_heads_are_planned_as_the_largest(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "global_head_dim": 48}
    Gemma4TextConfig(vocab_size=128, head_dim=16, num_attention_heads=4, **sizes).save_pretrained(tmp_path)
    assert model_shape(ModelConfig(), AutoConfig.from_pretrained(tmp_path)).head_dim == 48


def test_the_cache_of_latent_attention_holds_the_latent_on_every_device(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite: 512 + 64 numbers per token and block, where 16 heads would have 2 x 16 x 128."""
    DeepseekV2Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, n_routed_experts=4,
    ).save_pretrained(tmp_path)  # fmt: skip
    shape = model_shape(ModelConfig(), AutoConfig.from_pretrained(tmp_path))
    for tp in (1, 8):
        assert shape.kv_bytes_per_token(tensor_parallel_size=tp, dtype_bytes=2) == 3 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("gib", "sections", "key", "words"),
    [
        (24, {}, "learner.num_ranks", "masters (float32), moments (AdamW), gradients"),
        (80, {"learner": {"activation_checkpointing": False, "max_tokens_per_micro_batch": 1 << 17}},
         "learner.max_tokens_per_micro_batch", "activations"),
        (80, {"rollout": {"gpu_memory_utilization": 0.15}}, "rollout.gpu_memory_utilization", "must hold one sequence"),
        (80, {"rollout": {"gpu_memory_utilization": 0.95}, "weight_sync": {"commit": "staged"}},
         "weight_sync.commit", "only 4.00 GiB are left"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_by_name(
    shape_7b: ModelShape, gib: int, sections: dict[str, Any], key: str, words: str
) -> None:
    cfg = config(**sections)
    found = problems(planned(cfg, shape_7b, BIG._replace(total_bytes=gib * GIB)), cfg)
    assert key in [problem.key for problem in found]
    assert words in "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("share", "is_refused", "is_marked"), [(0.66, True, False), (0.7, False, True), (0.75, False, False)]
)
def test_a_cache_that_fits_beside_a_smaller_workspace_is_marked_and_not_refused(
    shape_7b: ModelShape, share: float, is_refused: bool, is_marked: bool
) -> None:
    cfg = config(rollout={"gpu_memory_utilization": share, "max_model_len": 32512})
    found = planned(cfg, shape_7b, BIG._replace(total_bytes=24 * GIB))
    assert ("rollout.gpu_memory_utilization" in [problem.key for problem in problems(found, cfg)]) == is_refused
    assert ("(may not fit: the longest sequence" in format_plan(found, cfg)) == is_marked


def test_processes_that_share_a_host_are_added_up(shape_7b: ModelShape) -> None:
    cfg = config()
    host = Device(name="cpu", total_bytes=200 * GIB, is_shared=True)
    found = planned(cfg, shape_7b, host)
    assert found.engine.kv_bytes == GIB
    (problem,) = problems(found, cfg)
    num_engines = cfg.rollout.num_replicas * cfg.rollout.tensor_parallel_size
    needed = cfg.learner.num_ranks * total(found.learner) + num_engines * total(found.engine.items)
    assert problem.value == f"{gib(needed)} for this host", "all ranks and engines together"
    assert not problems(planned(cfg, shape_7b, host._replace(total_bytes=2000 * GIB)), cfg)
    least = min_bytes(found.learner)
    offloaded = planned(config(learner={"cpu_offload": True}), shape_7b, host)
    assert min_bytes((*offloaded.learner, *offloaded.host)) >= least, "there is nowhere else to go"


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), "llama")


def test_a_real_learner_allocates_what_was_planned(tiny_dir: Path, tmp_path: Path) -> None:
    cfg = run_config(tiny_dir, num_ranks=1)
    backend = get_backend("cpu")
    with process_group(tmp_path / "store"):
        real = PolicyTrainer(cfg, device=torch.device("cpu"), backend=backend)
        params = [p.to_local() if isinstance(p, DTensor) else p for p in real.model.parameters()]
        moments = [t for state in real._optimizers[""]._adamw.state.values() for t in state.values() if t.ndim]
    shape = model_shape(cfg.model, AutoConfig.from_pretrained(tiny_dir))
    host = Device(name="cpu", total_bytes=64 * GIB, is_shared=True)
    parts = {item.name: item.nbytes for item in learner_items(cfg, shape, host, reference=None, critic=None)}
    assert parts["masters (float32)"] == sum(p.numel() * p.element_size() for p in params)
    assert parts["moments (AdamW)"] == sum(t.numel() * t.element_size() for t in moments)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("qwen2", torch.bfloat16)]
)
def test_activations_are_estimated_within_half(kind: str, dtype: torch.dtype) -> None:
    """What autograd keeps of one block, parameters left out, with attention that keeps no scores."""
    num_tokens = 64
    settings = KINDS[kind]()
    for name, value in {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 1}.items():
        setattr(settings, name, value)
    settings.head_dim = 32
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").to(dtype)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    holding: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda t: holding.append(t) or keep(t), lambda t: t):
        model.base_model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long))
    shape = ModelShape(
        num_params=0, num_block_params=0, num_root_params=0, num_head_params=0, num_visited_params=0, num_layers=1,
        hidden_size=128, intermediate_size=344, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=61,
    )  # fmt: skip
    expected = activation_bytes_per_block(shape, num_tokens=num_tokens, compute_bytes=dtype.itemsize)
    assert sum(kept.values()) == pytest.approx(expected, rel=0.5)
