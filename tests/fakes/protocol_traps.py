"""Traps: a process that reaches a named state of the weight-sync protocol sends a signal, to itself or to a party.

`watch_protocol` is called once in a process of its own; it looks at the seams that every transport and both commit
modes pass through, and does nothing while no trap is armed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.fakes import sync_world
from weight_sync.channel import ControlClient
from weight_sync.device.cpu import CpuBackend
from weight_sync.messages import LeaseGranted, ReleaseRequest
from weight_sync.transports import base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

State = Literal["opened", "packing", "sealed", "leased", "pulling", "pulled", "attested", "committing"]


def process_state(pid: int) -> str:
    """One letter of proc(5): T is stopped, Z is dead and not yet waited for; X if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat[stat.rindex(")") + 2]


def signal_and_see(pid: int, number: int) -> None:
    """Send SIGKILL or SIGSTOP and return when it has had its effect."""
    os.kill(pid, number)
    until = time.monotonic() + 5.0
    while process_state(pid) not in "TtZX":
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} is {process_state(pid)} 5 s after signal {number}")
        time.sleep(0.001)


class Traps:
    """At most one is armed, and it closes once. Whoever wakes its victim first calls `await_effect`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: tuple[State, int, int] | None = None
        self.is_committing = False
        """Set around a commit: its copies are the only ones that are not part of a pull."""

    def arm(self, state: State, number: int, pid: int) -> None:
        self._armed = (state, number, pid)

    def reach(self, state: State) -> None:
        """This process is in `state` now."""
        with self._lock:
            armed = self._armed
            if armed is None or armed[0] != state:
                return
            self._armed = None
            _, number, pid = armed
            if pid == os.getpid():
                # Sent to the process it would be taken by any thread, and this one would run on for a moment.
                signal.pthread_kill(threading.get_ident(), number)
            else:
                signal_and_see(pid, number)

    def await_effect(self) -> None:
        """Until a trap that is closing has seen its signal's effect: woken before, the victim would never be seen
        stopped."""
        with self._lock:
            pass

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        self.is_committing = True
        try:
            yield
        finally:
            self.is_committing = False


def watch_protocol(traps: Traps) -> None:
    """Put the traps into this process."""
    _watch_packing(traps)
    _watch_control(traps)
    _watch_pulls(base.ReceiverEnd, traps)
    synchronize = CpuBackend.synchronize

    def synchronized(self: CpuBackend, stream: Any | None = None) -> None:
        if traps.is_committing:
            traps.reach("committing")
        synchronize(self, stream)

    CpuBackend.synchronize = synchronized


def _watch_packing(traps: Traps) -> None:
    """A pack has begun when it looks at the first shard."""
    local_tensors = sync_world.local_tensors

    class Shards(dict[str, "torch.Tensor"]):
        def get(self, *args: Any) -> Any:
            traps.reach("packing")
            return super().get(*args)

        def __getitem__(self, name: str) -> torch.Tensor:
            traps.reach("packing")
            return super().__getitem__(name)

    def watched(full: Mapping[str, torch.Tensor], *, rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
        return Shards(local_tensors(dict(full), rank=rank, num_ranks=num_ranks))

    sync_world.local_tensors = watched


def _watch_control(traps: Traps) -> None:
    ask = ControlClient.ask

    def asked(self: Any, request: Any, kind: type[Any], **options: Any) -> Any:
        if isinstance(request, ReleaseRequest):
            traps.reach("attested")
        answer = ask(self, request, kind, **options)
        if isinstance(answer, LeaseGranted):
            traps.reach("leased")
        return answer

    ControlClient.ask = asked


def _watch_pulls(kind: type[Any], traps: Traps) -> None:
    """Every receiver end, whatever its transport."""
    for child in kind.__subclasses__():
        _watch_pulls(child, traps)
    if "pull" not in vars(kind) or getattr(kind.pull, "__isabstractmethod__", False):
        return
    original = kind.pull

    def pull(self: Any, *args: Any, check: Callable[[], None], **options: Any) -> None:
        def checked() -> None:
            check()
            traps.reach("pulling")

        original(self, *args, check=checked, **options)
        traps.reach("pulled")

    kind.pull = pull
