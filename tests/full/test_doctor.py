"""The doctor as people run it, on CPU: every probe does what it says, in one command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timing, pytest.mark.timeout(300)]


def test_every_probe_finds_this_machine_well() -> None:
    command = [sys.executable, "-m", "trainer", "doctor", "--device", "cpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.findall(r"^(?:ok|warning) +(sync by \w+|\w+)  ", ended.stdout, re.MULTILINE)
    assert found == [
        "machine", "network", "packages", "imports", "device", "memory", "ipc", "collectives",
        "sync by ipc", "sync by gloo", "sync by shm",
    ]  # fmt: skip
