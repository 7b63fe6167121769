"""The environment of processes that are about to be started."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weight_sync.device.environment import temporary_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def environment(defaults: Mapping[str, str], overrides: Mapping[str, str]) -> Iterator[None]:
    """Processes started inside see `defaults` (where nothing is set yet) and `overrides`; restored at the end."""
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    with temporary_environment({**unset, **overrides}):
        yield
