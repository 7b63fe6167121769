from __future__ import annotations

import contextlib
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.errors import LeaseExpired, PullTimeout, VersionUnavailable
from weight_sync.publish import slots as arena_module
from weight_sync.publish.slots import Arena, SlotState, SlotTable


def published(table: SlotTable, version: int, now: float = 0.0) -> int:
    slot = table.begin(version, now=now)
    assert slot is not None
    table.seal(slot, version)
    return slot


def test_states_follow_the_diagram() -> None:
    table = SlotTable(1)
    slot = table.slots[0]
    assert slot.state(0.0) is SlotState.FREE
    assert table.begin(1, now=0.0) == 0
    assert slot.state(0.0) is SlotState.PACKING
    table.seal(0, 1)
    assert slot.state(0.0) is SlotState.SEALED
    lease = table.lease(1, holder="a", ttl_s=5.0, now=0.0)
    assert slot.state(0.0) is SlotState.SERVING
    assert table.release(lease.lease_id, slot=0, generation=lease.generation)
    assert slot.state(0.0) is SlotState.SEALED


def test_leased_slot_is_never_packed() -> None:
    table = SlotTable(2)
    published(table, 1)
    published(table, 2)
    table.lease(1, holder="a", ttl_s=5.0, now=0.0)
    assert published(table, 3) == 1  # version 2, newer but unread, gives way
    table.lease(3, holder="b", ttl_s=5.0, now=0.0)
    assert table.begin(4, now=0.0) is None


def test_version_that_nobody_leased_is_superseded() -> None:
    table = SlotTable(1)
    published(table, 1)
    published(table, 2)
    assert table.num_superseded == 1
    with pytest.raises(VersionUnavailable, match=r"version 1 is not held here, held: \[2\]"):
        table.lease(1, holder="a", ttl_s=1.0, now=0.0)


def test_newest_version_stays_while_an_older_slot_can_be_taken() -> None:
    table = SlotTable(2)
    published(table, 1)
    published(table, 2)
    assert published(table, 3) == 0
    assert table.held_version(2) is not None


def test_expired_lease_frees_the_slot_and_the_slow_reader_notices() -> None:
    table = SlotTable(1)
    published(table, 1)
    lease = table.lease(1, holder="slow", ttl_s=5.0, now=0.0)
    assert table.begin(2, now=4.9) is None
    assert table.begin(2, now=5.0) == 0
    assert not table.release(lease.lease_id, slot=0, generation=lease.generation)
    assert table.num_expired == 1


def test_reader_that_outlived_its_lease_is_whole_if_nobody_reused_the_slot() -> None:
    table = SlotTable(1)
    published(table, 1)
    lease = table.lease(1, holder="slow", ttl_s=5.0, now=0.0)
    with pytest.raises(LeaseExpired):
        table.renew(lease.lease_id, ttl_s=5.0, now=6.0)
    assert table.release(lease.lease_id, slot=0, generation=lease.generation)


def test_renewed_lease_lives_longer() -> None:
    table = SlotTable(1)
    published(table, 1)
    lease = table.lease(1, holder="a", ttl_s=5.0, now=0.0)
    table.renew(lease.lease_id, ttl_s=5.0, now=4.0)
    assert table.begin(2, now=8.9) is None
    assert table.begin(2, now=9.0) == 0


def test_a_holder_has_one_lease() -> None:
    """It may not know of the first: it stopped waiting for the answer."""
    table = SlotTable(2)
    published(table, 1)
    published(table, 2)
    table.lease(1, holder="a", ttl_s=5.0, now=0.0)
    newest = table.lease(2, holder="a", ttl_s=5.0, now=0.0)
    other = table.lease(2, holder="b", ttl_s=5.0, now=0.0)
    assert table.live_leases(0.0) == [newest, other]
    assert table.begin(3, now=0.0) == 0


def test_a_holder_that_asks_for_what_is_gone_has_no_lease() -> None:
    table = SlotTable(2)
    published(table, 2)
    table.lease(2, holder="a", ttl_s=5.0, now=0.0)
    with pytest.raises(VersionUnavailable):
        table.lease(1, holder="a", ttl_s=5.0, now=0.0)
    assert table.live_leases(0.0) == []


