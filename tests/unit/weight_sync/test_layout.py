"""What a rank holds, checked against FSDP2 itself. A fake process group plays any rank of any mesh in this process."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import Chunk, Concatenate, Interleave, Transpose, WeightConverter

from tests.fakes.row_shards import held_by, rows_of
from weight_sync.errors import PlanMismatch
from weight_sync.plan.types import ShardBox
from weight_sync.publish.shards import chunk_rows, local_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from weight_sync.plan.types import ParamMeta

_TINY: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 14, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 11,
}  # fmt: skip
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
_MOE: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3MoeConfig(**_TINY, **_EXPERTS, mlp_only_layers=[1]),
    "one expert": lambda: Qwen3MoeConfig(**_TINY, **{**_EXPERTS, "num_experts": 1, "num_experts_per_tok": 1}),
    "shared expert": lambda: Qwen2MoeConfig(**_TINY, **_EXPERTS, shared_expert_intermediate_size=4),
    "mixtral": lambda: MixtralConfig(**_TINY, num_local_experts=5),
    "correction bias": lambda: DeepseekV3Config(
        **{**_TINY, "num_key_value_heads": 4}, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, moe_intermediate_size=6, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=6,
    ),
}  # fmt: skip


@contextmanager
def _rank(rank: int, world: int) -> Iterator[None]:
    """Be `rank` of `world`; collectives succeed and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


_fresh = count()


