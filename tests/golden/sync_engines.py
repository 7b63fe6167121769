"""Small engine models with loaders of every style, in plain torch, and what learners hold of their checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Load = Callable[[torch.Tensor, torch.Tensor], Any]
"""(engine tensor, checkpoint tensor): copies a part of the one into a part of the other."""


class Saved(NamedTuple):
    """A checkpoint tensor, in the dtype that the learner sends."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"


class Held(NamedTuple):
    """Rows of a checkpoint tensor on a learner rank. Copies of the same rows are numbered."""

    rank: int
    name: str
    start: int
    stop: int
    replica: int = 0


class Engine(torch.nn.Module):
    """One worker of an engine. `parts` are (engine tensor, checkpoint tensor, loader)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, str, Load]] = []

    def add(self, name: str, shape: Sequence[int], *parts: tuple[str, Load], dtype: torch.dtype | None = None) -> None:
        tensor = torch.zeros(tuple(shape), dtype=torch.bfloat16 if dtype is None else dtype)
        self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.parts += [(name, source, load) for source, load in parts]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        loaders: defaultdict[str, list[tuple[str, Load]]] = defaultdict(list)
        for name, source, load in self.parts:
            loaders[source].append((name, load))
        for source, tensor in weights:
            for name, load in loaders.get(source, ()):
                load(self.get_parameter(name).data, tensor)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A transformer over `tp` workers and `stages` of a pipeline."""

    tp: int = 1
    stages: int = 1
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    hidden: int = 8
    intermediate: int = 8
    vocab: int = 13
    bias: bool = False
    tied: bool = False
    experts: int = 0
    """Each worker has a slice of every expert; with `ep` it has whole ones."""
    ep: bool = False

    def saved(self) -> list[Saved]:
        q, kv, h, n = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        found = [Saved("embed", (self.vocab, h))]
        for i in range(self.layers):
            found += [Saved(f"{i}.q", (q, h)), Saved(f"{i}.k", (kv, h)), Saved(f"{i}.v", (kv, h))]
            found += [Saved(f"{i}.{x}_bias", (rows,)) for x, rows in (("q", q), ("k", kv), ("v", kv)) if self.bias]
            found += [Saved(f"{i}.o", (h, q)), Saved(f"{i}.norm", (h,))]
            mlps = [f"{i}.{e}." for e in range(self.experts)] or [f"{i}."]
            found += [Saved(f"{i}.router", (self.experts, h))] if self.experts else []
            found += [
                Saved(f"{mlp}{x}", (h, n) if x == "down" else (n, h)) for mlp in mlps for x in ("gate", "up", "down")
            ]
        return [*found, Saved("head_norm", (h,)), *([] if self.tied else [Saved("head", (self.vocab, h))])]

    def workers(self) -> list[torch.nn.Module]:
        return [self._worker(stage, place) for stage in range(self.stages) for place in range(self.tp)]

    def _worker(self, stage: int, place: int) -> Engine:
        engine, h = Engine(), self.hidden
        rows = -(-self.vocab // (2 * self.tp)) * 2  # padded
        first, last = stage == 0, stage == self.stages - 1
        if first or (last and self.tied):
            engine.add("embed", (rows, h), ("embed", _vocabulary(place * rows)))
        for i in range(self.layers):
            if i * self.stages // self.layers == stage:
                self._add_layer(engine, i, place)
        if last:
            engine.add("head_norm", (h,), ("head_norm", _whole), dtype=torch.float32)
            if not self.tied:
                engine.add("head", (rows, h), ("head", _vocabulary(place * rows)))
        return engine

    def _add_layer(self, engine: Engine, i: int, place: int) -> None:
        h, q = self.hidden, self.heads // self.tp * self.head_dim
        kv = max(1, self.kv_heads // self.tp) * self.head_dim
        kv_place = place // max(1, self.tp // self.kv_heads)
        cuts = [("q", 0, q, place), ("k", q, kv, kv_place), ("v", q + kv, kv, kv_place)]
        engine.add(f"{i}_qkv", (q + 2 * kv, h), *((f"{i}.{x}", _rows(to, n, at * n)) for x, to, n, at in cuts))
        if self.bias:
            engine.add(f"{i}_bias", (q + 2 * kv,), *((f"{i}.{x}_bias", _rows(to, n, at * n)) for x, to, n, at in cuts))
        engine.add(f"{i}_o", (h, q), (f"{i}.o", _columns(place * q, q)))
        engine.add(f"{i}_norm", (h,), (f"{i}.norm", _whole))
        if not self.experts:
            n = self.intermediate // self.tp
            gate_up = ((f"{i}.gate", _rows(0, n, place * n)), (f"{i}.up", _rows(n, n, place * n)))
            engine.add(f"{i}_gate_up", (2 * n, h), *gate_up)
            engine.add(f"{i}_down", (h, n), (f"{i}.down", _columns(place * n, n)))
            return
        engine.add(f"{i}_router", (self.experts, h), (f"{i}.router", _whole), dtype=torch.float32)
        here = self.experts // self.tp if self.ep else self.experts
        n, at = (self.intermediate, 0) if self.ep else (self.intermediate // self.tp, place)
        ids = range(place * here, (place + 1) * here) if self.ep else range(here)
        w13 = [(f"{i}.{e}.{x}", _expert(j, _rows(to, n, at * n))) for j, e in enumerate(ids)
               for x, to in (("gate", 0), ("up", n))]  # fmt: skip
        engine.add(f"{i}_w13", (here, 2 * n, h), *w13)
        w2 = [(f"{i}.{e}.down", _expert(j, _columns(at * n, n))) for j, e in enumerate(ids)]
        engine.add(f"{i}_w2", (here, h, n), *w2)


def odd_saved() -> list[Saved]:
    return [
        Saved("scale", ()), Saved("fused", (8, 4)), Saved("turned", (4, 6)), Saved("woven", (6, 4)),
        Saved("conv", (3, 2, 4)), Saved("wide", (4, 4), "float32"), Saved("codes", (4, 4), "float8_e4m3fn"),
        Saved("both", (4, 2)), Saved("steps", (5, 3)), Saved("empty", (0, 4)),
    ]  # fmt: skip


def odd_engine() -> Engine:
    """What loaders do besides slicing: transposes, permutations, strides, one tensor into two, pieces of one."""
    engine = Engine()
    engine.add("scale", (1,), ("scale", lambda to, it: to[0].copy_(it)))
    engine.add("first", (4, 4), ("fused", lambda to, it: to.copy_(it.chunk(2)[0])))
    engine.add("second", (4, 4), ("fused", lambda to, it: to.copy_(it.chunk(2)[1])))
    engine.add("turned", (6, 4), ("turned", lambda to, it: to.copy_(it.t())))
    engine.add("woven", (6, 4), ("woven", lambda to, it: to.view(3, 2, 4).copy_(it.view(2, 3, 4).transpose(0, 1))))
    engine.add("conv", (3, 2, 4), ("conv", lambda to, it: [to[i].copy_(part) for i, part in enumerate(it)]))
    engine.add("wide", (4, 4), ("wide", _whole), dtype=torch.float32)
    engine.add("codes", (4, 4), ("codes", _whole), dtype=torch.float8_e4m3fn)
    engine.add("twin", (8, 2), ("both", lambda to, it: [to[:4].copy_(it), to[4:].copy_(it)]))
    engine.add("steps", (5, 3), ("steps", lambda to, it: [to[i::2].copy_(it[i::2]) for i in (0, 1)]))
    return engine


class LoraLinear(torch.nn.Module):
    """A linear layer with LoRA as vLLM writes it: B cut by rows (column-parallel) or A by columns (row-parallel)."""

    def __init__(self, width: int, outs: Sequence[int], *, place: int, tp: int, by_rows: bool) -> None:
        super().__init__()
        self.place, self.tp, self.by_rows = place, tp, by_rows
        rows = [out if by_rows else out // tp for out in outs]
        self.lora_a_stacked = tuple(torch.zeros(2, 1, 4, width // tp if by_rows else width) for _ in outs)
        self.lora_b_stacked = tuple(torch.zeros(2, 1, out, 4) for out in rows)
        self.output_slices = tuple(rows)

    def reset_lora(self, index: int) -> None:
        for stacked in (*self.lora_a_stacked, *self.lora_b_stacked):
            stacked[index] = 0

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        self.reset_lora(index)
        given = zip(lora_a, lora_b, strict=True) if isinstance(lora_a, list) else [(lora_a, lora_b)]
        for part, (a, b) in enumerate(given):
            if a is None:
                continue
            own_a = a.chunk(self.tp, dim=1)[self.place] if self.by_rows else a
            own_b = b if self.by_rows else b.chunk(self.tp, dim=0)[self.place]
            for stacked, own in ((self.lora_a_stacked, own_a), (self.lora_b_stacked, own_b)):
                stacked[part][index, 0, : own.shape[0], : own.shape[1]].copy_(own)


PACKED = {"l.qkv_proj": ("l.q_proj", "l.k_proj", "l.v_proj")}
ADAPTED = {"q_proj": 8, "v_proj": 4, "o_proj": 6}


def lora_saved() -> list[Saved]:
    """An adapter of rank 2 for some of the layers, as PEFT saves it."""
    name = "base_model.model.l.{}.lora_{}.weight".format
    return [
        Saved(name(layer, x), (2, 6) if x == "A" else (out, 2), "float32")
        for layer, out in ADAPTED.items()
        for x in "AB"
    ]


def lora_layers(tp: int) -> list[dict[str, LoraLinear]]:
    """Of each worker."""
    return [
        {
            "l.qkv_proj": LoraLinear(6, (8, 4, 4), place=place, tp=tp, by_rows=False),
            "l.o_proj": LoraLinear(6, (6,), place=place, tp=tp, by_rows=True),
        }
        for place in range(tp)
    ]


# Learners


def in_rows(saved: Sequence[Saved], num_ranks: int, *, replicas: int = 1) -> list[Held]:
    """FSDP2: `torch.chunk` over rows; with replicas, HSDP."""
    held = []
    for name, shape, _ in saved:
        rows = shape[0] if shape else 1
        step = -(-rows // num_ranks)
        for rank in range(num_ranks):
            start, stop = min(rank * step, rows), min((rank + 1) * step, rows)
            held += [Held(copy * num_ranks + rank, name, start, stop, copy) for copy in range(replicas)]
    return held


def unevenly(saved: Sequence[Saved]) -> list[Held]:
    """Four ranks with unequal shares, in an order that turns from tensor to tensor."""
    held = []
    for number, (name, shape, _) in enumerate(saved):
        rows = shape[0] if shape else 1
        cuts = [0, rows // 5, rows // 5, rows // 2, rows]
        held += [Held((part + number) % 4, name, *span) for part, span in enumerate(pairwise(cuts))]
    return held


def by_tensor(saved: Sequence[Saved], num_ranks: int) -> list[Held]:
    """Whole tensors in turn, as experts that are sharded by expert."""
    return [
        Held(rank, name, 0, (shape[0] if shape else 1) if rank == number % num_ranks else 0)
        for number, (name, shape, _) in enumerate(saved)
        for rank in range(num_ranks)
    ]


# Parts of loaders


def _whole(to: torch.Tensor, it: torch.Tensor) -> None:
    to.copy_(it)


def _rows(to_row: int, num: int, from_row: int) -> Load:
    return lambda to, it: to.narrow(0, to_row, num).copy_(it.narrow(0, from_row, num))


def _columns(start: int, num: int) -> Load:
    return lambda to, it: to.copy_(it[:, start : start + num])


def _expert(index: int, load: Load) -> Load:
    return lambda to, it: load(to[index], it)


def _vocabulary(first: int) -> Load:
    """Rows from `first` on that there are; the rest is padding."""

    def load(to: torch.Tensor, it: torch.Tensor) -> None:
        part = it[first : first + len(to)]
        to[: len(part)].copy_(part)
        to[len(part) :].fill_(0)

    return load
