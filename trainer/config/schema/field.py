"""How a configuration key is declared: default, documentation and bounds in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any


def key(
    default: Any = ...,
    doc: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A dataclass field with its documentation and inclusive (`ge`, `le`) or exclusive (`gt`) bounds as metadata."""
    metadata = {"doc": doc, "ge": ge, "gt": gt, "le": le}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)
