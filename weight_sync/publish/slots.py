"""Which version is in which slot of a learner rank, and for how long it must stay there.

    FREE ──begin(v)──> PACKING ──seal──> SEALED <──pin / unpin, or its time is over──> PINNED
     ^                  ^  │                │
     └─────── abort ────┼──┘                │
                        └──── begin(w) ─────┘      a newer version needs the slot; never while it is pinned

The coordinator pins a version once per rank, however many workers read it. A sealed version stays readable until its
slot is needed again, so a late replica still finds it. The generation of a slot grows whenever it is packed again: a
reader compares it after its last byte, and throws away what it read if the slot was packed under it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from weight_sync import deadlines
from weight_sync.errors import PullTimeout, VersionUnavailable
from weight_sync.messages import Pinned

if TYPE_CHECKING:
    from collections.abc import Callable


class SlotState(Enum):
    FREE = "free"
    PACKING = "packing"
    """Being packed or sealed: not readable yet."""
    SEALED = "sealed"
    PINNED = "pinned"


TRANSITIONS = {
    (SlotState.FREE, "begin"): SlotState.PACKING,
    (SlotState.PACKING, "seal"): SlotState.SEALED,
    (SlotState.PACKING, "abort"): SlotState.FREE,
    (SlotState.SEALED, "begin"): SlotState.PACKING,
    (SlotState.SEALED, "pin"): SlotState.PINNED,
    (SlotState.PINNED, "pin"): SlotState.PINNED,
    (SlotState.PINNED, "unpin"): SlotState.SEALED,
    (SlotState.PINNED, "expire"): SlotState.SEALED,
}
"""Everything else is refused."""


@dataclass(slots=True)
class Slot:
    index: int
    state: SlotState = SlotState.FREE
    generation: int = 0
    version: int | None = None
    """What it holds, or is about to hold; None if it is free."""
    pinned_until: float = 0.0
    digests: tuple[int, ...] = ()
    """Of each range of this rank, once sealed; empty if the run does not verify."""
    seal_s: float = 0.0

    def apply(self, event: str) -> None:
        """The only writer of `state`."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise ValueError(f"slot {self.index} is {self.state.value}, which does not allow {event}")
        self.state = after


