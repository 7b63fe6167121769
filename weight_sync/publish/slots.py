"""Which version is in which slot, and who reads it.

            begin(v)            seal                lease
    FREE ────────────> PACKING ──────> SEALED(v) <────────> SERVING(v, leases)
      ^                   │ abort         │    release/expiry    │
      └───────────────────┘<──────────────┴──────── X ───────────┘  never while a lease lives

A sealed version stays readable until its slot is needed again, so a late replica still finds it; a version that nobody
leases may be superseded. Each slot has a generation (a seqlock): odd while being packed, and it grows whenever the slot
changes hands. A reader that was slower than its lease finds another generation afterwards and throws its bytes away.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from weight_sync.errors import LeaseExpired, PullTimeout, VersionUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable


WAIT_SLICE_S = 0.05
"""Leases also end by the clock, which wakes nobody: a waiting publisher looks again after this long."""


class SlotState(Enum):
    FREE = "free"
    PACKING = "packing"
    SEALED = "sealed"
    SERVING = "serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to read `version` from `slot` until `expires_at` (arena clock, seconds)."""

    lease_id: int
    holder: str
    version: int
    slot: int
    generation: int
    expires_at: float


@dataclass(slots=True, kw_only=True)
class Slot:
    index: int
    generation: int = 0
    version: int | None = None
    leases: dict[int, Lease] = field(default_factory=dict)

    def state(self, now: float) -> SlotState:
        if self.generation % 2:
            return SlotState.PACKING
        if self.version is None:
            return SlotState.FREE
        return SlotState.SERVING if self.live_leases(now) else SlotState.SEALED

    def live_leases(self, now: float) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.expires_at > now]


