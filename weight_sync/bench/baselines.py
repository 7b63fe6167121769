"""What weight sync is compared with: the two ways in common use, each in a file of its own, over one process group.

Both need what weight sync does without: the full tensor on a learner, a collective that all engines take part in, and
engines that stand still meanwhile. They are written as their users write them, on fast collectives, cast before the
gather, and without a Python call more than they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weight_sync.bench import param_broadcast, rank0_broadcast
from weight_sync.bench.party import Party

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.plan.types import ParamMeta

BASELINES = ("rank0_broadcast", "param_broadcast")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """How a process joins."""

    port: int
    rank: int
    num_learners: int
    world: int
    timeout_s: float
    bucket_bytes: int


def host_store(timeout_s: float) -> Any:
    """The meeting point, on an ephemeral port (`.port`) of this process."""
    return _store(0, timeout_s, is_master=True)


def _store(port: int, timeout_s: float, *, is_master: bool) -> Any:
    make: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, but torch does not list it
    timeout = timedelta(seconds=timeout_s)
    return make("127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def join(spec: GroupSpec, backend: Backend, device: torch.device, params: Sequence[ParamMeta]) -> Party:
    """Collective over all processes."""
    dist.init_process_group(
        collective_of(backend),
        store=_store(spec.port, spec.timeout_s, is_master=False),
        rank=spec.rank,
        world_size=spec.world,
        timeout=timedelta(seconds=spec.timeout_s),
        device_id=None if device.type == "cpu" else device,
    )
    learners = dist.new_group(list(range(spec.num_learners)))
    fan_out = dist.new_group([0, *range(spec.num_learners, spec.world)])
    return Party(
        rank=spec.rank,
        num_learners=spec.num_learners,
        device=device,
        dtype=getattr(torch, params[0].dtype),
        params=params,
        learners=learners,
        fan_out=fan_out,
        bucket_bytes=spec.bucket_bytes,
    )


def collective_of(backend: Backend) -> str:
    """The part of a backend's `collective` ("name", or "device:name,...") that serves its own devices."""
    parts = dict(part.split(":") for part in backend.collective.split(",") if ":" in part)
    return parts.get(backend.torch_device, backend.collective)


def leave() -> None:
    dist.destroy_process_group()


def send(name: str, party: Party, shards: Mapping[str, torch.Tensor]) -> None:
    """A learner's side of one transfer."""
    _module(name).send(party, shards)


def receive(name: str, party: Party, load_weights: Any) -> None:
    """An engine worker's side of one transfer."""
    _module(name).receive(party, load_weights)


def _module(name: str) -> Any:
    match name:
        case "rank0_broadcast":
            return rank0_broadcast
        case "param_broadcast":
            return param_broadcast
        case _:
            raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {name!r}")
