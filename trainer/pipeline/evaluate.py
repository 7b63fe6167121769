"""Held-out evaluation of exactly one policy version, beside training or while the learner waits.

Beside training it leases one replica. With other replicas that are live, commits pass it by and no new training request
goes to it: it would sample with weights that are older than its group may have. What it has it finishes, and when the
evaluation ends it takes the newest weights and is back. The only replica does both: training goes on there, with the
syncs waiting, and so with the staleness bound as the limit of how long; or until another one has been started again,
which then takes the training over.

While the learner waits no commit comes, so all live replicas of the newest version share the prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollout.engine.router import NoReplica
from rollout.types import Prompt, SamplingParams, Trajectory
from trainer.config.errors import first_cause, one_line
from trainer.pipeline.evaluation_result import by_prompt, evaluated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trainer.config.schema import RunConfig
    from trainer.pipeline.evaluation_result import Answered, Evaluated
    from trainer.pipeline.held_out import HeldOut
    from trainer.pipeline.workers import WorkerPool
    from weight_sync.coordinator import SyncCoordinator

log = logging.getLogger(__name__)

Freeze = Callable[[Sequence[str]], AbstractAsyncContextManager[Mapping[str, int | None]]]
"""Keeps replicas at their versions while the block runs, and yields these by name."""
Generate = Callable[[Sequence[Prompt], SamplingParams, str, Sequence[int]], Awaitable[list[Trajectory]]]
"""(prompts, sampling, replica, places of the prompts in the evaluation) -> one trajectory per prompt, in order."""


class EvaluationFailed(Exception):
    """There is no number, and why. Training does not need one."""

    def __init__(self, reason: str, *, version: int | None, time_s: float, answers: Sequence[Answered] = ()) -> None:
        """
        Args:
            version: None if it did not come as far as to have one.
            answers: all of them, if they all came in.
        """
        super().__init__(reason)
        self.version, self.time_s, self.answers = version, time_s, answers


class _Unscored(Exception):
    """Some answers ran out of time or have no reward: what is left of them is not a sample of all."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Running:
    """One evaluation that is under way."""

    entered: asyncio.Event
    is_shared: bool
    give_up: float
    """On the event loop's clock."""
    why: str
    """What to say then."""
    replicas: Sequence[str] = ()
    version: int | None = None
    lost: set[str] = field(default_factory=set)
    limit: asyncio.Timeout | None = None


