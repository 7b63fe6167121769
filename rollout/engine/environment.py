"""The environment of processes that are about to be started."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def environment(defaults: Mapping[str, str], overrides: Mapping[str, str]) -> Iterator[None]:
    """Processes started inside see `defaults` (where nothing is set yet) and `overrides`; restored at the end."""
    changed = {name: value for name, value in defaults.items() if name not in os.environ} | dict(overrides)
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
