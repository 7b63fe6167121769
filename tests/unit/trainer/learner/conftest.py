from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.learner import process_group, save_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    with process_group(tmp_path_factory.mktemp("group") / "store"):
        yield


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with tied embeddings and float32 weights."""
    return save_tiny(tmp_path_factory.mktemp("qwen2"))
