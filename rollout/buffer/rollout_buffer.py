r"""The buffer between prompts, engines and learner: every group that is under way.

    prompt_loop   wait_for_slot -> readmit | admit      waits for a slot, if needed     woken by release, filter, fail
    rollout_loop  claim -> finish | filter | fail       waits for an admitted prompt   woken by admit, fail (retry)
    batch_loop    take(step)                            waits for finished groups      woken by finish, filter, ...
    train_loop    release(step, version=step + 1)       never waits

    queued --claim--> running --finish--> ready --take--> taken --release--> (gone: slot free)
       ^                 | \--filter-----------------------------------------> (gone: slot free, counted)
       \--fail (retry)---/ \--fail (no retry left)---------------------------> (gone: slot free, counted)

A group holds a slot in each of the four states. `staleness.py` has the rule of `take` and its proof.
2*B slots are open at the start (B if S = 0), and B more whenever the learner has to wait, up to (S+1)*B. Near the end
slots stay empty: nothing is admitted that no step is left for.
One event loop, no threads: every method that is not `async` is atomic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rollout.buffer.buffer_stats import BufferStats, ProgressGuard, Tally
from rollout.buffer.staleness import Outstanding, Selection, Wait, select
from rollout.errors import BufferClosed, NoProgress, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollout.types import Group, Prompt


MAX_LOSSES = 2
"""Rollout workers that may be lost with one group in hand before that is taken for the group's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """A prompt that was admitted: generate its group."""

    group_id: int
    prompt: Prompt
    start_version: int
    """The policy version that was live at admission; no token of the group may come from an older one."""
    attempt: int = 0
    """0, or which retry this is."""
    num_losses: int = 0
    """Rollout workers that were lost with it in hand, and that it was not blamed for."""


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


MOST_NAMES = 8


class Taker:
    """Wakes `take` no earlier than what its `Wait` asks for has come: a look costs time in proportion to the slots."""

    def __init__(self) -> None:
        self._wait: Wait | None = None
        self._due: set[int] = set()
        self._num_missing = 0
        self._may_look = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        """And not about to look again."""
        return self._wait is not None and not self._may_look.is_set()

    async def wait(self, choice: Wait) -> None:
        """Waits for: what `choice` asks for. Unblocked by: `wake`; cancellation."""
        self._wait = choice
        self._due, self._num_missing = set(choice.group_ids), choice.num_needed
        self._may_look.clear()
        try:
            await self._may_look.wait()
        finally:
            self._wait = None

    def on_ended(self, group_id: int) -> None:
        """A running group finished, or left the buffer."""
        if group_id in self._due:
            self._due.remove(group_id)
            self._num_missing -= 1

    def may_go_on(self, *, has_step: bool) -> bool:
        """`has_step`: as many groups are ready as a step trains."""
        if self._wait is not None and self._wait.is_forced:
            return self._num_missing <= 0
        return has_step

    def wake(self) -> None:
        self._may_look.set()


def describe(wait: Wait, step: int, *, num_ready: int) -> str:
    """In words for a person or a stall message."""
    old = f" that are due, although {num_ready} are ready" if wait.is_forced else ""
    names = ", ".join(str(group_id) for group_id in wait.group_ids[:MOST_NAMES]) or "none admitted"
    more = f" and {len(wait.group_ids) - MOST_NAMES} more" if len(wait.group_ids) > MOST_NAMES else ""
    return f"step {step} waits for {wait.num_needed} of the unfinished groups{old} ({names}{more})"


log = logging.getLogger(__name__)


