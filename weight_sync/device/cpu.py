"""The cpu backend: host memory, shared between processes through anonymous files (memfd).

A memfd has no name in any file system: it lives as long as a process holds it or maps it, so nothing is left behind
after SIGKILL. Another process of the same user opens it as `/proc/<pid>/fd/<fd>`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weight_sync.device.base import (
    Backend,
    Capabilities,
    IpcHandle,
    PersistentBlock,
    Role,
    bytes_to_copy,
    require_size,
)
from weight_sync.device.collectives import GlooGroup, PairGroup
from weight_sync.device.environment import EnvVar, missing_variables
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.distributed_c10d import Store

_PAYLOAD = struct.Struct("<qqQQ")
"""pid, fd, inode, nbytes."""
_MEMFD_NAME = "tandem-block"


class SharedBlock(PersistentBlock):
    """A mapped memfd. After `close`, views that still live stay readable and keep the pages until they are gone.

    Every tensor holds a reference to the mapping (though no buffer of it), so the last one unmaps it: to unmap it under
    a view would crash the process at the next access.
    """

    def __init__(self, fd: int, nbytes: int, *, is_imported: bool) -> None:
        memory = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        super().__init__(memory, partial(os.close, fd), is_imported=is_imported)
        self.fd = fd


class CpuBackend(Backend):
    """Real everywhere Linux runs: gloo, shared memory, synchronous copies, no streams."""

    name = "cpu"
    torch_device = "cpu"
    ray_resource = None
    visible_devices_var = None
    collective = "gloo"

    def __init__(self, *, threads: int = 1) -> None:
        if threads < 1:
            raise DeviceError(f"device.cpu_threads must be >= 1, got {threads}")
        self.variables = (
            EnvVar(
                name="OMP_NUM_THREADS",
                value=str(threads),
                why="learner ranks and engines share the cores; without a limit each takes all of them and they stall",
            ),
            EnvVar(
                name="VLLM_CPU_OMP_THREADS_BIND",
                value="nobind",
                why="vLLM's `auto` pins an engine to cores that learners use too, and refuses more tensor-parallel "
                "ranks than NUMA nodes; on a host of its own, name the cores per rank, e.g. '0-7|8-15'",
                roles=("engine",),
            ),
        )

    def num_devices(self) -> int:
        """One "device" per process that may be asked for: CPUs are counted by Ray, not here."""
        return 1024

    def capabilities(self) -> Capabilities:
        return Capabilities(ipc=True, sleep_mode=False, forks=True)

    def check_env(self, role: Role, environ: dict[str, str]) -> list[str]:
        problems = missing_variables(self.process_env(role), environ)
        threads = environ.get("OMP_NUM_THREADS")
        if role != "driver" and threads is not None and not (threads.isdigit() and int(threads) >= 1):
            problems.append(f"OMP_NUM_THREADS must be a whole number >= 1, got {threads!r}; unset it or correct it")
        return problems

    def engine_defaults(self) -> dict[str, Any]:
        # There are no graphs to capture, and compiling costs minutes that a CPU engine does not earn back.
        return {"enforce_eager": True}

    def set_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def alloc_persistent(self, nbytes: int) -> SharedBlock:
        require_size(nbytes)
        free, _ = host_memory()
        if nbytes > free:
            raise DeviceError(_out_of_memory(nbytes, free))
        fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Take the pages now: a sparse file would fail later, with SIGBUS at some write.
            os.posix_fallocate(fd, 0, nbytes)
            # The file must not shrink under another process's mapping.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return SharedBlock(fd, nbytes, is_imported=False)
        except OSError as error:
            os.close(fd)
            raise DeviceError(f"{_out_of_memory(nbytes, host_memory()[0])}: {error}") from error

    def _export(self, block: SharedBlock) -> bytes:
        return _PAYLOAD.pack(os.getpid(), block.fd, os.fstat(block.fd).st_ino, block.nbytes)

    def _open(self, handle: IpcHandle) -> SharedBlock:
        pid, fd, inode, nbytes = _PAYLOAD.unpack(handle.payload)
        path = f"/proc/{pid}/fd/{fd}"
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(
                f"cannot open the block of process {pid}: {error.strerror}; it has been closed or its process has "
                "ended, or that process runs as another user or in another container"
            ) from error
        status = os.fstat(opened)
        if (status.st_ino, status.st_size) != (inode, nbytes) or nbytes != handle.nbytes:
            os.close(opened)
            raise DeviceError(
                f"{path} is no longer the exported block: expected inode {inode} with {nbytes} bytes, found inode "
                f"{status.st_ino} with {status.st_size} bytes; fetch a new handle"
            )
        try:
            return SharedBlock(opened, nbytes, is_imported=True)
        except OSError as error:
            os.close(opened)
            raise DeviceError(f"cannot map {nbytes} bytes of process {pid}: {error.strerror}") from error

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Any | None = None) -> None:
        bytes_to_copy(dst, src)
        _as_bytes(dst).copy_(_as_bytes(src))

    def new_stream(self) -> None:
        return None

    def use_stream(self, stream: Any | None) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, stream: Any | None = None) -> None:
        return None

    def connect_pair(self, store: Store, *, rank: int, timeout_s: float, host: str | None = None) -> PairGroup:
        return GlooGroup(store, rank=rank, timeout_s=timeout_s, host=host)

    def device_bytes(self) -> int:
        return host_memory()[1]

    def memory_info(self) -> tuple[int, int]:
        return host_memory()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _out_of_memory(nbytes: int, free: int) -> str:
    return (
        f"cpu: cannot allocate a persistent block of {nbytes} bytes: {free} bytes of host memory are free; "
        "use a smaller model, fewer arena slots or fewer processes"
    )


class _Files(NamedTuple):
    """A version of control groups: where it is mounted under /sys/fs/cgroup, and what it calls things."""

    mounts: tuple[str, ...]
    limit: str
    used: str
    inactive: str
    """File cache counts as used but is given back on demand; this row of memory.stat says how much."""


_V2 = _Files((".", "unified"), "memory.max", "memory.current", "inactive_file")
_V1 = _Files(("memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(free, total) bytes of this host for this process: what the kernel calls available, capped by the limits of its
    control groups, since a container or a batch job may be given less.

    A limit binds all groups below it, so each one from the process's own group up to the root counts. A group that
    cannot be read, as one outside a container, is skipped.
    """
    info = _table((root / "proc/meminfo").read_text().splitlines(), scale=1024)
    free, physical = info["MemAvailable"], info["MemTotal"]
    total = physical
    for files, group in _groups(root):
        limit, used = _number(group / files.limit), _number(group / files.used)
        if limit is None or used is None or limit >= physical:
            continue
        reclaimable = _table(_lines(group / "memory.stat")).get(files.inactive, 0)
        total = min(total, limit)
        free = min(free, max(0, limit - used + reclaimable))
    return free, total


def _groups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """Folders of the groups that hold this process, for both versions: its own, and all above it."""
    for files, own in ((_V2, _own_group(root, "")), (_V1, _own_group(root, "memory"))):
        for mount in files.mounts:
            for group in (own, *own.parents):
                yield files, root / "sys/fs/cgroup" / mount / group


def _own_group(root: Path, controller: str) -> PurePosixPath:
    """From /proc/self/cgroup, whose rows are number:controllers:/path; version 2 has no controllers there.

    The mount's root where there is no such row, and where the path leads out of the mount (`/../job`), as it does in a
    container that the process entered later.
    """
    for row in _lines(root / "proc/self/cgroup"):
        _, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        own = PurePosixPath(path.lstrip("/"))
        if controller in controllers.split(",") and ".." not in own.parts:
            return own
    return PurePosixPath()


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    """Empty if there is no such file, or it may not be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _table(lines: list[str], *, scale: int = 1) -> dict[str, int]:
    rows = (line.replace(":", " ").split() for line in lines)
    return {row[0]: int(row[1]) * scale for row in rows if len(row) >= 2 and row[1].isdigit()}