class Evaluator:
    """Decides when an evaluation is due, and evaluates on live replicas."""

    def __init__(
        self,
        cfg: RunConfig,
        held_out: Sequence[HeldOut],
        *,
        freeze: Freeze,
        generate: Generate,
        members: Callable[[], Mapping[str, str]],
        first_version: int = 0,
    ) -> None:
        """
        Args:
            held_out: the set that gives the accuracy first; none for no evaluation.
            members: replica -> "live", or how it was lost.
            first_version: the one that this process begins with; periods are counted from there.
        """
        self._cfg, self._reward, self._held_out = cfg.trainer, cfg.task.reward.name, held_out
        self._prompts = [prompt for one in held_out for prompt in one.prompts for _ in range(one.num_samples)]
        self._num_answers = [one.num_samples for one in held_out for _ in one.prompts]
        self._params = SamplingParams(
            max_tokens=cfg.rollout.max_response_tokens,
            temperature=cfg.trainer.eval_temperature,
            top_p=cfg.trainer.eval_top_p,
            stop=tuple(cfg.rollout.stop),
        )
        self._freeze, self._generate, self._members = freeze, generate, members
        self._first_version, self._last_version = first_version, -1
        self._running: set[_Running] = set()
        self._idle_since = -math.inf
        self._busy_since = self._ran_s = 0.0

    def is_due(self, version: int) -> bool:
        """Whether a periodic evaluation falls between the last evaluated version and this one.

        Not while one is running: the next live version after it has its turn.
        """
        every = self._cfg.eval_every
        if not self._prompts or not every or version <= self._last_version or self._running:
            return False
        return version // every > max(self._last_version, self._first_version) // every

    @property
    def is_possible(self) -> bool:
        return bool(self._prompts)

    @property
    def idle_s(self) -> float:
        """For how long none has been running, in seconds; 0 while one runs."""
        return 0.0 if self._running else asyncio.get_running_loop().time() - self._idle_since

    @property
    def running_s(self) -> float:
        """For how long any has been running so far, in seconds. It never falls: a difference is an overlap."""
        now = asyncio.get_running_loop().time()
        return self._ran_s + (now - self._busy_since if self._running else 0.0)

    @property
    def last_version(self) -> int:
        """-1 before the first evaluation."""
        return self._last_version

    async def run(self, entered: asyncio.Event, *, is_shared: bool = False) -> Evaluated:
        """Evaluate the version that the replica has. Sets `entered` once no commit can change it any more.

        One whose replica dies begins again on others, with the version that is live there.

        Consumes: the held-out prompts. Waits for: the replicas' commit locks, and their answers. Unblocked by:
        `trainer.eval_timeout_s`, or `hurry`.

        Args:
            is_shared: no version is published meanwhile, so all live replicas take part.

        Raises:
            EvaluationFailed: not every answer could be scored.
        """
        started, limit_s = time.monotonic(), self._cfg.eval_timeout_s
        one = _Running(
            entered=entered,
            is_shared=is_shared,
            give_up=asyncio.get_running_loop().time() + limit_s,
            why=f"it took longer than trainer.eval_timeout_s={limit_s:g} for {len(self._prompts)} answers; raise it, "
            "or ask for less (task.eval_size, task.eval_sets, trainer.eval_samples)",
        )
        self._begin(one)
        answers: Sequence[Answered] = ()
        try:
            trajectories, version = await self._answers(one)
            answers = by_prompt(self._held_out, trajectories)
            check_one_version(trajectories, version)
            check_all_scored(trajectories)
            time_s = time.monotonic() - started
            return evaluated(answers, self._cfg, reward=self._reward, version=version, time_s=time_s)
        except Exception as error:  # the edge of one evaluation, which training does not need
            reason = str(error) if isinstance(error, _Unscored) else one_line(first_cause(error))
            time_s = time.monotonic() - started
            raise EvaluationFailed(reason, version=one.version, time_s=time_s, answers=answers) from error
        finally:
            self._end(one)
            entered.set()  # whoever waits for it must not outlive a failure

    def _begin(self, one: _Running) -> None:
        if not self._running:
            self._busy_since = asyncio.get_running_loop().time()
        self._running.add(one)

    def _end(self, one: _Running) -> None:
        self._running.discard(one)
        self._idle_since = now = asyncio.get_running_loop().time()
        if not self._running:
            self._ran_s += now - self._busy_since

    def hurry(self, seconds: float, why: str) -> None:
        """Give what is running at most so many seconds more; `why` is what it says if that is not enough."""
        give_up = asyncio.get_running_loop().time() + seconds
        for one in self._running:
            if give_up < one.give_up:
                one.give_up, one.why = give_up, why
                if one.limit is not None:
                    one.limit.reschedule(give_up)

    async def _answers(self, one: _Running) -> tuple[list[Trajectory], int]:
        """All answers in order, and the version that gave them."""
        while True:
            one.replicas = self._choose(one)
            try:
                return await self._on_replicas(one)
            except NoReplica as error:
                if not self._live(one):
                    raise
                log.warning("the evaluation begins again on another replica: %s", error)

    def _live(self, one: _Running) -> list[str]:
        return [name for name, state in self._members().items() if state == "live" and name not in one.lost]

    def _choose(self, one: _Running) -> list[str]:
        """All live replicas, or one of them, if possible one that no other evaluation has.

        Raises:
            NoReplica: none is live.
        """
        live = self._live(one)
        if not live:
            raise NoReplica(f"no live replica is left to evaluate on: {dict(self._members())}")
        if one.is_shared:
            return live
        in_use = {name for other in self._running if other is not one for name in other.replicas}
        return [next((name for name in live if name not in in_use), live[0])]

    async def _on_replicas(self, one: _Running) -> tuple[list[Trajectory], int]:
        async with self._freeze(one.replicas) as versions:
            version = one.version = self._last_version = max(v for v in versions.values() if v is not None)
            one.entered.set()
            names = [name for name in one.replicas if versions[name] == version]  # a sync may have passed one by
            shares = zip(names, deal(self._num_answers, len(names)), strict=True)
            return await self._in_time(one, {name: numbers for name, numbers in shares if numbers}), version

    async def _in_time(self, one: _Running, shares: Mapping[str, Sequence[int]]) -> list[Trajectory]:
        """Its timeout leaves the freeze as an error and not as a cancellation, so that the replica catches up."""
        one.limit = asyncio.timeout_at(one.give_up)
        try:
            async with one.limit:
                return await self._gather(one, shares)
        except TimeoutError as error:
            if one.limit.expired():
                raise _Unscored(one.why) from error
            raise
        finally:
            one.limit = None

    async def _gather(self, one: _Running, shares: Mapping[str, Sequence[int]]) -> list[Trajectory]:
        """The answers of all replicas, put in order. The first that fails ends the others."""
        tasks = [asyncio.create_task(self._ask(one, name, numbers)) for name, numbers in shares.items()]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        by_number = {
            number: answer
            for numbers, share in zip(shares.values(), answers, strict=True)
            for number, answer in zip(numbers, share, strict=True)
        }
        return [by_number[number] for number in range(len(self._prompts))]

    async def _ask(self, one: _Running, replica: str, numbers: Sequence[int]) -> list[Trajectory]:
        try:
            return await self._generate([self._prompts[n] for n in numbers], self._params, replica, numbers)
        except NoReplica:
            one.lost.add(replica)
            raise


