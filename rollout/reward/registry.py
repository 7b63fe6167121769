"""Which reward functions there are, and how a user's own function is found.

A reward function has this signature (keyword arguments only are passed):

    def reward(*, prompt: str, response: str, answer: str, metadata: dict) -> float | dict[str, float]

or the same with `async def`, which is called for many responses at once. The dict must have the key "reward"; its other
entries become metrics. Functions travel by name, never as objects: every reward process loads its own copy.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

from rollout.errors import DataError, PluginError
from rollout.plugins import find, is_file, mismatch

RewardFn = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardEntry:
    """A reward function by name."""

    name: str
    target: str
    """`package.module:function`, or `/absolute/file.py:function`."""
    inline: bool = False
    """Runs in the caller's process, without a time limit: only for functions that trivially end (a comparison)."""
    needs_answer: bool = False
    """A prompt without an answer is an error of the data set."""
    cpu_limit_s: float | None = None
    """Processor time of one call, which the load of the host does not change. A response that exceeds it gets 0.0. For
    functions that hang inside a single operation, which only the kernel can end. Not for `async def`."""
    cheap_response: str = ""
    """If a call with it exceeds `cpu_limit_s` too, the fault is with the answer of the prompt."""
    memory_limit_bytes: int | None = None
    """Address space that one call may allocate; beyond it an allocation raises MemoryError. Not for `async def`."""


_BUILTIN = (
    RewardEntry(name="arithmetic", target="rollout.reward.builtin:arithmetic", inline=True, needs_answer=True),
    RewardEntry(
        name="math",
        target="rollout.reward.math:score",
        needs_answer=True,
        cpu_limit_s=3.0,
        cheap_response=r"\boxed{0}",
        memory_limit_bytes=2 << 30,
    ),
    RewardEntry(name="zero", target="rollout.reward.builtin:zero", inline=True),
)
BUILTIN_REWARDS: Mapping[str, RewardEntry] = MappingProxyType({entry.name: entry for entry in _BUILTIN})
"""Register a further built-in reward by a row in `_BUILTIN`."""


def lookup(name: str, *, directory: Path | None = None) -> RewardEntry:
    """The reward of that name: a registered one, `path/to/file.py:function`, or `package.module:function`, where the
    colon may be a dot. Paths relative to `directory` (None is the working directory) become absolute, so that the entry
    means the same in every process. Nothing is imported.

    Raises:
        DataError: no such name, or no such file.
    """
    if name in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[name]
    location, separator, function = name.rpartition(":")
    if not separator and not name.endswith(".py"):
        location, separator, function = name.rpartition(".")
    if not separator or not location or not function.isidentifier():
        near = difflib.get_close_matches(name, BUILTIN_REWARDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"unknown reward {name!r}; {hint}allowed: {', '.join(BUILTIN_REWARDS)}, or your own function as "
            "path/to/file.py:function or package.module.function; set task.reward.name"
        )
    if is_file(location):
        base = Path.cwd() if directory is None else directory
        path = base / Path(location).expanduser()
        if not path.is_file():
            raise DataError(f"reward {name!r}: there is no file {path} (paths are relative to {base})")
        location = str(path)
    return RewardEntry(name=name, target=f"{location}:{function}")


def load(target: str) -> RewardFn:
    """Imports the function behind `RewardEntry.target`.

    Raises:
        DataError: the module does not import (with the cause), has no such function, or cannot be called as a reward.
    """
    location, _, name = target.rpartition(":")
    try:
        function = find(location, name, path=target, what="reward")
    except PluginError as error:
        raise DataError(str(error)) from error
    if reason := mismatch(function, prompt="", response="", answer="", metadata={}):
        expected = "def reward(*, prompt: str, response: str, answer: str, metadata: dict) -> float"
        raise DataError(f"reward {target!r} cannot be called as a reward: {reason}; its signature is: {expected}")
    return cast("RewardFn", function)
