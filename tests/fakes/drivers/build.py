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

    def device_bytes(self, index: int) -> int:
        return 1 << 26

    def device_name(self, index: int) -> str:
        return f"Fake {index}"

    def release_cached(self) -> None:
        self.num_released += 1


class DeviceLikeBinding(HostBinding):
    """For whole runs: tensors that torch makes count as the device's, and those in shared memory as the host's."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self._library = ctypes.CDLL(library)

    def is_host(self, tensor: torch.Tensor) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        return not self._library.fake_owns(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(nbytes))


def vendor_host(name: str, directory: Path, *, num_devices: int) -> dict[str, str]:
    """Environment of a run on a host that has `num_devices` of this vendor, says `vendor_host/sitecustomize.py`."""
    directory.mkdir(exist_ok=True)
    library = Path(compile_fakes(directory)[name])
    place = directory / {"rocm": "lib/libamdhip64.so", "npu": "lib64/libascendcl.so"}[name]
    place.parent.mkdir()
    library.rename(place)
    root = Path(__file__).parents[3]
    return {
        "PYTHONPATH": f"{root / 'tests/fakes/vendor_host'}:{root}",
        "ROCM_PATH": str(directory),
        "ASCEND_HOME_PATH": str(directory),
        "FAKE_VENDOR": name,
        "FAKE_LIBRARY": str(place),
        "FAKE_NUM_DEVICES": str(num_devices),
        "FAKE_DEVICE_HAS_ALL_BUT_SHARED_MEMORY": "1",
        # One process and one import less, as on a host without accelerators.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


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
