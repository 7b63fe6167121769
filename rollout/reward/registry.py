"""Which reward functions there are, and how a user's own function is found.

A reward function has this signature (keyword arguments only are passed):

    def reward(*, prompt: str, response: str, answer: str, metadata: dict) -> float | dict[str, float]

The dict must have the key "reward"; its other entries become metrics. Functions travel by name, never as objects:
every reward process loads its own copy.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

from rollout.errors import DataError

RewardFn = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardEntry:
    """A reward function by name."""

    name: str
    target: str
    """`package.module:function`, or `/absolute/file.py:function`."""
    inline: bool
    """Runs in the caller's process, without a time limit: only for functions that trivially end (a comparison)."""
    needs_answer: bool
    """A prompt without an answer is an error of the data set."""


def _builtin(name: str, target: str, *, inline: bool) -> RewardEntry:
    return RewardEntry(name=name, target=target, inline=inline, needs_answer=True)


BUILTIN_REWARDS: Mapping[str, RewardEntry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            _builtin("arithmetic", "rollout.reward.arithmetic:score", inline=True),
            _builtin("math", "rollout.reward.math:score", inline=False),
        )
    }
)
"""Register a further built-in reward by a row here."""


def lookup(name: str) -> RewardEntry:
    """The reward of that name: a registered one, or `path/to/file.py:function`, or `package.module:function`.

    Relative paths are made absolute here, so that the entry means the same in every process. Nothing is imported.

    Raises:
        DataError: no such name, or no such file.
    """
    if name in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[name]
    location, colon, function = name.rpartition(":")
    if not colon or not location or not function.isidentifier():
        near = difflib.get_close_matches(name, BUILTIN_REWARDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"unknown reward {name!r}; {hint}allowed: {', '.join(BUILTIN_REWARDS)}, or your own function as "
            "path/to/file.py:function or package.module:function; set task.reward.name"
        )
    if _is_file(location):
        path = Path(location).expanduser().absolute()
        if not path.is_file():
            raise DataError(f"reward {name!r}: there is no file {path} (paths are relative to {Path.cwd()})")
        location = str(path)
    return RewardEntry(name=name, target=f"{location}:{function}", inline=False, needs_answer=False)


def load(target: str) -> RewardFn:
    """Imports the function behind `RewardEntry.target`.

    Raises:
        DataError: the module does not import (with the cause), has no such function, or cannot be called as a reward.
    """
    location, _, name = target.rpartition(":")
    try:
        module = _load_file(Path(location)) if _is_file(location) else importlib.import_module(location)
    except BaseException as error:
        raise DataError(f"reward {target!r} does not import: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"reward {target!r}: {location} has no function {name!r}{hint}")
    _check_signature(function, target)
    return function


def _is_file(location: str) -> bool:
    return location.endswith(".py") or "/" in location


def _load_file(path: Path) -> ModuleType:
    # The digest keeps two files of the same name apart; being in sys.modules is what dataclasses and pickle ask for.
    module_name = f"tandem_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import its neighbours; last, so that it shadows nothing
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _check_signature(function: object, target: str) -> None:
    expected = "def reward(*, prompt: str, response: str, answer: str, metadata: dict) -> float"
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else f"a {type(function).__name__}"
        raise DataError(f"reward {target!r} is {kind}; give a plain function: {expected}")
    try:
        inspect.signature(function).bind(prompt="", response="", answer="", metadata={})
    except TypeError as error:
        raise DataError(
            f"reward {target!r} cannot be called as a reward: {error}; its signature is: {expected}"
        ) from error
    except ValueError:
        return  # some compiled callables do not tell their signature; the first call will
