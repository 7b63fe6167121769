"""Weight sync: brings the weights of a sharded learner into running inference engines, in place, without a gather.

Nothing here depends on the rest of the project. Importing the package imports nothing else: names are looked up when
they are used, and those of plans, reports and errors need no torch.

    learner process (one per rank)      params, shards, tensors = local_shards(model, rollout_dtype="bfloat16")
                                        publisher = WeightPublisher(get_backend(), rank=rank)
    engine process (one per worker)     service = WorkerService(lambda: WeightReceiver(model, get_backend(), worker=0))
                                        or, in vLLM, `worker_extension_cls=EXTENSION` and `AsyncLLMReplica` around it
    driver                              coordinator = SyncCoordinator(learners, replicas, options=SyncOptions())
                                        await coordinator.open()
                                        await coordinator.publish(1)           # every rank packs what it holds now
                                        report = await coordinator.sync(1)     # every replica generates from version 1

The driver reaches the other two by a `PublisherHandle` per rank and a `ReplicaHandle` per engine: any RPC that carries
bytes. `weight_sync/example.py` is a whole program.
"""

# ruff: noqa: F401 - the imports are for those who check types, and of the errors
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from weight_sync import errors
from weight_sync.errors import (
    DeviceError,
    DigestMismatch,
    PlanMismatch,
    PublisherLost,
    PullTimeout,
    RelayStalled,
    ReplicaDirty,
    SlotOverwritten,
    StaleEpoch,
    TransportUnusable,
    VersionUnavailable,
    WeightSyncError,
)

if TYPE_CHECKING:
    from weight_sync.control.coordinator import SyncCoordinator
    from weight_sync.control.epoch import SyncOptions
    from weight_sync.control.members import PublisherHandle, ReplicaHandle
    from weight_sync.device.select import get_backend
    from weight_sync.messages import CommitResult, SyncReport, reply_state
    from weight_sync.publish.publisher import WeightPublisher
    from weight_sync.publish.shards import local_shards
    from weight_sync.receive.receiver import WeightReceiver, WorkerService
    from weight_sync.vllm.compat import EXTENSION, UnsupportedVllm
    from weight_sync.vllm.replica import AsyncLLMReplica

_HOME_OF = {
    "SyncCoordinator": "control.coordinator", "SyncOptions": "control.epoch", "PublisherHandle": "control.members",
    "ReplicaHandle": "control.members", "get_backend": "device.select", "CommitResult": "messages",
    "SyncReport": "messages", "reply_state": "messages", "WeightPublisher": "publish.publisher",
    "local_shards": "publish.shards", "WeightReceiver": "receive.receiver", "WorkerService": "receive.receiver",
    "EXTENSION": "vllm.compat", "UnsupportedVllm": "vllm.compat", "AsyncLLMReplica": "vllm.replica",
    **{name: "errors" for name, kind in vars(errors).items() if isinstance(kind, type)},
}  # fmt: skip
"""Public name -> the module of this package that is imported when it is used."""
__all__ = list(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll] - for type checkers the imports above count


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'weight_sync' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value: object = getattr(import_module(f"weight_sync.{_HOME_OF[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
