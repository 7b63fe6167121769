"""What several integration tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model lies, or will lie: it is made once, by the run that comes first."""
    return tmp_path_factory.mktemp("cache")
