"""The benchmark of modes, scaled down: a real run on shared devices, and one that is given no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.fakes.trainer_process import ROOT
from trainer.bench.workload import workload

if TYPE_CHECKING:
    from pathlib import Path

WORK = workload("w1", is_tiny=True)
CASES = {"colocated 1": (0, 1)}
"""Name to S, and how many devices."""
TIMEOUT_S = 300.0


def bench(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.bench", "--out", str(out), "--tiny", "--device", "cpu", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "out.json"
    ended = bench(path, "--case", "colocated:1", "--steps", "3", "--warmup", "1", "--timeout-s", str(TIMEOUT_S))
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return path


@pytest.fixture(scope="module")
def runs(out: Path) -> dict[str, dict[str, Any]]:
    return json.loads(out.read_text())["runs"]


def run_dir(out: Path, name: str) -> Path:
    return out.with_suffix(".runs") / name.replace(" ", "_")


@pytest.mark.parametrize("name", CASES)
def test_every_answer_has_exactly_the_length_of_its_prompt(out: Path, name: str) -> None:
    files = sorted((run_dir(out, name) / "trajectories").glob("*.jsonl"))
    groups = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(groups) >= 3 * WORK.groups_per_step
    for group in groups:
        row = int(group["prompt"]["prompt_id"].partition("/")[2]) - 1
        assert row == group["group_id"], "groups and prompts are counted alike: the bench reads lengths by group"
        assert len(group["prompt"]["token_ids"]) == WORK.prompt_tokens
        for trajectory in group["trajectories"]:
            assert (trajectory["status"], trajectory["num_generated_tokens"]) == ("completed", WORK.length(row))
    assert any(len(set(group["rewards"])) > 1 for group in groups)


def test_ratios_are_those_of_the_recorded_steps(out: Path, runs: dict[str, dict[str, Any]]) -> None:
    assert set(runs) == set(CASES)
    for name, result in runs.items():
        lines = [json.loads(line) for line in (run_dir(out, name) / "metrics.jsonl").read_text().splitlines()]
        steady, found = lines[1:], result["figures"]
        assert [line["step"] for line in lines] == [1, 2, 3]
        step_s = sum(line["perf/step_s"] for line in steady) / 2
        assert found["step_s"]["mean"] == pytest.approx(step_s)
        assert found["learning_s"] == pytest.approx(sum(line["learner/step_s"] for line in steady) / 2)
        staleness, devices = CASES[name]
        assert found["ratio"] == pytest.approx(step_s / max(found["generation_s"], found["learning_s"]))
        trained = sum(line["learner/num_tokens"] for line in steady)
        assert found["tokens_per_s_per_device"] == pytest.approx(trained / (2 * step_s) / devices)
        assert 0 < found["generation_s"] <= 1.5 * step_s
        assert found["engines"]["busy_frac"] > 0
        assert found["staleness_max"] <= staleness
        assert (found["failed_attempts"], found["discarded_tokens"], result["problem"]) == (0, 0, "")


def test_synchronous_steps_train_the_prompts_in_order(runs: dict[str, dict[str, Any]]) -> None:
    lengths = WORK.lengths(3 * WORK.groups_per_step)[WORK.groups_per_step :]
    tokens = WORK.group_size * sum(WORK.prompt_tokens + length for length in lengths)
    assert runs["colocated 1"]["figures"]["tokens_per_step"] == pytest.approx(tokens / 2)


def test_engines_that_read_no_weights_have_those_of_the_learner(out: Path) -> None:
    """On policy, both sides' log-probs of the same tokens agree but for rounding."""
    lines = (run_dir(out, "colocated 1") / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["learner/mismatch_engine"] < 1e-4 for line in lines)


def test_the_start_up_is_told_in_parts(runs: dict[str, dict[str, Any]]) -> None:
    for result in runs.values():
        parts = dict(result["start_up"])
        whole = parts.pop("to_first_step_s")
        del parts["to_first_prompt_s"]
        assert parts["phase: starting engines and learners"] > 0
        assert parts["checks and imports"] > 0  # what the others leave, so that all of it is told
        assert sum(parts.values()) == pytest.approx(whole, rel=1e-6)
        assert result["timeline"]["learner"]
        assert result["timeline"]["running"]


def test_a_run_out_of_time_is_a_failure_that_leaves_the_others_and_no_process(out: Path) -> None:
    before = out.read_text()
    ended = bench(out, "--case", "late=sync:1+1", "--timeout-s", "4")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED late: did not end within 4 s" in ended.stdout
    after = json.loads(out.read_text())["runs"]
    assert {name: after[name] for name in CASES} == json.loads(before)["runs"]
    assert after["late"]["figures"] is None
    folder = str(out.parent)
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or [])]
    assert left == []
