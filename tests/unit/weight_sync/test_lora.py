"""The adapter slot of an engine, with layers that behave as vLLM's: fused parts, tensor parallelism, padded ranks.

The reference is `set_lora` itself, run with real tensors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes.row_shards import held_by, row_shards, rows_of
from tests.fakes.sync_world import record_layout
from weight_sync.errors import PlanMismatch
from weight_sync.plan.planner import build_plan
from weight_sync.plan.types import ParamMeta, Plan
from weight_sync.publish.shards import local_shards
from weight_sync.vllm.compat import engine_lora_rank
from weight_sync.vllm.lora import ADAPTER_ID, AdapterSlot, TensorTree, peft_name, synced_model

SLOTS, IN = 2, 6
TARGETS = ("q_proj", "v_proj", "o_proj")


class _Layer(torch.nn.Module):
    """A linear layer with LoRA as vLLM writes it: B cut by rows (column-parallel) or A by columns (row-parallel)."""

    def __init__(self, rank: int, outs: tuple[int, ...], *, worker: int, size: int, row_parallel: bool) -> None:
        super().__init__()
        self.worker, self.size, self.row_parallel = worker, size, row_parallel
        columns = IN // size if row_parallel else IN
        rows = [out if row_parallel else out // size for out in outs]
        self.lora_a_stacked = tuple(torch.zeros(SLOTS, 1, rank, columns) for _ in outs)
        self.lora_b_stacked = tuple(torch.zeros(SLOTS, 1, out, rank) for out in rows)
        self.output_slices = tuple(rows)
        self.base = torch.nn.Linear(2, 2)

    def reset_lora(self, index: int) -> None:
        for stacked in (*self.lora_a_stacked, *self.lora_b_stacked):
            stacked[index] = 0

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        self.reset_lora(index)
        if not isinstance(lora_a, list):
            lora_a, lora_b = [lora_a], [lora_b]
        for part, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
            if a is None:
                continue
            own_a = a.chunk(self.size, dim=1)[self.worker] if self.row_parallel else a
            own_b = b if self.row_parallel else b.chunk(self.size, dim=0)[self.worker]
            for stacked, own in ((self.lora_a_stacked, own_a), (self.lora_b_stacked, own_b)):
                stacked[part][index, 0, : own.shape[0], : own.shape[1]].copy_(own, non_blocking=True)


PACKED = {"l.qkv_proj": ("l.q_proj", "l.k_proj", "l.v_proj")}


def layers_of(worker: int = 0, size: int = 1, *, rank: int = 2) -> dict[str, _Layer]:
    return {
        "l.qkv_proj": _Layer(rank, (8, 4, 4), worker=worker, size=size, row_parallel=False),
        "l.o_proj": _Layer(rank, (6,), worker=worker, size=size, row_parallel=True),
    }


def runner_of(layers: dict[str, _Layer], *ids: int) -> Any:
    """What weight sync reads of vLLM's runner and of its adapter manager, which holds these adapters."""
    manager = SimpleNamespace(
        lora_config=SimpleNamespace(target_modules=TARGETS), modules=layers,
        packed_modules={name: list(parts) for name, parts in PACKED.items()}, lora_index_to_id=[*ids, None],
    )  # fmt: skip
    loras = SimpleNamespace(_adapter_manager=manager, list_adapters=lambda: {i for i in manager.lora_index_to_id if i})
    model = torch.nn.Linear(2, 2)
    return SimpleNamespace(lora_manager=loras, get_model=lambda: model)


def adapter(rank: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q_proj": 8, "v_proj": 4, "o_proj": 6}
    return {
        peft_name(f"l.{name}", is_a=is_a): torch.randn((rank, IN) if is_a else (out, rank), generator=generator)
        for name, out in shapes.items()
        for is_a in (True, False)
    }


def metas_of(state: dict[str, torch.Tensor]) -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta(name=name, shape=tuple(t.shape), dtype="float32") for name, t in state.items())


def pull(plan: Plan, state: dict[str, torch.Tensor], slot: AdapterSlot, worker: int, num_ranks: int) -> None:
    """Pack as the ranks would and write the worker's runs."""
    arenas = {own.rank: torch.zeros(own.arena_bytes, dtype=torch.uint8) for own in plan.pack}
    for own in plan.pack:
        local = held_by(state, rows_of(plan.params, own.rank, num_ranks))
        for item in own.items:
            box = local[item.param][tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))]
            arenas[own.rank][item.arena_off : item.arena_off + item.nbytes] = (
                box.contiguous().view(-1).view(torch.uint8)
            )
    params = {name: param.data.view(-1).view(torch.uint8) for name, param in slot.named_parameters()}
    for run in plan.pull[worker].runs:
        params[run.dst_param][run.dst_off : run.dst_off + run.nbytes] = arenas[run.src_rank][
            run.src_off : run.src_off + run.nbytes
        ]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(("size", "rank"), [(1, 2), (2, 2), (2, 5)], ids=["tp1", "tp2", "tp2, padded rank"])
