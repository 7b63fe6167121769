"""What the accelerator backends need of a vendor's runtime library: one class per family of libraries, equal methods.

Pointers and streams are addresses; stream 0 is the default stream. Devices are those of the calling thread. Every
method raises DriverCallError if the library refuses.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import deque
from ctypes import c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

from weight_sync.errors import DeviceError

_IPC_HANDLE_BYTES = 64
_PCI_BUS_ID_BYTES = 32
_ACL_KEY_BYTES = 65
"""Fixed by the CANN documentation of aclrtIpcMemGetExportKey."""


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


class _Library(ABC):
    _OUT_OF_MEMORY: int

    def __init__(self, library: ctypes.CDLL, prefix: str = "") -> None:
        self._library = library
        self._prefix = prefix

    @abstractmethod
    def _describe(self, code: int) -> str:
        """The library's description of an error code. Also clears the error where the library keeps it."""

    def _call(self, name: str, *arguments: object, unless: int = 0) -> bool:
        """Whether it succeeded; False for the error code `unless`, while every other one raises."""
        name = self._prefix + name
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"{self._library._name} has no {name}; it is too old, or not the library it should be")
        function.restype = c_int
        code = function(*arguments)
        if code != 0:
            description = self._describe(code)
            if code != unless:
                kind = OutOfDeviceMemory if code == self._OUT_OF_MEMORY else DriverCallError
                raise kind(f"{name} failed with {code} ({description})")
        return code == 0

    def _value(self, kind: Any, name: str, *arguments: object) -> int:
        """What the call writes to where its first argument points."""
        value = kind()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    def _pointer(self, name: str, *arguments: object) -> int:
        pointer: int | None = self._value(c_void_p, name, *arguments)
        if pointer is None:
            raise DeviceError(f"{self._prefix}{name} reported success but returned a null pointer")
        return pointer


class CudaLikeDriver(_Library):
    """libcudart, and libamdhip64, which offers the same calls under the prefix `hip`."""

    _OUT_OF_MEMORY = 2
    _LAZY_ENABLE_PEER_ACCESS = 1
    _STREAM_NON_BLOCKING = 1
    _EVENT_WITHOUT_TIME = 2
    _NOT_READY = 600

    class _IpcHandle(ctypes.Structure):
        """cudaIpcMemHandle_t and hipIpcMemHandle_t; passed by value when opened."""

        _fields_ = (("reserved", ctypes.c_ubyte * _IPC_HANDLE_BYTES),)

    def device_count(self) -> int:
        return self._value(c_int, "GetDeviceCount")

    def set_device(self, index: int) -> None:
        self._call("SetDevice", c_int(index))

    def malloc(self, nbytes: int) -> int:
        return self._pointer("Malloc", c_size_t(nbytes))

    def free(self, pointer: int) -> None:
        self._call("Free", c_void_p(pointer))

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""
        total = c_size_t()
        return self._value(c_size_t, "MemGetInfo", ctypes.byref(total)), total.value

    def ipc_export(self, pointer: int, nbytes: int) -> bytes:
        handle = self._IpcHandle()
        self._call("IpcGetMemHandle", ctypes.byref(handle), c_void_p(pointer))
        return bytes(handle.reserved)

    def ipc_unexport(self, payload: bytes) -> None:
        """Nothing to do: the handle dies with the memory."""

    def ipc_open(self, payload: bytes) -> int:
        if len(payload) != _IPC_HANDLE_BYTES:
            raise DeviceError(f"an IPC handle has {_IPC_HANDLE_BYTES} bytes, got {len(payload)}")
        handle = self._IpcHandle.from_buffer_copy(payload)
        return self._pointer("IpcOpenMemHandle", handle, c_uint(self._LAZY_ENABLE_PEER_ACCESS))

    def ipc_close(self, pointer: int, payload: bytes) -> None:
        self._call("IpcCloseMemHandle", c_void_p(pointer))

    def pci_bus_id(self, index: int) -> str:
        """Where the device is in its host, whatever its number: `0000:c1:00.0`."""
        text = ctypes.create_string_buffer(_PCI_BUS_ID_BYTES)
        self._call("DeviceGetPCIBusId", text, c_int(_PCI_BUS_ID_BYTES), c_int(index))
        return text.value.decode()

    def host_register(self, pointer: int, nbytes: int) -> None:
        """Fix the pages of mapped host memory, so that the device reads and writes them by itself."""
        self._call("HostRegister", c_void_p(pointer), c_size_t(nbytes), c_uint(0))

    def host_unregister(self, pointer: int) -> None:
        """To be called before the memory is unmapped."""
        self._call("HostUnregister", c_void_p(pointer))

    def copy_async(self, dst: int, src: int, nbytes: int, *, kind: CopyKind, stream: int) -> None:
        self._call("MemcpyAsync", c_void_p(dst), c_void_p(src), c_size_t(nbytes), c_int(kind), c_void_p(stream))

    def stream_create(self) -> int:
        return self._pointer("StreamCreateWithFlags", c_uint(self._STREAM_NON_BLOCKING))

    def stream_synchronize(self, stream: int) -> None:
        self._call("StreamSynchronize", c_void_p(stream))

    def event_record(self, stream: int) -> int:
        """A new event behind all that is queued on `stream`."""
        event = self._pointer("EventCreateWithFlags", c_uint(self._EVENT_WITHOUT_TIME))
        self._call("EventRecord", c_void_p(event), c_void_p(stream))
        return event

    def event_is_done(self, event: int) -> bool:
        return self._call("EventQuery", c_void_p(event), unless=self._NOT_READY)

    def event_destroy(self, event: int) -> None:
        self._call("EventDestroy", c_void_p(event))

    def device_synchronize(self) -> None:
        self._call("DeviceSynchronize")

    def _describe(self, code: int) -> str:
        # The runtime remembers an error until it is asked for; left there, torch's next kernel check would raise it.
        getattr(self._library, self._prefix + "GetLastError")()
        function = getattr(self._library, self._prefix + "GetErrorString")
        function.restype = ctypes.c_char_p
        return _text(function(c_int(code)))


