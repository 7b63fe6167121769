"""A toy engine whose live weights are derived, with a way to derive them again like vLLM's.

Each layer's loader fills a bfloat16 `weight` from two checkpoint tensors; what the layer keeps of it depends on its
kind. The last layer holds nothing of its own: it is derived from the weights of another, like MLA's attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from weight_sync.plan.types import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weight_sync.receive.quantized import Ballots

Kind = Literal["plain", "quantised", "shuffled", "packed", "renamed", "computed"]
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
        target.copy_(share * 2 if self.kind == "computed" else share)
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
                packed, handle = self.weight.data.t().contiguous(), object()  # a new one each time, as of a library
                vars(self)["cached"] = lambda: (packed, handle)[0]
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


class Absorbed(torch.nn.Module):
    """Keeps the transposed weight of another layer."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layers = (layer,)  # a tuple, so that the layer is no part of this one
        self.process()

    def process(self) -> None:
        weight = self._layers[0].weight.data
        self.transposed = weight.t().contiguous()
        self.halved = _parameter((weight / 2).t())


class DerivedEngine(torch.nn.Module):
    """One layer of each kind; `quantised` also occurs twice, so that patterns can be seen."""

    KINDS: tuple[Kind, ...] = ("plain", "quantised", "shuffled", "packed", "renamed", "quantised", "computed")

    def __init__(self, worker: int = 0, num_workers: int = 1) -> None:
        super().__init__()
        layers = [
            Layer(kind, (f"layers.{i}.q", f"layers.{i}.k"), worker=worker, num_workers=num_workers)
            for i, kind in enumerate(self.KINDS)
        ]
        for layer in layers:
            layer.process()
        self.layers = torch.nn.ModuleList(layers)
        self.absorbed = Absorbed(layers[0])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            layer: Any = self.layers[int(name.split(".")[1])]
            layer.load(name, tensor)

    def loaded(self, full: Mapping[str, torch.Tensor]) -> DerivedEngine:
        """A new engine that loaded `full` from the start."""
        first: Any = self.layers[0]
        fresh = DerivedEngine(first.worker, ROWS // first.rows)
        reloader = ToyReloader(fresh)
        for layer in fresh.layers:
            reloader.restore_format(layer)
            for name, tensor in layer._parameters.items():
                layer._parameters[name] = _parameter(torch.empty_like(tensor, device="cpu"))  # pyright: ignore[reportArgumentType, reportCallIssue]
        fresh.load_weights(full.items())
        for module in (*fresh.layers, fresh.absorbed):
            reloader.post_process(module)
        return fresh


def checkpoint_params() -> tuple[ParamMeta, ...]:
    """Everything that `DerivedEngine` loads."""
    found: list[ParamMeta] = []
    for i in range(len(DerivedEngine.KINDS)):
        found += [ParamMeta(name=f"layers.{i}.{x}", shape=(ROWS, COLUMNS), dtype="bfloat16") for x in "qk"]
        found.append(ParamMeta(name=f"layers.{i}.bias", shape=(ROWS,), dtype="bfloat16"))
    return tuple(found)


class ToyReloader:
    """A `Reloader` for `DerivedEngine`."""

    def __init__(self, model: DerivedEngine, ballots: Ballots | None = None) -> None:
        self.model, self.ballots = model, ballots

    def checkpoint_tensors(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor] | None:
        return module.expected if isinstance(module, Layer) else None

    def restore_format(self, module: torch.nn.Module) -> None:
        if isinstance(module, Layer):
            module._parameters.clear()
            module._parameters.update({name: _parameter(tensor) for name, tensor in module.expected.items()})

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights)

    def post_process(self, module: torch.nn.Module) -> bool:
        assert isinstance(module, (Layer, Absorbed))
        module.process()
        return True

    def known_derived(self) -> Mapping[str, str]:
        return {}

    def dependents(self) -> Mapping[str, torch.nn.Module]:
        return {"absorbed": self.model.absorbed}


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
