"""What dotted paths lead to, and messages for those that lead nowhere."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

import pytest

from rollout.errors import PluginError
from rollout.plugins import load

if TYPE_CHECKING:
    from pathlib import Path


def test_a_dotted_path_leads_to_the_object_of_that_name() -> None:
    assert load("os.path.join", what="function") is os.path.join


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_of_mine.py").write_text("VALUE = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("plugin_of_mine.VALUE", what="value") is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("join", r"agent loop 'join' is not a dotted path; give package\.module\.name"),
        ("", "is not a dotted path"),
        ("os.path.", "is not a dotted path"),
        ("os/path.join", "is not a dotted path"),
        ("os.path:join", "is not a dotted path"),
        ("no_such_package.module.name", "does not import: ModuleNotFoundError: No module named 'no_such_package'"),
        ("os.path.joint", r"os\.path has no 'joint'; did you mean 'join'\?"),
    ],
)
def test_a_path_that_leads_nowhere_is_reported(path: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load(path, what="agent loop")


@pytest.mark.parametrize(
    ("source", "message"), [("1 / 0\n", "ZeroDivisionError"), ("import sys\nsys.exit(3)\n", "SystemExit: 3")]
)
def test_a_module_that_fails_is_reported_with_its_cause(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_of_mine.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=f"does not import: {message}"):
        load("broken_of_mine.thing", what="loss")
