"""torch_npu on host memory, for machines without NPUs: the real `NpuBinding` runs above it.

The stand-in has names that every release of torch_npu has and no other (those that end in `_` are for tests), so a call
of one that is missing there fails here too. Operators run on the cpu and at once; what shall wait in the queue on the
host, as torch_npu's operators do, is put there by the test.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.device.torch_binding import NpuBinding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")
_POOL = 32
"""torch_npu hands out so many streams and then begins again."""


class TaskQueue:
    """What was asked of torch and has not reached the driver. A thread launches it in torch_npu, at no known time; here
    nothing leaves it before somebody waits until it is empty, which is as late as it can be."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], object]] = []

    def put(self, task: Callable[[], object]) -> None:
        self._tasks.append(task)

    def drain(self) -> None:
        while self._tasks:
            self._tasks.pop(0)()


class Stream:
    """torch_npu.npu.Stream."""

    def __init__(self, queue: TaskQueue, address: int) -> None:
        self._queue = queue
        self._address = address

    @property
    def npu_stream(self) -> int:
        self._queue.drain()
        return self._address


class HostNpu:
    """The module torch_npu.npu, as far as it is used."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # torch keeps the current device and the current stream per thread.
        self._local = threading.local()
        self._pool: list[Stream] = []
        self._taken = 0
        self.queue_ = TaskQueue()
        self.entered_: list[int] = []
        self.num_released_ = 0

    def init(self) -> None:
        assert self._library.aclInit(None) in (0, 100002), "the second is for a library that is initialised already"

    def is_available(self) -> bool:
        return True

    def set_device(self, index: int) -> None:
        assert self._library.aclrtSetDevice(index) == 0
        self._local.index = index

    def current_device(self) -> int:
        return getattr(self._local, "index", 0)

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> Stream:  # noqa: N802 - torch_npu's name
        if len(self._pool) < _POOL:
            address = ctypes.c_void_p()
            assert self._library.aclrtCreateStream(ctypes.byref(address)) == 0
            assert address.value is not None
            self._pool.append(Stream(self.queue_, address.value))
        self._taken += 1
        return self._pool[(self._taken - 1) % _POOL]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._local, "stream", None) or Stream(self.queue_, 0x10)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, Stream), "it reads the fields of its own class"
        before = self.current_stream()
        self._local.stream = stream
        self.entered_.append(stream._address)
        try:
            yield
        finally:
            self._local.stream = before

    def synchronize(self, device: torch.device | None = None) -> None:
        self.queue_.drain()

    def empty_cache(self) -> None:
        self.num_released_ += 1

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(total_memory=1 << 26)

    def get_device_name(self, device: int | None = None) -> str:
        return f"Fake {device}"


class HostNpuC:
    """The module torch_npu._C, as far as it is used."""

    def _construct_storage_from_data_pointer(self, pointer: int, device: torch.device, nbytes: int) -> Any:
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(pointer), dtype=torch.uint8).untyped_storage()

    def _construct_NPU_Tensor_From_Storage_And_Metadata(self, metadata: dict[str, Any], storage: Any) -> torch.Tensor:  # noqa: N802
        assert storage.data_ptr() == metadata["data_ptr"]
        empty = torch.empty(0, dtype=metadata["dtype"], device=metadata["device"])
        return empty.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])


class HostTorchNpu:
    """The module torch_npu."""

    def __init__(self, library: str) -> None:
        self.npu = HostNpu(ctypes.CDLL(library))
        self._C = HostNpuC()
        self.formats_: dict[int, int] = {}
        """By address of a tensor, where it is not ND."""

    def get_npu_format(self, tensor: torch.Tensor) -> int:
        return self.formats_.get(tensor.data_ptr(), 2)


class HostNpuBinding(NpuBinding):
    """The real binding, but for where torch_npu comes from and what torch calls the device."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.module = HostTorchNpu(library)

    @property
    def queue(self) -> TaskQueue:
        return self.module.npu.queue_

    @property
    def entered(self) -> list[int]:
        """Addresses of the streams that were made torch's current one."""
        return self.module.npu.entered_

    @property
    def num_released(self) -> int:
        return self.module.npu.num_released_

    def is_host(self, tensor: torch.Tensor) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        return not self.library.fake_owns(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(nbytes))

    def _module(self) -> HostTorchNpu:
        return self.module

    def _device(self, index: int) -> torch.device:
        return CPU
