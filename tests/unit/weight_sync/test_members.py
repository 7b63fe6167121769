"""The states of a replica: what may happen in each, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from weight_sync.control.members import Member, ReplicaState, nothing

JOINING, LIVE, HELD, REPLACING, DIRTY, DEAD, LEFT = ReplicaState
EVENTS = ("open", "hold", "release", "replace", "keep", "lose", "mix", "leave")
FOLLOWS: dict[ReplicaState, tuple[ReplicaState | None, ...]] = {
    #          open  hold  let go replace    keep  lose  mix    leave
    JOINING: (LIVE, None, None, None, None, DEAD, DIRTY, LEFT),
    LIVE: (LIVE, HELD, None, REPLACING, None, DEAD, DIRTY, LEFT),
    HELD: (LIVE, None, LIVE, REPLACING, None, None, None, LEFT),
    REPLACING: (LIVE, None, None, REPLACING, LIVE, None, None, LEFT),
    DIRTY: (LIVE, None, None, None, None, None, None, LEFT),
    DEAD: (LIVE, None, None, None, None, None, None, LEFT),
    LEFT: (None, None, None, None, None, None, None, LEFT),
}
"""None: refused."""


def member_in(state: ReplicaState) -> Member:
    class Handle:
        name = "r0"

    handle: Any = Handle()
    member = Member(handle, lambda: 0.0)
    for event in {JOINING: [], LIVE: ["open"], HELD: ["open", "hold"], REPLACING: ["open", "replace"], DIRTY: ["mix"],
                  DEAD: ["lose"], LEFT: ["leave"]}[state]:  # fmt: skip
        member.apply(event)
    assert member.state is state
    return member


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", ReplicaState)
def test_every_event_in_every_state(state: ReplicaState, event: str) -> None:
    member, after = member_in(state), FOLLOWS[state][EVENTS.index(event)]
    if after is None:
        with pytest.raises(ValueError, match=f"r0 is {state.value}, which does not allow {event}"):
            member.apply(event)
    else:
        member.apply(event)
    assert member.state is (state if after is None else after)


@pytest.mark.parametrize("event", ["open", "keep"])
def test_a_replica_that_is_leased_meanwhile_is_held_when_it_comes_back(event: str) -> None:
    member = member_in(REPLACING)
    member.begin_lease(nothing)
    assert member.state is REPLACING
    member.apply(event)
    assert member.state is HELD
    member.begin_lease(nothing)
    member.end_lease(nothing)
    assert member.state is HELD, "another lease lives on"
    member.end_lease(nothing)
    assert member.state is LIVE


def test_only_dead_and_dirty_replicas_are_to_be_replaced() -> None:
    assert {state for state in ReplicaState if state.public != "live"} == {DIRTY, DEAD}
