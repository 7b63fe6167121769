"""Two ranks of a learner, and this process as the only one, for modules that have a `directory`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.learner import RankPool, process_group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def pool(directory: Path) -> Iterator[RankPool]:
    pool = RankPool(directory, world_size=2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def one_rank(directory: Path, pool: RankPool) -> Iterator[None]:
    """The other ranks are started before it."""
    del pool
    with process_group(directory / "store_of_one"):
        yield
