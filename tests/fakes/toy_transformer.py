"""A tensor-parallel transformer in numpy: what an engine's loader does, written as plain slices of whole arrays.

The slow reference for the plan. `expected_params` slices and concatenates full tensors; `worker_layouts` writes the
same rules down as recorded copies; `run_plan` executes a plan. None of them uses the planner's arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from weight_sync.plan.types import EngineParam, ParamMeta, Plan, RankShards, RecordedCopy, WorkerLayout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PAYLOAD = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16, "float8_e4m3fn": np.uint8}
"""Elements are opaque bits of the right width: a plan moves bytes."""
UNTOUCHED = 0xAB
"""Every byte of an engine parameter before a pull."""


@dataclass(frozen=True, kw_only=True)
class ToySpec:
    """One transformer, split over `tp` workers: fused qkv and gate_up, replicated KV heads, padded vocabulary."""

    tp: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    vocab_multiple: int
    layers: int = 1
    bias: bool = False
    tied: bool = False
    dtype: str = "bfloat16"

    @property
    def vocab_rows(self) -> int:
        """Rows of the padded vocabulary that one worker holds."""
        multiple = self.vocab_multiple * self.tp
        return -(-self.vocab // multiple) * multiple // self.tp

    def kv_range(self, worker: int) -> tuple[int, int]:
        """Rows of k_proj that a worker holds; workers share them when there are fewer KV heads than workers."""
        rows = max(1, self.kv_heads // self.tp) * self.head_dim
        copies = max(1, self.tp // self.kv_heads)
        return worker // copies * rows, (worker // copies + 1) * rows

    def params(self) -> tuple[ParamMeta, ...]:
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, self.hidden)}
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i in range(self.layers):
            shapes |= {f"{i}.q.weight": (q, self.hidden), f"{i}.k.weight": (kv, self.hidden)}
            shapes |= {f"{i}.v.weight": (kv, self.hidden), f"{i}.o.weight": (self.hidden, q)}
            if self.bias:
                shapes |= {f"{i}.q.bias": (q,), f"{i}.k.bias": (kv,), f"{i}.v.bias": (kv,)}
            shapes |= {f"{i}.gate.weight": (self.intermediate, self.hidden), f"{i}.norm.weight": (self.hidden,)}
            shapes |= {f"{i}.up.weight": (self.intermediate, self.hidden)}
            shapes |= {f"{i}.down.weight": (self.hidden, self.intermediate)}
        if not self.tied:
            shapes["head.weight"] = (self.vocab, self.hidden)
        return tuple(ParamMeta(name=name, shape=shape, dtype=self.dtype) for name, shape in shapes.items())

    def parts(self, worker: int) -> dict[str, list[tuple[str, tuple[slice, ...]]]]:
        """Engine parameter -> the slices of checkpoint tensors that are stacked along dimension 0 in it."""
        q = self.heads // self.tp * self.head_dim
        q_rows = slice(worker * q, (worker + 1) * q)
        kv_rows = slice(*self.kv_range(worker))
        n = self.intermediate // self.tp
        columns = slice(worker * n, (worker + 1) * n)
        first = worker * self.vocab_rows
        vocab_rows = slice(min(first, self.vocab), min(first + self.vocab_rows, self.vocab))
        out: dict[str, list[tuple[str, tuple[slice, ...]]]] = {"embed.weight": [("embed.weight", (vocab_rows,))]}
        for i in range(self.layers):
            for kind in ("weight", "bias") if self.bias else ("weight",):
                out[f"{i}.qkv.{kind}"] = [
                    (f"{i}.q.{kind}", (q_rows,)),
                    (f"{i}.k.{kind}", (kv_rows,)),
                    (f"{i}.v.{kind}", (kv_rows,)),
                ]
            out[f"{i}.o.weight"] = [(f"{i}.o.weight", (slice(None), q_rows))]
            out[f"{i}.gate_up.weight"] = [(f"{i}.gate.weight", (columns,)), (f"{i}.up.weight", (columns,))]
            out[f"{i}.down.weight"] = [(f"{i}.down.weight", (slice(None), columns))]
            out[f"{i}.norm.weight"] = [(f"{i}.norm.weight", (slice(None),))]
        if not self.tied:
            out["head.weight"] = [("head.weight", (vocab_rows,))]
        return out


def random_tensors(params: Sequence[ParamMeta], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random bits for every parameter."""
    return {p.name: rng.integers(0, np.iinfo(PAYLOAD[p.dtype]).max, p.shape, PAYLOAD[p.dtype]) for p in params}


