"""What becomes of the results in the file of an ablation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from scripts import ablation

if TYPE_CHECKING:
    from pathlib import Path


def result(name: str, best: float) -> dict[str, Any]:
    return {"name": name, "best": best, "num_steps": 1, "seconds": 1.0, "ok": True, "problem": "", "points": []}


def ablate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Every run reaches 0.99."""
    monkeypatch.setattr(ablation, "train_one", lambda run, _: result(run.name, 0.99))
    monkeypatch.setattr("sys.argv", ["ablation.py", *arguments])
    return ablation.main()


def written(out: Path) -> dict[str, float]:
    return {run["name"]: run["best"] for run in json.loads(out.read_text())["runs"]}


def test_a_run_takes_the_place_of_its_own_result_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found" / "out.json"
    assert ablate(monkeypatch, str(out), "--only", "rloo") == 0
    assert written(out) == {"rloo": 0.99}
    earlier = [result(name, 0.95) for name in ("grpo", "dapo", "gspo")]
    out.write_text(json.dumps({"suite": "algorithms", "goal": 0.9, "runs": earlier}))
    assert ablate(monkeypatch, str(out), "--only", "dapo,ppo") == 0
    assert written(out) == {"grpo": 0.95, "dapo": 0.99, "gspo": 0.95, "ppo": 0.99}
    assert list(written(out)) == ["grpo", "dapo", "ppo", "gspo"], "the order of the suite"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"suite": "algorithms", "goal": 0.9, "runs": [result("grpo", 0.95)]}), "of the suite algorithms"),
        ('{"suite": "modes"}', "holds no results"),
        ("{", "holds no results"),
    ],
)
def test_a_file_of_something_else_is_left_alone(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text(text)
    with pytest.raises(SystemExit) as ended:
        ablate(monkeypatch, str(out), "--suite", "modes")
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert out.read_text() == text


def test_a_run_that_does_not_end_when_it_is_asked_to_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "TIMEOUT_S", 0.0)
    monkeypatch.setattr(ablation, "PATIENCE_S", 0.1)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    run = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.readline()
    assert ablation.wait(run) == -signal.SIGKILL
    run.stdout.close()


def test_an_interrupt_leaves_no_run_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    def interrupted(_: float) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ablation.wait(run)
    assert run.wait(10) == -signal.SIGKILL
