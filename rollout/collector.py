"""How often Python looks for cycles, in processes that hold very many groups at a time."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

THRESHOLDS = (50_000, 20, 20)
"""See `gc.set_threshold`. The default (700, 10, 10) looks through everything each time that the objects in flight grow
by a quarter: with 10,000 trajectories that was half of all processor time, in pauses of 0.3 s of the event loop. Groups
form no cycles, so what has to be found is little: tracebacks and cancelled tasks."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """In the block, what exists already is never looked at, and full collections are rare."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
