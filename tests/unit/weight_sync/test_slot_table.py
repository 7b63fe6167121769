"""The slots of a learner rank: every state x every event, in time that the test moves; and what waits for a slot."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync import deadlines
from weight_sync.errors import PullTimeout, VersionUnavailable
from weight_sync.publish.slots import SlotState, SlotTable

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def publish(table: SlotTable, version: int) -> int:
    slot = table.try_begin(version)
    assert slot is not None
    table.seal(slot)
    return slot


def table_in(state: SlotState) -> tuple[SlotTable, Clock]:
    """One slot; unless it is free, with version 1. A pin lasts 5 s."""
    clock = Clock()
    table = SlotTable(1, clock=clock)
    if state is not SlotState.FREE:
        assert table.try_begin(1) == 0
    if state in (SlotState.SEALED, SlotState.PINNED):
        table.seal(0)
    if state is SlotState.PINNED:
        table.pin(1, 5.0)
    assert table.slots[0].state is state
    return table, clock


def let_time_pass(table: SlotTable, clock: Clock) -> None:
    clock.now = 5.0
    table.slot_of(1)


FREE, PACKING, SEALED, PINNED = SlotState
EVENTS: dict[str, Callable[[SlotTable, Clock], Any]] = {
    "begin": lambda table, _: table.begin(2, deadline_s=0.0),
    "seal": lambda table, _: table.seal(0),
    "abort": lambda table, _: table.abort(0, "no memory"),
    "pin": lambda table, _: table.pin(1, 5.0).done(),
    "pin another": lambda table, _: table.pin(7, 5.0),
    "unpin": lambda table, _: table.unpin(1),
    "time": let_time_pass,
}
TABLE: dict[tuple[SlotState, str], tuple[Any, SlotState]] = {
    (FREE, "begin"): (0, PACKING),
    (FREE, "seal"): (ValueError, FREE),
    (FREE, "abort"): (ValueError, FREE),
    (FREE, "pin"): (VersionUnavailable, FREE),
    (FREE, "unpin"): (None, FREE),
    (FREE, "time"): (None, FREE),
    (PACKING, "begin"): (PullTimeout, PACKING),
    (PACKING, "seal"): (None, SEALED),
    (PACKING, "abort"): (None, FREE),
    (PACKING, "pin"): (False, PACKING),
    (PACKING, "unpin"): (None, PACKING),
    (PACKING, "time"): (None, PACKING),
    (SEALED, "begin"): (0, PACKING),
    (SEALED, "seal"): (ValueError, SEALED),
    (SEALED, "abort"): (ValueError, SEALED),
    (SEALED, "pin"): (True, PINNED),
    (SEALED, "unpin"): (None, SEALED),
    (SEALED, "time"): (None, SEALED),
    (PINNED, "begin"): (PullTimeout, PINNED),
    (PINNED, "seal"): (ValueError, PINNED),
    (PINNED, "abort"): (ValueError, PINNED),
    (PINNED, "pin"): (True, PINNED),
    (PINNED, "unpin"): (None, SEALED),
    (PINNED, "time"): (None, SEALED),
    **{(state, "pin another"): (VersionUnavailable, state) for state in SlotState},
}
"""(state, event) -> what it gives or raises, and the state afterwards."""


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", SlotState)
def test_every_event_in_every_state(state: SlotState, event: str) -> None:
    result, after = TABLE[state, event]
    table, clock = table_in(state)
    if isinstance(result, type):
        with pytest.raises(result):
            EVENTS[event](table, clock)
    else:
        assert EVENTS[event](table, clock) == result
    assert table.slots[0].state is after


def test_a_renewed_pin_lives_longer_and_another_slot_is_taken_meanwhile() -> None:
    clock = Clock()
    table = SlotTable(2, clock=clock)
    publish(table, 1)
    publish(table, 2)
    table.pin(1, 5.0)
    clock.now = 4.0
    table.pin(1, 5.0)
    clock.now = 8.0
    assert publish(table, 3) == 1, "version 2, newer but not pinned, gives way"
    table.pin(3, 60.0)
    assert table.try_begin(4) is None
    clock.now = 9.0
    assert table.try_begin(4) == 0
    assert (table.num_superseded, table.num_expired) == (2, 1)


def test_the_newest_version_stays_while_an_older_slot_can_be_taken() -> None:
    table = SlotTable(2, clock=Clock())
    publish(table, 1)
    publish(table, 2)
    assert publish(table, 3) == 0
    assert table.slot_of(2) is not None


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_reader_that_is_too_slow_finds_that_its_slot_was_packed_again(num_slots: int) -> None:
    clock = Clock()
    table = SlotTable(num_slots, clock=clock)
    publish(table, 1)
    read = table.pin(1, 5.0).result(0)
    clock.now = 6.0
    for version in range(2, num_slots + 1):
        publish(table, version)
    assert table.holding(read.slot, read.generation) is not None, "what it read is whole, though its pin is over"
    assert publish(table, num_slots + 1) == read.slot
    assert table.holding(read.slot, read.generation) is None


@pytest.mark.parametrize("version", [4, 5])
def test_a_version_must_be_newer_than_all_that_are_held(version: int) -> None:
    table = SlotTable(2, clock=Clock())
    publish(table, 5)
    with pytest.raises(ValueError, match="version must be > 5"):
        table.try_begin(version)


def test_a_pin_that_comes_before_the_seal_is_answered_by_it_and_lives_from_then() -> None:
    table, clock = table_in(PACKING)
    answer = table.pin(1, 5.0)
    clock.now = 100.0
    table.seal(0, seal_s=2.0)
    assert (answer.result(0).slot, answer.result(0).seal_s) == (0, 2.0)
    clock.now = 104.9
    assert table.try_begin(2) is None


@pytest.mark.parametrize(
    ("end", "why"),
    [(lambda table: table.abort(0, "no page-locked memory"), "no page-locked memory"),
     (lambda table: table.unpin(1), "unpinned before it was sealed")],
)  # fmt: skip
def test_a_pin_whose_version_does_not_come_hears_why(end: Callable[[SlotTable], None], why: str) -> None:
    table, _ = table_in(PACKING)
    answer = table.pin(1, 5.0)
    end(table)
    with pytest.raises(VersionUnavailable, match=why):
        answer.result(0)


def test_a_version_that_could_not_be_sealed_says_why_until_it_is_packed_again() -> None:
    table, _ = table_in(PACKING)
    table.abort(0, "no page-locked memory")
    with pytest.raises(VersionUnavailable, match="no page-locked memory"):
        table.pin(1, 5.0)
    publish(table, 1)
    assert table.pin(1, 5.0).done()


events = st.lists(st.tuples(st.sampled_from(["publish", "fail", "pin", "unpin", "read", "wait"]), st.integers(0, 3)))


@settings(max_examples=200, deadline=None)
@given(num_slots=st.integers(1, 3), script=events)
def test_a_read_is_called_whole_exactly_if_the_bytes_are_the_pinned_ones(num_slots: int, script: list) -> None:
    """Slow reference: a list of what each slot truly holds; a reader compares what it was told with that."""
    clock, version, reads = Clock(), 0, []
    table, contents, pinned_until = SlotTable(num_slots, clock=clock), [-1] * num_slots, dict[int, float]()
    for event, number in script:
        asked = version - number
        match event:
            case "publish" | "fail":
                slot = table.try_begin(version + 1)
                if slot is not None:
                    assert pinned_until.get(contents[slot], 0.0) <= clock.now, "a pinned slot was packed"
                    version += 1
                    contents[slot] = version if event == "publish" else -1
                    table.seal(slot) if event == "publish" else table.abort(slot, "")
            case "pin" if asked in contents and asked > 0:
                pinned = table.pin(asked, 2.0).result(0)
                pinned_until[asked] = clock.now + 2.0
                reads.append((asked, pinned))
            case "unpin":
                table.unpin(asked)
                pinned_until.pop(asked, None)
            case "read" if reads:
                wanted, at = reads[number % len(reads)]
                assert (table.holding(at.slot, at.generation) is not None) == (contents[at.slot] == wanted)
            case "wait":
                clock.now += 1.0


def test_a_publisher_that_finds_no_slot_says_what_is_in_them() -> None:
    table, _ = table_in(PINNED)
    with pytest.raises(PullTimeout, match=r"version 1 in slot 0 is pinned for another 5\.0 s; raise weight_sync.num_"):
        table.begin(2, deadline_s=0.0)


def test_a_waiting_publisher_goes_on_when_the_version_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LOOK_S", 1000.0)
    table, _ = table_in(PINNED)
    begun: list[int] = []
    publisher = threading.Thread(target=lambda: begun.append(table.begin(2, deadline_s=1000.0)), daemon=True)
    publisher.start()
    while not table._changed._waiters:  # pyright: ignore[reportAttributeAccessIssue]
        time.sleep(0.001)
    table.unpin(1)
    publisher.join(20)
    assert begun == [0]


def test_a_waiting_publisher_goes_on_when_the_pin_of_a_dead_coordinator_runs_out() -> None:
    table = SlotTable(1, clock=time.monotonic)
    publish(table, 1)
    table.pin(1, 0.15)
    started = time.monotonic()
    assert table.begin(2, deadline_s=20.0) == 0
    assert time.monotonic() - started >= 0.14
