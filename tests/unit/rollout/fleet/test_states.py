from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, get_args

import pytest

from rollout.fleet.states import EngineRecord, EngineState, EventKind, apply

if TYPE_CHECKING:
    from collections.abc import Mapping

STATES: tuple[EngineState, ...] = get_args(EngineState)
EVENTS: tuple[EventKind, ...] = get_args(EventKind)
TABLE: Mapping[EngineState, tuple[str, ...]] = {
    #            joined  lost    pin       unpin   restart     retire
    "starting": ("live", "lost", "-",      "-",    "-",        "-"),
    "live":     ("-",    "lost", "pinned", "-",    "-",        "-"),
    "pinned":   ("-",    "lost", "pinned", "live", "-",        "-"),
    "lost":     ("-",    "-",    "-",      "-",    "starting", "retired"),
    "retired":  ("-",    "-",    "-",      "-",    "-",        "-"),
}  # fmt: skip


def record(state: EngineState) -> EngineRecord:
    return EngineRecord(incarnation=3, state=state, num_pins=int(state == "pinned"))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_state(state: EngineState, event: EventKind) -> None:
    changed = apply(record(state), event, incarnation=3, reason="died")
    assert ("-" if changed is None else changed.state) == TABLE[state][EVENTS.index(event)]
    if changed is not None:
        assert changed.incarnation == 3 + (event == "restart")
        assert changed.num_pins == int(changed.state == "pinned") + (state == "pinned" and event == "pin")
        assert changed.reason == ("died" if event == "lost" else "")


def test_it_is_pinned_until_every_pin_is_taken_back() -> None:
    twice = EngineRecord(incarnation=3, state="pinned", num_pins=2)
    assert apply(twice, "unpin", incarnation=3) == record("pinned")
    lost = apply(twice, "lost", incarnation=3)
    assert lost is not None and (lost.num_pins, lost.is_there) == (0, False)


def test_what_is_about_another_incarnation_is_ignored() -> None:
    for state, event, incarnation in product(STATES, EVENTS, (2, 4)):
        assert apply(record(state), event, incarnation=incarnation) is None, (state, event)


def test_the_reason_of_a_loss_is_kept_until_the_next_engine_has_joined() -> None:
    lost = apply(EngineRecord(), "lost", incarnation=0, reason="out of memory")
    assert lost is not None
    starting = apply(lost, "restart", incarnation=0)
    assert starting is not None
    assert (starting.reason, starting.incarnation) == ("out of memory", 1)
    live = apply(starting, "joined", incarnation=1)
    assert live == EngineRecord(incarnation=1)
