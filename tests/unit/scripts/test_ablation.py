"""What becomes of the results in the file of an ablation."""

from __future__ import annotations

import json
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


def test_the_curve_has_every_evaluation_that_gave_an_accuracy(tmp_path: Path) -> None:
    steps = [{"step": step, "reward/mean": step / 4, "mismatch/fresh": 0.5 * step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    evaluations = [
        {"version": 0, "accuracy": 0.25},
        {"version": 1, "error": "timeout"},
        {"version": 2, "accuracy": 0.5},
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    assert ablation.read_curve(tmp_path) == {
        "num_steps": 2, "rewards": [[1, 0.25], [2, 0.5]], "means": {"mismatch/fresh": 0.75},
        "points": [{"version": 0, "accuracy": 0.25}, {"version": 2, "accuracy": 0.5}],
    }  # fmt: skip
    assert ablation.read_curve(tmp_path / "none")["points"] == []
