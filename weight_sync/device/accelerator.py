"""What CUDA, ROCm and Ascend backends have in common."""

from __future__ import annotations

import ctypes
import logging
import weakref
from abc import abstractmethod
from collections import defaultdict, deque
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.device.base import (
    Backend,
    Capabilities,
    IpcHandle,
    PersistentBlock,
    Role,
    bytes_to_copy,
    is_self,
    require_size,
)
from weight_sync.device.collectives import DevicePair, Hccl, Nccl
from weight_sync.device.driver import CopyKind, CudaLikeDriver, Driver, DriverCallError, OutOfDeviceMemory, Pinning
from weight_sync.device.environment import EnvVar, is_true, missing_variables
from weight_sync.device.torch_binding import TorchBinding
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    from weight_sync.device.collectives import PairGroup


log = logging.getLogger(__name__)

ENGINE_SPAWNS = EnvVar(
    name="VLLM_WORKER_MULTIPROC_METHOD",
    value="spawn",
    why="a process forked after the device was initialised cannot use it",
    roles=("engine",),
)
"""Every engine with a device context needs it."""

_GRANULE = 2 * 1024 * 1024
"""Allocations are rounded up to this: drivers cut smaller ones out of a shared page, and IPC shares whole pages."""


class DriverBlock(PersistentBlock):
    """Memory of a driver's. Made by `AcceleratorBackend` only."""

    def __init__(
        self,
        backend: AcceleratorBackend,
        tensor: torch.Tensor,
        release: Callable[[], None],
        *,
        pointer: int,
        device_index: int,
        is_imported: bool,
    ) -> None:
        super().__init__(tensor, release, is_imported=is_imported)
        self.pointer = pointer
        self.device_index = device_index
        self.exported: bytes | None = None
        """The handle it was exported as."""
        self._backend = backend

    def close(self) -> None:
        """See `PersistentBlock`.

        Raises:
            RuntimeError: torch could not wait for its work on the device. As after a DeviceError, it is tried again.
        """
        self._tensor = None
        if self._to_release:
            try:
                # A copy that still runs, or that torch has not launched yet, must not find its memory unmapped.
                self._backend.synchronize_device(self.device_index)
                super().close()
            except (DeviceError, RuntimeError):
                self._backend.refused.append(self)
                raise


class AcceleratorStream:
    """A stream beside torch's current ones. Once it is unreferenced, torch's object goes to the end of `idle`.

    It is never destroyed: torch remembers on which streams its pinned memory was copied, and asks the driver about them
    when it frees that memory, which may be long after (with a stream that is gone, the process ends there).
    """

    def __init__(self, make: Callable[[], Any], address_of: Callable[[Any], int], idle: deque[Any]) -> None:
        try:
            self.in_torch = idle.popleft()
        except IndexError:
            self.in_torch = make()
        self.address = address_of(self.in_torch)
        """Asked for once: for that torch may wait until all is launched that it was asked to do, on any stream."""
        weakref.finalize(self, idle.append, self.in_torch).atexit = False


