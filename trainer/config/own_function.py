"""A function of the user in place of a built-in one, named by its dotted path: `package.module.function`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache

from rollout.errors import PluginError
from rollout.plugins import load
from trainer.errors import ConfigurationError, Problem

OwnFunction = Callable[..., object]

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def is_own(name: str) -> bool:
    """Whether `name` is the dotted path of a user's function; names of built-in functions have no dot."""
    return "." in name


def is_dotted_path(name: str) -> bool:
    """Whether `name` can be a dotted path: identifiers joined by dots. Nothing is imported."""
    return _PATH.fullmatch(name) is not None


def load_own(path: str, *, key: str, args: Mapping[str, float]) -> OwnFunction:
    """Import the function that `key` names, once, and check that it takes one positional argument and the numbers
    `args`.

    Args:
        key: such as "algorithm.loss"; the numbers are those of the key `KEY_args`.

    Raises:
        ConfigurationError: it does not import, is no plain function, or does not take these arguments.

    Example:
        load_own("my_package.losses.my_loss", key="algorithm.loss", args={"clip": 0.2})
    """
    return _load(path, key, tuple(args))


@cache
def _load(path: str, key: str, names: tuple[str, ...]) -> OwnFunction:
    try:
        function = load(path, what=key)
    except PluginError as error:
        raise _refused(key, path, str(error), "see docs/add_a_loss.md") from error
    if not callable(function) or inspect.iscoroutinefunction(function) or inspect.isclass(function):
        kind = "an async function or a class" if callable(function) else f"an object of type {type(function).__name__}"
        raise _refused(key, path, f"must be a plain function, got {kind}", "name a function, see docs/add_a_loss.md")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # some compiled callables have no signature; the first call shows whether it fits
    try:
        signature.bind(None, **dict.fromkeys(names, 0.0))
    except TypeError as error:
        given = ", ".join(names) if names else "nothing"
        message = f"cannot be called with one argument and the numbers of {key}_args ({given}): {error}"
        raise _refused(key, path, message, f"its signature is {signature}") from error
    return function


def _refused(key: str, path: str, message: str, hint: str) -> ConfigurationError:
    return ConfigurationError([Problem(key=key, value=path, message=message, hint=hint, related=(f"{key}_args",))])
