from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.buffer.staleness import GroupKey, StalenessViolation, Wait, select
from tests.fakes.staleness_oracle import is_kept


def groups(*start_versions: int, first_id: int = 0) -> list[GroupKey]:
    return [GroupKey(start_version=v, group_id=first_id + i) for i, v in enumerate(start_versions)]


def kept(outstanding: list[GroupKey], step: int, per_step: int, staleness: int) -> bool:
    versions = [group.start_version for group in outstanding]
    return is_kept(versions, step, groups_per_step=per_step, max_staleness=staleness)


def allowed_choices(
    step: int, ready: list[GroupKey], unfinished: list[GroupKey], per_step: int, staleness: int
) -> list[tuple[GroupKey, ...]]:
    """Every choice of B ready groups that leaves a kept timetable behind, by trying all of them."""
    return [
        chosen
        for chosen in combinations(ready, per_step)
        if kept([g for g in [*ready, *unfinished] if g not in chosen], step + 1, per_step, staleness)
    ]


@st.composite
def kept_states(draw: st.DrawFn) -> tuple[int, list[GroupKey], list[GroupKey], int, int]:
    per_step, staleness = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    step = draw(st.integers(staleness, staleness + 3))
    ages = draw(st.lists(st.integers(0, staleness), max_size=(staleness + 1) * per_step))
    outstanding: list[GroupKey] = []
    for group_id, age in enumerate(ages):
        candidate = [*outstanding, GroupKey(start_version=step - age, group_id=group_id)]
        if kept(candidate, step, per_step, staleness):
            outstanding = candidate
    ready = [g for g in outstanding if draw(st.booleans())]
    return step, ready, [g for g in outstanding if g not in ready], per_step, staleness


@settings(max_examples=300, deadline=None)
@given(kept_states())
def test_select_waits_exactly_when_no_choice_is_allowed(
    state: tuple[int, list[GroupKey], list[GroupKey], int, int],
) -> None:
    step, ready, unfinished, per_step, staleness = state
    choice = select(step, ready, unfinished, groups_per_step=per_step, max_staleness=staleness)
    allowed = allowed_choices(step, ready, unfinished, per_step, staleness)
    if isinstance(choice, Wait):
        assert not allowed
        assert choice.for_old_groups == (len(ready) >= per_step)
    else:
        assert len(choice) == per_step
        assert set(choice) in [{g.group_id for g in chosen} for chosen in allowed]


@settings(max_examples=150, deadline=None)
@given(kept_states())
def test_a_wait_is_not_over_before_num_needed_of_its_groups_finish(
    state: tuple[int, list[GroupKey], list[GroupKey], int, int],
) -> None:
    step, ready, unfinished, per_step, staleness = state
    choice = select(step, ready, unfinished, groups_per_step=per_step, max_staleness=staleness)
    if not isinstance(choice, Wait):
        return
    assert choice.num_needed >= 1
    named = [g for g in unfinished if g.group_id in choice.group_ids]
    too_few = named[: choice.num_needed - 1]
    others = [g for g in unfinished if g not in named]
    assert not allowed_choices(step, [*ready, *too_few, *others], named[len(too_few) :], per_step, staleness)


def test_the_oldest_ready_groups_are_chosen_and_ids_ascend() -> None:
    ready = [
        GroupKey(start_version=3, group_id=1),
        GroupKey(start_version=2, group_id=9),
        GroupKey(start_version=2, group_id=4),
    ]
    assert select(4, ready, [], groups_per_step=2, max_staleness=2) == (4, 9)


def test_a_group_that_is_due_now_is_waited_for_although_others_are_ready() -> None:
    ready, unfinished = groups(4, 4, 4), groups(2, first_id=10)
    choice = select(4, ready, unfinished, groups_per_step=2, max_staleness=2)
    assert choice == Wait(group_ids=(10,), num_needed=1, for_old_groups=True)


def test_more_groups_due_at_the_next_step_than_it_can_train_are_waited_for_now() -> None:
    """B=2, S=2: four running groups are due at step 5, which has room for two, so step 4 needs the other two."""
    behind = groups(3, 3, 3, 3, first_id=10)
    assert select(4, groups(4, 4), behind[:2], groups_per_step=2, max_staleness=2) == (0, 1)
    choice = select(4, groups(4, 4), behind, groups_per_step=2, max_staleness=2)
    assert choice == Wait(group_ids=(10, 11, 12, 13), num_needed=2, for_old_groups=True)


def test_without_enough_ready_groups_any_unfinished_one_is_waited_for() -> None:
    choice = select(0, groups(0), groups(0, 0, first_id=5), groups_per_step=3, max_staleness=0)
    assert choice == Wait(group_ids=(5, 6), num_needed=2, for_old_groups=False)


def test_a_state_that_cannot_be_kept_is_reported_with_its_numbers() -> None:
    with pytest.raises(StalenessViolation, match=r"max_staleness=1 from step 5 .*ages \[2\]"):
        select(5, groups(3), [], groups_per_step=1, max_staleness=1)
