"""Where the groups of the work buffer are."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rollout.buffer.staleness import Outstanding, Selection, Wait, select

if TYPE_CHECKING:
    from rollout.buffer.items import WorkItem
    from rollout.types import Group


class Stations:
    """The four states of a group that holds a slot, and what follows from how many are in each."""

    def __init__(self) -> None:
        self.queued: deque[WorkItem] = deque()
        self.running: dict[int, WorkItem] = {}
        self.ready: dict[int, tuple[WorkItem, Group]] = {}
        self.taken: dict[int, tuple[WorkItem, ...]] = {}
        """By step, until its weights are live."""

    @property
    def num_used(self) -> int:
        """Slots."""
        return self.num_outstanding + self.num_taken

    @property
    def num_outstanding(self) -> int:
        """Groups that no step has taken."""
        return len(self.queued) + len(self.running) + len(self.ready)

    @property
    def num_taken(self) -> int:
        return sum(len(items) for items in self.taken.values())

    @property
    def ready_tokens(self) -> int:
        return sum(group.num_generated_tokens for _, group in self.ready.values())

    def outstanding(self) -> tuple[WorkItem, ...]:
        """Groups that no step has taken."""
        return (*self.queued, *self.running.values(), *(item for item, _ in self.ready.values()))

    def choose(self, step: int, *, groups_per_step: int, max_staleness: int) -> Selection | Wait:
        """See `staleness.select`."""
        ready = [_outstanding(item) for item, _ in self.ready.values()]
        unfinished = [_outstanding(item) for item in (*self.queued, *self.running.values())]
        return select(step, ready, unfinished, groups_per_step=groups_per_step, max_staleness=max_staleness)

    def take(self, step: int, group_ids: tuple[int, ...]) -> list[Group]:
        """Moves these from `ready` to `taken`."""
        taken = [self.ready.pop(group_id) for group_id in group_ids]
        self.taken[step] = tuple(item for item, _ in taken)
        return [group for _, group in taken]


def _outstanding(item: WorkItem) -> Outstanding:
    return Outstanding(start_version=item.start_version, group_id=item.group_id)
