"""What the accelerator backends need of a vendor's runtime library: one class per family of libraries, equal methods.

Pointers and streams are addresses; stream 0 is the default stream. Devices are those of the calling thread. Every
method raises DriverCallError if the library refuses.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from enum import IntEnum

from weight_sync.errors import DeviceError

_IPC_HANDLE_BYTES = 64
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

    def __init__(self, message: str, *, code: int, out_of_memory: bool) -> None:
        super().__init__(message)
        self.code = code
        self.out_of_memory = out_of_memory


class _Library(ABC):
    _OUT_OF_MEMORY: int

    def __init__(self, library: ctypes.CDLL, prefix: str = "") -> None:
        self._library = library
        self._prefix = prefix

    @abstractmethod
    def _describe(self, code: int) -> str:
        """The library's description of an error code. Also clears the error where the library keeps it."""

    def _call(self, name: str, *arguments: object) -> None:
        name = self._prefix + name
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"{self._library._name} has no {name}; it is too old, or not the library it should be")
        function.restype = ctypes.c_int
        code = function(*arguments)
        if code != 0:
            message = f"{name} failed with {code} ({self._describe(code)})"
            raise DriverCallError(message, code=code, out_of_memory=code == self._OUT_OF_MEMORY)


class _IpcHandleStruct(ctypes.Structure):
    """cudaIpcMemHandle_t and hipIpcMemHandle_t; passed by value when opened."""

    _fields_ = (("reserved", ctypes.c_ubyte * _IPC_HANDLE_BYTES),)


