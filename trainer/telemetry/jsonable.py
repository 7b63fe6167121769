"""The one place where values become JSON. numpy scalars are not JSON, and neither are NaN and infinity."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np


def to_jsonable(value: object) -> object:
    """`value` in the types of JSON: dict, list, str, int, float, bool, None.

    A number that is not finite becomes None: JSON has no NaN, and many readers stop at one. A metric without data is
    left out by its writer, so a `null` in a metrics line always means that a NaN or infinity was computed.
    Raises `TypeError` for a type that is not known.
    """
    match value:
        case None | bool() | str() | int():
            return value
        case float() | np.floating():
            number = float(value)
            return number if math.isfinite(number) else None
        case np.bool_() | np.integer():
            return value.item()
        case np.ndarray():
            return to_jsonable(value.tolist())
        case enum.Enum():
            return value.name
        case Path():
            return str(value)
        case Mapping():
            return {str(to_jsonable(key)): to_jsonable(item) for key, item in value.items()}
        case Set():
            return sorted((to_jsonable(item) for item in value), key=str)
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [to_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r:.80}; convert it to plain values first")
