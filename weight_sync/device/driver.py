"""What the accelerator backends need of a vendor's runtime library: a table of its calls, and what needs more than one.

Pointers and streams are addresses; stream 0 is the default stream. Devices are those of the calling thread. Every
method raises DriverCallError if the library refuses.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections import deque
from ctypes import c_int, c_int32, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

from weight_sync.device.library import Call, Library
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

log = logging.getLogger(__name__)

STOP_S = 30.0
"""For the driver to end with the piece that it is at."""
_registered: set[Pinning] = set()
"""Holds the memory: what a driver has registered must not be unmapped."""
_refused_by: set[str] = set()
"""Names of backends whose driver has refused memory, which the log says once."""
_refused_lock = threading.Lock()


class CopyKind(IntEnum):
    """Direction of a copy. All three vendors use these numbers."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class DriverCallError(DeviceError):
    """A call into the runtime library returned an error code."""


class OutOfDeviceMemory(DriverCallError):
    """The device has not as much memory free as was asked for."""


class _Driver(Library):
    """What is the same for all vendors, but for names and signatures."""

    FAILED = DriverCallError
    OUT_OF_MEMORY: int
    IPC_BYTES: int
    """Of an exported handle."""
    MEMORY_KIND: tuple[int, ...] = ()

    def device_count(self) -> int:
        return self.value(c_int, "device_count")

    def set_device(self, index: int) -> None:
        self.call("set_device", index)

    def malloc(self, nbytes: int) -> int:
        return self.pointer("malloc", nbytes)

    def free(self, pointer: int) -> None:
        self.call("free", pointer)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""
        free, total = c_size_t(), c_size_t()
        self.call("memory_info", *self.MEMORY_KIND, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def host_register(self, pointer: int, nbytes: int) -> None:
        """Fix the pages of mapped host memory, so that the device reads and writes them by itself."""
        self.call("host_register", pointer, nbytes)

    def host_unregister(self, pointer: int) -> None:
        """To be called before the memory is unmapped."""
        self.call("host_unregister", pointer)

    def stream_synchronize(self, stream: int) -> None:
        self.call("stream_synchronize", stream)

    def event_record(self, stream: int) -> int:
        """A new event behind all that is queued on `stream`."""
        event = self.pointer("event_create")
        self.call("event_record", event, stream)
        return event

    def event_destroy(self, event: int) -> None:
        self.call("event_destroy", event)

    def device_synchronize(self) -> None:
        self.call("device_synchronize")

    def checked(self, payload: bytes) -> bytes:
        """A handle to open."""
        if len(payload) != self.IPC_BYTES:
            raise DeviceError(f"an IPC handle has {self.IPC_BYTES} bytes, got {len(payload)}")
        return payload

    def error(self, name: str, code: int) -> DeviceError:
        kind = OutOfDeviceMemory if code == self.OUT_OF_MEMORY else DriverCallError
        return kind(f"{name} failed with {code} ({self.describe(code)})")


_OUT, _IN, _EVENT, _STREAM = c_void_p, c_void_p, c_void_p, c_void_p


class _IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t and hipIpcMemHandle_t; passed by value when opened."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class CudaLikeDriver(_Driver):
    """libcudart, and libamdhip64, which offers the same calls under the prefix `hip`."""

    CALLS: ClassVar = {
        "device_count": Call("GetDeviceCount", (_OUT,)),
        "set_device": Call("SetDevice", (c_int,)),
        "malloc": Call("Malloc", (_OUT, c_size_t)),
        "free": Call("Free", (_IN,)),
        "memory_info": Call("MemGetInfo", (_OUT, _OUT)),
        "ipc_export": Call("IpcGetMemHandle", (_OUT, _IN)),
        "ipc_open": Call("IpcOpenMemHandle", (_OUT, _IpcHandle, c_uint), (1,)),  # cudaIpcMemLazyEnablePeerAccess
        "ipc_close": Call("IpcCloseMemHandle", (_IN,)),
        "pci_bus_id": Call("DeviceGetPCIBusId", (_OUT, c_int, c_int)),
        "host_register": Call("HostRegister", (_IN, c_size_t, c_uint), (0,)),
        "host_unregister": Call("HostUnregister", (_IN,)),
        "copy": Call("MemcpyAsync", (_OUT, _IN, c_size_t, c_int, _STREAM)),
        "stream_create": Call("StreamCreateWithFlags", (_OUT, c_uint), (1,)),  # cudaStreamNonBlocking
        "stream_synchronize": Call("StreamSynchronize", (_STREAM,)),
        "event_create": Call("EventCreateWithFlags", (_OUT, c_uint), (2,)),  # cudaEventDisableTiming
        "event_record": Call("EventRecord", (_EVENT, _STREAM)),
        "event_query": Call("EventQuery", (_EVENT,)),
        "event_destroy": Call("EventDestroy", (_EVENT,)),
        "device_synchronize": Call("DeviceSynchronize", ()),
    }
    OUT_OF_MEMORY = 2
    IPC_BYTES = ctypes.sizeof(_IpcHandle)
    _NOT_READY = 600
    _PCI_BUS_ID_BYTES = 32

    def ipc_export(self, pointer: int, nbytes: int) -> bytes:
        handle = _IpcHandle()
        self.call("ipc_export", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def ipc_unexport(self, payload: bytes) -> None:
        """Nothing to do: the handle dies with the memory."""

    def ipc_open(self, payload: bytes) -> int:
        return self.pointer("ipc_open", _IpcHandle.from_buffer_copy(self.checked(payload)))

    def ipc_close(self, pointer: int, payload: bytes) -> None:
        self.call("ipc_close", pointer)

    def copy_async(self, dst: int, src: int, nbytes: int, *, kind: CopyKind, stream: int) -> None:
        self.call("copy", dst, src, nbytes, kind, stream)

    def stream_create(self) -> int:
        return self.pointer("stream_create")

    def event_is_done(self, event: int) -> bool:
        return self.call("event_query", event, unless=self._NOT_READY)

    def pci_bus_id(self, index: int) -> str:
        """Where the device is in its host, whatever its number: `0000:c1:00.0`."""
        text = ctypes.create_string_buffer(self._PCI_BUS_ID_BYTES)
        self.call("pci_bus_id", text, self._PCI_BUS_ID_BYTES, index)
        return text.value.decode()

    def describe(self, code: int) -> str:
        # The runtime remembers an error until it is asked for; left there, torch's next kernel check would raise it.
        getattr(self._library, self._prefix + "GetLastError")()
        return self.text(self._prefix + "GetErrorString", c_int(code))


class AclDriver(_Driver):
    """libascendcl. Never run on hardware: written from the CANN documentation and tested against a fake library."""

    CALLS: ClassVar = {
        "device_count": Call("aclrtGetDeviceCount", (_OUT,)),
        "set_device": Call("aclrtSetDevice", (c_int32,)),
        "host_index": Call("aclrtGetPhyDevIdByUserDevId", (c_int32, _OUT)),
        "malloc": Call("aclrtMalloc", (_OUT, c_size_t, c_int), (0,)),  # ACL_MEM_MALLOC_HUGE_FIRST
        "malloc_host": Call("aclrtMallocHost", (_OUT, c_size_t)),
        "free": Call("aclrtFree", (_IN,)),
        "memory_info": Call("aclrtGetMemInfo", (c_int, _OUT, _OUT)),
        # Without a list of process ids: the receivers' are not known when the block is exported.
        "ipc_export": Call("aclrtIpcMemGetExportKey", (_IN, c_size_t, _OUT, c_size_t, c_uint64), (1,)),
        "ipc_open": Call("aclrtIpcMemImportByKey", (_OUT, _IN, c_uint64), (1,)),  # with access between peers
        "ipc_close": Call("aclrtIpcMemClose", (_IN,)),
        "host_register": Call("aclrtHostRegisterV2", (_IN, c_uint64, c_uint32), (0x10000000,)),  # pinned
        "host_unregister": Call("aclrtHostUnregister", (_IN,)),
        "copy": Call("aclrtMemcpyAsync", (_OUT, c_size_t, _IN, c_size_t, c_int, _STREAM)),
        "stream_synchronize": Call("aclrtSynchronizeStream", (_STREAM,)),
        "event_create": Call("aclrtCreateEvent", (_OUT,)),
        "event_record": Call("aclrtRecordEvent", (_EVENT, _STREAM)),
        "event_query": Call("aclrtQueryEventStatus", (_EVENT, _OUT)),
        "event_destroy": Call("aclrtDestroyEvent", (_EVENT,)),
        "device_synchronize": Call("aclrtSynchronizeDevice", ()),
    }
    OUT_OF_MEMORY = 207001
    IPC_BYTES = 65
    """Fixed by the CANN documentation of aclrtIpcMemGetExportKey."""
    MEMORY_KIND = (1,)  # HBM
    _EVENT_COMPLETE = 1
    _HOST_REGISTER_SINCE = (5, 11)
    """Below this version of Linux, memory that is not page-locked yet causes exceptions, says CANN."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._pinned: dict[int, int] = {}
        """Bytes of registered host memory by address."""
        self._bounce = _BounceBuffers(self)

    def ipc_export(self, pointer: int, nbytes: int) -> bytes:
        key = ctypes.create_string_buffer(self.IPC_BYTES)
        self.call("ipc_export", pointer, nbytes, key, self.IPC_BYTES)
        return key.raw

    def ipc_unexport(self, payload: bytes) -> None:
        """To be called before the exporter frees the memory."""
        self.call("ipc_close", payload)

    def ipc_open(self, payload: bytes) -> int:
        return self.pointer("ipc_open", self.checked(payload))

    def ipc_close(self, pointer: int, payload: bytes) -> None:
        self.call("ipc_close", payload)

    def host_register(self, pointer: int, nbytes: int) -> None:
        version = re.match(r"(\d+)\.(\d+)", os.uname().release)
        if version is None or tuple(map(int, version.groups())) < self._HOST_REGISTER_SINCE:
            raise DeviceError(f"Linux {os.uname().release} is too old for it; 5.11 is the first that will do")
        super().host_register(pointer, nbytes)
        self._pinned[pointer] = nbytes

    def host_unregister(self, pointer: int) -> None:
        super().host_unregister(pointer)
        del self._pinned[pointer]

    def copy_async(self, dst: int, src: int, nbytes: int, *, kind: CopyKind, stream: int) -> None:
        """The library copies between pinned host memory and the device, and within the device; the rest is done here,
        and is done when this returns, as far as it concerns the host."""
        host = {CopyKind.HOST_TO_DEVICE: src, CopyKind.DEVICE_TO_HOST: dst}.get(kind)
        if kind == CopyKind.HOST_TO_HOST:
            self.stream_synchronize(stream)
            ctypes.memmove(dst, src, nbytes)
        elif host is None or self._is_pinned(host, nbytes):
            self.call("copy", dst, nbytes, src, nbytes, kind, stream)
        else:
            self._bounce.copy(dst, src, nbytes, kind=kind, stream=stream)

    def stream_create(self) -> int:
        raise DeviceError("torch_npu makes its streams itself")

    def event_is_done(self, event: int) -> bool:
        status = c_int()
        self.call("event_query", event, ctypes.byref(status))
        return status.value == self._EVENT_COMPLETE

    def host_index(self, index: int) -> int | None:
        """The number that device `index` of this process has in its host; None if the library is too old to say."""
        if not self.has("host_index"):
            return None
        physical = c_int32()
        self.call("host_index", index, ctypes.byref(physical))
        return physical.value

    def _is_pinned(self, pointer: int, nbytes: int) -> bool:
        pinned = list(self._pinned.items())  # other threads change it
        return any(start <= pointer and pointer + nbytes <= start + size for start, size in pinned)

    def describe(self, code: int) -> str:
        return self.text("aclGetRecentErrMsg")


class _BounceBuffers:
    """Pinned host memory that copies go through where their own is not. Made at the first copy and never freed."""

    NUMBER, NBYTES = 4, 64 << 20

    def __init__(self, driver: AclDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._idle: deque[tuple[int, int | None]] = deque()
        """Address, and the stream on which a copy from there may still run; the one that has waited longest first."""

    def copy(self, dst: int, src: int, nbytes: int, *, kind: CopyKind, stream: int) -> None:
        with self._lock:
            while len(self._idle) < self.NUMBER:
                self._idle.append((self._driver.pointer("malloc_host", self.NBYTES), None))
            for start in range(0, nbytes, self.NBYTES):
                self._copy_part(dst + start, src + start, min(self.NBYTES, nbytes - start), kind, stream)

    def _copy_part(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        buffer, busy = self._idle[0]
        if busy is not None:
            self._driver.stream_synchronize(busy)
        self._idle.rotate(-1)
        self._idle[-1] = buffer, stream
        if kind == CopyKind.HOST_TO_DEVICE:
            ctypes.memmove(buffer, src, nbytes)
            self._driver.call("copy", dst, nbytes, buffer, nbytes, kind, stream)
        else:
            self._driver.call("copy", buffer, nbytes, src, nbytes, kind, stream)
            self._driver.stream_synchronize(stream)
            ctypes.memmove(dst, buffer, nbytes)


Driver = CudaLikeDriver | AclDriver


class Pinning:
    """Registers pieces of mapped host memory with a driver, which the device then reads and writes by itself, without a
    buffer in between.

    One after the other, in a thread, because it takes 0.2 s per GB. Until a piece is registered, and if the driver
    refuses (the log says so once), copies of it are several times slower.
    """

    def __init__(
        self, driver: Driver, tensor: torch.Tensor, pieces: Sequence[tuple[int, int]], *, device_index: int, name: str
    ) -> None:
        """`pieces` are those of `Backend.pin`, in uint8 `tensor`."""
        self._driver = driver
        self._tensor = tensor
        self._device_index = device_index
        self._name = name
        self._addresses: list[int] = []
        """Of registered pieces."""
        self._num_pieces = len(pieces)
        self._is_stopped = False
        _registered.add(self)
        self._thread = threading.Thread(target=self._register, args=(pieces,), name="weight-sync-pin", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all pieces are registered, as soon as that is known or time is up."""
        self._thread.join(timeout_s)
        return len(self._addresses) == self._num_pieces

    def undo(self) -> None:
        """To be called before the memory is unmapped, when all copies of it are done."""
        self._is_stopped = True
        self._thread.join(STOP_S)
        try:
            if self._thread.is_alive():
                raise DeviceError(f"the driver has been pinning it for over {STOP_S:.0f} s")
            self._driver.set_device(self._device_index)
            while self._addresses:
                self._driver.host_unregister(self._addresses[-1])
                self._addresses.pop()
        except DeviceError as error:
            log.warning("%s: shared host memory stays mapped until this process ends: %s", self._name, error)
        else:
            _registered.discard(self)

    def _register(self, pieces: Sequence[tuple[int, int]]) -> None:
        try:
            self._driver.set_device(self._device_index)
            for start, nbytes in pieces:
                if self._is_stopped:
                    return
                address = self._tensor.data_ptr() + start
                self._driver.host_register(address, nbytes)
                self._addresses.append(address)
        except DeviceError as error:
            with _refused_lock:  # learner and worker may pin in one process
                level = logging.DEBUG if self._name in _refused_by else logging.WARNING
                _refused_by.add(self._name)
            log.log(level, "%s: host memory cannot be pinned, so copies of it are slower: %s", self._name, error)