class CudaLikeDriver(_Library):
    """libcudart, and libamdhip64, which offers the same calls under the prefix `hip`."""

    _OUT_OF_MEMORY = 2
    _LAZY_ENABLE_PEER_ACCESS = 1
    _STREAM_NON_BLOCKING = 1

    def device_count(self) -> int:
        count = ctypes.c_int()
        self._call("GetDeviceCount", ctypes.byref(count))
        return count.value

    def set_device(self, index: int) -> None:
        self._call("SetDevice", ctypes.c_int(index))

    def malloc(self, nbytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("Malloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return _address(pointer)

    def free(self, pointer: int) -> None:
        self._call("Free", ctypes.c_void_p(pointer))

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("MemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def ipc_export(self, pointer: int, nbytes: int) -> bytes:
        handle = _IpcHandleStruct()
        self._call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        return bytes(handle.reserved)

    def ipc_unexport(self, payload: bytes) -> None:
        """Nothing to do: the handle dies with the memory."""

    def ipc_open(self, payload: bytes) -> int:
        if len(payload) != _IPC_HANDLE_BYTES:
            raise DeviceError(f"an IPC handle has {_IPC_HANDLE_BYTES} bytes, got {len(payload)}")
        pointer = ctypes.c_void_p()
        handle = _IpcHandleStruct.from_buffer_copy(payload)
        self._call("IpcOpenMemHandle", ctypes.byref(pointer), handle, ctypes.c_uint(self._LAZY_ENABLE_PEER_ACCESS))
        return _address(pointer)

    def ipc_close(self, pointer: int, payload: bytes) -> None:
        self._call("IpcCloseMemHandle", ctypes.c_void_p(pointer))

    def copy_async(self, dst: int, src: int, nbytes: int, *, kind: CopyKind, stream: int) -> None:
        self._call(
            "MemcpyAsync",
            ctypes.c_void_p(dst),
            ctypes.c_void_p(src),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(kind),
            ctypes.c_void_p(stream),
        )

    def host_register(self, pointer: int, nbytes: int) -> None:
        """Fix the pages of mapped host memory, so that the device reads and writes them by itself."""
        self._call("HostRegister", ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes), ctypes.c_uint(0))

    def host_unregister(self, pointer: int) -> None:
        """To be called before the memory is unmapped."""
        self._call("HostUnregister", ctypes.c_void_p(pointer))

    def stream_create(self) -> int:
        stream = ctypes.c_void_p()
        self._call("StreamCreateWithFlags", ctypes.byref(stream), ctypes.c_uint(self._STREAM_NON_BLOCKING))
        return _address(stream)

    def stream_synchronize(self, stream: int) -> None:
        self._call("StreamSynchronize", ctypes.c_void_p(stream))

    def device_synchronize(self) -> None:
        self._call("DeviceSynchronize")

    def _describe(self, code: int) -> str:
        # The runtime remembers an error until it is asked for; left there, torch's next kernel check would raise it.
        getattr(self._library, self._prefix + "GetLastError")()
        function = getattr(self._library, self._prefix + "GetErrorString")
        function.restype = ctypes.c_char_p
        return _text(function(ctypes.c_int(code)))


class AclDriver(_Library):
    """libascendcl. Never run on hardware: written from the CANN documentation and tested against a fake library."""

    _OUT_OF_MEMORY = 207001
    _MALLOC_HUGE_FIRST = 0
    _HBM_MEM = 1
    _EXPORT_WITHOUT_PID_LIST = 1
    """The receivers' process ids are not known when the block is exported."""
    _HOST_REGISTER_PINNED = 0x10000000
    _IMPORT_WITH_PEER_ACCESS = 1

    def device_count(self) -> int:
        count = ctypes.c_uint32()
        self._call("aclrtGetDeviceCount", ctypes.byref(count))
        return count.value

    def set_device(self, index: int) -> None:
        self._call("aclrtSetDevice", ctypes.c_int32(index))

    def malloc(self, nbytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("aclrtMalloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes), ctypes.c_int(self._MALLOC_HUGE_FIRST))
        return _address(pointer)

    def free(self, pointer: int) -> None:
        self._call("aclrtFree", ctypes.c_void_p(pointer))

    def memory_info(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("aclrtGetMemInfo", ctypes.c_int(self._HBM_MEM), ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def ipc_export(self, pointer: int, nbytes: int) -> bytes:
        key = ctypes.create_string_buffer(_ACL_KEY_BYTES)
        self._call(
            "aclrtIpcMemGetExportKey",
            ctypes.c_void_p(pointer),
            ctypes.c_size_t(nbytes),
            key,
            ctypes.c_size_t(_ACL_KEY_BYTES),
            ctypes.c_uint64(self._EXPORT_WITHOUT_PID_LIST),
        )
        return key.raw

    def ipc_unexport(self, payload: bytes) -> None:
        """To be called before the exporter frees the memory."""
        self._call("aclrtIpcMemClose", ctypes.c_char_p(payload))

    def ipc_open(self, payload: bytes) -> int:
        if len(payload) != _ACL_KEY_BYTES:
            raise DeviceError(f"an IPC key has {_ACL_KEY_BYTES} bytes, got {len(payload)}")
        pointer = ctypes.c_void_p()
        self._call(
            "aclrtIpcMemImportByKey",
            ctypes.byref(pointer),
            ctypes.c_char_p(payload),
            ctypes.c_uint64(self._IMPORT_WITH_PEER_ACCESS),
        )
        return _address(pointer)

    def ipc_close(self, pointer: int, payload: bytes) -> None:
        self._call("aclrtIpcMemClose", ctypes.c_char_p(payload))

    def copy_async(self, dst: int, src: int, nbytes: int, *, kind: CopyKind, stream: int) -> None:
        self._call(
            "aclrtMemcpyAsync",
            ctypes.c_void_p(dst),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(src),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(kind),
            ctypes.c_void_p(stream),
        )

    def host_register(self, pointer: int, nbytes: int) -> None:
        flags = ctypes.c_uint32(self._HOST_REGISTER_PINNED)
        self._call("aclrtHostRegisterV2", ctypes.c_void_p(pointer), ctypes.c_uint64(nbytes), flags)

    def host_unregister(self, pointer: int) -> None:
        self._call("aclrtHostUnregister", ctypes.c_void_p(pointer))

    def stream_create(self) -> int:
        raise DeviceError("torch_npu makes its streams itself")

    def stream_synchronize(self, stream: int) -> None:
        self._call("aclrtSynchronizeStream", ctypes.c_void_p(stream))

    def device_synchronize(self) -> None:
        self._call("aclrtSynchronizeDevice")

    def supports_ipc(self) -> bool:
        return hasattr(self._library, "aclrtIpcMemGetExportKey")

    def _describe(self, code: int) -> str:
        function = self._library.aclGetRecentErrMsg
        function.restype = ctypes.c_char_p
        return _text(function())


Driver = CudaLikeDriver | AclDriver


def _address(pointer: ctypes.c_void_p) -> int:
    if pointer.value is None:
        raise DeviceError("the driver reported success but returned a null pointer")
    return pointer.value


def _text(raw: bytes | None) -> str:
    return "no description" if raw is None else raw.decode(errors="replace").strip()
