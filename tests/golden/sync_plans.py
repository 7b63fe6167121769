"""What a sync copies from where to where: models x what learners hold x how engines split them.

A record has, for each worker and engine tensor, a digest of which element of which checkpoint tensor every byte comes
from; what each rank packs, and what each worker reads of it. How plans are written down makes no difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.golden import sync_seams
from tests.golden.net import Part, digest
from tests.golden.sync_engines import Dense, Saved, by_tensor, in_rows, lora_layers, lora_saved, odd_engine, odd_saved
from tests.golden.sync_engines import unevenly as in_uneven_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.golden.sync_engines import Held

DENSE = {
    "tp1": Dense(),
    "tp2": Dense(tp=2),
    "tp4, shared KV heads": Dense(tp=4),
    "pp2": Dense(stages=2),
    "tp2 pp2": Dense(tp=2, stages=2),
    "biased, tied, tp2": Dense(tp=2, bias=True, tied=True),
    "tied, pp2": Dense(stages=2, tied=True),
    "experts, tp1": Dense(experts=4),
    "experts, tp2": Dense(experts=4, tp=2),
    "experts, ep2": Dense(experts=4, tp=2, ep=True),
}
OTHERS = ("odd loaders", "adapter, tp1", "adapter, tp2", "derived, tp1", "derived, tp2")
LEARNERS: dict[str, Callable[[Sequence[Saved]], list[Held]]] = {
    "fsdp 1": lambda saved: in_rows(saved, 1),
    "fsdp 2": lambda saved: in_rows(saved, 2),
    "fsdp 4": lambda saved: in_rows(saved, 4),
    "hsdp 2x2": lambda saved: in_rows(saved, 2, replicas=2),
    "replicated": lambda saved: in_rows(saved, 1, replicas=2),
    "uneven rows": in_uneven_rows,
    "whole tensors": lambda saved: by_tensor(saved, 3),
}
DESCRIBED = {"fsdp 1": (1,), "fsdp 2": (2,), "fsdp 4": (4,), "hsdp 2x2": (2, 2), "unsharded": ()}
MODELS = ("dense", "tied", "experts", "shared expert")


def cases() -> Mapping[str, Any]:
    engines = (*DENSE, *OTHERS)
    return {
        **{f"{engine}: lands": ("lands", engine, "fsdp 2") for engine in engines},
        **{f"{engine} <- {held}": ("moves", engine, held) for engine in engines for held in LEARNERS},
        **{f"{model} on learners": ("describe", model, "") for model in MODELS},
    }


def play(given: tuple[str, str, str], _folder: Path) -> Any:
    kind, name, held = given
    if kind == "describe":
        return sync_seams.described(name, DESCRIBED)
    saved, engines = engines_of(name)
    moves = sync_seams.moves(saved, LEARNERS[held](saved), engines)
    if kind == "lands":
        return {
            "wider than sent": {s.name: dtype for s in saved if (dtype := moves.dtypes[s.name]) != s.dtype},
            "lands": {f"worker {w}": {n: _landed(a) for n, a in at.items()} for w, at in enumerate(moves.came_from)},
        }
    ranks = range(len(moves.packed))
    parts = [(np.concatenate([*at.values()]), np.concatenate([*by.values()]))
             for at, by in zip(moves.came_from, moves.came_by, strict=True)]  # fmt: skip
    return {
        "packed": moves.packed,
        "read": [[int((by == rank).sum()) for rank in ranks] for _, by in parts],
        "lands": digest(*(at for at, _ in parts)),
        "by rank": digest(*(by for _, by in parts)),
    }


def engines_of(name: str) -> tuple[list[Saved], list[Any]]:
    """The checkpoint, and the engine of every worker."""
    if name in DENSE:
        return DENSE[name].saved(), DENSE[name].workers()
    tp = int(name[-1]) if "tp" in name else 1
    match name.split(",")[0]:
        case "adapter":
            return lora_saved(), [sync_seams.adapter_slot(layers) for layers in lora_layers(tp)]
        case "derived":
            return sync_seams.derived_engines(tp)
        case _:
            return odd_saved(), [odd_engine()]


def _landed(came_from: np.ndarray) -> list[Any]:
    """Bytes, those of them that are padding, digest."""
    return [len(came_from), int((came_from < 0).sum()), digest(came_from)]


SYNC_PLANS = Part(name="sync_plans", cases=cases, play=play)