class AclDriver(_Library):
    """libascendcl. Never run on hardware: written from the CANN documentation and tested against a fake library."""

    _OUT_OF_MEMORY = 207001
    _MALLOC_HUGE_FIRST = 0
    _HBM_MEM = 1
    _EXPORT_WITHOUT_PID_LIST = 1
    """The receivers' process ids are not known when the block is exported."""
    _IMPORT_WITH_PEER_ACCESS = 1
    _EVENT_COMPLETE = 1
    _HOST_REGISTER_PINNED = 0x10000000
    _HOST_REGISTER_SINCE = (5, 11)
    """Below this version of Linux, memory that is not page-locked yet causes exceptions, says CANN."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._pinned: dict[int, int] = {}
        """Bytes of registered host memory by address."""
        self._bounce = _BounceBuffers(self)

    def device_count(self) -> int:
        return self._value(c_uint32, "aclrtGetDeviceCount")

    def set_device(self, index: int) -> None:
        self._call("aclrtSetDevice", ctypes.c_int32(index))

    def host_index(self, index: int) -> int | None:
        """The number that device `index` of this process has in its host; None if the library is too old to say."""
        if not hasattr(self._library, "aclrtGetPhyDevIdByUserDevId"):
            return None
        physical = ctypes.c_int32()
        self._call("aclrtGetPhyDevIdByUserDevId", ctypes.c_int32(index), ctypes.byref(physical))
        return physical.value

    def malloc(self, nbytes: int) -> int:
        return self._pointer("aclrtMalloc", c_size_t(nbytes), c_int(self._MALLOC_HUGE_FIRST))

    def malloc_host(self, nbytes: int) -> int:
        """Pinned host memory."""
        return self._pointer("aclrtMallocHost", c_size_t(nbytes))

    def free(self, pointer: int) -> None:
        self._call("aclrtFree", c_void_p(pointer))

    def memory_info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._call("aclrtGetMemInfo", c_int(self._HBM_MEM), ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def ipc_export(self, pointer: int, nbytes: int) -> bytes:
        key = ctypes.create_string_buffer(_ACL_KEY_BYTES)
        flags = c_uint64(self._EXPORT_WITHOUT_PID_LIST)
        room = c_size_t(_ACL_KEY_BYTES)
        self._call("aclrtIpcMemGetExportKey", c_void_p(pointer), c_size_t(nbytes), key, room, flags)
        return key.raw

    def ipc_unexport(self, payload: bytes) -> None:
        """To be called before the exporter frees the memory."""
        self._call("aclrtIpcMemClose", ctypes.c_char_p(payload))

    def ipc_open(self, payload: bytes) -> int:
        if len(payload) != _ACL_KEY_BYTES:
            raise DeviceError(f"an IPC key has {_ACL_KEY_BYTES} bytes, got {len(payload)}")
        key, flags = ctypes.c_char_p(payload), c_uint64(self._IMPORT_WITH_PEER_ACCESS)
        return self._pointer("aclrtIpcMemImportByKey", key, flags)

    def ipc_close(self, pointer: int, payload: bytes) -> None:
        self._call("aclrtIpcMemClose", ctypes.c_char_p(payload))

    def host_register(self, pointer: int, nbytes: int) -> None:
        version = re.match(r"(\d+)\.(\d+)", os.uname().release)
        if version is None or tuple(map(int, version.groups())) < self._HOST_REGISTER_SINCE:
            raise DeviceError(f"Linux {os.uname().release} is too old for it; 5.11 is the first that will do")
        flags = c_uint32(self._HOST_REGISTER_PINNED)
        self._call("aclrtHostRegisterV2", c_void_p(pointer), c_uint64(nbytes), flags)
        self._pinned[pointer] = nbytes

    def host_unregister(self, pointer: int) -> None:
        self._call("aclrtHostUnregister", c_void_p(pointer))
        del self._pinned[pointer]

    def copy_async(self, dst: int, src: int, nbytes: int, *, kind: CopyKind, stream: int) -> None:
        """The library copies between pinned host memory and the device, and within the device; the rest is done here,
        and is done when this returns, as far as it concerns the host."""
        host = {CopyKind.HOST_TO_DEVICE: src, CopyKind.DEVICE_TO_HOST: dst}.get(kind)
        if kind == CopyKind.HOST_TO_HOST:
            self.stream_synchronize(stream)
            ctypes.memmove(dst, src, nbytes)
        elif host is None or self._is_pinned(host, nbytes):
            self.copy_pinned(dst, src, nbytes, kind=kind, stream=stream)
        else:
            self._bounce.copy(dst, src, nbytes, kind=kind, stream=stream)

    def copy_pinned(self, dst: int, src: int, nbytes: int, *, kind: CopyKind, stream: int) -> None:
        size = c_size_t(nbytes)
        self._call("aclrtMemcpyAsync", c_void_p(dst), size, c_void_p(src), size, c_int(kind), c_void_p(stream))

    def stream_create(self) -> int:
        raise DeviceError("torch_npu makes its streams itself")

    def stream_synchronize(self, stream: int) -> None:
        self._call("aclrtSynchronizeStream", c_void_p(stream))

    def event_record(self, stream: int) -> int:
        event = self._pointer("aclrtCreateEvent")
        self._call("aclrtRecordEvent", c_void_p(event), c_void_p(stream))
        return event

    def event_is_done(self, event: int) -> bool:
        status = c_int()
        self._call("aclrtQueryEventStatus", c_void_p(event), ctypes.byref(status))
        return status.value == self._EVENT_COMPLETE

    def event_destroy(self, event: int) -> None:
        self._call("aclrtDestroyEvent", c_void_p(event))

    def device_synchronize(self) -> None:
        self._call("aclrtSynchronizeDevice")

    def supports_ipc(self) -> bool:
        return hasattr(self._library, "aclrtIpcMemGetExportKey")

    def _is_pinned(self, pointer: int, nbytes: int) -> bool:
        pinned = list(self._pinned.items())  # other threads change it
        return any(start <= pointer and pointer + nbytes <= start + size for start, size in pinned)

    def _describe(self, code: int) -> str:
        function = self._library.aclGetRecentErrMsg
        function.restype = ctypes.c_char_p
        return _text(function())


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
                self._idle.append((self._driver.malloc_host(self.NBYTES), None))
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
            self._driver.copy_pinned(dst, buffer, nbytes, kind=kind, stream=stream)
        else:
            self._driver.copy_pinned(buffer, src, nbytes, kind=kind, stream=stream)
            self._driver.stream_synchronize(stream)
            ctypes.memmove(dst, buffer, nbytes)


Driver = CudaLikeDriver | AclDriver


def _text(raw: bytes | None) -> str:
    return "no description" if raw is None else raw.decode(errors="replace").strip()
