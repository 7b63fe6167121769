"""A toy engine whose live weights are derived, with a reload that works like vLLM's.

Each layer's loader fills a bfloat16 `weight` from two checkpoint tensors; what the layer keeps of it depends on its
kind. The reload collects what the loaders are given, as views, until a layer is complete; only then does it load,
process and copy into the live tensors.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from weight_sync.plan.types import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Kind = Literal["plain", "quantised", "shuffled", "packed", "renamed"]
ROWS, COLUMNS = 6, 4
"""Rows of each checkpoint tensor, over all workers."""


class Layer(torch.nn.Module):
    """`sources` checkpoint tensors under one another; `worker` holds its share of the rows of each."""

    def __init__(self, kind: Kind, sources: Sequence[str], *, worker: int, num_workers: int) -> None:
        super().__init__()
        self.kind, self.sources, self.worker = kind, tuple(sources), worker
        self.rows = ROWS // num_workers
        self.weight = _parameter(torch.zeros(self.rows * len(sources), COLUMNS, dtype=torch.bfloat16))
        self.bias = _parameter(torch.zeros(self.rows, dtype=torch.bfloat16))
        vars(self)["cached"] = lambda: None
        self.expected = {name: tensor.detach().to("meta") for name, tensor in self.named_parameters()}

    def load(self, source: str, tensor: torch.Tensor) -> int:
        """Returns the number of elements that were filled."""
        share = tensor.narrow(0, self.worker * self.rows, self.rows)
        start = self.sources.index(source) * self.rows if source in self.sources else 0
        target = self.weight.data[start : start + self.rows] if source in self.sources else self.bias.data
        target.copy_(share)
        return target.numel()

    def process(self) -> None:
        """What the engine does after loading."""
        match self.kind:
            case "plain":
                vars(self)["cached"] = lambda: None
            case "quantised":
                scale = self.weight.data.float().abs().amax(dim=1, keepdim=True) / 127 + 1e-6
                codes = (self.weight.data.float() / scale).round().to(torch.int8)
                self.weight, self.scale = _parameter(codes.t()), _parameter(scale)
            case "shuffled":
                self.weight.data = self.weight.data.flip(0).contiguous()
            case "packed":
                packed = self.weight.data.t().contiguous()
                vars(self)["cached"] = lambda: packed
            case "renamed":
                self.kernel = _parameter(self.weight.data.t().contiguous())
                del self.weight

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer computes from its live state. x: [B, COLUMNS]."""
        match self.kind:
            case "quantised":
                weight = self.weight.data.t().float() * self.scale
            case "shuffled":
                weight = self.weight.data.flip(0).float()
            case "packed":
                weight = vars(self)["cached"]().t().float()
            case "renamed":
                weight = self.kernel.data.t().float()
            case _:
                weight = self.weight.data.float()
        return torch.cat([x @ weight.t(), self.bias.data.float().expand(len(x), -1)], 1)


class DerivedEngine(torch.nn.Module):
    """One layer of each kind; the first also occurs twice, so that patterns can be seen."""

    KINDS: tuple[Kind, ...] = ("plain", "quantised", "shuffled", "packed", "renamed", "quantised")

    def __init__(self, worker: int = 0, num_workers: int = 1) -> None:
        super().__init__()
        layers = [
            Layer(kind, (f"layers.{i}.q", f"layers.{i}.k"), worker=worker, num_workers=num_workers)
            for i, kind in enumerate(self.KINDS)
        ]
        for layer in layers:
            layer.process()
        self.layers = torch.nn.ModuleList(layers)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            layer: Any = self.layers[int(name.split(".")[1])]
            layer.load(name, tensor)

    def loaded(self, full: Mapping[str, torch.Tensor]) -> DerivedEngine:
        """A new engine that loaded `full` from the start."""
        first: Any = self.layers[0]
        fresh = DerivedEngine(first.worker, ROWS // first.rows)
        ToyReloader(fresh).reload(list(fresh.layers), full.items())
        return fresh


def checkpoint_params() -> tuple[ParamMeta, ...]:
    """Everything that `DerivedEngine` loads."""
    found: list[ParamMeta] = []
    for i in range(len(DerivedEngine.KINDS)):
        found += [ParamMeta(name=f"layers.{i}.{x}", shape=(ROWS, COLUMNS), dtype="bfloat16") for x in "qk"]
        found.append(ParamMeta(name=f"layers.{i}.bias", shape=(ROWS,), dtype="bfloat16"))
    return tuple(found)


class ToyReloader:
    """A `Reloader` for `DerivedEngine`. `moves` makes it put a new tensor in the place of a live one."""

    def __init__(self, model: DerivedEngine, *, moves: bool = False) -> None:
        self.model, self.moves = model, moves
        self.num_reloads = 0

    def checkpoint_tensors(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor] | None:
        return module.expected if isinstance(module, Layer) else None

    @contextmanager
    def checkpoint_format(self, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
        kept = [dict(module._parameters) for module in modules]
        try:
            for module in modules:
                _hold(module, {name: _parameter(tensor) for name, tensor in _expected(module).items()})
            yield
        finally:
            for module, held in zip(modules, kept, strict=True):
                _hold(module, held)

    def post_process(self, module: torch.nn.Module) -> bool:
        assert isinstance(module, Layer)
        module.process()
        return True

    def reload(self, modules: Sequence[torch.nn.Module], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.num_reloads += 1
        chosen = {id(module) for module in modules}
        waiting: dict[int, list[tuple[str, torch.Tensor]]] = {id(module): [] for module in modules}
        for name, tensor in weights:
            layer: Any = self.model.layers[int(name.split(".")[1])]
            assert id(layer) in chosen, f"{name} belongs to a layer that is not reloaded"
            waiting[id(layer)].append((name, tensor))  # a view: nothing is read before the layer is complete
            if len(waiting[id(layer)]) == 3:
                self._finish(layer, waiting.pop(id(layer)))
        assert not waiting, "a layer is incomplete"

    def _finish(self, layer: Layer, given: list[tuple[str, torch.Tensor]]) -> None:
        live: dict[str, Any] = dict(layer._parameters)
        _hold(layer, {name: _parameter(torch.empty_like(t, device="cpu")) for name, t in layer.expected.items()})
        for name, tensor in given:
            layer.load(name, tensor)
        layer.process()
        for name, tensor in live.items():
            tensor.data.copy_(layer._parameters[name])
        _hold(layer, live)
        if self.moves:
            layer.bias.data = layer.bias.data.clone()


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _expected(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    assert isinstance(module, Layer)
    return module.expected


def _hold(module: torch.nn.Module, tensors: Mapping[str, Any]) -> None:
    module._parameters.clear()
    module._parameters.update(tensors)
