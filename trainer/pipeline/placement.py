"""Which actor needs which resources. Pure: decides, starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

ROLLOUT_WORKER_CPUS = 0.5
"""Rollout workers wait most of the time; two share a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Resources of each kind of actor, as keyword arguments for `actor.options(...)`."""

    learner: dict[str, Any]
    engine: dict[str, Any]
    rollout_worker: dict[str, Any]
    num_devices: int
    """Accelerators needed in all; 0 on a backend whose devices are not a Ray resource."""
    num_cpus: float
    """Logical CPUs needed in all."""


def plan_placement(cfg: RunConfig, *, resource: str | None) -> Placement:
    """Resources for the actors of a run. `resource` is what Ray calls one device; None means plain CPUs."""
    ranks, replicas, tp = cfg.learner.num_ranks, cfg.rollout.num_replicas, cfg.rollout.tensor_parallel_size
    threads = cfg.device.cpu_threads
    if resource is None:
        learner, engine = {"num_cpus": threads}, {"num_cpus": threads * tp}
        num_devices, compute_cpus = 0, threads * (ranks + replicas * tp)
    else:
        learner, engine = _devices(resource, 1), _devices(resource, tp)
        num_devices, compute_cpus = ranks + replicas * tp, ranks + replicas
    return Placement(
        learner=learner,
        engine=engine,
        rollout_worker={"num_cpus": ROLLOUT_WORKER_CPUS},
        num_devices=num_devices,
        num_cpus=compute_cpus + ROLLOUT_WORKER_CPUS * cfg.rollout.num_workers,
    )


def check_fits(cfg: RunConfig, placement: Placement, *, backend: str, num_devices: int, where: str) -> None:
    """Raises ConfigurationError if more accelerators are asked for than `where` (this host, the cluster) has."""
    if placement.num_devices <= num_devices:
        return
    ranks, replicas, tp = cfg.learner.num_ranks, cfg.rollout.num_replicas, cfg.rollout.tensor_parallel_size
    raise ConfigurationError(
        [
            Problem(
                key="learner.num_ranks + rollout.num_replicas * rollout.tensor_parallel_size",
                got=f"{ranks} + {replicas} * {tp} = {placement.num_devices}",
                allowed=f"{where} has {num_devices} {backend} device{'' if num_devices == 1 else 's'}",
                do="ask for fewer ranks or replicas, or show more devices",
            )
        ]
    )


def _devices(resource: str, count: int) -> dict[str, Any]:
    if resource == "GPU":
        return {"num_gpus": count, "num_cpus": 1}
    return {"resources": {resource: count}, "num_cpus": 1}