def expected_params(spec: ToySpec, full: Mapping[str, np.ndarray], worker: int) -> dict[str, np.ndarray]:
    """What the worker's parameters hold after a sync; vocabulary padding keeps what was there."""
    result: dict[str, np.ndarray] = {}
    for name, parts in spec.parts(worker).items():
        value = np.concatenate([full[source][where] for source, where in parts])
        if name in ("embed.weight", "head.weight"):
            padded = np.full(spec.vocab_rows * spec.hidden * value.itemsize, UNTOUCHED, np.uint8)
            padded = padded.view(value.dtype).reshape(spec.vocab_rows, spec.hidden)
            padded[: len(value)] = value
            value = padded
        result[name] = np.ascontiguousarray(value)
    return result


def worker_layouts(spec: ToySpec) -> tuple[WorkerLayout, ...]:
    """The same rules as recorded copies."""
    shapes = {meta.name: meta.shape for meta in spec.params()}
    layouts: list[WorkerLayout] = []
    for worker in range(spec.tp):
        params: list[EngineParam] = []
        copies: list[RecordedCopy] = []
        for name, parts in spec.parts(worker).items():
            offset = 0
            for source, where in parts:
                ranges = [s.indices(n) for s, n in zip(where, shapes[source], strict=False)]
                ranges += [(0, n, 1) for n in shapes[source][len(where) :]]
                size = tuple(stop - start for start, stop, _ in ranges)
                stride = tuple(prod(size[d + 1 :]) for d in range(len(size)))
                copies.append(
                    RecordedCopy(
                        src_param=source,
                        src_start=tuple(start for start, _, _ in ranges),
                        src_size=size,
                        dst_param=name,
                        dst_offset=offset,
                        dst_stride=stride,
                    )
                )
                offset += prod(size)
            rows = spec.vocab_rows if name in ("embed.weight", "head.weight") else offset // prod(size[1:])
            params.append(EngineParam(name=name, shape=(rows, *size[1:]), dtype=spec.dtype))
        layouts.append(WorkerLayout(worker=worker, params=tuple(params), copies=tuple(copies)))
    return tuple(layouts)


def run_plan(
    plan: Plan,
    *,
    full: Mapping[str, np.ndarray],
    shards: Sequence[RankShards],
    sizes: Mapping[int, Mapping[str, int]],
) -> dict[int, dict[str, np.ndarray]]:
    """Pack and pull like learner and engine would.

    Args:
        full: checkpoint tensors.
        sizes: worker -> engine parameter -> bytes.

    Returns:
        worker -> engine parameter -> uint8[bytes].
    """
    held: dict[tuple[str, int], np.ndarray] = {}
    for shard in shards:
        for index, start, size in zip(shard.param, shard.start, shard.size, strict=True):
            name = plan.params[index].name
            spans = [slice(a, a + n) for a, n in zip(start, size, strict=True)]
            held[name, shard.rank] = full[name][tuple(spans[: full[name].ndim])]
    arenas: dict[int, np.ndarray] = {}
    for pack in plan.pack:
        arena = arenas[pack.rank] = np.full(pack.arena_bytes, 0xEE, np.uint8)
        for item in pack.items:
            box = held[item.param, pack.rank][
                tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))
            ]
            assert box.shape == item.size
            arena[item.arena_off : item.arena_off + item.nbytes] = np.frombuffer(box.tobytes(), np.uint8)
    engines = {w: {name: np.full(n, UNTOUCHED, np.uint8) for name, n in named.items()} for w, named in sizes.items()}
    for pull in plan.pull:
        for run in pull.runs:
            source = arenas[run.src_rank][run.src_off : run.src_off + run.nbytes]
            engines[pull.worker][run.dst_param][run.dst_off : run.dst_off + run.nbytes] = source
    return engines
