"""The Ray actor of one learner rank: a shell around `PolicyTrainer`."""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from trainer.errors import LearnerError
from weight_sync.device.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from trainer.algorithms.advantages import GroupRewards
    from trainer.config.schema import ModelConfig, RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.fsdp import Rendezvous
    from trainer.learner.policy import PolicyTrainer
    from trainer.learner.step_stats import StepResult
    from weight_sync.device.base import Backend
    from weight_sync.publisher import WeightPublisher


OWN_LOGGERS = ("trainer", "rollout", "weight_sync")


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """The texts of our own warnings and errors that are logged inside, in order; other handlers get them too."""
    keeper = _Keeper(logging.WARNING)
    loggers = [logging.getLogger(name) for name in OWN_LOGGERS]
    for logger in loggers:
        logger.addHandler(keeper)
    try:
        yield keeper.texts
    finally:
        for logger in loggers:
            logger.removeHandler(keeper)


class _Keeper(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


Address = tuple[str, int]
"""Host and port where the ranks meet."""


@dataclass(slots=True, kw_only=True)
class _LearnerState:
    """What a rank has once it is set up."""

    learner: PolicyTrainer
    publisher: WeightPublisher
    description: bytes
    """What weight sync is told of the shards."""
    tensors: dict[str, torch.Tensor]
    """Local shards, live."""
    refresh: Callable[[], None]
    """Brings `tensors` up to date with the parameters, where they do not share memory."""


def _described(learner: PolicyTrainer, publisher: WeightPublisher, model: ModelConfig) -> _LearnerState:
    """A learner that is on its device, and the views of its shards that will be published."""
    from trainer.learner.lora import AdapterSource
    from weight_sync.layout import local_shards

    def nothing() -> None: ...

    refresh = nothing
    if model.lora.rank:
        source = AdapterSource(learner.model, rollout_dtype=model.rollout_dtype)
        params, shards, tensors, refresh = source.params, source.shards, source.tensors, source.refresh
    else:
        params, shards, tensors = local_shards(learner.model, rollout_dtype=model.rollout_dtype)
    description = publisher.describe(params, shards)
    return _LearnerState(
        learner=learner, publisher=publisher, description=description, tensors=tensors, refresh=refresh
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """What one rank moved between its device and the host, and what its device has left."""

    nbytes: int
    seconds: float
    free_bytes: int
    """Of the whole device, whoever else is on it."""
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupReport:
    """What the setup of one rank took, and warned of."""

    seconds: dict[str, float]
    """Of each stage, in order."""
    warnings: tuple[str, ...]
    """For the driver's log; that of this process goes when the run ends in order."""


class LearnerActor:
    """One learner rank. Life: `node_address` (rank 0 only), `setup` on all ranks at once, then the rest, `close`.

    Methods other than `node_address`, `ws_*` and `close` are collective.
    """

    def __init__(self, cfg: RunConfig, *, rank: int, world_size: int) -> None:
        from weight_sync.device.select import build, get_backend
        from weight_sync.device.visibility import show_own_devices

        name = cfg.device.name
        show_own_devices(name, ray)
        self._cfg, self._rank, self._world_size = cfg, rank, world_size
        # What is wrong with a device that is named `setup` says: an actor that is not made dies, and says it at length.
        make = get_backend if name == "auto" else build
        self._backend: Backend = make(name, cpu_threads=cfg.device.cpu_threads)
        self._rendezvous: Rendezvous | None = None
        self._ready: _LearnerState | None = None

    def node_address(self) -> Address:
        """Open the meeting point on this node: an address other nodes reach, and a port that is bound from now on."""
        from trainer.learner.fsdp import Rendezvous

        host = ray.util.get_node_ip_address()
        learner = self._cfg.learner
        self._rendezvous = Rendezvous.host_at(
            host, port=learner.port, world_size=self._world_size, timeout_s=learner.timeout_s
        )
        return self._rendezvous.host, self._rendezvous.port

    def setup(self, address: Address) -> SetupReport:
        """Join the other ranks, build the model and compile it.

        Raises:
            DeviceError: this process lacks a variable its device needs, or the device is not here.
            ModelError: the model cannot be trained.
        """
        with captured_warnings() as warnings:
            seconds = self._set_up(address)
        return SetupReport(seconds=seconds, warnings=tuple(warnings))

    def _set_up(self, address: Address) -> dict[str, float]:
        """Returns the seconds of each stage, in order."""
        watch = [time.perf_counter()]
        import torch

        from trainer.learner.fsdp import Rendezvous, open_process_group
        from trainer.learner.policy import PolicyTrainer, largest_micro_batch
        from weight_sync.publisher import WeightPublisher

        watch.append(time.perf_counter())
        self._check_device()
        device = self._backend.set_device(0)  # Ray shows an actor only its own device
        if device.type == "cpu":
            torch.set_num_threads(self._cfg.device.cpu_threads)
        timeout_s, world_size = self._cfg.learner.timeout_s, self._world_size
        if self._rendezvous is None:
            self._rendezvous = Rendezvous.join(*address, world_size=world_size, timeout_s=timeout_s)
        open_process_group(
            self._rendezvous, backend=self._backend, rank=self._rank, world_size=world_size, timeout_s=timeout_s
        )
        watch.append(time.perf_counter())
        learner = PolicyTrainer(self._cfg, rank=self._rank, world_size=world_size, device=device, backend=self._backend)
        publisher = WeightPublisher(self._backend, rank=self._rank)
        self._ready = _described(learner, publisher, self._cfg.model)
        watch.append(time.perf_counter())
        stages = ["imports", "device and meeting", "model"]
        if self._cfg.learner.compile:  # beside the start of the engines, and not in the first step
            learner.warmup_compile(largest_micro_batch(self._cfg))
            watch.append(time.perf_counter())
            stages.append("compiling")
        return {stage: end - begin for stage, (begin, end) in zip(stages, pairwise(watch), strict=True)}

    def _check_device(self) -> None:
        problems = self._backend.check_env("learner", dict(os.environ))
        if problems:
            raise DeviceError("; ".join(problems))
        if (reason := self._backend.why_unavailable()) is not None:
            raise DeviceError(f"device {self._backend.name!r} cannot be used on the learner's node: {reason}")

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        step: int,
        group_rewards: Sequence[GroupRewards] | None = None,
        num_loss_tokens: int = 0,
    ) -> StepResult:
        """See `PolicyTrainer.train_step`."""
        return self._parts.learner.train_step(
            micro_batches, step=step, group_rewards=group_rewards, num_loss_tokens=num_loss_tokens
        )

    def save(self, path: str, step: int) -> None:
        """See `PolicyTrainer.save`."""
        self._parts.learner.save(Path(path), step=step)

    def load(self, path: str) -> int:
        """See `PolicyTrainer.load`."""
        return self._parts.learner.load(Path(path))

    def export_hf(self, path: str) -> None:
        """See `PolicyTrainer.export_hf`."""
        self._parts.learner.export_hf(Path(path))

    def visible_devices(self) -> str:
        """What this process sees, as the backend's variable writes it, its own device first. Before `setup`, too."""
        name = self._backend.visible_devices_var
        return "" if name is None else os.environ.get(name, "")

    def offload(self) -> OffloadReport:
        """Move weights and moments to the host, for an engine on the same device. Local, not collective."""
        return self._moved(self._parts.learner.offload.to_host)

    def onload(self) -> OffloadReport:
        """Undo `offload`. Local, not collective."""
        return self._moved(self._parts.learner.offload.to_device)

    def _moved(self, move: Callable[[], None]) -> OffloadReport:
        began = time.perf_counter()
        move()
        seconds = time.perf_counter() - began
        free, total = self._backend.memory_info()
        return OffloadReport(
            nbytes=self._parts.learner.offload.nbytes, seconds=seconds, free_bytes=free, total_bytes=total
        )

    def ws_describe(self) -> bytes:
        """What this rank can publish. Needs no memory on the device."""
        return self._parts.description

    def ws_open(self, request: bytes) -> bytes:
        return self._parts.publisher.open(request)

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        """Pack the current weights as `version`; the optimizer may go on when this returns."""
        parts = self._parts
        parts.learner.offload.require_onloaded("ws_publish")
        parts.refresh()
        return parts.publisher.publish(version, parts.tensors, deadline_s=deadline_s)

    def ws_digests(self, version: int) -> bytes:
        return self._parts.publisher.digests(version)

    def ws_close(self) -> None:
        if self._ready is not None:
            self._ready.publisher.close()

    def close(self) -> None:
        """Stop publishing and leave the process group. Idempotent."""
        from trainer.learner.fsdp import close_process_group

        self.ws_close()
        self._ready = None
        close_process_group()

    @property
    def _parts(self) -> _LearnerState:
        if self._ready is None:
            raise LearnerError(f"learner rank {self._rank} is not set up (or closed already); call setup first")
        return self._ready


def learner_actor() -> Any:
    """`LearnerActor` as a Ray actor class: `.options(...).remote(cfg, rank=0, world_size=2)`."""
    return ray.remote(LearnerActor)
