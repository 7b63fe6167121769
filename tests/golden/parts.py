"""The parts of the golden net, by name."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.golden import seams
from tests.golden.argv import ARGV
from tests.golden.runs import RUNS
from tests.golden.tools import TOOLS
from tests.golden.worlds import WORLDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARTS = {part.name: part for part in (ARGV, RUNS, WORLDS, TOOLS)}


@contextlib.contextmanager
def stage(folder: Path) -> Iterator[None]:
    """What cases share."""
    with seams.one_rank(folder):
        yield
