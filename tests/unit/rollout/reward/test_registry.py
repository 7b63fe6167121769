"""Finding reward functions: names, files and modules, and messages for everything that is wrong."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from rollout.errors import DataError
from rollout.reward.registry import BUILTIN_REWARDS, load, lookup

if TYPE_CHECKING:
    from pathlib import Path

GOOD = "def reward(*, prompt, response, answer, metadata):\n    return 2.0\n"


def call(target: str) -> object:
    return load(target)(prompt="", response="", answer="", metadata={})


def test_every_builtin_loads_and_says_whether_it_needs_an_answer() -> None:
    for name in BUILTIN_REWARDS:
        entry = lookup(name)
        assert entry is BUILTIN_REWARDS[name]
        assert entry.needs_answer == (name != "zero")
        load(entry.target)


def test_the_reward_for_environments_is_always_zero() -> None:
    assert call(lookup("zero").target) == 0.0


def test_a_relative_file_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    entry = lookup("mine.py:reward")
    monkeypatch.chdir("/")
    assert entry.target == f"{tmp_path}/mine.py:reward"
    assert not entry.inline
    assert not entry.needs_answer
    assert call(entry.target) == 2.0


def test_a_file_may_import_its_neighbours_and_shadows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 7.0\n")
    (tmp_path / "mine.py").write_text(
        "import importlib, json, neighbour_of_mine\n"
        "importlib.reload(json)\n"
        "def reward(*, prompt, response, answer, metadata):\n    return neighbour_of_mine.VALUE\n"
    )
    assert call(lookup(f"{tmp_path}/mine.py:reward").target) == 7.0


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(GOOD.replace("2.0", str(value)))
    assert [call(f"{tmp_path}/{folder}/mine.py:reward") for folder in "ab"] == [1.0, 2.0]


def test_a_module_is_found_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg_of_mine").mkdir()
    (tmp_path / "pkg_of_mine" / "scores.py").write_text(GOOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert call(lookup("pkg_of_mine.scores:reward").target) == 2.0
    assert call(lookup("pkg_of_mine.scores.reward").target) == 2.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetik", "did you mean 'arithmetic'.*allowed: arithmetic, math, zero"),
        ("my_rewards.py", "allowed: arithmetic, math, zero, or your own function"),
        ("nowhere/mine.py:reward", "there is no file .*nowhere/mine.py"),
        ("mine.py:", "unknown reward"),
        (":reward", "unknown reward"),
    ],
)
def test_unknown_names_are_refused_with_what_is_allowed(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        lookup(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(:\n", "SyntaxError"),
        ("import sys\nsys.exit(2)\n", "SystemExit: 2"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def rewards(*, prompt, response, answer, metadata): ...\n", "has no 'reward'; did you mean 'rewards'"),
        ("def reward(response): ...\n", "got an unexpected keyword argument 'prompt'.*its signature is"),
        ("def reward(*, prompt, response, answer, metadata, extra): ...\n", "missing a required .*'extra'"),
        ("async def reward(response): ...\n", "got an unexpected keyword argument 'prompt'.*its signature is"),
        ("reward = 3.0\n", "is a float"),
    ],
)
def test_files_that_hold_no_usable_function_are_refused(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(DataError, match=message):
        load(f"{tmp_path}/mine.py:reward")
