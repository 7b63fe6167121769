from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from weight_sync.vllm.compat import (
    UnsupportedVllm,
    check_vllm_version,
    rearranged_experts,
    rename_mapper,
)
from weight_sync.vllm.cpu import _apply_plain_experts, _leave_as_loaded

_OTHERS, _ROCM = "allowed: >= 0.25.1, < 0.34", "allowed: >= 0.19, < 0.34"
_VERSIONS: list[tuple[str, str | None, str]] = [
    *((version, None, "") for version in ("0.25.1", "0.25.1+cu130", "0.26.0", "0.33.9rc2", "0.32.1.dev3+gabc")),
    *((version, None, _OTHERS) for version in ("0.25.0", "0.9.2", "0.34.0", "0.34", "1.0.0")),
    *((version, None, "") for version in ("0.19.0+rocm721", "0.25.1+rocm723", "0.19.1.dev2+gabc1234.rocm720")),
    ("0.18.0+rocm700", None, _ROCM),
    ("0.26.0+empty", "0.26.0rc1", ""),
    ("0.26.0", "0.26.0.post1", ""),
    ("0.27.1", "0.26.0rc1", "vllm-ascend 0.26.0rc1 is made for vLLM 0.26.0, got vLLM 0.27.1"),
    ("0.27.1.dev4+gabc", "0.26.0rc1", ""),  # built from source: nobody can tell
]


@pytest.mark.parametrize(("version", "ascend", "refusal"), _VERSIONS)
def test_version_is_taken_or_refused_with_what_is_allowed(version: str, ascend: str | None, refusal: str) -> None:
    if not refusal:
        assert check_vllm_version(version, ascend) == version
        return
    with pytest.raises(UnsupportedVllm) as caught:
        check_vllm_version(version, ascend)
    assert refusal in str(caught.value)
    assert version in str(caught.value)


def test_installed_vllm_has_the_calls_we_prefer() -> None:
    """The fake of test_vllm_replica.py is only as good as this: the real signatures of the installed version."""
    import inspect

    client = pytest.importorskip("vllm.v1.engine.core_client")
    pause = inspect.signature(client.AsyncMPClient.pause_scheduler_async).parameters
    assert {"mode", "clear_cache"} <= set(pause)
    assert hasattr(client.AsyncMPClient, "resume_scheduler_async")
    check_vllm_version()


class _Experts(torch.nn.Module):
    """What vLLM's expert layers look like, as far as we look."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 3))
        self.quant_method = SimpleNamespace(
            **({} if backend is None else {"unquantized_backend": SimpleNamespace(value=backend)})
        )


def test_expert_layers_in_the_order_of_a_kernel_are_named() -> None:
    """Names and shapes are those that their loader fills, so a recorded layout would look right and scramble them."""
    kinds = {"a": "TRITON", "b": "FlashInfer CUTLASS", "c": "CPU", "d": "CPU", "e": None, "f": "BATCHED_TRITON"}
    model = torch.nn.ModuleDict({name: _Experts(backend) for name, backend in kinds.items()})
    model.add_module("dense", torch.nn.Linear(2, 2))
    _leave_as_loaded(None, model["d"])  # what our extension makes vLLM's CPU experts do
    assert rearranged_experts(model) == {"b": "FlashInfer CUTLASS", "c": "CPU"}


@pytest.mark.parametrize("fold_weights_first", [False, True])
def test_plain_experts_compute_the_weighted_sum_of_their_experts(fold_weights_first: bool) -> None:
    """Against the definition, token by token; one expert lives on another rank, one gets no token."""
    pytest.importorskip("vllm.model_executor.layers.fused_moe.activation")
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    torch.manual_seed(0)
    x, w13, w2 = torch.randn(7, 32), torch.randn(3, 64, 32) / 8, torch.randn(3, 32, 32) / 8
    ids = torch.tensor([[0, 3], [2, 0], [0, 2], [3, 2], [2, 0], [0, 2], [0, 3]])
    weights, local = torch.rand(7, 2), torch.tensor([0, 1, 2, -1])
    wanted = torch.zeros(7, 32)
    for token, choice in itertools.product(range(7), range(2)):
        if (expert := int(local[ids[token, choice]])) >= 0:
            gate, up = (w13[expert] @ x[token]).chunk(2)
            factor = 1.0 if fold_weights_first else weights[token, choice]
            wanted[token] += factor * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    output = torch.empty(7, 32)
    experts = SimpleNamespace(w1_bias=None, w2_bias=None)
    how = {"activation": MoEActivation.SILU, "expert_map": local, "apply_router_weight_on_input": fold_weights_first}
    _apply_plain_experts(experts, output, x, w13, w2, weights, ids, **how)
    torch.testing.assert_close(output, wanted)
    alone = torch.empty(1, 32)
    _apply_plain_experts(experts, alone, x[:1], w13, w2, weights[:1], ids[:1], **how)
    assert torch.equal(alone, output[:1])  # a token's bits do not depend on its neighbours


def test_parts_of_fused_layers_keep_their_names_with_every_vllm() -> None:
    for method in ("get_rename_mapper", "get_unstacked_mapper"):
        whole = SimpleNamespace(**{method: lambda: "unfused"})
        assert rename_mapper(SimpleNamespace(hf_to_vllm_mapper=whole)) == "unfused"
    plain = SimpleNamespace()
    assert rename_mapper(SimpleNamespace(hf_to_vllm_mapper=plain)) is plain, "it fuses nothing"
    assert rename_mapper(SimpleNamespace()) is None
