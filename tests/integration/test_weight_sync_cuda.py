"""Weight sync on real devices, next to an allocator that hands all its memory back between versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("expandable", ["True", "False"])
def test_a_hundred_versions_arrive_while_every_process_empties_its_cache(expandable: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    line = ["--model", "qwen2.5-0.5b", "--syncs", "100", "--churn", "--no-baselines", "--case-timeout", "200"]
    if torch.cuda.device_count() < 2:
        line.append("--colocate")
    environ = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    ended = subprocess.run(
        [sys.executable, "-m", "weight_sync.bench", *line, "--json", str(out)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=220,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = map(json.loads, out.read_text().splitlines())
    # ok: the last version is compared bit for bit, and neither counters nor device memory grew after the first sync.
    assert found["ok"], found["problems"]
    assert (found["num_syncs"], found["mismatches"], found["retries"]) == (100, 0, 0)
