"""The device layer's contract: everything the rest of Tandem may ask of an accelerator.

One `Backend` per kind of device. Vendor names stay inside this package: callers hold a `Backend` and ask for a
capability. Importing this module touches no driver and no environment; `Backend` objects are cheap to build.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch.distributed.distributed_c10d import Store

    from weight_sync.device.collectives import PairGroup
    from weight_sync.device.driver import Pinning
    from weight_sync.device.environment import EnvVar

Role = Literal["driver", "learner", "engine"]
"""Which kind of process an environment is meant for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this backend can do here. A missing capability is a fact to plan around, never an error by itself."""

    ipc: bool
    """Another process of this host can map a persistent block without a copy."""
    sleep_mode: bool
    """vLLM can give its device memory back and take it again."""
    forks: bool
    """To import vLLM touches no device here, so a process that has done no more may be forked."""
    float32_products: bool = False
    """A product of half-precision matrices can leave its sums in float32, at no cost (`torch.mm(out_dtype=)`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcHandle:
    """A persistent block as another process can open it. Plain values, travels as msgpack."""

    backend: str
    nbytes: int
    payload: bytes
    """Opaque: driver IPC handle, or (pid, fd, inode) for shared memory."""
    device_index: int = 0
    attributes: dict[str, str] = field(default_factory=dict)


class PersistentBlock:
    """One raw driver allocation, seen as a torch tensor. Never moves; torch's caching allocator does not own it."""

    device_index = 0

    def __init__(self, tensor: torch.Tensor, release: Callable[[], None], *, is_imported: bool) -> None:
        """`release` frees the memory (owner) or unmaps it (importer)."""
        self.nbytes = tensor.numel()
        self.is_imported = is_imported
        self._tensor: torch.Tensor | None = tensor
        self._to_release = [release]

    @property
    def tensor(self) -> torch.Tensor:
        """uint8[nbytes] on the backend's device, sharing the block's memory."""
        if self._tensor is None:
            raise DeviceError("this persistent block is closed; take views of it only while it is open")
        return self._tensor

    @property
    def is_closed(self) -> bool:
        return self._tensor is None

    def release_first(self, release: Callable[[], None]) -> None:
        """Have `release` called by `close`, before what it calls so far."""
        self._to_release.insert(0, release)

    def close(self) -> None:
        """Free (owner) or unmap (importer). Idempotent. Views of `tensor` are invalid afterwards.

        What fails keeps nothing else from being released, and is tried again by the next call.

        Raises:
            DeviceError: the first that failed; the backend tries it again too, before its next block.
        """
        self._tensor = None
        left: list[Callable[[], None]] = []
        errors: list[DeviceError] = []
        for release in self._to_release:
            try:
                release()
            except DeviceError as error:
                left.append(release)
                errors.append(error)
        self._to_release = left
        if errors:
            raise errors[0]


class Backend(ABC):
    """One kind of device."""

    name: str
    """cpu | cuda | rocm | npu"""
    torch_device: str
    """The device type torch knows it by."""
    ray_resource: str | None
    """Ray resource that one device is counted as; None if the device is not a Ray resource."""
    visible_devices_var: str | None
    sees_whole_host: bool = False
    """Whether every process sees all devices of its host and finds its own by their place. Elsewhere Ray shows an actor
    no other devices than it has given it."""
    visible_devices_alias: str | None = None
    """Another variable that the driver reads too. Where both are set they must say the same."""
    no_fused_kernels: str | None = None
    """Why `fused` does not try its kernels on this device."""
    collective: str
    """torch.distributed backend for the learner."""
    variables: tuple[EnvVar, ...] = ()
    """What processes need in their environment."""
    version_files: tuple[str, ...] = ()
    """Where driver and runtime say their version: patterns of paths below `/`."""

    def unavailable_reason(self) -> str | None:
        """What driver or torch lack and what to do about it; None if the backend is available. Never raises."""
        return None

    def is_available(self) -> bool:
        return self.unavailable_reason() is None

    def device_id(self, place: int, environ: Mapping[str, str]) -> str:
        """Of the device at `place` among those that a process with this environment sees: as its variable has it."""
        visible = None if self.visible_devices_var is None else environ.get(self.visible_devices_var)
        return str(place) if visible is None else visible.split(",")[place]

    @abstractmethod
    def num_devices(self) -> int:
        """Devices visible to this process. For cpu: a generous number, CPUs are counted by Ray."""

    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    def process_env(self, role: Role) -> tuple[EnvVar, ...]:
        """Variables a process of this role needs, each with its reason."""
        return tuple(variable for variable in self.variables if role in variable.roles)

    def sharing_env(self) -> tuple[EnvVar, ...]:
        """What learner and engine need on top where they share devices."""
        return ()

    @abstractmethod
    def check_env(self, role: Role, environ: dict[str, str]) -> list[str]:
        """Problems with `environ` as a process of this role finds it; empty if all is well."""

    def engine_defaults(self) -> dict[str, Any]:
        """vLLM engine arguments this backend needs or is better with."""
        return {}

    def engine_args(self, user: Mapping[str, Any]) -> dict[str, Any]:
        """`engine_defaults` with a user's own arguments, which win. Raises DeviceError for one that cannot work."""
        return {**self.engine_defaults(), **user}

    @abstractmethod
    def set_device(self, index: int) -> torch.device:
        """Make `index` this process's current device and return it."""

    @abstractmethod
    def alloc_persistent(self, nbytes: int) -> PersistentBlock:
        """One raw driver allocation.

        Raises:
            DeviceError: out of memory, with requested and free bytes.
        """

    def ipc_export(self, block: PersistentBlock) -> IpcHandle:
        """Make a block openable by other processes of this host.

        Raises:
            DeviceError: not an open block that `alloc_persistent` made in this process, or the driver refused.
        """
        if not isinstance(block, PersistentBlock):
            raise DeviceError(
                f"a {type(block).__name__} cannot be exported: memory from torch's allocator may lie in a "
                "virtual-memory segment (expandable_segments), which no driver has a handle for, or in one that other "
                "tensors share; use alloc_persistent and copy into it"
            )
        if block.is_closed or block.is_imported:
            raise DeviceError("only an open block can be exported, and only by the process that allocated it")
        return IpcHandle(
            backend=self.name,
            nbytes=block.nbytes,
            payload=self._export(block),
            device_index=block.device_index,
            attributes=describe_self(),
        )

    def ipc_open(self, handle: IpcHandle) -> PersistentBlock:
        """Map another process's block.

        Raises:
            DeviceError: the exporter is gone, the handle is foreign, or the driver refused.
        """
        if handle.backend != self.name:
            raise DeviceError(f"a handle of device {handle.backend!r} cannot be opened by {self.name!r}")
        require_alive(handle.attributes)
        return self._open(handle)

    @abstractmethod
    def _export(self, block: Any) -> bytes:
        """`IpcHandle.payload` of an own block."""

    @abstractmethod
    def _open(self, handle: IpcHandle) -> PersistentBlock:
        """The block of a handle of this backend's, whose exporter is not known to be gone."""

    def pin(self, block: PersistentBlock, pieces: Sequence[tuple[int, int]]) -> Pinning | None:
        """Begin to make copies between this device and shared host memory fast. It ends when the block is closed.

        Args:
            block: of the cpu backend. Whoever closes it has waited for all copies.
            pieces: (offset, bytes); each begins a page. No copy may cross the border of one.
        """
        return None

    @abstractmethod
    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Any | None = None) -> None:
        """Copy contiguous bytes of equal size, on `stream` where there are streams (else immediately)."""

    @abstractmethod
    def new_stream(self) -> Any | None:
        """A stream beside compute; None where the backend has none."""

    @abstractmethod
    def use_stream(self, stream: Any | None) -> AbstractContextManager[None]:
        """Run torch operations of this block on `stream`; no-op for None."""

    @abstractmethod
    def synchronize(self, stream: Any | None = None) -> None:
        """Wait for a stream, or for the whole device."""

    def synchronize_current(self) -> None:
        """Wait for what is queued on torch's current stream of this thread, and for nothing else on the device.

        Unlike `synchronize()` it does not wait for a transfer to a peer that is slow or dead.
        """
        self.synchronize()

    def enter(self) -> int:
        """Make this backend's device the calling thread's current one, and return its index; 0 if threads have none.

        Drivers keep it per thread, so a helper thread would otherwise work on device 0.
        """
        return 0

    def digest(self, data: torch.Tensor) -> int:
        """64-bit digest of a contiguous tensor's bytes; equal bytes give equal digests on every backend."""
        from weight_sync.device.digest import digest_bytes

        return digest_bytes(data)

    def connect_pair(self, store: Store, *, rank: int, timeout_s: float, host: str | None = None) -> PairGroup:
        """Member `rank` (0 or 1) of a group of two that moves memory of this device. Blocks until the other has joined.

        `store` is where the two find each other. `host` is the own address for the other to connect to, where the
        library asks for one.

        Raises:
            DeviceError: this device has no library for that.
            LinkBroken: the other did not join within `timeout_s`.
        """
        raise DeviceError(f"device {self.name!r} has no collective library that connects two processes; use gloo")

    def check_layout(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Of an engine's parameters, by name.

        Raises:
            DeviceError: the memory of some is not laid out in rows, as weight sync writes it.
        """
        return

    def device_identity(self) -> str:
        """What tells the current device from every other device of every host; empty if that is not known."""
        return ""

    def device_name(self) -> str:
        """What the vendor calls the current device ("NVIDIA H200"); empty if there is no vendor to ask."""
        return ""

    def versions(self) -> list[str]:
        """Of driver and runtime, as their files say it: "path: first line"."""
        found = sorted(path for pattern in self.version_files for path in Path("/").glob(pattern))
        return [f"{path}: {path.read_text(errors='replace').strip().partition(chr(10))[0]}" for path in found]

    def release_cached(self) -> None:
        """Give device memory that torch caches but does not use back to the driver, for other processes."""
        return

    @abstractmethod
    def device_bytes(self) -> int:
        """Memory of the first device that this process sees, without a context on it."""

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""


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


def require_size(nbytes: int) -> None:
    """Raises DeviceError unless `nbytes` is a size that can be allocated."""
    if nbytes <= 0:
        raise DeviceError(f"a persistent block needs a size of at least 1 byte, got {nbytes}")


def describe_self() -> dict[str, str]:
    """Process id, start time and process-id namespace of this process, as handle attributes."""
    pid = os.getpid()
    return {"pid": str(pid), "start": _start_ticks(pid) or "", "pid_namespace": _pid_namespace()}


def is_self(attributes: Mapping[str, str]) -> bool:
    return all(attributes.get(key) == value for key, value in describe_self().items())


def require_alive(attributes: Mapping[str, str]) -> None:
    """Refuse a handle whose exporter is known to be gone.

    A process in another process-id namespace (another container) cannot be looked up; then the driver has to decide.

    Raises:
        DeviceError: the exporter has ended.
    """
    if attributes.get("pid_namespace") != _pid_namespace():
        return
    pid = attributes.get("pid", "")
    if not pid.isdigit() or _start_ticks(int(pid)) != attributes.get("start"):
        raise DeviceError(
            f"the process that exported this block (pid {pid or '?'}) has ended, and its memory with it; "
            "fetch a new handle from the process that replaces it"
        )


def _start_ticks(pid: int) -> str | None:
    """Start time in clock ticks since boot (field 22 of proc(5) stat); tells a reused pid from the old process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name (field 2) may contain spaces and parentheses: count from its last ")".
    fields = stat[stat.rindex(")") + 2 :].split()
    state, start = fields[0], fields[19]
    return None if state in {"Z", "X"} else start


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
