"""What users of weight sync see: public names, fields of options and reports, and the texts of refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.golden import sync_seams
from tests.golden.net import Part
from tests.golden.sync_engines import Engine, Held, Load, Saved
from tests.golden.sync_seams import Copied, EngineTensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SAVED = [Saved("w", (4, 2))]
ROWS = [Held(0, "w", 0, 2), Held(1, "w", 2, 4)]
STORED = [EngineTensor("w", (4, 2))]
WHOLE = Copied("w", (0, 0), (4, 2), "w", 0, (2, 1))
SECOND = Saved("head", (3, 3))
PLANS: dict[str, dict[str, Any]] = {
    "source unknown": {"copies": [WHOLE._replace(source="v")]},
    "target unknown": {"copies": [WHOLE._replace(to="x")]},
    "box too large": {"copies": [WHOLE._replace(size=(5, 2))]},
    "box of other dimensions": {"copies": [WHOLE._replace(start=(0, 0, 0))]},
    "beyond the end": {"copies": [WHOLE._replace(offset=1)]},
    "written twice": {"copies": [WHOLE._replace(stride=(1, 1))]},
    "backwards": {"copies": [WHOLE._replace(stride=(-2, 1))]},
    "half is loaded": {"copies": [WHOLE._replace(size=(2, 2))]},
    "scattered": {
        "saved": [Saved("w", (2048, 1024))], "held": [Held(0, "w", 0, 2048)],
        "stored": [EngineTensor("w", (1024, 2048))], "copies": [WHOLE._replace(size=(2048, 1024), stride=(1, 2048))],
    },
    "trained, not loaded": {"saved": [*SAVED, SECOND], "held": [*ROWS, Held(0, "head", 0, 3)]},
    "stored, not trained": {"stored": [*STORED, EngineTensor("idle", (7,))]},
    "listed twice": {"saved": SAVED * 2},
    "other dtype": {"saved": [SAVED[0]._replace(dtype="float32")]},
    "dtype that cannot travel": {"saved": [*SAVED, Saved("odd", (1,), "complex64")],
                                 "held": [*ROWS, Held(0, "odd", 0, 1)]},
    "impossible shape": {"saved": [*SAVED, Saved("odd", (-1,))]},
    "held twice": {"held": [ROWS[0], Held(1, "w", 1, 4)]},
    "held by nobody": {"held": [ROWS[0], Held(1, "w", 3, 4)]},
    "more rows than there are": {"held": [ROWS[0], Held(1, "w", 2, 9)]},
    "two shards of one rank": {"held": [ROWS[0], Held(0, "w", 2, 4)]},
    "shard of nothing": {"held": [*ROWS, Held(2, "v", 0, 1)]},
    "no worker": {"workers": []},
    "many at once": {
        "saved": [SAVED[0]._replace(dtype="float32"), SECOND], "held": [ROWS[0], Held(2, "v", 0, 1)],
        "stored": [*STORED, EngineTensor("idle", (7,))],
    },
}  # fmt: skip


def _swallow(to: torch.Tensor, it: torch.Tensor) -> None:
    try:
        to.copy_(it * 2)
    except Exception:  # noqa: BLE001 - as loaders do that try one way and then another
        to.copy_(it)


LOADERS: dict[str, Load] = {
    "arithmetic": lambda to, it: to.copy_(it + 1),
    "concatenation": lambda to, it: to.copy_(torch.cat([it[:3], it[3:]])),
    "a number of it": lambda to, it: to.fill_(it[0, 0].item()),
    "index": lambda to, it: to.copy_(it[torch.tensor([5, 4, 3, 2, 1, 0])]),
    "narrower dtype": lambda to, it: to.copy_(it.to(torch.bfloat16)),
    "other bytes": lambda to, it: to.copy_(it.view(torch.int32)),
    "its bytes": lambda to, it: to.view(torch.int32).copy_(it),
    "temporary": lambda to, it: to.copy_(torch.empty(6, 4).copy_(it)),
    "other source": lambda to, _: to.copy_(torch.zeros(6, 4)),
    "random": lambda to, _: to.normal_(),
    "into the checkpoint": lambda to, it: it.copy_(to),
    "added": lambda to, it: to.add_(it),
    "failure swallowed": _swallow,
    "wrong shape": lambda to, it: to[:5].copy_(it),
    "beyond its rows": lambda to, it: to.copy_(it.narrow(0, 3, 6)),
    "half": lambda to, it: to[:2].copy_(it[:2]),
    "twice": lambda to, it: [to.copy_(it), to[5].copy_(it[5])],
    "filled afterwards": lambda to, it: [to.copy_(it), to[1:3].fill_(0)],
    "unknown": lambda to, it: to.no_such_thing(it),
}

BENCH = {
    "nonsense": ["--model", "gpt-9"],
    "cases": ["--model", "tiny", "--device", "cpu", "--learners", "2", "--syncs", "2", "--suite",
              '[{"device": "abacus"}, {"timeout": 30, "replicas": 2}]'],
}  # fmt: skip


def cases() -> Mapping[str, Any]:
    return {
        "public names": ("names", None),
        **{f"fields of {what}": ("fields", what) for what in ("options", "report", "times of a replica")},
        "errors": ("errors", None),
        **{f"plan: {name}": ("plan", changes) for name, changes in PLANS.items()},
        **{f"loader: {name}": ("loader", load) for name, load in LOADERS.items()},
        "calls": ("calls", None),
        "options of the bench": ("options", None),
        **{f"bench: {name}": ("bench", argv) for name, argv in BENCH.items()},
    }


def play(given: tuple[str, Any], folder: Path) -> Any:
    match given:
        case "names", _:
            return sync_seams.public_roles()
        case "fields", what:
            return sync_seams.fields_of(what)
        case "errors", _:
            return sync_seams.error_bases()
        case "plan", changes:
            whole = {"saved": SAVED, "held": ROWS, "stored": STORED, "copies": [WHOLE], **changes}
            workers = changes.get("workers", [(whole["stored"], whole["copies"])])
            return sync_seams.refused_plan(whole["saved"], whole["held"], workers)
        case "loader", load:
            engine = Engine()
            engine.add("w", (6, 4), ("t", load), dtype=torch.float32)
            return sync_seams.refused_loader([Saved("t", (6, 4), "float32")], engine)
        case "options", _:
            return sync_seams.bench_options()
        case "bench", argv:
            return sync_seams.benched(argv, folder)
        case _:
            return sync_seams.refused_calls()


SYNC_FACES = Part(name="sync_faces", cases=cases, play=play)
