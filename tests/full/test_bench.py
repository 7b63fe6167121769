"""The benchmark of modes, scaled down: real runs on shared devices and with S = 2, and one that is given no time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.fakes.trainer_process import ROOT
from trainer.tools.bench_workload import workload

if TYPE_CHECKING:
    from pathlib import Path

WORK = workload("w1", is_tiny=True)
CASES = {"colocated 1": (0, 1), "async 1+1": (2, 2)}
"""Name to S, and how many devices."""
WARMUP, NUM_STEPS = 1, 2
TIMEOUT_S = 300.0


def bench(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer", "bench", "--out", str(out), "--tiny", "--device", "cpu", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=(len(CASES) + 1) * TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "out.json"
    cases = ("--case", "colocated:1", "--case", "async:1+1", "--set", "async:mode.max_staleness=2")
    steps = ("--steps", str(NUM_STEPS), "--warmup", str(WARMUP), "--commit", "abc123")
    ended = bench(path, *cases, *steps, "--timeout-s", str(TIMEOUT_S))
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return path


@pytest.fixture(scope="module")
def runs(out: Path) -> dict[str, dict[str, Any]]:
    return json.loads(out.read_text())["runs"]


def run_dir(out: Path, name: str) -> Path:
    return out.with_suffix(".runs") / name.replace(" ", "_")


def metrics(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir(out, name) / "metrics.jsonl").read_text().splitlines()]


def total_steps(name: str) -> int:
    return WARMUP + NUM_STEPS + CASES[name][0]


@pytest.mark.parametrize("name", CASES)
def test_the_responses_to_a_prompt_have_exactly_its_lengths(out: Path, name: str) -> None:
    files = sorted((run_dir(out, name) / "trajectories").glob("*.jsonl"))
    groups = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(groups) == total_steps(name) * WORK.groups_per_step
    for group in groups:
        row = int(group["prompt"]["prompt_id"].partition("/")[2]) - 1
        assert row == group["group_id"], "groups and prompts are counted alike: the bench reads lengths by group"
        assert len(group["prompt"]["token_ids"]) == WORK.prompt_tokens
        assert {trajectory["status"] for trajectory in group["trajectories"]} == {"completed"}
        generated = [trajectory["num_generated_tokens"] for trajectory in group["trajectories"]]
        assert sorted(generated) == sorted(WORK.lengths_of(row))
    assert any(len(set(group["rewards"])) > 1 for group in groups)


def test_ratios_are_those_of_the_recorded_steps(out: Path, runs: dict[str, dict[str, Any]]) -> None:
    assert set(runs) == set(CASES)
    for name, result in runs.items():
        (staleness, devices), found = CASES[name], result["figures"]
        steady = metrics(out, name)[WARMUP : WARMUP + NUM_STEPS]
        step_s = sum(line["perf/step_s"] for line in steady) / NUM_STEPS
        assert found["step_s"]["mean"] == pytest.approx(step_s)
        assert found["learning_s"] == pytest.approx(sum(line["learner/step_s"] for line in steady) / NUM_STEPS)
        assert found["ratio"] == pytest.approx(step_s / max(found["generation_s"], found["learning_s"]))
        full_s = found["generation_full_s"]
        strict = None if full_s is None else pytest.approx(step_s / max(full_s, found["learning_s"]))
        assert found["strict_ratio"] == strict
        trained = sum(line["learner/num_tokens"] for line in steady)
        assert found["tokens_per_s_per_device"] == pytest.approx(trained / (NUM_STEPS * step_s) / devices)
        assert found["generation_s"] > 0
        # With S > 0, what is trained in these steps was in part generated before them.
        assert staleness > 0 or found["generation_s"] <= 1.5 * step_s
        assert found["engines"]["busy_frac"] > 0
        assert found["staleness_max"] <= staleness
        assert (found["failed_attempts"], found["discarded_tokens"], result["problem"]) == (0, 0, "")


@pytest.mark.parametrize("name", CASES)
def test_the_last_s_steps_do_not_count_and_every_step_is_kept(
    out: Path, runs: dict[str, dict[str, Any]], name: str
) -> None:
    lines, entries, found = metrics(out, name), runs[name]["per_step"], runs[name]["figures"]
    all_steps = list(range(1, total_steps(name) + 1))
    assert found["steps"] == [WARMUP + 1, WARMUP + NUM_STEPS]
    assert [line["step"] for line in lines] == [entry["step"] for entry in entries] == all_steps
    counted = [entry for entry in entries if entry["is_counted"]]
    assert [entry["step"] for entry in counted] == [WARMUP + 1, WARMUP + NUM_STEPS]
    idle_s = [entry["engines_idle_s"] for entry in counted]
    assert found["engines_idle_s"] == pytest.approx(sum(idle_s) / NUM_STEPS)
    for entry in entries:
        assert None not in entry.values()
    # The run generated what it trained, and nothing for steps that it did not make.
    assert sum(entry["generated_tokens"] for entry in entries) == sum(entry["loss_tokens"] for entry in entries)


def test_results_name_their_code_and_day(runs: dict[str, dict[str, Any]]) -> None:
    for name, result in runs.items():
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", result["date"])
        assert (result["commit"], "torch" in result["versions"]) == ("abc123", True)
        assert result["planned_steps"] == {"warmup": WARMUP, "counted": NUM_STEPS, "tail": CASES[name][0]}


def test_synchronous_steps_train_the_prompts_in_order(runs: dict[str, dict[str, Any]]) -> None:
    warmup = WARMUP * WORK.groups_per_step * WORK.group_size
    lengths = WORK.lengths((WARMUP + NUM_STEPS) * WORK.groups_per_step)[warmup:]
    tokens = sum(WORK.prompt_tokens + length for length in lengths)
    assert runs["colocated 1"]["figures"]["tokens_per_step"] == pytest.approx(tokens / NUM_STEPS)


def test_engines_that_read_no_weights_have_those_of_the_learner(out: Path) -> None:
    """On policy, both sides' log-probs of the same tokens agree but for rounding."""
    assert all(line["mismatch/fresh"] < 1e-4 for line in metrics(out, "colocated 1"))


def test_the_start_up_is_reported_in_parts(runs: dict[str, dict[str, Any]]) -> None:
    for result in runs.values():
        parts = dict(result["start_up"])
        whole = parts.pop("to_first_step_s")
        del parts["to_first_prompt_s"]
        assert parts["phase: starting engines and learners"] > 0
        assert parts["checks and imports"] > 0  # what the others leave
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
