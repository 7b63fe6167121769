"""Every thread of a receiver works on the device of its worker, on a cpu backend that remembers who called for what."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from tests.fakes.sync_world import FusedModel, LocalPublisher, LocalReplica, full_weights
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device.cpu import CpuBackend
from weight_sync.receive.receiver import WeightReceiver, WorkerService

if TYPE_CHECKING:
    from collections.abc import Iterator


DEVICE = torch.device("cpu", 3)
PULLING = ("weight-sync-pull", "weight-sync-source")
DEVICE_CALLS = ("alloc_persistent", "ipc_open", "ipc_export", "new_stream", "copy_async", "synchronize", "enter",
                "digest", "memory_info")  # fmt: skip


class RecordingBackend(CpuBackend):
    """As a driver has it: a device chosen by `set_device`, and in each thread torch's own, which is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self._chosen = 0
        self._of_thread = threading.local()
        self.seen: defaultdict[str, set[tuple[str, int, int]]] = defaultdict(set)
        """Thread -> (call, device of the driver, device of torch)."""

    def set_device(self, index: int) -> torch.device:
        self._chosen = self._of_thread.index = index
        return DEVICE

    def note(self, call: str) -> None:
        thread = threading.current_thread().name.rstrip("0123456789-_")
        self.seen[thread].add((call, self._chosen, getattr(self._of_thread, "index", 0)))


def _noted(name: str) -> Any:
    original = getattr(CpuBackend, name)

    def call(self: RecordingBackend, *args: Any, **kwargs: Any) -> Any:
        self.note(name)
        if name == "copy_async":
            time.sleep(0.02)  # so that no thread of a pull does it all
        return original(self, *args, **kwargs)

    return call


for _name in DEVICE_CALLS:
    setattr(RecordingBackend, _name, _noted(_name))


class OnDevice3(FusedModel):
    """Host memory that says it lies on a device with a number."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        for parameter in super().parameters(recurse):
            yield type("Parameter", (), {"device": DEVICE, "dtype": parameter.dtype})


def replica(name: str) -> tuple[LocalReplica, RecordingBackend]:
    made, backend = LocalReplica(name), RecordingBackend()
    made.models[0] = OnDevice3()
    receiver = WeightReceiver(made.models[0], backend, worker=0)
    made.receivers[0], made.services[0] = receiver, WorkerService(lambda: receiver)
    return made, backend


async def test_threads_of_a_receiver_work_on_the_device_of_its_worker() -> None:
    """Relays are on, so the threads of a pull map another replica's memory and make streams."""
    learners = [LocalPublisher(rank, 2, full_weights(1)) for rank in range(2)]
    replicas, backends = zip(*(replica(f"r{i}") for i in range(3)), strict=True)
    coordinator = SyncCoordinator(learners, replicas, options=SyncOptions(timeout_s=20.0, commit="staged"))
    await coordinator.open()
    try:
        await coordinator.publish(1)
        await coordinator.sync(1)
        for one in replicas:
            one.assert_holds(full_weights(1))
    finally:
        await coordinator.close()
    for backend in backends:
        for thread, calls in backend.seen.items():
            wrong = {call for call, chosen, _ in calls if chosen != DEVICE.index}
            assert not wrong, f"{thread} made {sorted(wrong)} on device 0"
        for thread in PULLING:
            assert {index for *_, index in backend.seen[thread]} <= {DEVICE.index}, f"torch of {thread} is on 0"
    for thread in PULLING:
        assert any(backend.seen[thread] for backend in backends), f"{thread} did nothing"
    by_pull = set().union(*(backend.seen[thread] for backend in backends for thread in PULLING))
    assert {call for call, *_ in by_pull} >= {"ipc_open", "new_stream"}, "no replica was linked to another"