class AcceleratorBackend(Backend):
    """Shared mechanics. A subclass names its words, its libraries, its environment and its engine arguments.

    `library` replaces the vendor's libraries and `binding` torch's support of them; both are for tests.
    """

    _libraries: tuple[str, str]
    """The vendor's runtime and its collectives."""
    _collectives_of: Callable[[ctypes.CDLL], Nccl | Hccl] = Nccl
    _ipc_hint = ""
    """What to check when another process's block cannot be opened."""

    def __init__(self, *, library: str | None = None, binding: TorchBinding | None = None) -> None:
        self._binding = self._make_binding() if binding is None else binding
        self._library_path = library
        self._own_index: int | None = None
        self._idle_streams: defaultdict[int, deque[Any]] = defaultdict(deque)
        """By device: torch's objects of streams that are not in use."""
        self.refused: deque[DriverBlock] = deque()
        """Closed, but the driver did not take them back (another process mapped them still, say): tried again before
        the next block, because nobody else holds them any longer."""

    @abstractmethod
    def _make_binding(self) -> TorchBinding: ...

    @abstractmethod
    def _make_driver(self, library: ctypes.CDLL) -> Driver: ...

    @abstractmethod
    def _load(self, stem: str) -> ctypes.CDLL:
        """Load a library of the vendor's, as torch loads it. Raises DeviceError if it cannot be found."""

    def _library(self, stem: str) -> ctypes.CDLL:
        return self._load(stem) if self._library_path is None else ctypes.CDLL(self._library_path)

    @cached_property
    def _collectives(self) -> Nccl | Hccl:
        return type(self)._collectives_of(self._library(self._libraries[1]))

    @cached_property
    def _driver(self) -> Driver:
        return self._make_driver(self._library(self._libraries[0]))

    def unavailable_reason(self) -> str | None:
        reason = self._binding.unavailable_reason()
        if reason is not None:
            return reason
        try:
            _ = self._driver
        except (DeviceError, OSError) as error:
            return str(error)
        return None

    def num_devices(self) -> int:
        return self._driver.device_count()

    def capabilities(self) -> Capabilities:
        return Capabilities(ipc=True, sleep_mode=True, forks=True, float32_products=True)

    def check_env(self, role: Role, environ: dict[str, str]) -> list[str]:
        problems = missing_variables(self.process_env(role), environ)
        if role != "driver" and self.visible_devices_var is not None:
            visible = environ.get(self.visible_devices_var)
            if visible is not None and visible.strip() in {"", "-1"}:
                problems.append(
                    f"{self.visible_devices_var} is {visible!r}, so this {role} sees no device; ask Ray for one "
                    f"(resource {self.ray_resource!r}) or unset the variable"
                )
        unset = f"RAY_EXPERIMENTAL_NOSET_{self.visible_devices_var}"
        if not self.sees_whole_host and is_true(environ.get(unset)):
            problems.append(
                f"{unset} is set, so every learner and engine would see all devices and take device 0; "
                "unset it before `ray start`"
            )
        return problems

    def device_name(self) -> str:
        return self._binding.device_name(self.enter())

    def set_device(self, index: int) -> torch.device:
        count = self._driver.device_count()
        if not 0 <= index < count:
            raise DeviceError(
                f"{self.name} device index must be in 0..{count - 1} ({count} visible to this process), got {index}; "
                f"check {self.visible_devices_var}"
            )
        device = self._binding.set_device(index)
        self._own_index = index
        self._driver.set_device(index)
        return device

    def alloc_persistent(self, nbytes: int) -> DriverBlock:
        require_size(nbytes)
        self._close_refused()
        index = self.enter()
        rounded = _whole_granules(nbytes)
        try:
            try:
                pointer = self._driver.malloc(rounded)
            except OutOfDeviceMemory:
                # torch may sit on memory it does not use at the moment.
                self._binding.release_cached()
                pointer = self._driver.malloc(rounded)
        except OutOfDeviceMemory as error:
            free, total = self._driver.memory_info()
            raise DeviceError(
                f"{self.name} device {index}: cannot allocate a persistent block of {nbytes} bytes: {free} of {total} "
                "bytes are free; lower rollout.gpu_memory_utilization or weight_sync.num_slots, or use more devices"
            ) from error
        return self._block(pointer, nbytes, index, partial(self._driver.free, pointer), is_imported=False)

    def _export(self, block: DriverBlock) -> bytes:
        if block.exported is None:
            self._driver.set_device(block.device_index)
            block.exported = self._driver.ipc_export(block.pointer, _whole_granules(block.nbytes))
            block.release_first(partial(self._driver.ipc_unexport, block.exported))
        return block.exported

    def _open(self, handle: IpcHandle) -> DriverBlock:
        if is_self(handle.attributes):
            raise DeviceError("a block cannot be opened by the process that exported it; use the block itself")
        self._close_refused()
        index = self.enter()
        try:
            pointer = self._driver.ipc_open(handle.payload)
        except DriverCallError as error:
            raise DeviceError(
                f"{self.name} device {index} cannot open the block of process {handle.attributes.get('pid', '?')} "
                f"(its device {handle.device_index}): {error}; {self._ipc_hint}"
            ) from error
        release = partial(self._driver.ipc_close, pointer, handle.payload)
        return self._block(pointer, handle.nbytes, index, release, is_imported=True)

    def _block(
        self, pointer: int, nbytes: int, index: int, release: Callable[[], None], *, is_imported: bool
    ) -> DriverBlock:
        """The block at `pointer`.

        Raises:
            DeviceError: torch cannot view it, whatever torch's own error is (no memory is one). It was released.
        """
        try:
            tensor = self._binding.tensor_at(pointer, nbytes, index)
        except (DeviceError, RuntimeError) as error:
            release()
            raise DeviceError(
                f"{self.name} device {index}: torch cannot view {nbytes} bytes of the driver's memory: {error}"
            ) from error
        return DriverBlock(self, tensor, release, pointer=pointer, device_index=index, is_imported=is_imported)

    def _close_refused(self) -> None:
        for _ in range(len(self.refused)):
            with suppress(DeviceError, RuntimeError, IndexError):  # those that are refused again are there again
                self.refused.popleft().close()

    def pin(self, block: PersistentBlock, pieces: Sequence[tuple[int, int]]) -> Pinning:
        index = self.enter()
        pinning = Pinning(self._driver, block.tensor, pieces, device_index=index, name=self.name)
        block.release_first(pinning.undo)
        return pinning

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Any | None = None) -> None:
        """By the copy engine, on `stream` or torch's current one. The caller keeps both tensors until it is done.

        On `stream` it comes after what torch was asked to do in a `use_stream` that has ended.
        """
        nbytes = bytes_to_copy(dst, src)
        if nbytes == 0:
            return
        self.enter()
        address = self._binding.current_stream() if stream is None else _require_stream(stream).address
        kind = _COPY_KINDS[self._binding.is_host(dst), self._binding.is_host(src)]
        self._driver.copy_async(dst.data_ptr(), src.data_ptr(), nbytes, kind=kind, stream=address)

    def new_stream(self) -> AcceleratorStream:
        index = self.enter()
        make = partial(self._binding.new_stream, index, self._driver.stream_create)
        return AcceleratorStream(make, self._binding.address_of, self._idle_streams[index])

    def use_stream(self, stream: Any | None) -> AbstractContextManager[None]:
        if stream is None:
            return nullcontext()
        return self._binding.use_stream(_require_stream(stream).in_torch)

    def synchronize(self, stream: Any | None = None) -> None:
        index = self.enter()
        if stream is None:
            self.synchronize_device(index)
        else:
            self._driver.stream_synchronize(self._binding.address_of(_require_stream(stream).in_torch))

    def synchronize_device(self, index: int) -> None:
        """Wait for device `index`, and for what torch has not yet asked it for."""
        self._driver.set_device(index)
        self._binding.flush(index)
        self._driver.device_synchronize()

    def synchronize_current(self) -> None:
        self.enter()
        self._driver.stream_synchronize(self._binding.current_stream())

    def connect_pair(self, store: Store, *, rank: int, timeout_s: float, host: str | None = None) -> PairGroup:
        # The library chooses its interfaces itself, by variables of its own.
        return DevicePair(
            self._collectives,
            self._driver,
            store,
            rank=rank,
            timeout_s=timeout_s,
            device=self._binding.set_device(self.enter()),
            stream=self.new_stream(),
            enter=self.enter,
        )

    def enter(self) -> int:
        """See `Backend.enter`. Where `set_device` was not called (an engine worker chose its own device), torch's
        choice counts."""
        index = self._binding.current_device() if self._own_index is None else self._own_index
        self._driver.set_device(index)
        return index

    def release_cached(self) -> None:
        self._binding.release_cached()

    def device_bytes(self) -> int:
        return self._binding.device_bytes(0)

    def memory_info(self) -> tuple[int, int]:
        self.enter()
        return self._driver.memory_info()


