from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from weight_sync.vllm.compat import (
    UnsupportedVllm,
    check_vllm_version,
    pause_engine,
    rearranged_experts,
    rename_mapper,
    resume_engine,
)
from weight_sync.vllm.cpu import _apply_plain_experts, _leave_as_loaded


@pytest.mark.parametrize("version", ["0.25.1", "0.25.1+cu130", "0.26.0", "0.32.0", "0.33.9rc2", "0.32.1.dev3+gabc"])
def test_versions_in_the_range_are_taken(version: str) -> None:
    assert check_vllm_version(version) == version


@pytest.mark.parametrize("version", ["0.25.0", "0.9.2", "0.34.0", "0.34", "1.0.0"])
def test_version_outside_is_refused_with_what_is_allowed(version: str) -> None:
    with pytest.raises(UnsupportedVllm, match=rf"vLLM {version} is not supported, allowed: >= 0.25.1, < 0.34"):
        check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.19.0+rocm721", "0.25.1+rocm723", "0.19.1.dev2+gabc1234.rocm720"])
def test_builds_for_rocm_are_taken_from_the_oldest_that_others_train_with(version: str) -> None:
    assert check_vllm_version(version) == version
    with pytest.raises(UnsupportedVllm, match=r"vLLM 0.18.0\+rocm700 is not supported, allowed: >= 0.19, < 0.34"):
        check_vllm_version("0.18.0+rocm700")


@pytest.mark.parametrize(
    ("version", "ascend", "fit"),
    [
        ("0.26.0+empty", "0.26.0rc1", True),
        ("0.26.0", "0.26.0.post1", True),
        ("0.27.1", "0.26.0rc1", False),
        ("0.27.1.dev4+gabc", "0.26.0rc1", True),  # built from source: nobody can tell
    ],
)
def test_a_plugin_for_ascend_made_for_another_vllm_is_refused(version: str, ascend: str, fit: bool) -> None:
    if fit:
        assert check_vllm_version(version, ascend) == version
        return
    with pytest.raises(UnsupportedVllm, match=r"vllm-ascend 0.26.0rc1 is made for vLLM 0.26.0, got vLLM 0.27.1"):
        check_vllm_version(version, ascend)


class Calls:
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []


class NewCore(Calls):
    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self.seen.append(("pause", mode, clear_cache))

    async def resume_scheduler_async(self) -> None:
        self.seen.append(("resume",))


class NewEngine:
    def __init__(self) -> None:
        self.engine_core = NewCore()


class OldEngine(Calls):
    """Only the public calls."""

    engine_core = object()

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.seen.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.seen.append(("resume",))


@pytest.mark.parametrize(
    ("mode", "expected"), [("keep", ("keep", False)), ("recompute", ("keep", True)), ("abort", ("abort", True))]
)
async def test_in_flight_policies_become_pause_modes(mode: str, expected: tuple[str, bool]) -> None:
    new, old = NewEngine(), OldEngine()
    for engine in (new, old):
        await pause_engine(engine, mode=mode)
        await resume_engine(engine)
    assert new.engine_core.seen == [("pause", *expected), ("resume",)]
    assert old.seen == [("pause", *expected), ("resume",)]


def test_installed_vllm_has_the_calls_we_prefer() -> None:
    """The fakes above are only as good as this: the real signatures of the installed version."""
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


@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"])
def test_parts_of_fused_layers_keep_their_names_with_every_vllm(method: str) -> None:
    whole = SimpleNamespace(**{method: lambda: "unfused"})
    assert rename_mapper(SimpleNamespace(hf_to_vllm_mapper=whole)) == "unfused"


def test_a_mapper_that_fuses_nothing_is_taken_as_it_is() -> None:
    plain = SimpleNamespace()
    assert rename_mapper(SimpleNamespace(hf_to_vllm_mapper=plain)) is plain
    assert rename_mapper(SimpleNamespace()) is None
