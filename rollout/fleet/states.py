"""Which engines are there, and which of them take requests of training: the rules, and what workers receive of them.

    starting ──joined──> live ──pin──> pinned            pinned: an evaluation holds its version; what runs there
        │                 │ └──<──unpin──┘               continues, and nothing new of training comes
        └──────lost───────┴──────lost───────> lost ──restart──> starting, as the next incarnation
                                                └────retire──> retired: no restart is left, or none is needed

The one table is the driver's (`trainer.driver.fleet.Fleet`); everything here is pure. An event of an older incarnation
comes too late and is ignored: it is about an engine that has been replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.interface import EngineStatus


EngineState = Literal["starting", "live", "pinned", "lost", "retired"]
EventKind = Literal["joined", "lost", "pin", "unpin", "restart", "retire"]
TRANSITIONS: dict[tuple[EngineState, EventKind], EngineState] = {
    ("starting", "joined"): "live",
    ("starting", "lost"): "lost",
    ("live", "lost"): "lost",
    ("live", "pin"): "pinned",
    ("pinned", "lost"): "lost",
    ("pinned", "pin"): "pinned",
    ("pinned", "unpin"): "live",
    ("lost", "restart"): "starting",
    ("lost", "retire"): "retired",
}
"""Every other pair is ignored: the first reason of a loss is kept, and the lost are neither pinned nor unpinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One row of the table."""

    incarnation: int = 0
    """How many engines had this place before."""
    state: EngineState = "live"
    reason: str = ""
    """Why it was lost; kept while the next one starts."""
    num_pins: int = 0

    @property
    def is_there(self) -> bool:
        """It has the weights of some version and generates."""
        return self.state in ("live", "pinned")


def apply(record: EngineRecord, event: EventKind, *, incarnation: int, reason: str = "") -> EngineRecord | None:
    """The row after an event of the engine of this `incarnation`, or None if it is ignored; `reason` is of a loss."""
    state = TRANSITIONS.get((record.state, event))
    if state is None or incarnation != record.incarnation:
        return None
    num_pins = record.num_pins + {"pin": 1, "unpin": -1}.get(event, -record.num_pins)
    return EngineRecord(
        incarnation=incarnation + (event == "restart"),
        state="pinned" if num_pins else state,
        reason={"lost": reason, "joined": ""}.get(event, record.reason),
        num_pins=num_pins,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine, as the driver reports it to a rollout worker."""

    incarnation: int
    state: EngineState
    reason: str = ""
    load: EngineStatus | None = None
    """Of the last poll; None if the engine did not answer it."""
    num_polls: int = 0
    """Polls that this engine answered: a load that was sent before is nothing new."""
    num_elsewhere: int = 0
    """Requests that other workers have there, by their last reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """All engines, as the driver reports them to a rollout worker."""

    epoch: int
    """Raised with every change of the table."""
    engines: Mapping[str, EngineView]
    handles: Mapping[str, Any]
    """Actors of engines that this worker does not have yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A rollout worker's reply to a view. Counts are since its start."""

    limits: Mapping[str, int]
    """Engine -> most requests that it has there at once; only engines with a limit."""
    in_flight: Mapping[str, int]
    """Engine -> its requests there."""
    num_queued: int
    """Its requests that wait for room."""
    migrated_requests: int = 0
    """How often it moved a request so that its engine is free."""
    migrated_tokens: int = 0
    """Computed again for that."""
    recovered_requests: int = 0
    """Requests that continued elsewhere when their engine was lost."""
    recovered_tokens: int = 0
    """Tokens of responses that they kept."""
    lost_tokens: int = 0
    """Generated for groups that came to nothing here."""
    hanging_threads: int = 0
    """Threads of tools and agents that still run calls that took too long."""
    lost_engines: Mapping[str, tuple[int, str]]
    """Engine -> (incarnation, why this worker sends it nothing more)."""
