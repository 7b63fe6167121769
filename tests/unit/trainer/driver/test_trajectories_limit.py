"""`telemetry.trajectories_gib` reaches the recorder, and what it leaves out the line of each step."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.fakes.scripted_run import ScriptedRun, config
from trainer.telemetry import session as telemetry
from trainer.telemetry.trajectories import TrajectoryRecorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.driver import loops


@pytest.mark.parametrize(("gib", "num_skipped"), [(1e-9, 1), (20.0, 0), (None, 0)])
def test_the_configured_limit_is_that_of_the_recorder(tmp_path: Path, gib: float | None, num_skipped: int) -> None:
    cfg = replace(config(telemetry={"trajectories_gib": gib}), run_dir=str(tmp_path / "run"))
    console = Console(file=io.StringIO())
    with telemetry.claimed_run_dir(cfg, console) as run_dir, telemetry.opened(cfg, run_dir, console) as sinks:
        (run_dir.answers / "version_0.jsonl").write_text("{}\n")
        assert sinks.recorder is not None
        sinks.recorder.begin_evaluation(run_dir.answers, 1)
        assert sinks.recorder.num_skipped == num_skipped


def test_every_group_that_is_left_out_is_counted(
    scripted: Callable[..., ScriptedRun], play: Callable[..., loops.Parts]
) -> None:
    run = scripted(num_held_out=0)
    folder = run.telemetry.run_dir.trajectories
    run.telemetry = replace(run.telemetry, recorder=TrajectoryRecorder(folder, max_bytes=0))
    play(run)
    last = json.loads(run.telemetry.run_dir.metrics.read_text().splitlines()[-1])
    assert last["telemetry/trajectories_left_out"] == last["buffer/finished"] > 0
    assert list(folder.iterdir()) == []
