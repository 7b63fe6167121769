"""Write `data/stored_runs.tar.gz`: three run directories, one with a checkpoint of a real learner.

    python -m tests.golden.stored

Only for a new kind of stored file: what is there is kept, so that runs of earlier days are known to load.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

from tests.golden import seams
from tests.golden.clocks import virtual_clocks
from tests.golden.parts import stage
from tests.golden.runs import LONG_TAIL
from tests.golden.tools import STORED
from tests.golden.worlds import TAIL
from tests.simulation.fleet import Plan


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, stage(Path(folder)), virtual_clocks():
        path = Path(folder) / "stored"
        path.mkdir()
        seams.store_learning_run(path / "async", num_steps=12)
        seams.store_scripted_run(path / "sync", num_steps=12, script=LONG_TAIL)
        plan = {"num_steps": 20, "groups_per_step": 3, "workload": TAIL, "seed": 7, "shares_devices": True}
        seams.simulated(
            Plan(**plan, death_every_s=80.0, restart_s=5.0, max_staleness=0), path / "colocated", keeps_config=True
        )
        with tarfile.open(STORED, "w:gz") as archive:
            for run in sorted(path.iterdir()):
                archive.add(run, arcname=run.name, filter=_nobodys)
    print(f"{STORED}: {STORED.stat().st_size:,} bytes")
    return 0


def _nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    sys.exit(main())
