"""What becomes of the lines that earlier processes wrote into the run directory, once a run begins or goes on in it.

Trajectories and the answers of evaluations have files of their own for each process, and TensorBoard is told by its
sink.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from trainer.telemetry.sinks.jsonl import truncate_after

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.telemetry.run_dir import RunDir

logger = logging.getLogger(__name__)


def cut_records(run_dir: RunDir, *, after_step: int) -> None:
    """The run goes on from the checkpoint of `after_step`: the steps behind it are made again."""
    removed = truncate_after(run_dir.metrics, after_step)
    # By version: what was said of one that stays holds, however late it was said.
    truncate_after(run_dir.evaluations, after_step, key="version")
    logger.info("resuming after step %d: %d later lines cut from %s", after_step, removed, run_dir.metrics)


def set_records_aside(run_dir: RunDir) -> None:
    """The run begins anew: what an earlier attempt wrote is kept as metrics.N.jsonl and evaluations.N.jsonl."""
    written = [path for path in (run_dir.metrics, run_dir.evaluations) if path.exists() and path.stat().st_size]
    if not written:
        return
    number = next(n for n in itertools.count(1) if not any(_aside(path, n).exists() for path in written))
    for path in written:
        path.rename(_aside(path, number))
    names = " and ".join(_aside(path, number).name for path in written)
    logger.warning("there is no checkpoint to go on from; what an earlier attempt wrote is now %s", names)


def _aside(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}{path.suffix}")
