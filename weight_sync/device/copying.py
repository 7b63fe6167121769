"""What every backend checks before it copies bytes."""

from __future__ import annotations

import torch

from weight_sync.device.errors import DeviceError


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
