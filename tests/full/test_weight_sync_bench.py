"""The benchmark as people run it: a case that cannot work, then one that does, in one command on CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weight_sync.bench.shapes import architecture

ROOT = Path(__file__).resolve().parents[2]
LINE = ("--model", "tiny", "--device", "cpu", "--learners", "2", "--replicas", "2", "--syncs", "3")
pytestmark = [pytest.mark.timing, pytest.mark.timeout(300)]


def test_a_suite_goes_on_after_a_failure_and_measures_what_works(tmp_path: Path) -> None:
    out, suite = tmp_path / "out.json", tmp_path / "suite.json"
    suite.write_text(json.dumps([{"device": "abacus"}, {"timeout": 0.001, "baselines": False}, {"timeout": 30}]))
    ended = subprocess.run(
        [sys.executable, "-m", "weight_sync.bench", *LINE, "--suite", str(suite), "--json", str(out)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    refused, failed, worked = map(json.loads, out.read_text().splitlines())
    assert not refused["ok"]
    assert "got 'abacus'" in refused["problems"][0]
    assert not failed["ok"]
    assert failed["problems"]
    assert "FAILED" in ended.stdout

    assert worked["ok"], worked["problems"]
    assert (worked["num_syncs"], worked["mismatches"], worked["retries"]) == (3, 0, 0)
    for name, figure in worked["figures"].items():
        assert 0 <= figure["p50"] <= figure["max"] < 30, name
    # What a worker pulls is the whole model: every parameter once, in bfloat16.
    assert {worker["bytes"] for worker in worked["workers"].values()} == {2 * architecture("tiny").num_params}
    assert set(worked["workers"]) == {"r0/0", "r1/0"}
    assert all(math.isfinite(value) for worker in worked["workers"].values() for value in worker.values())
    assert 0 < worked["ceiling"]["ratio"] < 2
    assert {name: found["bit_exact"] for name, found in worked["baselines"].items()} == {
        "rank0_broadcast": True,
        "param_broadcast": True,
    }
