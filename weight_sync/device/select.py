"""Choosing a backend by name. Vendor modules are imported here on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from weight_sync.device.base import Backend

AUTO_ORDER = ("cuda", "rocm", "npu", "cpu")
"""`auto` takes the first of these that is available."""
INSTALL = 'pip install -e ".[cpu]" (or [cuda]), or scripts/install.sh rocm or npu'
"""What installs Tandem with the vLLM of a kind of hardware."""
FIRST_VLLM = {"rocm": (0, 19)}
"""By a word in the label of a build (0.25.1+rocm723): the oldest vLLM that is taken, where it is older than elsewhere.
None of these older ones has been run."""


def get_backend(name: str = "auto", *, cpu_threads: int = 1) -> Backend:
    """The backend called `name` (auto | cpu | cuda | rocm | npu).

    `cpu_threads` is the number of compute threads per process on `cpu`; accelerators ignore it.

    Raises:
        DeviceError: unknown name, or the backend cannot run here (the message says what is missing and what to do).
    """
    if name == "auto":
        return next(backend for backend in (build(each, cpu_threads) for each in AUTO_ORDER) if backend.is_available())
    backend = build(name, cpu_threads)
    reason = backend.unavailable_reason()
    if reason is not None:
        raise DeviceError(f"device {name!r} was asked for but cannot be used: {reason}")
    return backend


def names_by_resource() -> dict[str, list[str]]:
    """What Ray calls a device -> the backends whose devices it calls so."""
    found: dict[str, list[str]] = {}
    for name in AUTO_ORDER:
        resource = build(name).ray_resource
        if resource is not None:
            found.setdefault(resource, []).append(name)
    return found


def build(name: str, cpu_threads: int = 1) -> Backend:
    """The backend object called `name`, whether or not it can run here (its environment rules always can be read)."""
    match name:
        case "cpu":
            from weight_sync.device.cpu import CpuBackend

            return CpuBackend(threads=cpu_threads)
        case "cuda":
            from weight_sync.device.cuda import CudaBackend

            return CudaBackend()
        case "rocm":
            from weight_sync.device.rocm import RocmBackend

            return RocmBackend()
        case "npu":
            from weight_sync.device.npu import NpuBackend

            return NpuBackend()
        case _:
            raise DeviceError(f"device must be one of auto, {', '.join(sorted(AUTO_ORDER))}, got {name!r}")