def _mesh(*shape: int) -> DeviceMesh:
    """A mesh under names never used before: DTensor caches meshes by value, and with them the rank they belong to."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"dim{next(_fresh)}" for _ in shape))


def _model(config: PretrainedConfig | None = None) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen2Config(**_TINY) if config is None else config)


def _sharded(mesh: Any, model: Any | None = None) -> Any:
    model = _model() if model is None else model
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@given(rows=st.integers(0, 200), ranks=st.integers(1, 40))
def test_chunk_rows_equals_torch_chunk(rows: int, ranks: int) -> None:
    chunks = list(torch.arange(rows).chunk(ranks)) if rows else []
    got = [chunk_rows(rows, ranks, rank) for rank in range(ranks)]
    want = [(int(c[0]), int(c[-1]) + 1) for c in chunks if len(c)]
    assert [span for span in got if span[0] < span[1]] == want
    assert all(start == stop == rows for start, stop in got[len(want) :])


def test_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4 of 4"):
        chunk_rows(3, 4, 4)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_local_shards_are_the_rows_that_fsdp_holds(world: int) -> None:
    """Together the ranks rebuild every tensor, and each holds the rows that torch.chunk gives it."""
    full = dict(_model().named_parameters())
    rebuilt: dict[str, list[torch.Tensor]] = {name: [] for name in full}
    params: tuple[ParamMeta, ...] = ()
    for rank in range(world):
        with _rank(rank, world):
            params, shards, tensors = local_shards(_sharded(_mesh(world)), rollout_dtype="bfloat16")
        assert shards == rows_of(params, rank, world)
        assert set(tensors) == {shard.param for shard in shards}
        for name, held in held_by(full, shards).items():
            assert torch.equal(tensors[name], held)
            rebuilt[name].append(tensors[name])
    assert [(p.name, p.shape, p.dtype) for p in params] == [(n, tuple(p.shape), "bfloat16") for n, p in full.items()]
    assert all(torch.equal(torch.cat(parts), full[name]) for name, parts in rebuilt.items())


def test_replicas_list_the_same_boxes_and_say_so() -> None:
    full = dict(_model().named_parameters())
    found: list[tuple[ShardBox, ...]] = []
    for rank in range(4):
        with _rank(rank, 4):
            params, shards, tensors = local_shards(_sharded(_mesh(2, 2)), rollout_dtype="bfloat16")
        assert [p.name for p in params] == list(full)
        assert all(torch.equal(tensors[name], held) for name, held in held_by(full, shards).items())
        assert [box._replace(is_replicated=False) for box in shards] == list(rows_of(params, rank % 2, 2))
        found.append(shards)
    assert found[0] == found[2] != found[1] == found[3]
    assert all(box.is_replicated for shards in found for box in shards)


PLACEMENTS: dict[str, tuple[list[Any], tuple[int, ...]]] = {
    "columns": ([Replicate(), Shard(1)], (7, 6)),
    "columns, uneven": ([Shard(0), Shard(1)], (5, 7)),
    "rows of rows": ([Shard(0), Shard(0)], (9, 3)),
    "FSDP over rows of tensor parallelism": ([_StridedShard(0, split_factor=2), Shard(0)], (8, 3)),
    "FSDP over columns of tensor parallelism": ([_StridedShard(1, split_factor=2), Shard(1)], (3, 4)),
    "FSDP by rows, tensor parallelism by columns": ([Shard(0), Shard(1)], (5, 6)),
    "more ranks than rows": ([Shard(0), Shard(1)], (1, 6)),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_boxes_of_two_dimensions_are_those_that_the_ranks_hold(name: str) -> None:
    placements, shape = PLACEMENTS[name]
    whole = torch.arange(torch.Size(shape).numel()).view(shape).float()
    times = torch.zeros(shape)
    for rank in range(4):
        with _rank(rank, 4):
            # Cut as torch cuts it, not as we compute it.
            local = distribute_tensor(whole, _mesh(2, 2), placements, src_data_rank=None)
            model = torch.nn.ParameterDict({"w": torch.nn.Parameter(local)})
            _, shards, tensors = local_shards(model, rollout_dtype="float32")
        for box in shards:
            assert torch.equal(tensors["w"], held_by({"w": whole}, [box])["w"])
            held_by({"w": times}, [box])["w"].add_(1)
    assert (times == (2 if Replicate() in placements else 1)).all(), "every element is held equally often"


@pytest.mark.parametrize("rank", [0, 1])
def test_plain_model_is_served_whole_by_rank_zero(rank: int) -> None:
    model = _model()
    with _rank(rank, 2):
        _, shards, tensors = local_shards(model, rollout_dtype="float32")
    assert set(tensors) == (set(dict(model.named_parameters())) if rank == 0 else set())
    assert [s.param for s in shards] == list(tensors)


def test_tensors_are_live_views_of_the_parameters() -> None:
    with _rank(1, 2):
        model = _sharded(_mesh(2))
        _, _, tensors = local_shards(model, rollout_dtype="bfloat16")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(3.0)
        assert all((tensor == 3.0).all() and not tensor.requires_grad for tensor in tensors.values())


def test_gathered_root_is_resharded_before_it_is_described() -> None:
    """After a forward without backward FSDP2 leaves the root group gathered, as plain full tensors."""
    with _rank(1, 2):
        model = _sharded(_mesh(2))
        before = local_shards(model, rollout_dtype="bfloat16")[1]
        model.set_reshard_after_forward(False)
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))
        assert any(type(p) is torch.nn.Parameter for p in model.parameters())
        assert local_shards(model, rollout_dtype="bfloat16")[1] == before


@pytest.mark.parametrize(
    ("placements", "rows", "words"),
    [
        ([_StridedShard(0, split_factor=2), Shard(0)], 2, "split 6 unevenly; .* must be a multiple of 4"),
        ([Replicate(), _StridedShard(0, split_factor=3)], 3, "leave more than one box"),
        ([Replicate(), Partial()], 6, "allowed: Shard and Replicate"),
    ],
)
def test_what_is_no_box_is_refused_with_every_name(placements: list[Any], rows: int, words: str) -> None:
    with _rank(0, 4):
        mesh, local = _mesh(2, 2), torch.ones(rows, 4)
        bad, worse = (
            DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size((6, 4)), stride=(4, 1))
            for _ in range(2)
        )
        tensors = {"good": distribute_tensor(torch.ones(8, 4), mesh, [Replicate()] * 2), "bad": bad, "worse": worse}
        module = torch.nn.ParameterDict({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()})
        with pytest.raises(PlanMismatch, match=rf"bad \(6, 4\): .*{words}.*; worse \(6, 4\): ") as caught:
            local_shards(module, rollout_dtype="bfloat16")
        assert "good" not in str(caught.value)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="got 'bf16'"):
        local_shards(torch.nn.Linear(2, 2), rollout_dtype="bf16")


def test_wrapper_names_are_stripped() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = _model()
    names = [p.name for p in local_shards(model, rollout_dtype="bfloat16")[0]]
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(checkpoint_wrapper(layer), backend="eager")
    wrapped = torch.compile(model, backend="eager")
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_parameters())
    assert [p.name for p in local_shards(wrapped, rollout_dtype="bfloat16")[0]] == names


def _scrambled(config: PretrainedConfig | None = None) -> Any:
    """A model in which no two elements of its checkpoint are equal, buffers included."""
    model = _model(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape))
    return model


_SAVED: dict[str, Callable[[], PretrainedConfig]] = {
    **{f"{kind.__name__}, tied: {tied}": lambda kind=kind, tied=tied: kind(**_TINY, tie_word_embeddings=tied)
       for kind, tied in ((Qwen2Config, False), (Qwen2Config, True), (Qwen3Config, False), (LlamaConfig, True))},
    **_MOE,
}  # fmt: skip


@pytest.mark.parametrize("case", _SAVED)
def test_names_shapes_and_values_are_those_of_a_saved_checkpoint(case: str, tmp_path: Path) -> None:
    """Experts too, which transformers fuses in memory; and of a model that was loaded, not made."""
    model = _scrambled(_SAVED[case]())
    model.save_pretrained(tmp_path)
    for source in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        params, _, tensors = local_shards(source, rollout_dtype="bfloat16")
        with safe_open(tmp_path / "model.safetensors", "pt") as saved:
            assert {p.name: p.shape for p in params} == {
                name: tuple(saved.get_slice(name).get_shape())
                for name in saved.keys()  # noqa: SIM118
            }
            assert all(torch.equal(saved.get_tensor(name), tensor) for name, tensor in tensors.items())
    assert ("lm_head.weight" in tensors) == ("tied: True" not in case)
    assert any(".experts.0." in p.name for p in params) == (case in _MOE)


@pytest.mark.parametrize("kind", _MOE)
@pytest.mark.parametrize("world", [3, 8])
def test_each_expert_is_served_whole_by_the_rank_that_holds_it(kind: str, world: int) -> None:
    """5 experts over 3 ranks: 2, 2, 1; over 8: one each, and three ranks with none."""
    config = _MOE[kind]()
    whole = local_shards(_scrambled(config), rollout_dtype="bfloat16")[2]
    rebuilt: dict[str, list[torch.Tensor]] = {name: [] for name in whole}
    experts: set[tuple[int, int]] = set()
    for rank in range(world):
        with _rank(rank, world):
            model = _sharded(_mesh(world), _scrambled(config))
            params, shards, tensors = local_shards(model, rollout_dtype="bfloat16")
        assert [p.name for p in params] == list(whole)
        assert [s.param for s in shards] == list(tensors)
        for shard in shards:
            assert shard.size == tuple(tensors[shard.param].shape)
            if ".experts." in shard.param:
                assert shard.size == tuple(whole[shard.param].shape)
                experts.add((rank, int(shard.param.split(".experts.")[1].split(".")[0])))
        for name, tensor in tensors.items():
            rebuilt[name].append(tensor)
    assert all(torch.equal(torch.cat(parts), whole[name]) for name, parts in rebuilt.items())
    num_experts = len({expert for _, expert in experts})
    assert experts == {(expert // -(-num_experts // world), expert) for expert in range(num_experts)}


def test_expert_tensors_are_live_views_without_a_copy() -> None:
    with _rank(1, 2):
        model = _sharded(_mesh(2), _model(_MOE["qwen3"]()))
        _, _, tensors = local_shards(model, rollout_dtype="bfloat16")
        local = model.model.layers[0].mlp.experts.gate_up_proj.to_local().detach()
        with torch.no_grad():
            local.copy_(torch.arange(local.numel()).view_as(local))
    gate, up = (tensors[f"model.layers.0.mlp.experts.4.{part}_proj.weight"] for part in ("gate", "up"))
    assert gate.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([gate, up]), local[1])  # this rank holds experts 3 and 4


def test_parameter_saved_transposed_inside_its_rows_is_a_strided_view() -> None:
    """Like experts [E, H, 2I] that are saved as [E, 2I, H]: a rank serves its rows of both."""
    model = _scrambled(_MOE["qwen3"]())
    model._weight_conversions = [
        WeightConverter("experts.gate_up_proj", "experts.gate_up_proj", operations=[Transpose(1, 2)])
    ]
    whole = dict(model.named_parameters())["model.layers.0.mlp.experts.gate_up_proj"]
    with _rank(1, 2):
        params, shards, tensors = local_shards(_sharded(_mesh(2), model), rollout_dtype="bfloat16")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert {p.name: p.shape for p in params}[name] == (5, 24, 12)
    assert [s for s in shards if s.param == name] == [ShardBox(name, (3, 0, 0), (2, 24, 12))]
    assert torch.equal(tensors[name], whole[3:].transpose(1, 2))


@pytest.mark.parametrize(
    ("conversion", "words"),
    [(WeightConverter("mlp.fused.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], operations=[Chunk(0)]),
      r"aten\.cat\.default combines model\.layers\.0\.mlp\.gate_proj\.weight"),
     (WeightConverter("mlp.mixed.weight", "mlp.down_proj.weight", operations=[Interleave(0)]),
      r"of model\.layers\.0\.mlp\.down_proj\.weight .* rearranges it"),
     (WeightConverter(["mlp.a.weight", "mlp.b.weight"], "mlp.down_proj.weight", operations=[Concatenate(0)]),
      r"mlp\.a\.weight \(12, 14\) lies in model\.layers\.0\.mlp\.down_proj\.weight \(24, 14\) at offset 0")],
)  # fmt: skip
def test_parameter_that_is_not_saved_as_a_view_of_its_rows_is_refused(conversion: WeightConverter, words: str) -> None:
    model = _scrambled()
    model._weight_conversions = [conversion]  # as `from_pretrained` notes what it loads through
    with pytest.raises(PlanMismatch, match=words):
        local_shards(model, rollout_dtype="bfloat16")


def test_persistent_buffers_are_served_by_rank_zero_and_others_not_at_all() -> None:
    model = _scrambled(_MOE["correction bias"]())
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for rank in range(2):
        with _rank(rank, 2):
            params, shards, tensors = local_shards(model, rollout_dtype="bfloat16")
        assert [s for s in shards if s.param == name] == ([ShardBox(name, (0,), (4,))] if rank == 0 else [])
        assert (name in tensors) == (rank == 0)
        assert not any("inv_freq" in p.name for p in params)