class CudaLikeBackend(AcceleratorBackend):
    """CUDA, and ROCm: torch calls both "cuda", the runtime libraries share their calls, RCCL answers to NCCL's name."""

    torch_device = "cuda"
    ray_resource = "GPU"
    # gloo beside nccl: CPU offload and asynchronous checkpoints put host tensors through collectives.
    collective = "cpu:gloo,cuda:nccl"
    _call_prefix: str
    """Of the runtime library's calls."""

    def _make_binding(self) -> TorchBinding:
        return TorchBinding(self.name)

    def _make_driver(self, library: ctypes.CDLL) -> Driver:
        return CudaLikeDriver(library, self._call_prefix)

    def device_identity(self) -> str:
        index = self.enter()
        if not torch.cuda.is_available():
            return ""
        return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


_COPY_KINDS = {
    (True, True): CopyKind.HOST_TO_HOST,
    (True, False): CopyKind.DEVICE_TO_HOST,
    (False, True): CopyKind.HOST_TO_DEVICE,
    (False, False): CopyKind.DEVICE_TO_DEVICE,
}
"""By whether the destination and the source are host memory."""


def _whole_granules(nbytes: int) -> int:
    return -(-nbytes // _GRANULE) * _GRANULE


def _require_stream(stream: Any) -> AcceleratorStream:
    if not isinstance(stream, AcceleratorStream):
        raise DeviceError(f"stream must come from new_stream(), got {type(stream).__name__}")
    return stream
