"""What the ranks of a 1-D FSDP2 mesh hold of parameters that are trained as they are saved. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weight_sync.plan.types import RankShards, ShardBox

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weight_sync.plan.types import ParamMeta


def rows_of(params: Sequence[ParamMeta], rank: int, num_ranks: int) -> tuple[ShardBox, ...]:
    """torch.chunk over rows, written down once more."""
    boxes: list[ShardBox] = []
    for name, shape in ((meta.name, meta.shape) for meta in params):
        num_rows = shape[0] if shape else 1
        step = -(-num_rows // num_ranks)
        rows = range(num_rows)[rank * step : (rank + 1) * step]
        if not len(rows):
            continue
        start, size = (rows.start, *(0 for _ in shape[1:])), (len(rows), *shape[1:])
        boxes.append(ShardBox(name, start, size) if shape else ShardBox(name, (), ()))
    return tuple(boxes)


def row_shards(params: Sequence[ParamMeta], num_ranks: int) -> list[RankShards]:
    return [RankShards.of(rank, params, rows_of(params, rank, num_ranks)) for rank in range(num_ranks)]


def held_by(full: Mapping[str, Any], boxes: Sequence[ShardBox]) -> dict[str, Any]:
    """The boxes of whole tensors or arrays."""
    return {
        box.param: full[box.param][tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        for box in boxes
    }
