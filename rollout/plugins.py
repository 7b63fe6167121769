"""Finds custom objects by the name of their module or by their file.

They travel by name, never as objects: every process imports its own copy.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.errors import PluginError

if TYPE_CHECKING:
    from types import ModuleType


def load(path: str, *, what: str) -> object:
    """The object at `package.module.name`; the caller checks its kind. `what` it should be is for messages, such as
    "agent loop". Raises PluginError if that is not a dotted path, or as `find`."""
    module, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        raise PluginError(
            f"{what} {path!r} is not a dotted path; give package.module.name, of the working directory or an installed "
            "package"
        )
    return find(module, name, path=path, what=what)


def load_plugin(path: str, *, what: str) -> object:
    """As `load`, and for `path/to/file.py:name`."""
    file, colon, name = path.rpartition(":")
    if colon and is_file(file) and name.isidentifier():
        return find(str(Path(file).expanduser()), name, path=path, what=what)
    return load(path, what=what)


def find(location: str, name: str, *, path: str, what: str) -> object:
    """`name` in the module or Python file `location`; `path` is as the user wrote it, for messages.

    Raises:
        PluginError: the module does not import (with the cause), or has no such name.
    """
    try:
        module = _load_file(Path(location)) if is_file(location) else importlib.import_module(location)
    except BaseException as error:  # user code may raise anything, sys.exit() included
        raise PluginError(f"{what} {path!r} does not import: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PluginError(f"{what} {path!r}: {location} has no {name!r}{hint}")
    return getattr(module, name)


def mismatch(function: object, /, *args: object, **kwargs: object) -> str | None:
    """Why the object cannot be called like this; None if it can, or has no signature, as some compiled functions."""
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(function).bind(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError as error:
            return str(error)
    return None


def is_file(location: str) -> bool:
    """Whether it names a Python file rather than a module."""
    return location.endswith(".py") or "/" in location


def _load_file(path: Path) -> ModuleType:
    # The digest keeps two files of the same name apart; dataclasses and pickle need the entry in sys.modules.
    module_name = f"tandem_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
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
