"""A stand-in for an engine's model: vLLM's parameter layout with a loader that fills it, and no forward pass.

Fused `qkv_proj` and `gate_up_proj`, columns of `o_proj` and `down_proj` split over the workers, KV heads repeated when
there are fewer of them than workers, experts stacked, a vocabulary padded to multiples of 64: plans and byte runs have
the sizes and the number of a real engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weight_sync.bench.shapes import Architecture

VOCAB_MULTIPLE = 64


class Place(NamedTuple):
    """Where a worker keeps its part of one checkpoint tensor."""

    param: str
    shape: tuple[int, ...]
    """Of the engine parameter."""
    dim: int
    span: tuple[int, int]
    """(start, size) of the part, along `dim` of the checkpoint tensor."""
    row: int = 0
    """First row in the engine parameter."""
    expert: int | None = None
    """Index into the engine parameter's first dimension, where experts are stacked."""
    is_padded: bool = False
    """Rows after this part are vocabulary padding."""


def places(arch: Architecture, *, worker: int, num_workers: int) -> Iterator[tuple[str, Place]]:
    """(checkpoint name, place) of every tensor.

    Raises:
        ValueError: the model cannot be split over so many workers.
    """
    kv_fits = arch.kv_heads % num_workers == 0 or num_workers % arch.kv_heads == 0
    inner = arch.expert_intermediate if arch.num_experts else arch.intermediate
    if arch.heads % num_workers or inner % num_workers or VOCAB_MULTIPLE % num_workers or not kv_fits:
        raise ValueError(
            f"{arch.name} cannot be split over {num_workers} workers: it has {arch.heads} heads, {arch.kv_heads} "
            f"KV heads and {inner} MLP columns; use a number of workers that divides them"
        )
    inner //= num_workers
    q_rows = arch.heads // num_workers * arch.head_dim
    kv_rows = max(1, arch.kv_heads // num_workers) * arch.head_dim
    vocab_rows = -(-arch.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // num_workers
    first_row = min(worker * vocab_rows, arch.vocab)
    vocab = (first_row, min(vocab_rows, arch.vocab - first_row))
    q, columns = (worker * q_rows, q_rows), (worker * inner, inner)
    kv = (worker // max(1, num_workers // arch.kv_heads) * kv_rows, kv_rows)
    in_qkv = {"q_proj": (q, 0), "k_proj": (kv, q_rows), "v_proj": (kv, q_rows + kv_rows)}
    for name, shape in arch.shapes():
        stem, _, kind = name.rpartition(".")
        prefix, _, leaf = stem.rpartition(".")
        # "model.layers.0.mlp.experts.7.gate_proj" is part of "model.layers.0.mlp.experts.w13_weight".
        experts, _, number = prefix.rpartition(".")
        expert = int(number) if experts.endswith("experts") else None
        stack = () if expert is None else (arch.num_experts,)
        match leaf:
            case "q_proj" | "k_proj" | "v_proj":
                span, row = in_qkv[leaf]
                yield name, Place(f"{prefix}.qkv_proj.{kind}", (q_rows + 2 * kv_rows, *shape[1:]), 0, span, row)
            case "o_proj":
                yield name, Place(name, (shape[0], q_rows), 1, q)
            case "gate_proj" | "up_proj":
                param = f"{prefix}.gate_up_proj.weight" if expert is None else f"{experts}.w13_weight"
                row = inner if leaf == "up_proj" else 0
                yield name, Place(param, (*stack, 2 * inner, shape[1]), 0, columns, row, expert)
            case "down_proj":
                param = name if expert is None else f"{experts}.w2_weight"
                yield name, Place(param, (*stack, shape[0], inner), 1, columns, expert=expert)
            case "embed_tokens" | "lm_head":
                yield name, Place(name, (vocab_rows, shape[1]), 0, vocab, is_padded=True)
            case _:
                yield name, Place(name, shape, 0, (0, shape[0]))


class EngineModel(torch.nn.Module):
    """The parameters of one worker, all zeros at first."""

    def __init__(
        self, arch: Architecture, *, worker: int, num_workers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._places = dict(places(arch, worker=worker, num_workers=num_workers))
        self._flat: dict[str, torch.nn.Parameter] = {}
        for name, shape in {place.param: place.shape for place in self._places.values()}.items():
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            self._flat[name] = torch.nn.Parameter(tensor, requires_grad=False)
            self._attach(name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this worker's part of each full checkpoint tensor to its place. As in vLLM, any subset, in any order."""
        for name, tensor in weights:
            place = self._places[name]
            target = self._flat[place.param].data
            if place.expert is not None:
                target = target[place.expert]
            part = tensor.narrow(place.dim, *place.span)
            target.narrow(0, place.row, part.shape[0]).copy_(part)
            if place.is_padded:
                target[part.shape[0] :].fill_(0)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The parameters without their autograd wrapping, in a fixed order."""
        return (parameter.data for parameter in self._flat.values())

    def _attach(self, name: str) -> None:
        """Register a parameter under its dotted name, making the modules on the way."""
        *path, leaf = name.split(".")
        module: torch.nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, self._flat[name])
