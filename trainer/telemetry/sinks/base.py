"""The contract of a metric sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class MetricSink(Protocol):
    """Takes one record per step. May raise whatever it likes: `MetricWriter` logs and counts it."""

    name: str

    def write(self, record: Mapping[str, object]) -> None:
        """`record` is JSON-able and holds `step`."""
        ...

    def close(self) -> None:
        """Write out what is buffered. Called once."""
        ...