class SlotTable:
    """The state machine. Pure: time comes in as `now`, nothing waits, nothing locks."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be >= 1, got {num_slots}; 2 lets a version be packed while one is read")
        self.slots = tuple(Slot(index=index) for index in range(num_slots))
        self.num_expired = 0
        self.num_superseded = 0
        self._next_lease = 1

    def begin(self, version: int, *, now: float) -> int | None:
        """Take a slot for packing `version`: a free one, else the oldest sealed one. None if all are being read.

        Raises:
            ValueError: `version` is not newer than every sealed one.
        """
        held = [slot.version for slot in self.slots if slot.version is not None]
        if held and version <= max(held):
            raise ValueError(f"version must be > {max(held)} (the newest published), got {version}")
        by_age = sorted(self.slots, key=lambda slot: -1 if slot.version is None else slot.version)
        for slot in by_age:
            state = slot.state(now)
            if state in (SlotState.FREE, SlotState.SEALED):
                self.num_superseded += state is SlotState.SEALED
                self.num_expired += len(slot.leases)
                slot.leases.clear()
                slot.version = None
                slot.generation += 1
                return slot.index
        return None

    def seal(self, index: int, version: int) -> int:
        """The pack of `index` is complete. Returns the generation readers will find."""
        slot = self._packing(index)
        slot.generation += 1
        slot.version = version
        return slot.generation

    def abort(self, index: int) -> None:
        """The pack of `index` failed; what it holds is garbage."""
        self._packing(index).generation += 1

    def lease(self, version: int, *, holder: str, ttl_s: float, now: float) -> Lease:
        """Let `holder` read `version` for `ttl_s`. A holder has one lease: an earlier one ends, also if this raises.

        A holder that stopped waiting for an answer does not know what it was granted, so it cannot give that back.

        Raises:
            VersionUnavailable: no slot holds `version`.
        """
        self.drop(holder)
        for slot in self.slots:
            if slot.version == version:
                return self._grant(slot, holder, now + ttl_s)
        held = sorted(slot.version for slot in self.slots if slot.version is not None)
        raise VersionUnavailable(f"version {version} is not held here, held: {held}; ask for the newest of them")

    def renew(self, lease_id: int, *, ttl_s: float, now: float) -> Lease:
        """Make a lease live `ttl_s` from now.

        Raises:
            LeaseExpired: it had run out already, even if its slot was not reused yet.
        """
        for slot in self.slots:
            lease = slot.leases.get(lease_id)
            if lease is not None and lease.expires_at > now:
                renewed = self._replace(lease, now + ttl_s)
                slot.leases[lease_id] = renewed
                return renewed
        raise LeaseExpired(f"lease {lease_id} ran out before it was renewed; lease the version again")

    def release(self, lease_id: int, *, slot: int, generation: int) -> bool:
        """End a lease. True if the slot still holds what was leased, that is, if what was read is whole.

        Idempotent, and true to the seqlock: an expired lease whose slot nobody reused has read good bytes.
        """
        if not 0 <= slot < len(self.slots):
            return False
        self.slots[slot].leases.pop(lease_id, None)
        return self.slots[slot].generation == generation

    def held_version(self, version: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.version == version), None)

    def live_leases(self, now: float) -> list[Lease]:
        return [lease for slot in self.slots for lease in slot.live_leases(now)]

    def drop(self, holder: str) -> None:
        """End the lease of `holder`, if it has one."""
        for slot in self.slots:
            slot.leases = {number: lease for number, lease in slot.leases.items() if lease.holder != holder}

    def _grant(self, slot: Slot, holder: str, expires_at: float) -> Lease:
        assert slot.version is not None
        lease = Lease(
            lease_id=self._next_lease,
            holder=holder,
            version=slot.version,
            slot=slot.index,
            generation=slot.generation,
            expires_at=expires_at,
        )
        self._next_lease += 1
        slot.leases[lease.lease_id] = lease
        return lease

    @staticmethod
    def _replace(lease: Lease, expires_at: float) -> Lease:
        return Lease(
            lease_id=lease.lease_id,
            holder=lease.holder,
            version=lease.version,
            slot=lease.slot,
            generation=lease.generation,
            expires_at=expires_at,
        )

    def _packing(self, index: int) -> Slot:
        slot = self.slots[index]
        if slot.generation % 2 == 0:
            raise ValueError(f"slot {index} is not being packed; call begin first")
        return slot


class Arena:
    """A `SlotTable` shared by the learner's thread (packs) and the control thread (leases)."""

    def __init__(self, num_slots: int, *, clock: Callable[[], float]) -> None:
        self._table = SlotTable(num_slots)
        self._clock = clock
        self._changed = threading.Condition()

    def begin(self, version: int, *, deadline_s: float) -> int:
        """Wait for a slot and take it.

        Raises:
            PullTimeout: every slot stayed leased for `deadline_s`; the message says by whom.
        """
        give_up = self._clock() + deadline_s
        with self._changed:
            while True:
                now = self._clock()
                index = self._table.begin(version, now=now)
                if index is not None:
                    return index
                if now >= give_up:
                    leases = self._table.live_leases(now)
                    readers = ", ".join(f"{x.holder} reads version {x.version} in slot {x.slot}" for x in leases)
                    raise PullTimeout(
                        f"no free slot for version {version} within {deadline_s:.1f} s: {readers or 'all packed'}; "
                        "raise weight_sync.num_slots or look why these engines are slow"
                    )
                self._changed.wait(min(WAIT_SLICE_S, give_up - now))

    def seal(self, index: int, version: int) -> int:
        with self._changed:
            return self._table.seal(index, version)

    def abort(self, index: int) -> None:
        with self._changed:
            self._table.abort(index)
            self._changed.notify_all()

    def lease(self, version: int, *, holder: str, ttl_s: float) -> Lease:
        """See `SlotTable.lease`."""
        with self._changed:
            try:
                return self._table.lease(version, holder=holder, ttl_s=ttl_s, now=self._clock())
            finally:
                self._changed.notify_all()  # an earlier lease of the holder may have ended

    def renew(self, lease_id: int, *, ttl_s: float) -> Lease:
        with self._changed:
            return self._table.renew(lease_id, ttl_s=ttl_s, now=self._clock())

    def release(self, lease_id: int, *, slot: int, generation: int) -> bool:
        with self._changed:
            is_intact = self._table.release(lease_id, slot=slot, generation=generation)
            self._changed.notify_all()
            return is_intact

    def drop(self, holder: str) -> None:
        """See `SlotTable.drop`."""
        with self._changed:
            self._table.drop(holder)
            self._changed.notify_all()

    def slot_of(self, version: int) -> Slot | None:
        """The slot that holds `version`, if any."""
        with self._changed:
            return self._table.held_version(version)

    def counters(self) -> dict[str, int]:
        with self._changed:
            return {"leases_expired": self._table.num_expired, "versions_superseded": self._table.num_superseded}
