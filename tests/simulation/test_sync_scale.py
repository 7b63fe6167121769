"""The figures of docs/weight_sync.md for sizes that no test can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.sync_scale import table


@pytest.mark.full
def test_the_table_of_the_docs_is_what_the_routes_give() -> None:
    docs = (Path(__file__).parents[2] / "docs/weight_sync.md").read_text()
    assert "\n".join(table()) in docs
