"""A stand-in for an engine's model: vLLM's parameter layout with a loader that fills it, and no forward pass.

Fused `qkv_proj` and `gate_up_proj`, columns of `o_proj` and `down_proj` split over the workers, KV heads repeated when
there are fewer of them than workers, experts stacked, a vocabulary padded to multiples of 64. In all this an engine's
layout differs from a checkpoint's, so plans and byte runs have the sizes and the number of a real engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from weight_sync.bench.shapes import Architecture

VOCAB_MULTIPLE = 64
Span = tuple[int, int]
"""(start, size)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a worker keeps its part of one checkpoint tensor."""

    param: str
    part: tuple[int, Span] | None = None
    """(dimension, span) of the checkpoint tensor; None: all of it."""
    row: int = 0
    """First row in the engine parameter."""
    expert: int | None = None
    """Index into the engine parameter's first dimension, where experts are stacked."""
    is_padded: bool = False
    """Rows after this part are vocabulary padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """What one worker of a replica holds: its engine parameters, and the place of every checkpoint tensor."""

    params: dict[str, tuple[int, ...]]
    places: dict[str, Place]


def worker_shape(arch: Architecture, *, worker: int, num_workers: int) -> WorkerShape:
    """
    Raises:
        ValueError: the model cannot be split over so many workers.
    """
    split = _Split(arch, worker, num_workers)
    params: dict[str, tuple[int, ...]] = {}
    places: dict[str, Place] = {}
    for name, shape in arch.shapes():
        place = split.place(name, shape)
        places[name] = place
        params[place.param] = split.param_shape(place.param, name, shape)
    return WorkerShape(params=params, places=places)


class _Split:
    def __init__(self, arch: Architecture, worker: int, num_workers: int) -> None:
        kv_fits = arch.kv_heads % num_workers == 0 or num_workers % arch.kv_heads == 0
        inner = arch.expert_intermediate if arch.num_experts else arch.intermediate
        if arch.heads % num_workers or inner % num_workers or VOCAB_MULTIPLE % num_workers or not kv_fits:
            raise ValueError(
                f"{arch.name} cannot be split over {num_workers} workers: it has {arch.heads} heads, {arch.kv_heads} "
                f"KV heads and {inner} MLP columns; use a number of workers that divides them"
            )
        self.arch = arch
        self.inner = inner // num_workers
        self.q_rows = arch.heads // num_workers * arch.head_dim
        self.kv_rows = max(1, arch.kv_heads // num_workers) * arch.head_dim
        self.vocab_rows = -(-arch.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // num_workers
        first_kv = worker // max(1, num_workers // arch.kv_heads) * self.kv_rows
        self.q, self.kv = (worker * self.q_rows, self.q_rows), (first_kv, self.kv_rows)
        self.columns = (worker * self.inner, self.inner)
        first = min(worker * self.vocab_rows, arch.vocab)
        self.vocab = (first, min(self.vocab_rows, arch.vocab - first))

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        stem, _, kind = name.rpartition(".")
        prefix, _, leaf = stem.rpartition(".")
        # "model.layers.0.mlp.experts.7.gate_proj" is part of "model.layers.0.mlp.experts.w13_weight".
        experts, _, number = prefix.rpartition(".")
        expert = int(number) if experts.endswith("experts") else None
        gate_up = f"{prefix}.gate_up_proj.{kind}" if expert is None else f"{experts}.w13_weight"
        down = f"{prefix}.down_proj.{kind}" if expert is None else f"{experts}.w2_weight"
        qkv = f"{prefix}.qkv_proj.{kind}"
        match leaf:
            case "q_proj":
                return Place(param=qkv, part=(0, self.q))
            case "k_proj":
                return Place(param=qkv, part=(0, self.kv), row=self.q_rows)
            case "v_proj":
                return Place(param=qkv, part=(0, self.kv), row=self.q_rows + self.kv_rows)
            case "gate_proj" | "up_proj":
                row = self.inner if leaf == "up_proj" else 0
                return Place(param=gate_up, part=(0, self.columns), row=row, expert=expert)
            case "o_proj":
                return Place(param=name, part=(1, self.q))
            case "down_proj":
                return Place(param=down, part=(1, self.columns), expert=expert)
            case "embed_tokens" | "lm_head":
                return Place(param=name, part=(0, self.vocab), is_padded=True)
            case _:
                return Place(param=name)

    def param_shape(self, param: str, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of an engine parameter, seen from one of the checkpoint tensors that it takes in."""
        stacked = (self.arch.num_experts,) if "experts." in name else ()
        match param.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]:
            case "qkv_proj":
                return (self.q_rows + 2 * self.kv_rows, *shape[1:])
            case "gate_up_proj" | "w13_weight":
                return (*stacked, 2 * self.inner, shape[1])
            case "o_proj":
                return (shape[0], self.q_rows)
            case "down_proj" | "w2_weight":
                return (*stacked, shape[0], self.inner)
            case "embed_tokens" | "lm_head":
                return (self.vocab_rows, shape[1])
            case _:
                return shape


class EngineModel(torch.nn.Module):
    """The parameters of one worker, all zeros at first."""

    def __init__(
        self, arch: Architecture, *, worker: int, num_workers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        shape = worker_shape(arch, worker=worker, num_workers=num_workers)
        self._places = shape.places
        self._flat: dict[str, torch.nn.Parameter] = {}
        for name, size in shape.params.items():
            tensor = torch.zeros(size, dtype=dtype, device=device)
            self._flat[name] = torch.nn.Parameter(tensor, requires_grad=False)
            _attach(self, name, self._flat[name])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this worker's part of each full checkpoint tensor to its place. As in vLLM, any subset, in any order."""
        for name, tensor in weights:
            place = self._places[name]
            target = self._flat[place.param].data
            if place.expert is not None:
                target = target[place.expert]
            if place.part is not None:
                dim, (start, size) = place.part
                tensor = tensor.narrow(dim, start, size)  # noqa: PLW2901
            target.narrow(0, place.row, tensor.shape[0]).copy_(tensor)
            if place.is_padded:
                target[tensor.shape[0] :].fill_(0)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The parameters without their autograd wrapping, in a fixed order."""
        return (parameter.data for parameter in self._flat.values())


def _attach(root: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Register under a dotted name, making the modules on the way."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, parameter)
