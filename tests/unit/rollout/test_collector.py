from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from rollout.worker.actor import THRESHOLDS, rare_collections

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_the_collector_is_as_before_after_the_block_even_if_that_fails() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="block"), rare_collections():
        assert gc.get_threshold() == THRESHOLDS != before
        raise ValueError("the block")
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with rare_collections():
        pass
    assert gc.get_freeze_count() > 0, "it was frozen before"


def test_a_young_cycle_is_still_found_in_the_block() -> None:
    with rare_collections():
        node = weakref.ref(Node())
        kept = [[number] for number in range(2 * THRESHOLDS[0])]
        assert node() is None
        assert len(kept) == 2 * THRESHOLDS[0]


def test_what_existed_before_is_left_alone_in_the_block() -> None:
    node = Node()
    seen = weakref.ref(node)
    with rare_collections():
        del node
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None
