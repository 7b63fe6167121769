"""The Ray actor of one learner rank: a shell around `PolicyTrainer`."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from rollout.fork_server import take_num_threads
from trainer.errors import CheckpointError, LearnerError
from trainer.files import appears
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, but not declared

    from trainer.algorithms.advantages import GroupRewards
    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.fit import Fit
    from trainer.learner.flops import ModelFlops
    from trainer.learner.lora import PublishedShards
    from trainer.learner.policy import PolicyTrainer
    from trainer.learner.step_stats import StepResult
    from weight_sync.device.base import Backend
    from weight_sync.publish.publisher import WeightPublisher


DRIVER_MARK = "driver"
SAVING = "saving"
"""Ray's name of the thread that waits for a checkpoint; another one runs all other methods."""
Address = tuple[str, int]
"""Host and port where the ranks meet."""


@contextmanager
def captured_warnings() -> Iterator[list[logging.LogRecord]]:
    """Our own warnings and errors that are logged inside, in order; other handlers get them too."""
    handler = BufferingHandler(capacity=sys.maxsize)
    handler.setLevel(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("trainer", "rollout", "weight_sync")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def check_shared(folder: Path, *, rank: int, timeout_s: float = 10.0) -> None:
    """Read what the driver wrote in `folder`, and write there. Raises CheckpointError if this host has another one, or
    may not write."""
    share = "the ranks of a learner save into one run_dir: put it on a file system that all nodes share"
    if not appears(folder / DRIVER_MARK, timeout_s=timeout_s):
        raise CheckpointError(f"{folder.parent} on {platform.node()} is not the driver's directory; {share}")
    try:
        (folder / f"rank_{rank}").touch()
    except OSError as error:
        raise CheckpointError(f"{folder.parent} cannot be written on {platform.node()} ({error}); {share}") from error


class _LearnerState(NamedTuple):
    """What a rank has once it is set up."""

    fit: Fit
    learner: PolicyTrainer
    publisher: WeightPublisher
    description: bytes
    """Of the shards, for weight sync."""
    published: PublishedShards


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """What one rank moved between its device and the host, and what its device has left."""

    nbytes: int
    seconds: float
    free_bytes: int
    """Of the whole device, other processes included."""
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupReport:
    """How long the setup of one rank took, and its warnings."""

    seconds: dict[str, float]
    """Of each stage, in order."""
    warnings: tuple[str, ...]
    """For the driver's log; that of this process is deleted at a clean shutdown."""
    flops: ModelFlops | None
    """Of the policy; None where its shapes are not enough to know."""
    max_tokens_per_micro_batch: int
    """The same on every rank."""
    description: str
    """How the rank computes, for the driver's log."""
    shares_prefix: bool = False
    """Whether its attention computes a prompt that sequences share once."""
    stays_on_device: bool = True
    """Whether its memory need not leave the device for engines that share it; the same on every rank."""


class LearnerActor:
    """One learner rank. Life: `node_address` (rank 0 only), `setup` on all ranks at once, then the rest, `close`.
    `setup` and the methods of `PolicyTrainer` are collective, the others local."""

    def __init__(self, cfg: RunConfig, *, rank: int, world_size: int) -> None:
        from weight_sync.device.select import build, get_backend, take_devices

        name = cfg.device.name
        self._places = take_devices(name, ray)
        self._cfg, self._rank, self._world_size = cfg, rank, world_size
        # `setup` reports what is wrong with a named device: the death of an actor in its constructor is unreadable.
        make = get_backend if name == "auto" else build
        self._backend: Backend = make(name, cpu_threads=cfg.device.cpu_threads)
        self._store: TCPStore | None = None
        self._ready: _LearnerState | None = None

    def node_address(self) -> Address:
        """Open the store on this node: an address that other nodes reach, and a port that is bound from now on."""
        host = ray.util.get_node_ip_address()
        self._store = self._open_store((host, self._cfg.learner.port), is_master=True)
        return host, self._store.port

    def _open_store(self, address: Address, *, is_master: bool) -> TCPStore:
        from trainer.learner.fsdp import open_store

        timeout_s = self._cfg.learner.timeout_s
        return open_store(*address, is_master=is_master, world_size=self._world_size, timeout_s=timeout_s)

    def setup(self, address: Address, earlier_tokens: int | None = None) -> SetupReport:
        """Join the other ranks, build the model, and rehearse a step. `earlier_tokens` were those of a micro-batch
        before the run was resumed. Raises DeviceError if this process lacks a variable or the device itself, ModelError
        if the model cannot be trained, LearnerError if a micro-batch does not fit."""
        with captured_warnings() as records:
            seconds = self._set_up(address, earlier_tokens)
        return SetupReport(
            seconds=seconds,
            warnings=tuple(record.getMessage() for record in records),
            flops=self._parts.learner.flops,
            max_tokens_per_micro_batch=self._parts.fit.tokens,
            shares_prefix=self._parts.learner.layout.shares_prefix,
            description=self._parts.learner.description,
            stays_on_device=self._parts.fit.stays_on_device,
        )

    def _set_up(self, address: Address, earlier_tokens: int | None) -> dict[str, float]:
        """Returns the seconds of each stage, in order."""
        cfg, seconds, began = self._cfg, dict[str, float](), time.perf_counter()

        def end_stage(name: str) -> None:
            seconds[name] = time.perf_counter() - began - sum(seconds.values())

        import torch
        import torch.distributed as dist

        from trainer.learner.fit import fit_micro_batch
        from trainer.learner.lora import PublishedShards
        from trainer.learner.model import torch_dtype
        from trainer.learner.policy import PolicyTrainer
        from weight_sync.publish.publisher import WeightPublisher

        end_stage("imports")
        self._check_device()
        device = self._backend.set_device(self._place)
        if device.type == "cpu":
            torch.set_num_threads(cfg.device.cpu_threads)
        else:
            take_num_threads()
        dist.init_process_group(  # for one rank, too: FSDP2 has no other way to run
            self._backend.collective,
            store=self._open_store(address, is_master=False) if self._store is None else self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=cfg.learner.timeout_s),
        )
        end_stage("device and meeting")
        learner = PolicyTrainer(cfg, device=device, backend=self._backend)
        publisher = WeightPublisher(self._backend, rank=self._rank)
        published = PublishedShards(learner.model, rollout_dtype=cfg.model.rollout_dtype)
        published.refresh()  # so that replicas describe the same values
        description = publisher.describe(published.params, published.shards, published.tensors)
        end_stage("model")
        slot_bytes = (
            sum(one.numel() for one in published.tensors.values()) * torch_dtype(cfg.model.rollout_dtype).itemsize
        )
        arena_bytes = slot_bytes * cfg.weight_sync.num_slots
        # Concurrently with the start of the engines, and not in the first step.
        fit = fit_micro_batch(learner, cfg, self._backend, arena_bytes=arena_bytes, earlier=earlier_tokens)
        gc.collect()
        gc.freeze()  # what is there now stays; new cycles, which may hold memory of the device, are found as before
        if cfg.mode.shares_devices:
            self._backend.release_cached()  # an engine that starts must find its share free
        self._ready = _LearnerState(fit, learner, publisher, description, published)
        end_stage("rehearsal")
        return seconds

    def _check_device(self) -> None:
        problems = self._backend.check_env("learner", dict(os.environ))
        if problems:
            raise DeviceError("; ".join(problems))
        if (reason := self._backend.unavailable_reason()) is not None:
            raise DeviceError(f"device {self._backend.name!r} cannot be used on the learner's node: {reason}")

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        step: int,
        updates: Sequence[tuple[int, int]],
        version: int,
        group_rewards: Sequence[GroupRewards] | None = None,
    ) -> StepResult:
        return self._parts.learner.train_step(
            micro_batches, step=step, updates=updates, version=version, group_rewards=group_rewards
        )

    def check_directory(self, folder: str) -> None:
        """As `check_shared`. Also before `setup`."""
        check_shared(Path(folder), rank=self._rank)

    def save(self, path: str, step: int, in_background: bool = False) -> None:
        self._parts.learner.save(Path(path), step=step, in_background=in_background)

    @ray.method(concurrency_group=SAVING)  # while `train_step` runs
    def wait_saved(self) -> None:
        self._parts.learner.wait_saved()

    def load(self, path: str) -> int:
        return self._parts.learner.load(Path(path))

    def export_hf(self, path: str) -> None:
        self._parts.learner.export_hf(Path(path))

    def device_id(self) -> str:
        """Of its device, for an engine that shares it. Also before `setup`."""
        return self._backend.device_id(self._place, os.environ)

    @property
    def _place(self) -> int:
        return self._places[0] if self._places else 0

    def offload(self) -> OffloadReport:
        """Move weights and moments to the host, for an engine on the same device."""
        return self._moved(self._parts.learner.offload.to_host)

    def onload(self) -> OffloadReport:
        """Undo `offload`."""
        return self._moved(self._parts.learner.offload.to_device)

    def _moved(self, move: Callable[[], None]) -> OffloadReport:
        nbytes, began = self._parts.learner.offload.nbytes, time.perf_counter()
        move()
        seconds = time.perf_counter() - began
        free, total = self._backend.memory_info()
        return OffloadReport(nbytes=nbytes, seconds=seconds, free_bytes=free, total_bytes=total)

    def ws_describe(self) -> bytes:
        """What this rank can publish. Needs no memory on the device."""
        return self._parts.description

    def ws_open(self, request: bytes) -> bytes:
        return self._parts.publisher.open(request)

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        """Pack the current weights as `version`; the optimizer may continue when this returns."""
        parts = self._parts
        parts.learner.offload.require_onloaded("ws_publish")
        parts.published.refresh()
        return parts.publisher.publish(version, parts.published.tensors, deadline_s=deadline_s)

    def ws_digests(self, version: int, deadline_s: float) -> bytes:
        return self._parts.publisher.digests(version, deadline_s=deadline_s)

    def ws_close(self) -> None:
        if self._ready is not None:
            self._ready.publisher.close()

    def close(self) -> None:
        """Stop publishing and leave the process group. Idempotent."""
        import torch.distributed as dist

        self.ws_close()
        if self._ready is not None:
            with suppress(CheckpointError):
                self._ready.learner.wait_saved()  # its thread may be in a collective
        self._ready = None
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _parts(self) -> _LearnerState:
        if self._ready is None:
            raise LearnerError(f"learner rank {self._rank} is not set up (or closed already); call setup first")
        return self._ready


def learner_actor() -> Any:
    """`LearnerActor` as a Ray actor class: `.options(...).remote(cfg, rank=0, world_size=2)`."""
    remote: Any = ray.remote  # its types do not know of groups
    return remote(concurrency_groups={SAVING: 1})(LearnerActor)