def deal(num_answers: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Numbers of the answers that each replica gives: the prompts in turn, all answers to one together, since they
    share what the prompt costs. `num_answers` are those to each prompt."""
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    first = 0
    for place, number in enumerate(num_answers):
        shares[place % num_replicas] += range(first, first + number)
        first += number
    return shares


def members(coordinator: SyncCoordinator, workers: WorkerPool) -> dict[str, str]:
    """replica -> "live", or how it was lost; those that only the workers know of, too."""
    return {**coordinator.members, **workers.lost_engines}


@contextlib.asynccontextmanager
async def leased(
    names: Sequence[str], *, coordinator: SyncCoordinator, workers: WorkerPool
) -> AsyncIterator[Mapping[str, int | None]]:
    """Keep replicas at their versions for an evaluation, as the module says. Yields these versions."""
    if len(names) > 1:
        async with contextlib.AsyncExitStack() as stack:
            yield {name: await stack.enter_async_context(coordinator.freeze(name)) for name in names}
        return
    (name,) = names
    is_resting = False

    async def rest() -> None:
        nonlocal is_resting
        if not is_resting:
            is_resting = True
            await workers.rest(name)

    if list(members(coordinator, workers).values()).count("live") > 1:
        await rest()
    try:
        async with coordinator.lease(name, before_passed=rest) as version:
            yield {name: version}
    finally:
        # One that did not catch up stays out; whoever restarts it lets it in again. What a worker has given up it sends
        # nothing to anyway, and its successor may think otherwise.
        if is_resting and coordinator.members.get(name) == "live":
            await workers.resume(name)


def check_one_version(trajectories: Sequence[Trajectory], version: int) -> None:
    """Raises RuntimeError if any token came from another version: the result would belong to no policy."""
    seen = {v for trajectory in trajectories for v in trajectory.versions}
    if seen - {version}:
        raise RuntimeError(f"evaluation of version {version} holds tokens of versions {sorted(seen)}; freeze is broken")


def check_all_scored(trajectories: Sequence[Trajectory]) -> None:
    """Raises _Unscored if an answer has no reward. The mean of the others would favour what is easy to answer."""
    failed = [trajectory for trajectory in trajectories if trajectory.status == "failed"]
    if failed:
        raise _Unscored(
            f"{len(failed)} of {len(trajectories)} answers have no reward; the first, to prompt {failed[0].prompt_id}: "
            f"{failed[0].error}"
        )
