"""Communicators of two processes.

    GlooGroup         host memory, TCP
    CollectiveGroup   device memory, through the vendor's collective library

Both are made for peers that may die or stop at any moment. A group is aborted from any thread, whatever it is doing;
afterwards it is of no use and the next transfer needs a new one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from weight_sync.device.environment import EnvVar, temporary_environment
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.distributed_c10d import Store


POLL_S = (0.00005, 0.002)
"""First and longest pause between two looks at a device transfer."""
ABORT_S = 10.0
"""A driver that has not released its kernels after this long never will."""
_ABORT_TAG = 2**30
_WHY = "the default; in the environment from the start, because it cannot be added safely once other threads run"
NCCL_SWITCHES = (EnvVar(name="TORCH_NCCL_BLOCKING_WAIT", value="0", why=_WHY),)
HCCL_SWITCHES = tuple(
    EnvVar(name=f"{prefix}HCCL_{name}", value=value, why=_WHY)
    for prefix in ("", "TORCH_")
    for name, value in (("BLOCKING_WAIT", "0"), ("ASYNC_ERROR_HANDLING", "1"))
)
"""Variables that have the other value while a group of ours is built."""
_environment_lock = threading.Lock()


class LinkBroken(DeviceError):
    """The other process ended, went silent, or one of the two aborted the group."""


class Transfer(Protocol):
    """Messages on their way."""

    def wait(self, timeout_s: float) -> None:
        """Block until all have left (sender) or arrived (receiver), with one timeout for each.

        Raises:
            LinkBroken: they will not, or not in time; the group must be aborted.
        """
        ...


class PairGroup(Protocol):
    """A group of two. Used by one thread, except for `abort`. Messages arrive in the order in which they were sent."""

    def send(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start sending contiguous tensors, one message each. They must live and not change until it is done."""
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
    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout_s: float) -> None:
        for work in self._works:
            try:
                work.wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise LinkBroken(f"gloo: {_first_line(error)}") from error


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
            if self._is_aborted:
                return
            self._is_aborted = True
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._group.recv([nothing], self._peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def _start(self, operation: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> GlooTransfer:
        if self._is_aborted:
            raise LinkBroken("gloo: the group was aborted")
        try:
            return GlooTransfer([operation([tensor], self._peer, 0) for tensor in tensors])
        except RuntimeError as error:
            raise LinkBroken(f"gloo: {_first_line(error)}") from error


class CollectiveTransfer:
    """Looks at the device from time to time instead of synchronising with it: a dead peer leaves a kernel that waits
    for ever, and a thread in a driver call cannot be woken."""

    def __init__(self, works: Sequence[Any], group: CollectiveGroup) -> None:
        self._works = works
        self._group = group

    def wait(self, timeout_s: float) -> None:
        pause_s, longest_s = POLL_S
        deadline = time.monotonic() + timeout_s
        try:
            for work in self._works:
                while not work.is_completed():
                    if self._group.is_aborted:
                        break
                    if time.monotonic() > deadline:
                        raise LinkBroken(f"{self._group.name}: no progress within {timeout_s:.1f} s")
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, longest_s)
                # Aborting ends the kernels, so an aborted transfer looks complete.
                if self._group.is_aborted:
                    raise LinkBroken(f"{self._group.name}: the group was aborted")
                work.wait()  # complete, so this returns immediately, or raises what went wrong
        except RuntimeError as error:
            raise LinkBroken(f"{self._group.name}: {_first_line(error)}") from error


class CollectiveGroup:
    """Device memory. `build` makes the vendor's process group object, `stop` aborts it."""

    def __init__(
        self,
        build: Callable[[], Any],
        stop: Callable[[Any], None],
        *,
        name: str,
        rank: int,
        grouped: bool,
        device: torch.device,
    ) -> None:
        """`grouped`: the messages of one call are one launch (the library can do that)."""
        self.name = name
        self.is_aborted = False
        self._stop = stop
        self._grouped = grouped
        self._device = device
        self._peer = 1 - rank
        self._abort_lock = threading.Lock()
        try:
            self._group = build()
        except RuntimeError as error:
            raise LinkBroken(f"{name}: {_first_line(error)}") from error

    def handshake(self, timeout_s: float) -> CollectiveGroup:
        """Exchange one small message, which makes the library connect. Until then no real tensor is involved, so a peer
        that never joins holds no memory.

        Raises:
            LinkBroken: the peer did not answer within `timeout_s`.
        """
        token = torch.zeros(16, dtype=torch.uint8, device=self._device)
        try:
            (self.receive if self._peer == 0 else self.send)([token]).wait(timeout_s)
        except BaseException:
            with contextlib.suppress(LinkBroken):
                self.abort()
            raise
        return self

    def send(self, tensors: Sequence[torch.Tensor]) -> CollectiveTransfer:
        return self._start(self._group.send, tensors)

    def receive(self, tensors: Sequence[torch.Tensor]) -> CollectiveTransfer:
        return self._start(self._group.recv, tensors)

    def abort(self) -> None:
        with self._abort_lock:
            if self.is_aborted:
                return
            self.is_aborted = True
        # In a thread: a library that hangs in its abort must not take the caller along.
        stopper = threading.Thread(target=self._stop_quietly, name=f"{self.name}-abort", daemon=True)
        stopper.start()
        stopper.join(ABORT_S)
        if stopper.is_alive():
            raise LinkBroken(f"{self.name} did not abort within {ABORT_S:.0f} s; restart this process")

    def _stop_quietly(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._stop(self._group)

    def _start(self, operation: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> CollectiveTransfer:
        if self.is_aborted:
            raise LinkBroken(f"{self.name}: the group was aborted")
        self._require_own(tensors)
        try:
            if not self._grouped:
                return CollectiveTransfer([operation([tensor], self._peer, 0) for tensor in tensors], self)
            self._group._start_coalescing()
            for tensor in tensors:
                operation([tensor], self._peer, 0)
            return CollectiveTransfer([self._group._end_coalescing()], self)
        except RuntimeError as error:
            raise LinkBroken(f"{self.name}: {_first_line(error)}") from error

    def _require_own(self, tensors: Sequence[torch.Tensor]) -> None:
        """The library would quietly build a second communicator for another device, which nobody on the other side
        joins. A tensor gets there easily: torch's current device is one per thread, and the first one in a new thread.

        Raises:
            ValueError: a tensor lies on another device.
        """
        for tensor in tensors:
            if tensor.device != self._device:
                raise ValueError(
                    f"{self.name} of {self._device} cannot move a tensor on {tensor.device}; name the device when the "
                    "tensor is made"
                )


@contextlib.contextmanager
def _switched(switches: Sequence[EnvVar]) -> Iterator[None]:
    """Tandem's processes start with these variables (`Backend.process_env`): giving one another value replaces a
    pointer, while adding or removing one moves the table that C code of other threads may be reading. A process that
    started without them gets them with its first group, and keeps them."""
    with _environment_lock:
        for switch in switches:
            os.environ.setdefault(switch.name, switch.value)
        with temporary_environment({switch.name: "1" if switch.value == "0" else "0" for switch in switches}):
            yield


def _build(make: Any, options: Any, switches: Sequence[EnvVar], store: Store, *, rank: int, timeout_s: float) -> Any:
    options._timeout = timedelta(seconds=timeout_s)
    # Rank 1 waits in this store for what rank 0 puts there.
    store.set_timeout(timedelta(seconds=timeout_s))
    with _switched(switches):
        return make(store, rank, 2, options)


def nccl_group(store: Store, *, rank: int, timeout_s: float, device: torch.device) -> CollectiveGroup:
    """NCCL, and RCCL under the same name.

    torch gives every such group a watchdog thread which, by default, ends the *process* when a peer dies or a transfer
    takes too long. There is no option for that, only the environment, read when the group is built: with
    TORCH_NCCL_BLOCKING_WAIT=1 there is neither watchdog nor heartbeat monitor, `is_completed` itself asks the library
    for errors, and `abort` is ours to call. It is set for the moment of building only; the learner's own groups keep
    their watchdogs.

    Raises:
        DeviceError: this torch has no such group.
        LinkBroken: the peer did not join within `timeout_s`.
    """
    make = getattr(dist, "ProcessGroupNCCL", None)
    if make is None:
        raise DeviceError(f"torch {torch.__version__} was built without NCCL; use ipc, shm or gloo")

    build = partial(_build, make, make.Options(), NCCL_SWITCHES, store, rank=rank, timeout_s=timeout_s)
    group = CollectiveGroup(build, lambda built: built.abort(), name="nccl", rank=rank, grouped=True, device=device)
    return group.handshake(timeout_s)


_HCCL_BUFFER_MIB = 16
"""Twice per group and device. HCCL's 200 would be 400 MiB for each peer that a process has."""


def hccl_group(store: Store, *, rank: int, timeout_s: float, device: torch.device) -> CollectiveGroup:
    """HCCL. Never run on hardware: its test uses a fake `torch_npu`.

    Same shape and same caution as `nccl_group`. Messages are not grouped: torch_npu does so only in some versions.

    Raises:
        DeviceError: torch_npu is not installed.
        LinkBroken: the peer did not join within `timeout_s`.
    """
    try:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise DeviceError(f"torch_npu cannot be imported ({error}); install it, or use ipc, shm or gloo") from error

    def stop(built: Any) -> None:
        built.abort_hccl_comm("the peer of a weight transfer is gone")

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": _HCCL_BUFFER_MIB}
    build = partial(_build, ProcessGroupHCCL, options, HCCL_SWITCHES, store, rank=rank, timeout_s=timeout_s)
    return CollectiveGroup(build, stop, name="hccl", rank=rank, grouped=False, device=device).handshake(timeout_s)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
