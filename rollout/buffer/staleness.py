"""Which groups may be trained now, so that no group ever becomes too old and no finished one is ever thrown away.

Words
    step t          trains policy version t and makes version t+1.
    age             of a group at step t: `t - start_version`.
    S               the largest age allowed (`max_staleness`); B groups are trained per step (`groups_per_step`).
    deadline        of a group: `start_version + S`, the last step that may train it.
    outstanding     admitted and not yet taken by a step: queued, running, or finished ("ready").
    L               the version that is live on the engines: weights of steps 0..L-1 have landed.

The timetable
    Line the outstanding groups up, oldest first, in rows of B. Row r is the step `t + r` that trains them if from now
    on everything is trained in order of age. The timetable from step t is *kept* if no group is in a row after its
    deadline; counted out: for every k >= 0, at most (k+1)*B outstanding groups have a deadline <= t+k. Call that C(t).

The rule (`select`)
    Step t takes exactly B ready groups, the oldest ones, provided that those who stay behind (ready or not) keep the
    timetable from step t+1: for every k >= 0, at most k*B of them have a deadline <= t+k. (k = 0: what is due now
    must be taken now.) Otherwise it waits. Oldest first is the best choice there is: no other B ready groups contain
    more groups with a deadline <= t+k, for any k. So if any choice of B ready groups would be allowed, this
    one is, and `select` waits only when it must.

Promise: every trained group has age <= S, and no group is discarded for its age.

Proof. There are at most (S+1)*B slots, whenever they are opened. A group holds a slot from its admission until the
weights of the step that trained it are live, or until it is filtered or dropped. Admission stamps `start_version = L`.
We show that C(t) holds whenever t is the next step to be taken; then a group taken at step t had `t <= deadline`, by
C(t) of the steps before, and is of age <= S.

  1. Start. At step t = L nothing is outstanding; C(t) is empty. This includes a resumed run: it begins with an empty
     buffer at L = t, and prompts that were in flight are admitted again, as in 2.
  2. Admission keeps C(t). Steps L..t-1 were taken and are not live yet, so their (t-L)*B groups still hold their slots
     and, the new group counted, at most (S+1)*B - (t-L)*B = (L+S-t+1)*B groups are outstanding. The deadline of the
     new group is t+k' with k' = L+S-t. Counts for k < k' do not change. For k >= k' the count is at most all of the
     outstanding, (k'+1)*B <= (k+1)*B. (When t-L = S+1 there is no slot left, and no admission.) This is where it
     matters that slots are freed when weights are *live*, not when the step was trained: an earlier release would let
     in (S+1)*B groups whose deadline is counted from an older version.
  3. A group that leaves (filtered, dropped) only lowers counts. Its refill is an admission. A failed group that is
     retried leaves and is admitted again with `start_version = L`: nothing that it generated will be trained, so it is
     as young as a new one. (Keeping the old start version would be safe too, but would make steps wait for it.)
  4. A release raises L and changes no deadline and no outstanding group. Raising L further than the released steps
     (weights landed before their slots were freed) leaves the bound in 2 with room to spare.
  5. A take turns C(t) into C(t+1), because the rule demands exactly that.

Steps that change no weight (a critic that is trained alone, a gradient that is not finite) make no version. Then "step
t" above is the version that the step may train at most: L, and one more for each step whose weights are not live. Such
a step lowers that number when it is released, and C(t+1) implies C(t); in 2, t-L is at most the number of steps that
hold slots. Ages are at most those of the proof.

No deadlock. The number of slots is a multiple of B. Say step t waits. If steps L..t-1 hold all of them, it waits for
their weights to land, which frees slots, and not for groups. If not, B slots are left for it and fill up: at least B
groups are outstanding once the prompts have come.
Every outstanding group ends some day (a deadline bounds generation and reward), and unless all are filtered, which
the buffer counts and ends with an error, at some point all outstanding ones are ready. The B oldest of *all* leave a
timetable behind that is the old one without its first row, each row now one step later in name only: C(t+1) holds, so
the take succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class StalenessViolation(Exception):
    """A group is older than the bound: a bug of this module or of its caller, never a normal event."""


class GroupKey(NamedTuple):
    """An outstanding group. Orders by age, oldest first; a tuple, because it is sorted a lot."""

    start_version: int
    group_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The step cannot be taken until at least `num_needed` of `group_ids` finish (or leave the buffer).

    `for_old_groups`: B others are ready, but these are due. With no `group_ids` it is admissions that are missing.
    """

    group_ids: tuple[int, ...]
    num_needed: int
    for_old_groups: bool


def select(
    step: int,
    ready: Sequence[GroupKey],
    unfinished: Sequence[GroupKey],
    *,
    groups_per_step: int,
    max_staleness: int,
) -> tuple[int, ...] | Wait:
    """The ids of the finished groups that `step` trains, ascending; or what must finish first.

    Raises:
        StalenessViolation: the outstanding groups do not keep the timetable from `step`, so no choice can be right.
    """

    def first_late(by_age: Sequence[GroupKey], first_step: int) -> GroupKey | None:
        """The first that misses its deadline in the timetable from `first_step`; None if that is kept."""
        for index, group in enumerate(by_age):
            if first_step + index // groups_per_step > group.start_version + max_staleness:
                return group
        return None

    by_age, to_come = sorted(ready), sorted(unfinished)
    if first_late(sorted([*by_age, *to_come]), step) is not None:
        ages = sorted((step - group.start_version for group in [*ready, *unfinished]), reverse=True)
        raise StalenessViolation(
            f"outstanding groups cannot all be trained within max_staleness={max_staleness} from step {step} on: "
            f"{len(ready)} ready and {len(unfinished)} unfinished with ages {ages[:16]} at {groups_per_step} groups "
            "per step; slots were freed before weights were live, or a group was stamped with a version that was "
            "not live"
        )
    chosen = by_age[:groups_per_step]
    if (num_missing := groups_per_step - len(chosen)) > 0:
        return Wait(group_ids=_ids(to_come), num_needed=num_missing, for_old_groups=False)
    late = first_late(sorted([*by_age[groups_per_step:], *to_come]), step + 1)
    if late is None:
        return tuple(sorted(_ids(chosen)))
    # Too many groups up to this age would stay behind. All of them are unfinished: were B of the ready ones as old,
    # C(step) alone would have made the choice allowed.
    due = [group for group in to_come if group.start_version <= late.start_version]
    room = (late.start_version + max_staleness - step) * groups_per_step
    return Wait(group_ids=_ids(due), num_needed=len(due) - room, for_old_groups=True)


def _ids(groups: Sequence[GroupKey]) -> tuple[int, ...]:
    return tuple(group.group_id for group in groups)
