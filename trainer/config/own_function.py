"""A function of the user in place of a built-in one, named by its dotted path: `package.module.function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache

from rollout.errors import PluginError
from rollout.plugins import load
from trainer.errors import ConfigurationError, Problem

OwnFunction = Callable[..., object]


def is_own(name: str) -> bool:
    """Whether `name` is the dotted path of a user's function; names of built-in functions have no dot."""
    return "." in name


def load_own(path: str, *, key: str, args: Mapping[str, float]) -> OwnFunction:
    """Import the function that `key` (such as "algorithm.loss") names, once, and check that it takes one positional
    argument and the numbers `args` of the key `KEY_args`.

    Raises `ConfigurationError` if it does not import, is not a plain function, or does not take these arguments.
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
