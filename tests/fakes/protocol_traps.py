"""Traps: a process that reaches a named state of the weight-sync protocol sends a signal, to itself or to a party.

A `Trapped` object puts them into its process, at the seams that every transport and both commit modes pass through.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Literal

from tests.fakes import sync_world
from tests.fakes.processes import Vitals, signal_and_see
from weight_sync.channel import ControlClient
from weight_sync.device.cpu import CpuBackend
from weight_sync.messages import Check
from weight_sync.receive.receiver import WeightReceiver
from weight_sync.transports import base

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

State = Literal["opened", "packing", "sealed", "pinned", "pulling", "pulled", "attested", "committing"]


class Trapped:
    """At most one trap is armed, and it closes once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: tuple[State, int, int] | None = None
        self.is_committing = False
        """Set around a commit, whose copies are the only ones that are not part of a pull."""
        self.has_read = False
        """Something of the version that is being brought."""
        _watch_protocol(self)

    def see_trap(self, state: State, number: int, pid: int | None) -> None:
        """Arm it for process `pid`, or for this one."""
        self._armed = (state, number, os.getpid() if pid is None else pid)

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

    def see_trap_closed(self) -> None:
        """Wait until a closing trap has seen its effect: a victim that is woken earlier is never seen stopped."""
        with self._lock:
            pass

    def see_vitals(self) -> Vitals:
        return Vitals.of_this()


def _watch_protocol(traps: Trapped) -> None:
    """Once in a process."""
    local_tensors, begin, synchronize = sync_world.local_tensors, ControlClient.begin, CpuBackend.synchronize
    prefetch = WeightReceiver.prefetch

    class Shards(dict[str, "torch.Tensor"]):
        """A pack has begun when it looks at the first shard."""

        def get(self, *args: Any) -> Any:
            traps.reach("packing")
            return super().get(*args)

        def __getitem__(self, name: str) -> torch.Tensor:
            traps.reach("packing")
            return super().__getitem__(name)

    def watched(full: Mapping[str, torch.Tensor], **of_rank: Any) -> dict[str, torch.Tensor]:
        return Shards(local_tensors(dict(full), **of_rank))

    def asked(self: Any, request: Any) -> Any:
        if isinstance(request, Check) and traps.has_read:
            traps.reach("attested")
        return begin(self, request)

    def prefetched(self: Any, *args: Any, **options: Any) -> Any:
        traps.has_read = False
        traps.reach("pinned")
        return prefetch(self, *args, **options)

    def synchronized(self: CpuBackend, stream: Any | None = None) -> None:
        if traps.is_committing:
            traps.reach("committing")
        synchronize(self, stream)

    sync_world.local_tensors, ControlClient.begin, CpuBackend.synchronize = watched, asked, synchronized
    WeightReceiver.prefetch = prefetched
    _watch_pulls(base.SourceReader, traps)


def _watch_pulls(kind: type[Any], traps: Trapped) -> None:
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
        traps.has_read = True
        traps.reach("pulled")

    kind.pull = pull