class WorkBuffer:
    """Admits prompts, hands them out, and gives finished groups to the learner in time.

    Args:
        groups_per_step: B, groups per optimizer step.
        max_staleness: S, the largest age in policy versions at which a group may be trained.
        max_retries: how often a failed group is tried again before its prompt is dropped.
        max_refills_per_step: when to give up with `NoProgress`, see `ProgressGuard`.
        version: the policy version that is live now; the first step to be taken.
        end_step: the step that is not taken any more; None for no end.
        next_group_id: the first group id to hand out.
        clock: seconds, for waiting times only; no decision depends on it.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        max_retries: int,
        max_refills_per_step: int,
        version: int = 0,
        end_step: int | None = None,
        next_group_id: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check("groups_per_step", groups_per_step, 1)
        _check("max_staleness", max_staleness, 0)
        _check("max_retries", max_retries, 0)
        _check("max_refills_per_step", max_refills_per_step, 1)
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._max_retries = max_retries
        self._num_slots = min(2, max_staleness + 1) * groups_per_step
        self._version = version
        self._first_step = self._next_step = version
        self._end_step = end_step
        self._next_group_id = next_group_id
        self._clock = clock

        self._returning: deque[tuple[int, Prompt]] = deque()
        self._at = Stations()
        self._tally = Tally()
        self._tokens: Counter[str] = Counter()
        self._progress = ProgressGuard(groups_per_step=groups_per_step, max_refills_per_step=max_refills_per_step)

        self._taker = Taker()
        self._closed: BufferClosed | None = None
        # Level-triggered: set exactly while there is a slot to fill / a queued item (or the buffer is closed), so that
        # no wake-up is lost when a waiter is cancelled.
        self._has_slot = asyncio.Event()
        self._has_queued = asyncio.Event()
        self._notify()

    # --- prompt_loop -------------------------------------------------------------------------------------------------

    async def wait_for_slot(self) -> None:
        """Returns when a slot is free and one more group is needed. Of several callers each must look again."""
        started = self._clock()
        try:
            await self._has_slot.wait()
        finally:
            self._tally.seconds["slot"] += self._clock() - started
        self._raise_if_closed()

    def readmit(self) -> WorkItem | None:
        """Admits the next prompt that a resumed run owes (under its old group id), or returns None if there is none.

        Prompts that were in flight at the checkpoint come back before any new one, so that none is lost.
        """
        if not self._returning:
            return None
        self._require_slot()
        group_id, prompt = self._returning.popleft()
        return self._enqueue(group_id, prompt)

    def admit(self, prompt: Prompt) -> WorkItem:
        """Takes a slot for `prompt`, stamps it with the live version and queues it.

        Raises:
            RuntimeError: no slot is free, or `readmit` still has prompts to admit first.
        """
        self._require_slot()
        if self._returning:
            raise RuntimeError(f"{len(self._returning)} prompts of the resumed run come first; call readmit()")
        group_id = self._next_group_id
        self._next_group_id += 1
        self._tally.counts["admitted"] += 1
        return self._enqueue(group_id, prompt)

    # --- rollout_loop ------------------------------------------------------------------------------------------------

    async def claim(self) -> WorkItem:
        """The next queued prompt, first in first out, retries first. Whoever claims must finish, filter or fail it."""
        while True:
            await self._has_queued.wait()
            self._raise_if_closed()
            if self._at.queued:  # another claimer may have been woken first
                item = self._at.queued.popleft()
                self._at.running[item.group_id] = item
                self._notify()
                return item

    def finish(self, group: Group) -> None:
        """Puts a claimed group where `take` finds it.

        Raises:
            ValueError: the group is not running, or carries another start version than it was claimed with.
        """
        item = self._end_running(group.group_id, "finish")
        if group.start_version != item.start_version:
            self._at.running[group.group_id] = item
            raise ValueError(
                f"group {group.group_id} was claimed with start_version {item.start_version} but finished with "
                f"{group.start_version}; copy it from the WorkItem"
            )
        self._at.ready[group.group_id] = (item, group)
        self._tally.counts["finished"] += 1
        self._tokens["finished"] += group.num_generated_tokens
        self._progress.on_finished()
        self._notify()

    def filter(self, group_id: int, reason: str, *, failure: str = "") -> None:
        """Ends a claimed group that is not worth a training slot (e.g. all rewards equal); its slot is refilled.

        Args:
            failure: the first error in the group, if its rewards failed.

        Raises:
            NoProgress: too many were filtered while not one step's groups worked. The buffer is closed with this error.
        """
        self._end_running(group_id, "filter")
        self._tally.filtered[reason] += 1
        self._notify()
        self._stop_if(self._progress.on_filtered(reason, failure=failure))

    def fail(self, group_id: int, error: Exception) -> Literal["retried", "dropped"]:
        """Ends a claimed attempt that produced nothing: retried with the live version as its start, or dropped.

        A `WorkerLost` is not the group's failure and costs no retry, unless the same group sees `MAX_LOSSES` more.

        Raises:
            NoProgress: many prompts in a row were dropped. Carries the first error; the buffer is closed with it.
        """
        item = self._end_running(group_id, "fail")
        self._tally.counts["failed"] += 1
        is_blameless = isinstance(error, WorkerLost) and item.num_losses < MAX_LOSSES
        if is_blameless or item.attempt < self._max_retries:
            self._tally.counts["retried"] += 1
            item = replace(
                item,
                start_version=self._version,
                attempt=item.attempt + (not is_blameless),
                num_losses=item.num_losses + is_blameless,
            )
            self._at.queued.appendleft(item)
            self._notify()
            return "retried"
        self._tally.dropped[type(error).__name__] += 1
        self._notify()
        self._stop_if(self._progress.on_dropped(error))
        return "dropped"

    # --- batch_loop --------------------------------------------------------------------------------------------------

    async def take(self, step: int) -> list[Group]:
        """The B groups that `step` trains, by ascending group id. One caller at a time; steps in order.

        Waits while fewer than B groups are ready, or while an old group must come first (see `staleness.select`).

        Raises:
            ValueError: `step` is not the next one.
            StalenessViolation: the promise cannot be kept; only a bug can cause it.
        """
        if step != self._next_step:
            raise ValueError(f"step {step} was taken out of order; the next one is {self._next_step}")
        while True:
            self._raise_if_closed()
            started = self._clock()
            choice = self._choose()
            if not isinstance(choice, Wait):
                return self._hand_over(step, choice.group_ids)
            try:
                await self._taker.wait(choice)
            finally:
                self._tally.take_waited(self._clock() - started, is_forced=choice.is_forced)

    def _choose(self) -> Selection | Wait:
        sizes = {"groups_per_step": self._groups_per_step, "max_staleness": self._max_staleness}
        return self._at.choose(self._next_step, **sizes)

    def _hand_over(self, step: int, group_ids: tuple[int, ...]) -> list[Group]:
        groups = self._at.take(step, group_ids)
        self._tokens["taken"] += sum(group.num_generated_tokens for group in groups)
        self._next_step = step + 1
        self._notify()
        return groups

    # --- train_loop --------------------------------------------------------------------------------------------------

    def learner_waits(self) -> None:
        """The learner has nothing to do. If it is groups that are missing, B more slots are open from now on.

        Not before the first step, for which nothing can be ready.
        """
        is_needed = self._taker.is_waiting and self._is_group_missing and self._next_step > self._first_step
        if is_needed and self._num_slots < (self._max_staleness + 1) * self._groups_per_step:
            self._num_slots += self._groups_per_step
            log.info("step %d waits for groups: %d may be under way from now on", self._next_step, self._num_slots)
            self._notify()

    def release(self, step: int, *, version: int) -> None:
        """The weights that `step` made (`version == step + 1`) are live on the engines: its slots are free.

        Steps before it that were not released (their weights were superseded on the way) are released with it.
        """
        taken = self._at.taken
        if step not in taken:
            raise ValueError(f"step {step} was released but not taken, or released twice; taken: {sorted(taken)}")
        if version != step + 1:
            raise ValueError(f"step {step} makes policy version {step + 1}, but was released with {version}")
        for earlier in [s for s in taken if s <= step]:
            self._tally.counts["trained"] += len(taken.pop(earlier))
        self._version = max(self._version, version)
        self._notify()

    # --- shutdown, statistics, resume --------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Wakes every waiter with `BufferClosed`, now and for ever; `error` is its cause. The first call counts."""
        if self._closed is None:
            self._closed = BufferClosed(f"closed by {type(error).__name__}: {error}" if error else "closed")
            self._closed.__cause__ = error
            self._notify()

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    @property
    def waiting_for(self) -> str:
        """What `take` waits for, in words for a person or a stall message; empty if it does not wait."""
        wait = self._choose() if self._taker.is_waiting else None
        return describe(wait, self._next_step, num_ready=len(self._at.ready)) if isinstance(wait, Wait) else ""

    def stats(self) -> BufferStats:
        at, start_versions = self._at, [item.start_version for item in self._at.outstanding()]
        return self._tally.stats(
            num_slots=self._num_slots,
            num_slots_used=at.num_used,
            num_queued=len(at.queued),
            num_running=len(at.running),
            num_ready=len(at.ready),
            num_taken=at.num_taken,
            oldest_age=self._next_step - min(start_versions, default=self._next_step),
            version=self._version,
            discarded_tokens=self._tokens["finished"] - self._tokens["taken"] - at.ready_tokens,
        )

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a checkpoint of policy version `step` must remember, as plain JSON values.

        Steps before `step` count as trained; every other prompt in the buffer, those taken for `step` and later
        included, is written down, to be admitted anew. Take it in the same event-loop turn as the state of the prompt
        source, or a prompt between the two is lost.
        """
        if step < self._next_step - len(self._at.taken) or step > self._next_step:
            raise ValueError(
                f"no checkpoint of step {step} can be made: taken and not released are {sorted(self._at.taken)}"
            )
        taken = [item for taken_by, items in self._at.taken.items() if taken_by >= step for item in items]
        untrained = [*self._at.outstanding(), *taken]
        owed = sorted([(item.group_id, item.prompt) for item in untrained] + list(self._returning), key=lambda o: o[0])
        trained = self._tally.counts["trained"] + sum(len(items) for s, items in self._at.taken.items() if s < step)
        return {
            "step": step,
            "next_group_id": self._next_group_id,
            "prompts": [{"group_id": group_id, "prompt_id": prompt.prompt_id} for group_id, prompt in owed],
            "num_finished": len(self._at.ready) + len(taken),
            **self._tally.state_dict(num_trained=trained),
        }

    def load_state_dict(self, state: Mapping[str, Any], find: Callable[[str], Prompt]) -> None:
        """Makes this new buffer, built with `version` = the checkpoint's step, owe the prompts of the checkpoint.

        Args:
            find: prompt id -> the prompt. A checkpoint has no prompts: what a data set may hold, JSON may not.

        Raises:
            ValueError: the buffer is in use, or starts at another version than the checkpoint.
        """
        if self._at.num_used or self._tally.counts or self._returning:
            raise ValueError("load_state_dict needs a buffer that was not used yet")
        if state["step"] != self._version:
            raise ValueError(f"the checkpoint is of step {state['step']}, but this buffer starts at {self._version}")
        self._next_group_id = state["next_group_id"]
        self._returning.extend((entry["group_id"], find(_prompt_id(entry))) for entry in state["prompts"])
        self._tally.load_state_dict(state)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _enqueue(self, group_id: int, prompt: Prompt) -> WorkItem:
        item = WorkItem(group_id=group_id, prompt=prompt, start_version=self._version)
        self._at.queued.append(item)
        self._notify()
        return item

    def _end_running(self, group_id: int, verb: str) -> WorkItem:
        self._raise_if_closed()
        if group_id not in self._at.running:
            raise ValueError(f"cannot {verb} group {group_id}: it is not running; claim it first, and end it once")
        self._taker.on_ended(group_id)
        return self._at.running.pop(group_id)

    def _require_slot(self) -> None:
        self._raise_if_closed()
        if self._at.num_used >= self._num_slots:
            raise RuntimeError(f"all {self._num_slots} slots are in use; await wait_for_slot() first")

    def _raise_if_closed(self) -> None:
        if self._closed is not None:
            raise BufferClosed(*self._closed.args) from self._closed.__cause__

    def _stop_if(self, error: NoProgress | None) -> None:
        if error is not None:
            self.close(error)
            raise error

    def _notify(self) -> None:
        """Brings the events up to date after any change, and lets the taker look again if that may help it."""
        is_closed = self._closed is not None
        _set(self._has_slot, is_closed or (self._at.num_used < self._num_slots and self._is_group_missing))
        _set(self._has_queued, is_closed or bool(self._at.queued))
        if is_closed or self._taker.may_go_on(has_step=len(self._at.ready) >= self._groups_per_step):
            self._taker.wake()

    @property
    def _is_group_missing(self) -> bool:
        """Whether the steps that are left need more groups than are outstanding."""
        end = self._end_step
        return end is None or self._at.num_outstanding < (end - self._next_step) * self._groups_per_step


def _prompt_id(entry: Mapping[str, Any]) -> str:
    return entry["prompt_id"] if "prompt_id" in entry else entry["prompt"]["prompt_id"]  # as checkpoints were once


def _set(event: asyncio.Event, value: bool) -> None:
    (event.set if value else event.clear)()


def _check(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise ValueError(f"{name} must be >= {smallest}, got {value}")
