"""`weight_sync`: how new weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    transport: Literal["auto", "ipc", "nccl", "hccl", "shm", "gloo"] = key(
        "auto",
        "Data plane: `ipc` maps device memory of the same host, `nccl` (also RCCL) and `hccl` let learners send from "
        "device to device on any host, `shm` goes through shared host memory, `gloo` sends through host memory; `auto` "
        "lets every engine worker take the fastest that a probe proves to work, learner by learner.",
    )
    relay: Literal["auto", "off"] = key(
        "auto",
        "Whether engines hand a version on to each other: where they outnumber the learners, and so that every byte "
        "enters a node once. Needs staged commits.",
    )
    commit: Literal["auto", "staged", "inplace"] = key(
        "auto",
        "`staged` pulls beside generation and stops it for a local copy; `inplace` pulls while stopped and "
        "needs no memory; `auto` takes `staged` when the shadow fits.",
    )
    num_slots: int = key(2, "Arena slots per learner rank.", ge=1, le=4)
    timeout_s: float = key(120.0, "Deadline of one sync, shared by all parties.", gt=0)
    verify: bool = key(True, "Check digests of what arrived before it is committed.")
    self_test: bool = key(True, "At start, read the weights back from the engines and compare them bit for bit.")
