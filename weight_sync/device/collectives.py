"""Communicators of two processes.

    GlooGroup    host memory, TCP, through torch
    DevicePair   device memory, through the vendor's collective library: NCCL (RCCL has the same calls) or HCCL

Both are made for peers that may die or stop at any moment. A group is aborted from any thread, whatever it is doing;
afterwards it is of no use and the next transfer needs a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from ctypes import c_int, c_size_t, c_uint32, c_uint64, c_void_p
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from weight_sync.device.library import Call, Library
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

    from weight_sync.device.driver import Driver


POLL_S = (0.00005, 0.002)
"""First and longest pause between two looks at a device transfer."""
ABORT_S = 10.0
"""A driver that has not released its kernels after this long never will."""
_ABORT_TAG = 2**30
_FOREVER = timedelta(days=1)
_ROOT = "root"


class LinkBroken(DeviceError):
    """The other process ended, went silent, or one of the two aborted the group."""


class Transfer(Protocol):
    """Messages on their way."""

    def is_done(self, wait_s: float) -> bool:
        """Whether all have left (sender) or arrived (receiver); waits up to `wait_s` for that.

        Raises:
            LinkBroken: they will not; the group must be aborted.
        """
        ...


class PairGroup(Protocol):
    """A group of two. Used by one thread, except for `abort`. Messages arrive in the order in which they were sent."""

    def send(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start sending contiguous tensors, one message each. They must not change until it is done."""
        ...

    def receive(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start receiving messages of exactly these sizes."""
        ...

    def abort(self) -> None:
        """End the group immediately, from any thread; idempotent. Waiting transfers then fail.

        Once this has returned, nothing is written into tensors that were to be received.

        Raises:
            LinkBroken: the driver does not release them.
        """
        ...


class GlooTransfer:
    """Waits in a thread of its own: gloo cannot be asked, and a wait of it that times out ends the group."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._error: RuntimeError | None = None
        self.waiting = threading.Thread(target=self._wait, name="gloo-transfer", daemon=True)
        self.waiting.start()

    def is_done(self, wait_s: float) -> bool:
        self.waiting.join(wait_s)
        if self.waiting.is_alive():
            return False
        if self._error is not None:
            raise LinkBroken(f"gloo: {_first_line(self._error)}") from self._error
        return True

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait(_FOREVER)
        except RuntimeError as error:
            self._error = error


class GlooGroup:
    """Host memory over TCP. `host` is the own address that the peer connects to; None lets gloo choose."""

    def __init__(self, store: Store, *, rank: int, timeout_s: float, host: str | None = None) -> None:
        """Blocks until the peer has joined.

        Raises:
            LinkBroken: it has not, within `timeout_s`.
        """
        make: Any = dist.ProcessGroupGloo
        options = make._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        # Not lazily: a pair that cannot connect must show here, and not as a transfer that does not progress.
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            device = (
                make.create_device(hostname=host, lazy_init=False)
                if host
                else make.create_default_device(lazy_init=False)
            )
            options._devices = [device]
            self._group: Any = make(store, rank, 2, options)
        except RuntimeError as error:
            raise LinkBroken(f"gloo on {host or 'the default address'}: {_first_line(error)}") from error
        self._peer = 1 - rank
        self._transfers: list[GlooTransfer] = []
        """That may be under way."""
        self._is_aborted = False
        self._abort_lock = threading.Lock()

    def send(self, tensors: Sequence[torch.Tensor]) -> GlooTransfer:
        return self._start(self._group.send, tensors)

    def receive(self, tensors: Sequence[torch.Tensor]) -> GlooTransfer:
        return self._start(self._group.recv, tensors)

    def abort(self) -> None:
        """gloo has no abort (`ProcessGroupGloo.abort` does nothing), but a wait that times out closes the connections
        of its group and fails everything else that waits there, so we let one time out."""
        with self._abort_lock:
            if not self._is_aborted:
                self._is_aborted = True
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    self._group.recv([nothing], self._peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
            deadline = time.monotonic() + ABORT_S
            for transfer in self._transfers:
                transfer.waiting.join(max(0.0, deadline - time.monotonic()))
                if transfer.waiting.is_alive():
                    raise LinkBroken(f"gloo did not abort within {ABORT_S:.0f} s; restart this process")

    def _start(self, operation: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> GlooTransfer:
        if self._is_aborted:
            raise LinkBroken("gloo: the group was aborted")
        try:
            transfer = GlooTransfer([operation([tensor], self._peer, 0) for tensor in tensors])
        except RuntimeError as error:
            raise LinkBroken(f"gloo: {_first_line(error)}") from error
        self._transfers = [one for one in self._transfers if one.waiting.is_alive()] + [transfer]
        return transfer


class Stream(Protocol):
    """A stream of the driver's; see `Backend.new_stream`."""

    address: int


class DeviceTransfer:
    """Looks at an event from time to time instead of synchronising with the device: a dead peer leaves a kernel that
    waits for ever, and a thread in a driver call cannot be woken."""

    def __init__(self, pair: DevicePair, event: int) -> None:
        self._pair = pair
        self._event = event

    def is_done(self, wait_s: float) -> bool:
        return self._pair.poll(lambda: self._pair.is_recorded(self._event), wait_s)


class DevicePair:
    """Device memory, by a vendor's collective library. Its transfers have a stream of their own: on a shared one, those
    of other pairs would wait behind a peer that is dead."""

    def __init__(
        self,
        library: Nccl | Hccl,
        driver: Driver,
        store: Store,
        *,
        rank: int,
        timeout_s: float,
        device: torch.device,
        stream: Stream,
        enter: Callable[[], int],
    ) -> None:
        """Blocks until the peer has joined.

        Args:
            store: brings what rank 0 puts there to rank 1: where the library's two ends find each other.
            enter: makes `device` the calling thread's.

        Raises:
            LinkBroken: the peer has not joined within `timeout_s`, or the library refused.
        """
        self.name = library.name
        self.is_aborted = False
        self._library = library
        self._driver = driver
        self._device = device
        self._stream = stream
        self._enter = enter
        self._peer = 1 - rank
        self._timeout_s = timeout_s
        self._events: dict[int, Sequence[torch.Tensor]] = {}
        """Of transfers that may be under way, with their memory."""
        self._comm: int | None = None
        self._calls = threading.Lock()
        """Held in every call that uses the communicator, so that none meets one that an abort has freed."""
        self._abort_lock = threading.Lock()
        self._aborting: threading.Thread | None = None
        try:
            self._connect(store, rank)
        except BaseException:
            with contextlib.suppress(LinkBroken):
                self.abort()
            raise

    def send(self, tensors: Sequence[torch.Tensor]) -> DeviceTransfer:
        return self._start("send", tensors)

    def receive(self, tensors: Sequence[torch.Tensor]) -> DeviceTransfer:
        return self._start("receive", tensors)

    def abort(self) -> None:
        self.is_aborted = True
        with self._abort_lock:
            if self._aborting is None:
                # In a thread: a library that hangs in its abort must not take the caller along.
                self._aborting = threading.Thread(target=self._abort, name=f"{self.name}-abort", daemon=True)
                self._aborting.start()
        self._aborting.join(ABORT_S)
        if self._aborting.is_alive() or self._events:
            raise LinkBroken(f"{self.name} did not abort within {ABORT_S:.0f} s; restart this process")

    def poll(self, is_so: Callable[[], bool], wait_s: float) -> bool:
        """Whether it `is_so` within `wait_s`.

        Raises:
            LinkBroken: the pair was aborted, or its library has an error.
        """
        pause_s, longest_s = POLL_S
        deadline = time.monotonic() + wait_s
        while True:
            with self._calls:
                self._require_open()
                is_ready = self._comm is None or self._library.is_ready(self._comm)
                if is_ready and is_so():
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def is_recorded(self, event: int) -> bool:
        """Whether the device has come to `event`, which is freed then."""
        if event in self._events:
            if not self._driver.event_is_done(event):
                return False
            self._driver.event_destroy(event)
            del self._events[event]
        return True

    def _connect(self, store: Store, rank: int) -> None:
        store.set_timeout(timedelta(seconds=self._timeout_s))
        deadline = time.monotonic() + self._timeout_s
        try:
            if rank == 0:
                store.set(_ROOT, self._library.new_root())  # type: ignore[arg-type]
            root = bytes(store.get(_ROOT))
        except RuntimeError as error:
            why = _first_line(error)
            raise LinkBroken(f"{self.name}: the peer did not join within {self._timeout_s:.1f} s: {why}") from error
        self._comm = self._library.connect(root, rank)
        self._await_ready(deadline - time.monotonic())
        # The library connects with the first message. Until then no real tensor is involved, so a peer that never joins
        # holds no memory.
        token = torch.zeros(16, dtype=torch.uint8, device=self._device)
        transfer = (self.receive if self._peer == 0 else self.send)([token])
        if not transfer.is_done(deadline - time.monotonic()):
            raise LinkBroken(f"{self.name}: the peer did not join within {self._timeout_s:.1f} s")

    def _start(self, word: str, tensors: Sequence[torch.Tensor]) -> DeviceTransfer:
        for tensor in tensors:
            if tensor.device != self._device or not tensor.is_contiguous() or tensor.dtype != torch.uint8:
                raise ValueError(
                    f"{self.name} of {self._device} moves contiguous bytes on that device, got {tensor.dtype} on "
                    f"{tensor.device} with strides {tensor.stride()}; name the device when the tensor is made"
                )
        self._enter()
        with self._calls:
            self._require_open()
            assert self._comm is not None
            self._library.move(word, self._comm, tensors, peer=self._peer, stream=self._stream.address)
        # What the library has not launched yet, an event would not wait for.
        self._await_ready(self._timeout_s)
        with self._calls:
            self._require_open()
            event = self._driver.event_record(self._stream.address)
            self._events[event] = tensors
        return DeviceTransfer(self, event)

    def _await_ready(self, wait_s: float) -> None:
        if not self.poll(lambda: True, wait_s):
            raise LinkBroken(f"{self.name}: the peer did not join within {self._timeout_s:.1f} s")

    def _require_open(self) -> None:
        if self.is_aborted:
            raise LinkBroken(f"{self.name}: the group was aborted")

    def _abort(self) -> None:
        deadline = time.monotonic() + ABORT_S
        with self._calls:
            comm, self._comm = self._comm, None
        with contextlib.suppress(DeviceError):
            self._enter()
            if comm is not None:
                self._library.call("abort", comm)
        # The kernels end soon after; until then they may write.
        while self._events and time.monotonic() < deadline:
            for event in [*self._events]:
                with contextlib.suppress(DeviceError):
                    self.is_recorded(event)
            time.sleep(POLL_S[0])


class _CollectiveLibrary(Library):
    """What NCCL and HCCL share."""

    FAILED = LinkBroken
    WITHOUT = "it is too old, use ipc, shm or gloo"
    name: str
    PAIR_BYTES: int
    """What a group of two takes of the device at each end."""
    BYTES: int
    """Number of the data type of a byte."""

    def is_ready(self, comm: int) -> bool:
        """Whether the last call is through.

        Raises:
            LinkBroken: it failed, or a transfer did.
        """
        state = c_int()
        self.call("state", comm, ctypes.byref(state))
        if state.value not in (0, self.PENDING):
            raise self.error(self.name, state.value)
        return state.value == 0

    def move(self, word: str, comm: int, tensors: Sequence[torch.Tensor], *, peer: int, stream: int) -> None:
        """`send` or `receive` messages."""
        for tensor in tensors:
            self.call(word, tensor.data_ptr(), tensor.numel(), self.BYTES, peer, comm, stream)


class _NcclId(ctypes.Structure):
    """ncclUniqueId; passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class _NcclConfig(ctypes.Structure):
    """ncclConfig_t as of 2.17. Later libraries take the rest of theirs from their defaults."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", ctypes.c_char_p),
    )


_MESSAGE = (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
"""Address, bytes, data type, peer, communicator, stream. HCCL's integers have the same sizes."""


class Nccl(_CollectiveLibrary):
    """NCCL, and RCCL with the same calls."""

    name = "nccl"
    CALLS: ClassVar = {
        "new_root": Call("ncclGetUniqueId", (c_void_p,)),
        "connect": Call("ncclCommInitRankConfig", (c_void_p, c_int, _NcclId, c_int, c_void_p)),
        "state": Call("ncclCommGetAsyncError", (c_void_p, c_void_p)),
        "send": Call("ncclSend", _MESSAGE),
        "receive": Call("ncclRecv", _MESSAGE),
        "group_start": Call("ncclGroupStart", ()),
        "group_end": Call("ncclGroupEnd", ()),
        "abort": Call("ncclCommAbort", (c_void_p,)),
    }
    MAX_CTAS = 4
    """Multiprocessors that a transfer takes from the learner's compute. More than 4 move no more bytes (89 GB/s between
    two H200s), and each takes 8 MiB of the device for buffers."""
    PAIR_BYTES = 36 << 20
    """Measured with `MAX_CTAS`. The first communicator of a process takes 0.4 GiB more."""
    PENDING = 7
    BYTES = 1
    _UNSET = -(2**31)

    def new_root(self) -> bytes:
        root = _NcclId()
        self.call("new_root", ctypes.byref(root))
        return ctypes.string_at(ctypes.byref(root), ctypes.sizeof(root))

    def connect(self, root: bytes, rank: int) -> int:
        config = _NcclConfig(
            size=ctypes.sizeof(_NcclConfig),
            magic=0xCAFEBEEF,
            version=21700,
            blocking=0,
            cga_cluster_size=self._UNSET,
            min_ctas=self._UNSET,
            max_ctas=self.MAX_CTAS,
        )
        return self.pointer("connect", 2, _NcclId.from_buffer_copy(root), rank, ctypes.byref(config))

    def move(self, word: str, comm: int, tensors: Sequence[torch.Tensor], *, peer: int, stream: int) -> None:
        """The messages of one call are one launch."""
        self.call("group_start")
        try:
            super().move(word, comm, tensors, peer=peer, stream=stream)
        finally:
            self.call("group_end")

    def describe(self, code: int) -> str:
        return self.text("ncclGetErrorString", c_int(code))


class _HcclConfig(ctypes.Structure):
    """HcclCommConfig of version 1. Later libraries take the rest of theirs from their defaults."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint32),
        ("version", c_uint32),
        ("reserved", c_uint64),
        ("buffer_mib", c_uint32),
        ("deterministic", c_uint32),
    )


class Hccl(_CollectiveLibrary):
    """HCCL. Never run on hardware: written from its headers, tested against a fake library.

    It has neither groups nor an abort: messages are launched one by one, and destroying a communicator is what ends it.
    A kernel that waits for a dead peer may outlive that; then `abort` fails after `ABORT_S`, with the process still
    alive.
    """

    name = "hccl"
    CALLS: ClassVar = {
        "new_root": Call("HcclGetRootInfo", (c_void_p,)),
        "connect": Call("HcclCommInitRootInfoConfig", (c_uint32, c_void_p, c_uint32, c_void_p, c_void_p)),
        "state": Call("HcclGetCommAsyncError", (c_void_p, c_void_p)),
        "send": Call("HcclSend", _MESSAGE),
        "receive": Call("HcclRecv", _MESSAGE),
        "abort": Call("HcclCommDestroy", (c_void_p,)),
    }
    BUFFER_MIB = 16
    """Twice per pair and device. HCCL's own 200 would be 400 MiB for each peer that a process has."""
    PAIR_BYTES = 2 * BUFFER_MIB << 20
    BYTES = 0
    _ROOT_BYTES = 4108

    def new_root(self) -> bytes:
        root = ctypes.create_string_buffer(self._ROOT_BYTES)
        self.call("new_root", root)
        return root.raw

    def connect(self, root: bytes, rank: int) -> int:
        """Blocks until the peer has joined, or for HCCL_CONNECT_TIMEOUT."""
        config = _HcclConfig(
            size=ctypes.sizeof(_HcclConfig), magic=0xF0F0F0F0, version=1, buffer_mib=self.BUFFER_MIB, deterministic=0
        )
        comm, buffer = c_void_p(), ctypes.create_string_buffer(root, self._ROOT_BYTES)
        self.call("connect", 2, buffer, rank, ctypes.byref(config), ctypes.byref(comm))
        if comm.value is None:
            raise LinkBroken("the library reported success but returned no communicator")
        return comm.value

    def describe(self, code: int) -> str:
        return self.text("HcclGetErrorString", c_int(code))


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
