"""The parts of the golden net, by name."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.golden import seams
from tests.golden.agents import AGENTS
from tests.golden.argv import ARGV
from tests.golden.batches import BATCHES
from tests.golden.runs import RUNS
from tests.golden.steps import RANKS, STEPS
from tests.golden.sync_faces import SYNC_FACES
from tests.golden.sync_plans import SYNC_PLANS
from tests.golden.sync_states import SYNC_STATES
from tests.golden.tools import TOOLS
from tests.golden.worlds import WORLDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SYNC = (SYNC_FACES, SYNC_PLANS, SYNC_STATES)
PARTS = {part.name: part for part in (ARGV, BATCHES, STEPS, RANKS, RUNS, WORLDS, AGENTS, TOOLS, *SYNC)}


@contextlib.contextmanager
def stage(folder: Path) -> Iterator[None]:
    """What cases share."""
    with seams.one_rank(folder):
        yield