class SlotTable:
    """Shared by the learner's thread, which packs, the one that seals, and the control thread, which pins."""

    def __init__(self, num_slots: int, *, clock: Callable[[], float]) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be >= 1, got {num_slots}; 2 lets a version be packed while one is read")
        self.slots = tuple(Slot(index) for index in range(num_slots))
        self.num_expired = 0
        self.num_superseded = 0
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, float, Future[Pinned]]] = []
        """(version, ttl_s, answer) of pins that came before the seal."""
        self._failed: tuple[int, str] | None = None
        """The last version that could not be sealed, and why."""

    def begin(self, version: int, *, deadline_s: float) -> int:
        """Take a slot for `version`, a free one or the oldest that is not pinned; waits for one.

        Raises:
            ValueError: `version` is not newer than every sealed one.
            PullTimeout: every slot stayed pinned for `deadline_s`.
        """
        deadline = self._clock() + deadline_s
        with self._changed:
            while (index := self.try_begin(version)) is None:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    raise PullTimeout(
                        f"no free slot for version {version} within {deadline_s:.1f} s: {self._readers()}; raise "
                        "weight_sync.num_slots or find out why the engines are slow"
                    )
                # Pins also end by the clock, which wakes nobody.
                self._changed.wait(min(deadlines.LOOK_S, left_s))
        return index

    def try_begin(self, version: int) -> int | None:
        """As `begin`; None instead of waiting."""
        with self._changed:
            self._expire()
            held = [slot.version for slot in self.slots if slot.version is not None]
            if held and version <= max(held):
                raise ValueError(f"version must be > {max(held)} (the newest published), got {version}")
            by_age = sorted(self.slots, key=lambda slot: -1 if slot.version is None else slot.version)
            slot = next((slot for slot in by_age if (slot.state, "begin") in TRANSITIONS), None)
            if slot is None:
                return None
            self.num_superseded += slot.state is SlotState.SEALED
            slot.apply("begin")
            slot.generation += 1
            slot.version = version
            return slot.index

    def seal(self, index: int, *, digests: tuple[int, ...] = (), seal_s: float = 0.0) -> None:
        """The slot can be read. Answers the pins that wait for its version."""
        with self._changed:
            slot = self.slots[index]
            slot.apply("seal")
            slot.digests, slot.seal_s = digests, seal_s
            answers = [(future, self._pin(slot, ttl_s)) for ttl_s, future in self._take_waiting(slot.version)]
        for future, pinned in answers:
            future.set_result(pinned)

    def abort(self, index: int, why: str) -> None:
        """Packing or sealing failed; what the slot holds is garbage. Fails the pins that wait for its version."""
        with self._changed:
            slot = self.slots[index]
            slot.apply("abort")
            assert slot.version is not None
            self._failed = (slot.version, why)
            waiting = self._take_waiting(slot.version)
            slot.version = None
            self._changed.notify_all()
        for _, future in waiting:
            future.set_exception(VersionUnavailable(why))

    def pin(self, version: int, ttl_s: float) -> Future[Pinned]:
        """Keep `version` for `ttl_s` from now, or from its seal; a repeated pin counts anew.

        Raises (or answers with):
            VersionUnavailable: no slot holds it; it could not be sealed; or it was unpinned before it was sealed.
        """
        answer: Future[Pinned] = Future()
        with self._changed:
            slot = self.slot_of(version)
            if slot is None:
                if self._failed is not None and self._failed[0] == version:
                    raise VersionUnavailable(self._failed[1])
                held = sorted(slot.version for slot in self.slots if slot.version is not None)
                raise VersionUnavailable(
                    f"version {version} is not held here, held: {held}; ask for the newest of them"
                )
            if slot.state is SlotState.PACKING:
                self._waiting.append((version, ttl_s, answer))
            else:
                answer.set_result(self._pin(slot, ttl_s))
        return answer

    def unpin(self, version: int) -> None:
        """Nobody reads `version` any more. Idempotent."""
        with self._changed:
            slot = self.slot_of(version)
            if slot is not None and slot.state is SlotState.PINNED:
                slot.apply("unpin")
            waiting = self._take_waiting(version)
            self._changed.notify_all()
        for _, future in waiting:
            future.set_exception(VersionUnavailable(f"version {version} was unpinned before it was sealed"))

    def holding(self, index: int, generation: int) -> Slot | None:
        """The slot, if it still holds what it held in this generation, that is, if what was read of it is whole."""
        if not 0 <= index < len(self.slots):
            return None
        with self._changed:
            slot = self.slots[index]
            return slot if slot.generation == generation else None

    def slot_of(self, version: int) -> Slot | None:
        """The slot that holds `version`, or is being packed with it."""
        with self._changed:
            self._expire()
            return next((slot for slot in self.slots if slot.version == version), None)

    def counters(self) -> dict[str, int]:
        return {"pins_expired": self.num_expired, "versions_superseded": self.num_superseded}

    def _pin(self, slot: Slot, ttl_s: float) -> Pinned:
        slot.apply("pin")
        slot.pinned_until = self._clock() + ttl_s
        return Pinned(slot=slot.index, generation=slot.generation, seal_s=slot.seal_s)

    def _expire(self) -> None:
        now = self._clock()
        for slot in self.slots:
            if slot.state is SlotState.PINNED and slot.pinned_until <= now:
                self.num_expired += 1
                slot.apply("expire")

    def _take_waiting(self, version: int | None) -> list[tuple[float, Future[Pinned]]]:
        taken = [(ttl_s, future) for waited, ttl_s, future in self._waiting if waited == version]
        self._waiting = [entry for entry in self._waiting if entry[0] != version]
        return taken

    def _readers(self) -> str:
        now = self._clock()
        return ", ".join(
            f"version {slot.version} in slot {slot.index} is {slot.state.value}"
            + (f" for another {slot.pinned_until - now:.1f} s" if slot.state is SlotState.PINNED else "")
            for slot in self.slots
        )
