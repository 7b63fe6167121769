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
    lt: float | None = None,
    is_path: bool = False,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A dataclass field with its documentation and inclusive (`ge`, `le`) or exclusive (`gt`, `lt`) bounds as metadata.

    `is_path` marks text that may name a file of the user; a leading `~` in it is expanded.
    """
    metadata = {"doc": doc, "ge": ge, "gt": gt, "le": le, "lt": lt, "is_path": is_path}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)