def test_failed_pack_leaves_nothing_to_read() -> None:
    table = SlotTable(1)
    slot = table.begin(1, now=0.0)
    assert slot == 0
    table.abort(slot)
    with pytest.raises(VersionUnavailable):
        table.lease(1, holder="a", ttl_s=1.0, now=0.0)
    assert published(table, 1) == 0


def test_older_version_is_refused() -> None:
    table = SlotTable(2)
    published(table, 5)
    with pytest.raises(ValueError, match="version must be > 5"):
        table.begin(5, now=0.0)


actions = st.lists(st.tuples(st.sampled_from(["publish", "lease", "release", "wait"]), st.integers(0, 3)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(num_slots=st.integers(1, 3), script=actions)
def test_read_is_called_whole_exactly_if_the_bytes_are_the_leased_ones(num_slots: int, script: list) -> None:
    """Slow reference: a list of what each slot truly holds; a reader compares what it leased with that."""
    table, contents, leases, now, version = SlotTable(num_slots), [-1] * num_slots, [], 0.0, 0
    num_leases = 0
    for action, number in script:
        if action == "publish":
            version += 1
            slot = table.begin(version, now=now)
            if slot is not None:
                assert not table.slots[slot].live_leases(now)
                contents[slot] = version
                table.seal(slot, version)
        elif action == "lease" and version in contents:
            num_leases += 1
            leases.append(table.lease(version, holder=f"r{num_leases}", ttl_s=2.0, now=now))
        elif action == "release" and leases:
            lease = leases.pop(number % len(leases))
            is_whole = table.release(lease.lease_id, slot=lease.slot, generation=lease.generation)
            assert is_whole == (contents[lease.slot] == lease.version)
        elif action == "wait":
            now += 1.0
        for lease in leases:
            if lease.expires_at > now:
                assert contents[lease.slot] == lease.version, "a slot under a live lease was packed"


def test_publisher_that_finds_no_slot_says_who_reads() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.3
        return now[0]

    arena = Arena(1, clock=clock)
    arena.seal(arena.begin(1, deadline_s=1.0), 1)
    arena.lease(1, holder="replica7/0", ttl_s=1000.0)
    with pytest.raises(PullTimeout, match="replica7/0 reads version 1 in slot 0"):
        arena.begin(2, deadline_s=1.0)


def test_waiting_publisher_goes_on_when_the_last_reader_leaves() -> None:
    now = [0.0]
    arena = Arena(1, clock=lambda: now[0])
    arena.seal(arena.begin(1, deadline_s=1.0), 1)
    lease = arena.lease(1, holder="a", ttl_s=1000.0)
    timer = threading.Timer(0.05, arena.release, [lease.lease_id], {"slot": 0, "generation": lease.generation})
    timer.start()
    assert arena.begin(2, deadline_s=1000.0) == 0
    timer.join()


@pytest.mark.parametrize("is_held", [True, False])
def test_waiting_publisher_goes_on_when_the_last_reader_asks_for_another_version(
    monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    monkeypatch.setattr(arena_module, "WAIT_SLICE_S", 1000.0)
    arena = Arena(2, clock=lambda: 0.0)
    for version in (1, 2):
        arena.seal(arena.begin(version, deadline_s=1.0), version)
    arena.lease(1, holder="a", ttl_s=1000.0)
    arena.lease(2, holder="b", ttl_s=1000.0)
    begun: list[int] = []
    publisher = threading.Thread(target=lambda: begun.append(arena.begin(3, deadline_s=1000.0)), daemon=True)
    publisher.start()
    while not arena._changed._waiters:  # pyright: ignore[reportAttributeAccessIssue]
        time.sleep(0.001)
    with contextlib.nullcontext() if is_held else pytest.raises(VersionUnavailable):
        arena.lease(2 if is_held else 77, holder="a", ttl_s=1000.0)
    publisher.join(20)
    assert begun == [0]
