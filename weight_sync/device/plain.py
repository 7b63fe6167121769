"""Digests, copies and checks of tensors with torch alone, for backends and their fused kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


class Streams(Protocol):
    """The part of a `weight_sync.device.base.Backend` that is used here."""

    def new_stream(self) -> Any: ...

    def use_stream(self, stream: Any | None) -> AbstractContextManager[None]: ...

    def digest(self, data: torch.Tensor) -> int: ...


class PlainDigester:
    """A loop over `Backend.digest`, on a stream of its own where there are streams."""

    def __init__(self, backend: Streams, views: Sequence[torch.Tensor]) -> None:
        self._backend = backend
        self._views = require_bytes(views)
        self._stream = backend.new_stream()

    def __call__(self) -> tuple[int, ...]:
        with self._backend.use_stream(self._stream):
            return tuple(self._backend.digest(view) for view in self._views)


class PlainMover:
    """torch's copies; the list goes down in one call."""

    def __init__(self, backend: Streams, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._backend = backend
        filled = require_pairs(pairs)
        self._targets = [target for target, _ in filled]
        self._sources = [source for _, source in filled]
        self.nbytes = sum(target.numel() * target.element_size() for target in self._targets)

    def __call__(self, stream: Any | None = None) -> None:
        with self._backend.use_stream(stream):
            copy_all(self._targets, self._sources)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy and cast every source to its target on the current stream."""
    if targets:
        with torch.no_grad():
            # Falls back to one copy_ each, below Python, for what it cannot group.
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


def require_bytes(views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """
    Raises:
        DeviceError: a view is not made of bytes, or is not contiguous.
    """
    for index, view in enumerate(views):
        if view.dtype != torch.uint8 or not view.is_contiguous():
            raise DeviceError(
                f"a digester takes contiguous uint8 views, got number {index} with {view.dtype}, shape "
                f"{tuple(view.shape)} and strides {view.stride()}; give it slices of the buffer's bytes"
            )
    return tuple(views)


def require_pairs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pairs that hold anything, detached.

    Raises:
        DeviceError: a destination is not contiguous, or its shape is not its source's.
    """
    filled: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, (target, source) in enumerate(pairs):
        if target.shape != source.shape or not target.is_contiguous():
            raise DeviceError(
                f"a mover takes contiguous destinations of their source's shape, got number {index} with destination "
                f"{tuple(target.shape)} (strides {target.stride()}) and source {tuple(source.shape)}"
            )
        if target.numel():
            filled.append((target.detach(), source.detach()))
    return filled


def bytes_to_copy(dst: torch.Tensor, src: torch.Tensor) -> int:
    """Size of the copy in bytes. Dtypes and shapes may differ, the bytes are what counts.

    Raises:
        DeviceError: a side is not contiguous, or the sizes differ.
    """
    for side, tensor in (("destination", dst), ("source", src)):
        if not tensor.is_contiguous():
            raise DeviceError(
                f"copy {side} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}; "
                "copy run by run, or pack it first"
            )
    dst_bytes, src_bytes = dst.numel() * dst.element_size(), src.numel() * src.element_size()
    if dst_bytes != src_bytes:
        raise DeviceError(
            f"copy sizes must be equal, got {dst_bytes} bytes of destination ({dst.dtype}, {tuple(dst.shape)}) and "
            f"{src_bytes} bytes of source ({src.dtype}, {tuple(src.shape)})"
        )
    return dst_bytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[nbytes] view of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def require_size(nbytes: int) -> None:
    """Raises DeviceError unless `nbytes` is a size that can be allocated."""
    if nbytes <= 0:
        raise DeviceError(f"a persistent block needs a size of at least 1 byte, got {nbytes}")
