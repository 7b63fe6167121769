"""From a dotted path to an agent loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rollout.agent.loop import SingleTurnLoop
from rollout.agent.runner import make_loop
from rollout.errors import PluginError

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
class Loop:
    def __init__(self, max_turns=2):
        self.max_turns = max_turns
    async def run(self, prompt, max_tokens, generate):
        return None

class NoRun: ...

class SyncRun:
    def run(self, prompt, max_tokens, generate): ...

class ShortRun:
    async def run(self, prompt): ...

def raises():
    raise OSError("no tool server")

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_empty_path_is_the_single_turn() -> None:
    assert isinstance(make_loop("", {}), SingleTurnLoop)


def test_the_factory_gets_its_arguments_by_name() -> None:
    assert make_loop("agents_of_mine.Loop", {}).max_turns == 2  # type: ignore[attr-defined]
    assert make_loop("agents_of_mine.Loop", {"max_turns": 7}).max_turns == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Lop", {}, "has no 'Lop'; did you mean 'Loop'"),
        ("NUMBER", {}, "is a int and cannot be called; give package.module.factory"),
        ("Loop", {"turns": 3}, r"cannot be called with task.agent_args={'turns': 3}: got an unexpected keyword"),
        ("raises", {}, "raised OSError: no tool server"),
        ("NoRun", {}, "returned a NoRun, which has no method run"),
        ("SyncRun", {}, "returned a SyncRun, which has a run that is no async method"),
        ("ShortRun", {}, "its run cannot be called as a loop: too many positional arguments"),
    ],
)
def test_what_is_no_loop_is_refused(name: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_loop(f"agents_of_mine.{name}", args)
