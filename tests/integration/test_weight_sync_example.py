"""The example of the package does what its page documents, in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timing


def test_the_example_brings_three_versions_to_its_engine() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "weight_sync.example"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    # Two matrices of 64 x 64 in two bytes each.
    assert ended.stdout.splitlines() == [
        f"version {version}: the same weights in the engine, {2 * 64 * 64 * 2} bytes by ipc" for version in (1, 2, 3)
    ]
