"""Compiles the fake driver libraries and builds backends on them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.fakes.drivers.host_npu import HostNpuBinding
from weight_sync.device.cpu import CpuBackend
from weight_sync.device.cuda import CudaBackend
from weight_sync.device.npu import NpuBackend
from weight_sync.device.rocm import RocmBackend
from weight_sync.device.torch_binding import TorchBinding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weight_sync.device.base import Backend

SOURCES = {"cuda": "fake_cudart.c", "rocm": "fake_hip.c", "npu": "fake_acl.c"}


def compiler() -> str | None:
    return shutil.which("cc")


def compile_fakes(directory: Path) -> dict[str, str]:
    """Backend name to the path of its fake library in `directory`."""
    libraries = {}
    for name, source in SOURCES.items():
        output = directory / f"lib{name}_fake.so"
        command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o", str(output)]
        subprocess.run([*command, str(Path(__file__).parent / source)], check=True)
        libraries[name] = str(output)
    return libraries


@dataclass(frozen=True)
class HostStream:
    """As torch's object for a stream that it was given."""

    address: int


class HostBinding(TorchBinding):
    """torch's side of a fake cuda or rocm: its "device memory" is host memory, seen as a cpu tensor."""

    def __init__(self) -> None:
        # torch too keeps the current device per thread, 0 at first.
        self._local = threading.local()
        self.num_released = 0
        self.entered: list[int] = []
        """Addresses of the streams that were made torch's current one."""

    def unavailable_reason(self) -> str | None:
        return None

    def _runtime(self) -> Any:
        raise AssertionError("there is no torch module for this device")

    def _device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> torch.device:
        self._local.index = index
        return self._device(index)

    def current_device(self) -> int:
        return getattr(self._local, "index", 0)

    def tensor_at(self, pointer: int, nbytes: int, index: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(pointer), dtype=torch.uint8)

    def new_stream(self, index: int, create: Callable[[], int]) -> HostStream:
        return HostStream(create())

    def address_of(self, stream: HostStream) -> int:
        return stream.address

    def current_stream(self) -> int:
        return 0

    @contextmanager
    def use_stream(self, stream: HostStream) -> Iterator[None]:
        self.entered.append(stream.address)
        yield

    def flush(self, index: int) -> None:
        pass

    def device_name(self, index: int) -> str:
        return f"Fake {index}"

    def release_cached(self) -> None:
        self.num_released += 1


def make_binding(name: str, library: str) -> HostBinding | HostNpuBinding:
    """torch's side of the backend called `name`, above its fake `library`."""
    return HostNpuBinding(library) if name == "npu" else HostBinding()


def make_backend(name: str, library: str | None, binding: HostBinding | HostNpuBinding | None = None) -> Backend:
    """The backend called `name`: on the fake `library`, or the real thing if that is None."""
    if library is not None and binding is None:
        binding = make_binding(name, library)
    match name:
        case "cpu":
            return CpuBackend()
        case "cuda":
            return CudaBackend(library=library, binding=binding)
        case "rocm":
            return RocmBackend(library=library, binding=binding)
        case "npu":
            return NpuBackend(library=library, binding=binding)
        case _:
            raise ValueError(f"no backend {name!r}")
