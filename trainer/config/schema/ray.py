"""`ray`: the cluster that runs the actors."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    address: str = key("local", "`local` starts a private cluster for this run; `auto` or an address joins one.")
    num_cpus: int = key(0, "Logical CPUs of the private cluster; 0 means enough for the actors asked for.", ge=0)
    object_store_gib: float = key(0.25, "Object store of the private cluster, GiB.", gt=0)
    placement_timeout_s: float = key(
        60.0, "Longest wait, on a cluster that is joined, until the resources of all actors are set aside.", gt=0
    )
