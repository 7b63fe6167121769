"""What others import from the package, and what that costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import weight_sync
from weight_sync import errors


def test_every_public_name_is_there_and_every_error_is_public() -> None:
    for name in weight_sync.__all__:
        found = getattr(weight_sync, name)
        assert not inspect.isclass(found) or found.__name__ == name
    ours = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert ours <= set(weight_sync.__all__) <= set(dir(weight_sync))
    with pytest.raises(AttributeError, match=r"no attribute 'Publisher'; public names: .*WeightPublisher"):
        weight_sync.Publisher  # noqa: B018


def test_the_package_imports_nothing_heavy_until_a_name_is_used() -> None:
    code = """
import sys, weight_sync
heavy = {"torch", "numpy", "zmq", "msgspec", "vllm"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from weight_sync import PlanMismatch, SyncReport
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
