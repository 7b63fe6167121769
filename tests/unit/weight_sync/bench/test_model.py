"""The synthetic engine model: what its loader leaves on each worker, against slices of whole tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from weight_sync.bench.model import EngineModel
from weight_sync.bench.shapes import Architecture
from weight_sync.receive.recorder import record_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

DENSE = Architecture(
    name="dense", model_type="qwen2", hidden=32, layers=2, heads=8, kv_heads=2, head_dim=4, intermediate=48, vocab=100,
    has_qkv_bias=True,
)  # fmt: skip
TIED = Architecture(
    name="tied", model_type="qwen3", hidden=32, layers=1, heads=8, kv_heads=8, head_dim=4, intermediate=48, vocab=128,
    has_qk_norm=True, is_tied=True,
)  # fmt: skip
EXPERTS = Architecture(
    name="experts", model_type="qwen3_moe", hidden=16, layers=2, heads=8, kv_heads=4, head_dim=4, intermediate=64,
    vocab=64, has_qk_norm=True, num_experts=4, expert_intermediate=24, experts_per_token=2,
)  # fmt: skip
CASES = [(arch, tp) for arch in (DENSE, TIED, EXPERTS) for tp in (1, 2, 4, 8)]


def whole(arch: Architecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in arch.shapes()}


def expected(arch: Architecture, full: Mapping[str, torch.Tensor], worker: int, tp: int) -> dict[str, torch.Tensor]:
    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp, dim=0)[worker]

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp, dim=1)[worker]

    def kv(tensor: torch.Tensor) -> torch.Tensor:
        heads = tensor.reshape(arch.kv_heads, arch.head_dim, *tensor.shape[1:])
        # Every head is written down as often as workers need it, then dealt out in order.
        repeated = heads.repeat_interleave(max(1, tp // arch.kv_heads), dim=0)
        return repeated.chunk(tp, dim=0)[worker].reshape(-1, *tensor.shape[1:])

    def vocabulary(tensor: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(-len(tensor) % 64, tensor.shape[1], dtype=tensor.dtype)
        return rows(torch.cat([tensor, padding]))

    out = {name: vocabulary(full[name]) for name in ("model.embed_tokens.weight", "lm_head.weight") if name in full}
    out["model.norm.weight"] = full["model.norm.weight"]
    for layer in range(arch.layers):
        p = f"model.layers.{layer}."
        for kind in ("weight", "bias") if arch.has_qkv_bias else ("weight",):
            q, k, v = (full[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv")
            out[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat([rows(q), kv(k), kv(v)])
        out[f"{p}self_attn.o_proj.weight"] = columns(full[f"{p}self_attn.o_proj.weight"])
        if arch.num_experts:
            parts = [{x: full[f"{p}mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up", "down")} for e in range(4)]
            out[f"{p}mlp.experts.w13_weight"] = torch.stack(
                [torch.cat([rows(x["gate"]), rows(x["up"])]) for x in parts]
            )
            out[f"{p}mlp.experts.w2_weight"] = torch.stack([columns(x["down"]) for x in parts])
        else:
            gate, up, down = (full[f"{p}mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
            out[f"{p}mlp.gate_up_proj.weight"] = torch.cat([rows(gate), rows(up)])
            out[f"{p}mlp.down_proj.weight"] = columns(down)
        whole_names = ["input_layernorm", "post_attention_layernorm"]
        whole_names += ["self_attn.q_norm", "self_attn.k_norm"] if arch.has_qk_norm else []
        whole_names += ["mlp.gate"] if arch.num_experts else []
        out |= {f"{p}{name}.weight": full[f"{p}{name}.weight"] for name in whole_names}
    return out


def engine(arch: Architecture, worker: int, tp: int) -> EngineModel:
    return EngineModel(arch, worker=worker, num_workers=tp, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize(("arch", "tp"), CASES, ids=lambda value: getattr(value, "name", value))
def test_every_worker_holds_its_slice_of_every_tensor_in_place(arch: Architecture, tp: int) -> None:
    full = whole(arch)
    for worker in range(tp):
        model = engine(arch, worker, tp)
        for tensor in model.tensors():
            tensor.fill_(9.0)  # padding must be written too
        model.load_weights(reversed(full.items()))
        found = dict(model.named_parameters())
        wanted = expected(arch, full, worker, tp)
        assert found.keys() == wanted.keys()
        wrong = [name for name, tensor in wanted.items() if not torch.equal(found[name].data, tensor)]
        assert not wrong, f"worker {worker}: {wrong}"


@pytest.mark.parametrize(("arch", "tp"), CASES, ids=lambda value: getattr(value, "name", value))
def test_the_loader_can_be_recorded_and_fills_every_element_once(arch: Architecture, tp: int) -> None:
    layouts = [record_layout(engine(arch, worker, tp), arch.params("bfloat16"), worker=worker) for worker in range(tp)]
    assert [layout.worker for layout in layouts] == list(range(tp))
    for layout in layouts:
        missing = dict(arch.shapes()).keys() - {copy.src_param for copy in layout.copies}
        # The last of many workers may hold nothing but padding of the vocabulary.
        assert missing <= {"model.embed_tokens.weight", "lm_head.weight"}
        assert not missing or (arch.name, tp, layout.worker) == ("dense", 8, 7)


def test_a_number_of_workers_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="dense cannot be split over 3 workers: it has 8 heads, 2 KV heads"):
        engine(DENSE, 0, 3)
