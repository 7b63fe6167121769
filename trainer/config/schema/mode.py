"""`mode`: how far generation may run ahead of learning, and whether both use the same devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeConfig:
    name: Literal["async", "one_step_off", "sync", "colocated"] = key(
        "async",
        "`colocated`: learners and engines take turns on the same devices (accelerators have one learner rank and one "
        "engine worker each). All others have devices of their own for both, and differ by `max_staleness` alone.",
    )
    max_staleness: int = key(
        1, "S: policy versions a trained group may be old. 0 is synchronous on-policy training.", ge=0
    )
    in_flight: Literal["keep", "recompute", "abort"] = key(
        "keep",
        "What happens to running requests when new weights are committed: `keep` lets them go on with the cache they "
        "have, `recompute` computes their cache again under the new weights, `abort` gives them back; they go on from "
        "their prefix as new requests. [Which one](staleness.md#running-requests-at-a-commit).",
    )

    @property
    def shares_devices(self) -> bool:
        return self.name == "colocated"
