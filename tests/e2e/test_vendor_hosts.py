"""Launch scripts of vendors, on hosts that have, as far as their drivers tell, their devices (see `vendor_host`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.drivers.build import compiler, vendor_host

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(compiler() is None, reason="no C compiler `cc` to build the fake driver libraries with"),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["rocm", "npu"])
def test_the_launch_script_of_a_vendor_finds_its_devices(name: str, tmp_path: Path) -> None:
    """And nothing else is wrong but the number of devices, and what would come over a network."""
    host = {**vendor_host(name, tmp_path, num_devices=4), "HF_HUB_OFFLINE": "1", "PYTHON": sys.executable}
    script = ["bash", f"scripts/dapo_7b_{name}.sh"]
    result = subprocess.run(script, cwd=ROOT, env={**os.environ, **host}, capture_output=True, text=True, timeout=300)
    said = result.stdout + result.stderr
    assert result.returncode == 2, said
    assert f"device={name}" in said and f"this host has 4 {name} devices" in said
    assert "3 configuration errors" in said and "model.path" in said and "  task" in said
