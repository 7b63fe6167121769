r"""The buffer between prompts, engines and learner: every group that is under way.

    feed_prompts  wait_for_slot -> readmit | admit      waits for a slot, if needed     woken by release, filter, fail
    run_rollouts  claim -> finish | filter | fail       waits for an admitted prompt    woken by admit, fail (retry)
    build_batches take(step)                            waits for finished groups       woken by finish, filter, fail
    take_steps    release(step, version)                never waits

    queued --claim--> running --finish--> ready --take--> in training --release--> (gone: slot free)
       ^                 | \--filter---------------------------------------------> (gone: slot free, counted)
       \--fail (retry)---/ \--fail (no retry left)-------------------------------> (gone: slot free, counted)

A group holds a slot in each of the four states. `staleness.py` has the rule of `take` and its proof.
2*B slots are open at the start (B if S = 0), and B more whenever the learner has to wait, up to (S+1)*B. Near the end
of a run slots stay empty: no group is admitted that no remaining step would train.
One event loop, no threads: every method that is not `async` is atomic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from rollout.buffer.buffer_stats import BufferStats, StarvationGuard
from rollout.buffer.staleness import GroupKey, Wait, select
from rollout.errors import BufferClosed, NoProgress, WorkerLost
from rollout.types import RolloutRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollout.types import Group, Prompt

log = logging.getLogger(__name__)

MAX_WORKER_LOSSES = 2
"""Rollout workers that may be lost while they generate one group before the group is blamed for it."""
MAX_NAMES = 8
"""Group ids in a message."""


class RolloutBuffer:
    """Admits prompts, hands them out, and gives finished groups to the learner in time.

    Args:
        groups_per_step: B, groups per optimizer step.
        max_staleness: S, the largest age in policy versions at which a group may be trained.
        max_retries: how often a failed group is tried again before its prompt is dropped.
        max_filtered_batches_per_step: when to stop with `NoProgress`, see `StarvationGuard`.
        step: the first step to be taken.
        version: the policy version that is live now.
        end_step: the first step that is not taken any more; None for no end.
        next_group_id: the first group id to hand out.
        clock: seconds, for waiting times only; no decision depends on it.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        max_retries: int,
        max_filtered_batches_per_step: int,
        step: int = 0,
        version: int = 0,
        end_step: int | None = None,
        next_group_id: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value, smallest in (
            ("groups_per_step", groups_per_step, 1),
            ("max_staleness", max_staleness, 0),
            ("max_retries", max_retries, 0),
            ("max_filtered_batches_per_step", max_filtered_batches_per_step, 1),
        ):
            if value < smallest:
                raise ValueError(f"{name} must be >= {smallest}, got {value}")
        self._groups_per_step, self._max_staleness, self._max_retries = groups_per_step, max_staleness, max_retries
        self._num_slots = min(2, max_staleness + 1) * groups_per_step
        self._version, self._end_step, self._next_group_id, self._clock = version, end_step, next_group_id, clock
        self._first_step = self._next_step = step

        self._returning: deque[tuple[int, Prompt]] = deque()  # of a resumed run, not admitted again yet
        self._queued: deque[RolloutRequest] = deque()
        self._running: dict[int, RolloutRequest] = {}
        self._ready: dict[int, tuple[RolloutRequest, Group]] = {}
        self._in_training: dict[int, list[RolloutRequest]] = {}  # by step, until its weights are live

        self._counts: Counter[str] = Counter()  # admitted, finished, trained, failed, retried
        self._filtered: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()  # finished, taken
        self._seconds = {"take": 0.0, "forced": 0.0, "slot": 0.0}
        self._guard = StarvationGuard(
            groups_per_step=groups_per_step, max_filtered_batches_per_step=max_filtered_batches_per_step
        )

        # `take` looks again no earlier than when its `Wait` may be over: a look takes time in proportion to the slots.
        self._wait: Wait | None = None
        self._awaited: set[int] = set()
        self._may_take = asyncio.Event()
        self._closed: BufferClosed | None = None
        # Level-triggered: set exactly while there is a slot to fill / a queued request (or the buffer is closed), so
        # that no wake-up is lost when a waiter is cancelled.
        self._has_slot = asyncio.Event()
        self._has_queued = asyncio.Event()
        self._notify()

    # --- feed_prompts ------------------------------------------------------------------------------------------------

    async def wait_for_slot(self) -> None:
        """Returns when a slot is free and one more group is needed. Of several callers each must look again."""
        started = self._clock()
        try:
            await self._has_slot.wait()
        finally:
            self._seconds["slot"] += self._clock() - started
        self._raise_if_closed()

    def readmit(self) -> RolloutRequest | None:
        """Admits the next prompt that a resumed run owes, under its old group id; None if there is none. They come
        before any new prompt, so that none is lost."""
        if not self._returning:
            return None
        self._require_slot()
        return self._enqueue(*self._returning.popleft())

    def admit(self, prompt: Prompt) -> RolloutRequest:
        """Takes a slot for `prompt`, stamps it with the live version and queues it.

        Raises:
            RuntimeError: no slot is free, or `readmit` still has prompts to admit first.
        """
        self._require_slot()
        if self._returning:
            raise RuntimeError(f"{len(self._returning)} prompts of the resumed run come first; call readmit()")
        group_id = self._next_group_id
        self._next_group_id += 1
        self._counts["admitted"] += 1
        return self._enqueue(group_id, prompt)

    # --- run_rollouts -------------------------------------------------------------------------------------------------

    async def claim(self) -> RolloutRequest:
        """The next queued prompt, first in first out, retries first. The caller must finish, filter or fail it."""
        while True:
            await self._has_queued.wait()
            self._raise_if_closed()
            if self._queued:  # another claimer may have been woken first
                request = self._queued.popleft()
                self._running[request.group_id] = request
                self._notify()
                return request

    def finish(self, group: Group) -> None:
        """Puts a claimed group where `take` finds it.

        Raises:
            ValueError: the group is not running, or carries another start version than it was claimed with.
        """
        request = self._require_running(group.group_id, "finish")
        if group.start_version != request.start_version:
            raise ValueError(
                f"group {group.group_id} was claimed with start_version {request.start_version} but finished with "
                f"{group.start_version}; copy it from the RolloutRequest"
            )
        self._ready[group.group_id] = (request, group)
        self._counts["finished"] += 1
        self._tokens["finished"] += group.num_generated_tokens
        self._guard.on_finished()
        self._end_running(group.group_id)

    def filter(self, group_id: int, reason: str, *, failure: str = "") -> None:
        """Ends a claimed group that is not worth a training slot (e.g. all rewards equal); its slot is replaced.

        Args:
            failure: the first error in the group, if its rewards failed.

        Raises:
            NoProgress: too many were filtered while not one step's groups worked. The buffer is closed with this error.
        """
        self._require_running(group_id, "filter")
        self._filtered[reason] += 1
        self._end_running(group_id)
        self._close_if(self._guard.on_filtered(reason, failure=failure))

    def fail(self, group_id: int, error: Exception) -> Literal["retried", "dropped"]:
        """Ends a claimed attempt that produced nothing: retried with the live version as its start, or dropped.

        A `WorkerLost` is not the group's failure and costs no retry, until `MAX_WORKER_LOSSES` were lost with it.

        Raises:
            NoProgress: many prompts in a row were dropped. Carries the first error; the buffer is closed with it.
        """
        request = self._require_running(group_id, "fail")
        self._counts["failed"] += 1
        is_blameless = isinstance(error, WorkerLost) and request.num_worker_losses < MAX_WORKER_LOSSES
        if is_blameless or request.attempt < self._max_retries:
            self._counts["retried"] += 1
            again = replace(
                request,
                start_version=self._version,
                attempt=request.attempt + (not is_blameless),
                num_worker_losses=request.num_worker_losses + is_blameless,
            )
            self._queued.appendleft(again)
            self._end_running(group_id)
            return "retried"
        self._dropped[type(error).__name__] += 1
        self._end_running(group_id)
        self._close_if(self._guard.on_dropped(error))
        return "dropped"

    # --- build_batches -----------------------------------------------------------------------------------------------

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
                break
            self._wait, self._awaited = choice, set(choice.group_ids)
            self._may_take.clear()
            try:
                await self._may_take.wait()
            finally:
                self._wait = None
                waited_s = self._clock() - started
                self._seconds["take"] += waited_s
                self._seconds["forced"] += waited_s if choice.for_old_groups else 0.0
        taken = [self._ready.pop(group_id) for group_id in choice]
        self._in_training[step] = [request for request, _ in taken]
        self._tokens["taken"] += sum(group.num_generated_tokens for _, group in taken)
        self._next_step = step + 1
        self._notify()
        return [group for _, group in taken]

    def _choose(self) -> tuple[int, ...] | Wait:
        return select(
            self._newest_version,
            [GroupKey(request.start_version, request.group_id) for request, _ in self._ready.values()],
            [GroupKey(one.start_version, one.group_id) for one in (*self._queued, *self._running.values())],
            groups_per_step=self._groups_per_step,
            max_staleness=self._max_staleness,
        )

    # --- take_steps ---------------------------------------------------------------------------------------------------

    def grow_slots(self) -> None:
        """The learner has nothing to do: if groups are missing, B more slots are open from now on. Not before the first
        step, for which nothing can be ready."""
        is_needed = self._is_take_waiting and self._is_group_missing and self._next_step > self._first_step
        if is_needed and self._num_slots < (self._max_staleness + 1) * self._groups_per_step:
            self._num_slots += self._groups_per_step
            log.info("step %d waits for groups: from now on %d may be in flight", self._next_step, self._num_slots)
            self._notify()

    def release(self, step: int, *, version: int) -> None:
        """The weights after `step` are live on the engines, as `version`: its slots are free. A step that changed no
        weight leaves the version as it was.

        Steps before it that were not released (their weights were superseded on the way) are released with it.
        """
        taken = self._in_training
        if step not in taken:
            raise ValueError(f"step {step} was released but not taken, or released twice; taken: {sorted(taken)}")
        steps = [earlier for earlier in taken if earlier <= step]
        if not self._version <= version <= self._version + len(steps):
            raise ValueError(
                f"steps {steps} make at most one version each after version {self._version}, but step {step} was "
                f"released with version {version}"
            )
        before = self._newest_version
        for earlier in steps:
            self._counts["trained"] += len(taken.pop(earlier))
        self._version = version
        if self._newest_version < before:  # a step made no version, so old groups have longer than `take` thought
            self._may_take.set()
        self._notify()

    # --- shutdown, statistics, resume --------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Wakes every waiter, now and later, with `BufferClosed`; `error` is its cause. The first call counts."""
        if self._closed is None:
            self._closed = BufferClosed(f"closed by {type(error).__name__}: {error}" if error else "closed")
            self._closed.__cause__ = error
            self._notify()

    @property
    def waiting_for(self) -> str:
        """What `take` waits for, as text for a person or a stall message; empty if it does not wait."""
        wait = self._choose() if self._is_take_waiting else None
        if not isinstance(wait, Wait):
            return ""
        old = f" that are due, although {len(self._ready)} are ready" if wait.for_old_groups else ""
        names = ", ".join(str(group_id) for group_id in wait.group_ids[:MAX_NAMES]) or "none admitted"
        more = f" and {len(wait.group_ids) - MAX_NAMES} more" if len(wait.group_ids) > MAX_NAMES else ""
        return f"step {self._next_step} waits for {wait.num_needed} of the unfinished groups{old} ({names}{more})"

    def stats(self) -> BufferStats:
        newest = self._newest_version
        ready_tokens = sum(group.num_generated_tokens for _, group in self._ready.values())
        return BufferStats(
            num_slots=self._num_slots,
            num_slots_used=self._num_slots_used,
            num_queued=len(self._queued),
            num_running=len(self._running),
            num_ready=len(self._ready),
            num_training=self._num_slots_used - self._num_outstanding,
            oldest_age=newest - min((request.start_version for request in self._outstanding()), default=newest),
            version=self._version,
            **{name: self._counts[name] for name in ("admitted", "finished", "trained", "failed", "retried")},
            filtered=dict(self._filtered),
            dropped=dict(self._dropped),
            replaced=self._filtered.total() + self._dropped.total(),
            discarded_tokens=self._tokens["finished"] - self._tokens["taken"] - ready_tokens,
            batch_wait_s=self._seconds["take"],
            oldest_wait_s=self._seconds["forced"],
            slot_wait_s=self._seconds["slot"],
        )

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps must remember, as plain JSON values.

        Steps before `step` count as trained; every other prompt in the buffer, those taken for `step` and later
        included, is in it, to be admitted again. Take it in the same event-loop turn as the state of the prompt source,
        or a prompt between the two is lost.
        """
        if not self._next_step - len(self._in_training) <= step <= self._next_step:
            raise ValueError(
                f"no checkpoint of step {step} can be made: taken and not released are {sorted(self._in_training)}"
            )
        untrained = [request for by, requests in self._in_training.items() if by >= step for request in requests]
        num_trained = self._counts["trained"] + sum(len(r) for by, r in self._in_training.items() if by < step)
        owed = [(request.group_id, request.prompt) for request in (*self._outstanding(), *untrained)]
        owed = sorted([*owed, *self._returning], key=lambda entry: entry[0])
        return {
            "step": step,
            "next_group_id": self._next_group_id,
            "prompts": [{"group_id": group_id, "prompt_id": prompt.prompt_id} for group_id, prompt in owed],
            "num_finished": len(self._ready) + len(untrained),
            "counts": {**self._counts, "finished": num_trained, "trained": num_trained},
            "filtered": dict(self._filtered),
            "dropped": dict(self._dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any], find: Callable[[str], Prompt]) -> None:
        """Makes this new buffer, built with the checkpoint's step, owe the prompts of the checkpoint.

        Args:
            find: prompt id -> the prompt. A checkpoint has no prompts: what a data set may hold, JSON may not.

        Raises:
            ValueError: the buffer is in use, or starts at another step than the checkpoint.
        """
        if self._num_slots_used or self._counts or self._returning:
            raise ValueError("load_state_dict needs a buffer that was not used yet")
        if state["step"] != self._next_step:
            raise ValueError(f"the checkpoint is of step {state['step']}, but this buffer starts at {self._next_step}")
        self._next_group_id = state["next_group_id"]
        for entry in state["prompts"]:  # an older checkpoint has the prompt itself
            prompt_id = entry["prompt_id"] if "prompt_id" in entry else entry["prompt"]["prompt_id"]
            self._returning.append((entry["group_id"], find(prompt_id)))
        self._counts.update(state["counts"])
        self._filtered.update(state["filtered"])
        self._dropped.update(state["dropped"])

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _newest_version(self) -> int:
        """That the next step may train: every step whose weights are not live yet may make a version."""
        return self._version + len(self._in_training)

    @property
    def _num_outstanding(self) -> int:
        return len(self._queued) + len(self._running) + len(self._ready)

    @property
    def _num_slots_used(self) -> int:
        return self._num_outstanding + sum(map(len, self._in_training.values()))

    @property
    def _is_take_waiting(self) -> bool:
        """And not about to look again."""
        return self._wait is not None and not self._may_take.is_set()

    @property
    def _is_group_missing(self) -> bool:
        """Whether the remaining steps need more groups than are outstanding."""
        end = self._end_step
        return end is None or self._num_outstanding < (end - self._next_step) * self._groups_per_step

    def _outstanding(self) -> tuple[RolloutRequest, ...]:
        """Groups that no step has taken."""
        return (*self._queued, *self._running.values(), *(request for request, _ in self._ready.values()))

    def _enqueue(self, group_id: int, prompt: Prompt) -> RolloutRequest:
        request = RolloutRequest(group_id=group_id, prompt=prompt, start_version=self._version)
        self._queued.append(request)
        self._notify()
        return request

    def _require_running(self, group_id: int, verb: str) -> RolloutRequest:
        self._raise_if_closed()
        if group_id not in self._running:
            raise ValueError(f"cannot {verb} group {group_id}: it is not running; claim it first, and end it once")
        return self._running[group_id]

    def _end_running(self, group_id: int) -> None:
        del self._running[group_id]
        self._awaited.discard(group_id)
        self._notify()

    def _require_slot(self) -> None:
        self._raise_if_closed()
        if self._num_slots_used >= self._num_slots:
            raise RuntimeError(f"all {self._num_slots} slots are in use; await wait_for_slot() first")

    def _raise_if_closed(self) -> None:
        if self._closed is not None:
            raise BufferClosed(*self._closed.args) from self._closed.__cause__

    def _close_if(self, error: NoProgress | None) -> None:
        if error is not None:
            self.close(error)
            raise error

    def _notify(self) -> None:
        """Brings the events up to date after any change, and lets `take` look again if its wait may be over."""
        is_closed = self._closed is not None
        has_slot = self._num_slots_used < self._num_slots and self._is_group_missing
        for event, is_set in ((self._has_slot, has_slot), (self._has_queued, bool(self._queued))):
            (event.set if is_set or is_closed else event.clear)()
        wait = self._wait
        if wait is not None and wait.for_old_groups:
            is_over = len(wait.group_ids) - len(self._awaited) >= wait.num_needed
        else:
            is_over = len(self._ready) >= self._groups_per_step
        if is_over or is_closed:
            self._may_take.set()
