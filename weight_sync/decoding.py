"""Typed msgpack decoders, each built once.

msgspec (0.22, `StructInfo_Convert` in its `_core.c`) puts what it learns of a Struct class on the class before it is
filled in, for the sake of types that contain themselves, and runs Python code in between. A second thread that decodes
the class meanwhile finds null pointers and ends the process. Several threads do meet here: a worker greets all
publishers at once. So the first use of every type is under one lock; afterwards nobody waits for it.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_building = threading.Lock()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def decode_typed(data: bytes, kind: type[T]) -> T:
    """`data` as a `kind`, safe in any thread.

    Raises:
        msgspec.DecodeError: not msgpack, or not of this type.
        UnicodeDecodeError: a text in it is not UTF-8.
        RecursionError: nested too deep.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _building:
            decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder.decode(data)
