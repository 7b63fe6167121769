"""What the tools print: advice on stored runs, the plan of a dry run, the table of a benchmark; and that stored runs of
earlier days still load and go on.

`stored_runs.tar.gz` was written by `python -m tests.golden.stored`. It is not written anew when the code changes: what
it holds is what users have on their disks.
"""

from __future__ import annotations

import shlex
import tarfile
from typing import TYPE_CHECKING, Any

from tests.golden import seams
from tests.golden.net import DATA, Part

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STORED = DATA / "stored_runs.tar.gz"
NAMES = ("async", "sync", "colocated")
PUBLISHED = ("bench_w1_3b_2_devices", "bench_w1_05b_1_device", "bench_w1-heavy_3b_2_devices")

PLANS = {
    "tiny": "model.path=small",
    "7B, async": "--config-name grpo_7b model.path=large task=arithmetic",
    "7B, colocated": "model.path=large mode=colocated learner.num_ranks=4 rollout.num_replicas=4 rollout.group_size=8",
    "7B, critic and KL": "model.path=large algorithm=ppo algorithm.kl.coef=0.1 learner.num_ranks=8",
    "7B, critic": "model.path=large algorithm=ppo learner.activation_checkpointing=true learner.num_ranks=8",
    "7B on nodes": "--config-name dapo_7b model.path=large task=arithmetic device=cuda --nodes 8,8",
    "does not fit": "model.path=large learner.num_ranks=1",
}
PLANNED = "--dry-run --device-memory-gib 80 model.random_weights=true"


def cases() -> Mapping[str, Any]:
    return {
        **{f"advise {name}{kind}": ("advise", name, kind) for name in NAMES for kind in (" --json", "")},
        **{f"plan: {name}": ("plan", words) for name, words in PLANS.items()},
        **{f"bench {name}": ("bench", name) for name in NAMES},
        **{f"published {name}": ("published", name) for name in PUBLISHED},
        **{f"load {name}": ("load", name) for name in NAMES},
        "go on from the stored checkpoint": ("go on", "async"),
    }


def play(given: tuple[str, ...], folder: Path) -> Any:
    kind, name = given[:2]
    if kind in ("advise", "bench", "load", "go on"):
        with tarfile.open(STORED) as archive:
            # Filters came with Python 3.11.4.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
            archive.extractall(folder)
    match kind:
        case "advise":
            return seams.advised([name, *shlex.split(given[2])])
        case "plan":
            seams.write_models(folder)
            return seams.planned([*shlex.split(PLANNED), *shlex.split(name)])
        case "bench":
            return seams.bench_of(folder / name)
        case "published":
            return seams.bench_table(name)
        case "load":
            return seams.loaded(folder / name)
        case _:
            return seams.gone_on(folder / name)


TOOLS = Part(name="tools", cases=cases, play=play, tolerance=2e-4)