def test_planned_bytes_fill_the_slot_as_set_lora_would(size: int, rank: int, num_ranks: int) -> None:
    state = adapter()
    slots = [AdapterSlot(layers_of(w, size, rank=rank), PACKED, targets=TARGETS) for w in range(size)]
    layouts = [record_layout(slot, metas_of(state), worker=w) for w, slot in enumerate(slots)]
    assert not any(param.any() for slot in slots for param in slot.parameters()), "recording writes nothing"
    plan = build_plan(epoch=1, params=metas_of(state), shards=row_shards(metas_of(state), num_ranks), workers=layouts)
    copies = {"q_proj": (size, 1), "v_proj": (size, 1), "o_proj": (1, size)}  # of A, of B
    wanted = [state[peft_name(f"l.{name}", is_a=i == 0)].nbytes * copies[name][i] for name in copies for i in (0, 1)]
    assert sum(own.nbytes for own in plan.pull) == sum(wanted), "adapter bytes, and nothing else"
    for worker, slot in enumerate(slots):
        pull(plan, state, slot, worker, num_ranks)
        expected = layers_of(worker, size, rank=rank)
        AdapterSlot(expected, PACKED).load_weights(iter(state.items()))
        for name, layer in expected.items():
            got = slot._linear[name]
            for kind in ("lora_a_stacked", "lora_b_stacked"):
                for left, right in zip(getattr(got, kind), getattr(layer, kind), strict=True):
                    assert torch.equal(left, right), f"worker {worker}: {name}.{kind}"


def test_parts_without_an_adapter_are_no_parameters_and_the_other_slot_is_never_seen() -> None:
    slot = AdapterSlot(layers_of(), PACKED, targets=TARGETS)
    assert [name for name, _ in slot.named_parameters()] == [
        "l.qkv_proj.lora_a.0", "l.qkv_proj.lora_a.2", "l.qkv_proj.lora_b.0", "l.qkv_proj.lora_b.2",
        "l.o_proj.lora_a.0", "l.o_proj.lora_b.0",
    ]  # fmt: skip
    assert [name for name, _ in slot.named_buffers()] == ["l.qkv_proj.lora_a.1", "l.qkv_proj.lora_b.1"]
    assert {tuple(param.shape) for param in slot.parameters()} == {(1, 2, IN), (1, 8, 2), (1, 4, 2), (1, 6, 2)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (peft_name("l.gate_proj", is_a=True), "no linear layer with LoRA"),
        ("l.q_proj.weight", "not the name of a LoRA matrix"),
    ],
)
def test_a_tensor_that_is_no_adapter_of_the_engine_is_refused(name: str, message: str) -> None:
    state = {name: torch.zeros(2, IN), name.replace("lora_A", "lora_B"): torch.zeros(4, 2)}
    with pytest.raises(PlanMismatch, match=message):
        record_layout(AdapterSlot(layers_of(), PACKED, targets=TARGETS), metas_of(adapter() | state), worker=0)


def test_half_an_adapter_is_refused() -> None:
    state = adapter()
    del state[peft_name("l.o_proj", is_a=False)]
    with pytest.raises(ValueError, match=r"l\.o_proj has only lora_A"):
        AdapterSlot(layers_of(), PACKED).load_weights(iter(state.items()))


def test_moved_buffers_and_a_lost_slot_are_noticed_before_a_write() -> None:
    layers = layers_of()
    layers["l.o_proj"].output_slices = (6,)
    runner = runner_of(layers, ADAPTER_ID)
    slot = synced_model(runner)
    assert dict(slot.named_parameters())
    layers["l.o_proj"].lora_a_stacked = tuple(t.clone() for t in layers["l.o_proj"].lora_a_stacked)
    with pytest.raises(PlanMismatch, match=r"moved 1 LoRA buffers, e\.g\. l\.o_proj\.lora_a\.0"):
        dict(slot.named_parameters())
    runner.lora_manager._adapter_manager.lora_index_to_id[0] = 7
    with pytest.raises(PlanMismatch, match="holds adapter 7, not the policy"):
        dict(slot.named_parameters())


def test_without_an_adapter_the_whole_model_is_synchronised() -> None:
    runner = runner_of(layers_of())
    assert synced_model(runner) is runner.get_model()


def test_a_tree_is_described_like_a_model_of_these_names() -> None:
    state = adapter()
    params, shards, tensors = local_shards(TensorTree(state), rollout_dtype="bfloat16")
    assert [(p.name, p.shape, p.dtype) for p in params] == [(n, tuple(t.shape), "bfloat16") for n, t in state.items()]
    assert [(s.param, s.start, s.size) for s in shards] == [(n, (0, 0), tuple(t.shape)) for n, t in state.items()]
    assert all(tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items())


def test_engines_get_the_next_rank_that_their_kernels_know() -> None:
    assert [engine_lora_rank(rank) for rank in (1, 2, 8, 9, 512)] == [1, 8, 8, 16, 512]
    with pytest.raises(ValueError, match=r"513 is more than engines support; allowed is 1\.\.512"):
        engine_lora_rank(513)
