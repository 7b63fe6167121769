"""What the picture of a run is drawn from."""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from scripts.plot_run import main, numbers, reward_limits, spans_of_last_start
from trainer.telemetry.trace import Tracer

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_timeline_is_of_the_last_start_and_needs_no_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert spans_of_last_start(path) == []
    for start_s in (100.0, 90_000.0):
        tracer = Tracer(path)
        tracer.add_span("learner", f"at {start_s}", start_s=start_s, end_s=start_s + 1)
        tracer.close()
    assert len(json.loads(path.read_text())) == 6
    assert [(span.track, span.begin_s, span.end_s) for span in spans_of_last_start(path)] == [
        ("learner", 90_000.0, 90_001.0)
    ]
    path.write_bytes(path.read_bytes()[:-40])  # torn by a crash: the last span is gone, what is before it is not
    assert [span.begin_s for span in spans_of_last_start(path)] == [100.0]


def test_rewards_outside_of_0_and_1_are_in_the_picture() -> None:
    assert reward_limits([0.25, None, 0.5]) == (0.0, 1.0)
    assert reward_limits([-1.0, 0.5]) == (-1.0, 1.0)
    assert reward_limits([0.0, 3.5]) == (0.0, 3.5)
    gap = numbers([0.5, None])
    assert gap[0] == 0.5
    assert math.isnan(gap[1])


def test_without_matplotlib_one_line_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(tmp_path), str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err == 'matplotlib is not installed; install it with: pip install -e ".[plot]"\n'


def test_a_directory_without_steps_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    metrics = tmp_path / "metrics.jsonl"
    assert main([str(tmp_path), str(tmp_path / "x.png")]) == 2
    shown = capsys.readouterr().err
    assert shown == f"{metrics} does not exist; give a run directory in which a step has ended\n"
    metrics.write_text('{"st')
    assert main([str(tmp_path), str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err == f"{metrics} has no whole line; wait until a step has ended\n"
