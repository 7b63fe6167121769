"""The rollout workers as the driver sees them: groups sent to them, what they report, restarts of those that are lost.

    live ──died, or silent for too long──> lost ──a restart is left──> a new worker takes its place, live
                                             └──none is left─────────> it stays out; without any other the run ends,
                                                                       while it still needs groups

A group whose worker is lost fails with `WorkerLost`, which costs it no retry: the buffer hands it out again at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.errors import WorkerLost
from rollout.fleet.scheduler import NoReplica
from rollout.worker.actor import cancel_call, is_actor_lost, kill_actor
from rollout.worker.group_server import EVERY_S
from trainer.driver.weight_updates import no_engine_returns
from trainer.errors import first_cause, one_line
from trainer.remote import NoAnswer, answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from rollout.engine.interface import EngineTimes
    from rollout.fleet.engine_monitor import LoadReport, ReplicaLoad
    from rollout.types import Group, Prompt, RolloutRequest, SamplingParams, Trajectory
    from trainer.driver.weight_updates import AwaitEngine


RETRY_S = 1.0
"""After a call that failed though the worker lives."""


class GroupCalls:
    """The other end of a worker's `GroupServer`. Of use until the worker is lost.

    Args:
        actor: the rollout worker's actor.
        ask: the result of a remote call to it; raises what it raised, or WorkerLost if the actor is gone.
    """

    def __init__(self, actor: Any, ask: Callable[[Any], Awaitable[Any]]) -> None:
        self._actor = actor
        self._ask = ask
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[Group]] = {}
        self._to_begin: dict[int, RolloutRequest] = {}
        self._given_up: list[int] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lost: WorkerLost | None = None

    async def run(self, item: RolloutRequest) -> Group:
        """Generate and reward one group. Cancelled, it ends in the worker too.

        Waits for: the worker's answer. Unblocked by: its caller's deadline; the loss of the worker.

        Raises:
            WorkerLost: the worker died with the group, or never had it.
            Exception: what the worker raised.
        """
        if self._lost is not None:
            raise self._lost
        ticket, future = next(self._tickets), asyncio.get_running_loop().create_future()
        self._waiting[ticket], self._to_begin[ticket] = future, item
        self._keep_running("send", self._send)
        self._keep_running("receive", self._receive)
        try:
            return await future
        finally:
            del self._waiting[ticket]
            if future.cancelled() and self._to_begin.pop(ticket, None) is None and self._lost is None:
                self._given_up.append(ticket)
                self._keep_running("send", self._send)

    def close(self) -> None:
        """The run is over: nobody waits for this worker any more, and nothing is said when it ends."""
        self._fail((), WorkerLost("the run is over"))
        for task in self._tasks.values():
            task.cancel()

    def _keep_running(self, name: str, coroutine: Callable[[], Any]) -> None:
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(coroutine(), name=f"groups {name}")

    async def _send(self) -> None:
        """Consumes: groups to begin and to give up. Waits for: the worker to take them, and `EVERY_S`.

        Unblocked by: the loss of the worker, which the pool watches.
        """
        while self._to_begin or self._given_up:
            items, self._to_begin = self._to_begin, {}
            given_up, self._given_up = self._given_up, []
            try:
                await self._ask(self._actor.submit.remote(items, given_up))
            except Exception as error:  # noqa: BLE001 - each of these groups gets it
                self._given_up += given_up  # with the next call
                self._fail(items, error)
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(EVERY_S)

    async def _receive(self) -> None:
        """Consumes: what has ended in the worker. Waits for: it. Unblocked by: the loss of the worker, as `_send`."""
        while self._waiting and self._lost is None:
            try:
                self._settle(await self._ask(self._actor.ended.remote()))
            except Exception as error:  # noqa: BLE001 - whose answer it was is unknown, so each that waits gets it
                begun = self._waiting.keys() - self._to_begin.keys()
                self._given_up += begun
                self._fail(begun, error)
                self._keep_running("send", self._send)
                await asyncio.sleep(RETRY_S)

    def _settle(self, ended: Mapping[int, Group | Exception]) -> None:
        for ticket, outcome in ended.items():
            future = self._waiting.get(ticket)
            if future is None or future.done():
                continue  # it was given up, with the reason, while the answer was on its way
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _fail(self, tickets: Iterable[int], error: Exception) -> None:
        """A lost worker is never called again, and all its groups fail."""
        if isinstance(error, WorkerLost):
            self._lost = error
            self._to_begin.clear()
            self._given_up.clear()
            tickets = self._waiting
        for ticket in tickets:
            future = self._waiting.get(ticket)
            if future is not None and not future.done():
                future.set_exception(error)


@dataclass(slots=True, kw_only=True)
class _Account:
    """Of one replica, over all engines that take its place one after the other."""

    at: float
    """Up to when it is kept, by our clock."""
    said: EngineTimes | None = None
    """What its engine said last."""
    busy_s: float = 0.0
    up_s: float = 0.0
    told_busy_s: float = 0.0
    """Of `busy_s`, what was asked for already; so with `told_up_s`."""
    told_up_s: float = 0.0
    idle_frac: float | None = None

    def add(self, busy_s: float, up_s: float, now: float) -> None:
        self.busy_s, self.up_s, self.at = self.busy_s + min(busy_s, up_s), self.up_s + up_s, now

    def take(self) -> float | None:
        """The idle share since it was asked for last; nothing new: as it was before."""
        busy_s, up_s = self.busy_s - self.told_busy_s, self.up_s - self.told_up_s
        self.told_busy_s, self.told_up_s = self.busy_s, self.up_s
        if up_s > 0:
            self.idle_frac = 1.0 - busy_s / up_s
        return self.idle_frac


class IdleEngines:
    """An account per replica. The time from the loss of an engine to the first word of the next one is idle time.

    One event loop, no threads.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def hear(self, times: Mapping[str, EngineTimes], lost: Collection[str]) -> None:
        """
        Args:
            times: by replica, as its engine said last; may be what it said before.
            lost: replicas that have no engine now.
        """
        now = self._clock()
        for name in {*times, *lost}:
            account = self._accounts.setdefault(name, _Account(at=now))
            said, before = times.get(name), account.said
            account.said = said if said is not None else before
            if said is not None and before is not None and said.began_at == before.began_at and said.up_s > before.up_s:
                account.add(said.busy_s - before.busy_s, min(said.up_s - before.up_s, now - account.at), now)
            elif said is not None and (before is None or said.began_at != before.began_at):
                account.add(said.busy_s, now - account.at, now)  # nothing, where it is the first one we hear of
            elif name in lost:
                account.add(0.0, now - account.at, now)

    def take_frac(self, *, num_replicas: int) -> float | None:
        """Mean over all replicas since the call before; None before all were heard of twice."""
        fracs = [frac for account in self._accounts.values() if (frac := account.take()) is not None]
        return sum(fracs) / num_replicas if len(fracs) == num_replicas else None


log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the workers, and through them at the engines."""
GROUP_GRACE_S = 60.0
"""A worker bounds generation and rewards itself; a live one has answered this much later."""
TOO_SLOW = (
    "generation or rewards take longer than their deadlines together, so look at its file in actor_logs/, or raise "
    "rollout.request_timeout_s (task.agent_timeout_s with an agent) or task.reward.queue_timeout_s"
)
HANGS = "its process hangs; look at its file in actor_logs/"
HEALTHY_S = 3600.0
"""A worker that has lived so long has all its restarts again: the few faults of a run of weeks are not to add up."""
SILENCE_S = 120.0
"""`rollout.silence_timeout_s` by default."""


class NoWorker(Exception):
    """No rollout worker is left, and none may be started any more."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    """One of the pool's places, and who sits there."""

    name: str
    actor: Any
    calls: GroupCalls | None = None
    """To this actor; None before the first group."""
    num_groups: int = 0
    """In flight."""
    lost: str = ""
    """Why; empty while it lives."""
    num_restarts: int = 0
    """Tried, for this place, in the whole run."""
    num_spent: int = 0
    """Of these, how many count against the limit."""
    live_since: float | None = None
    """By the event loop's clock; None before the first look."""
    question: asyncio.Task[tuple[int, LoadReport]] | None = None
    """How busy the engines are, as it sees them; not answered yet, or not looked at."""
    report: tuple[int, LoadReport] | None = None
    """Its last answer, behind the number of engines that had been replaced when it was asked."""


@dataclass(slots=True)
class _Standing:
    """What the workers were told of one replica: a new worker has to know it too."""

    engine: Any = None
    """The newest engine actor that took its place; None for the first one."""
    quarantine: str = ""
    is_resting: bool = False

    def tell(self, name: str, actor: Any) -> list[Any]:
        """The calls that bring a new worker up to date, in order."""
        calls = [actor.replace.remote(name, self.engine)] if self.engine is not None else []
        calls += [actor.quarantine.remote(name, self.quarantine)] if self.quarantine else []
        return calls + ([actor.rest.remote(name)] if self.is_resting else [])


class WorkerPool:
    """Rollout worker actors; each group goes to the live one with the fewest groups in flight."""

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        group_timeout_s: float,
        silence_timeout_s: float = SILENCE_S,
        restart: Callable[[int, int], Awaitable[Any]] | None = None,
        max_restarts: int = 0,
        await_engine: AwaitEngine = no_engine_returns,
    ) -> None:
        """
        Args:
            group_timeout_s: longest time that a worker may take for a group, rewards included.
            silence_timeout_s: a worker that does not say for so long how it is, is lost.
            restart: (place, number of the restart) -> a new worker actor, started. Has a deadline.
            max_restarts: of each place.
            await_engine: where a group waits that found no engine at all.
        """
        self._workers = [_Worker(name=f"rollout worker {index}", actor=actor) for index, actor in enumerate(actors)]
        self._group_timeout_s = group_timeout_s + GROUP_GRACE_S
        self._silence_timeout_s = silence_timeout_s
        self._restart = restart
        self._max_restarts = max_restarts if restart is not None else 0
        self._await_engine = await_engine
        self._standings: dict[str, _Standing] = {}
        self._num_replaced = 0
        self._has_live = asyncio.Event()
        self._has_live.set()
        self._is_closed = False
        self.load_record: dict[str, float] = {}
        """Metrics of the engines' load as they were last; empty before the first answer."""
        self.idle_engines = IdleEngines()
        self.lost_engines: dict[str, str] = {}
        """Replica -> why some worker gave it up, by the last look. Replaced ones are not in it."""

    async def run_group(self, item: RolloutRequest) -> Group:
        """Generate and reward one group. Raises what the worker raised.

        Where no engine is left it waits for one and begins anew, which costs the group no retry.

        Raises:
            NoReplica: no engine is left, and none comes back.
            TimeoutError: it took too long, and was cancelled in the worker.
            WorkerLost: the worker died with the group, or never had it.
        """
        while True:
            try:
                return await self._run_once(item)
            except NoReplica as error:
                await self._await_engine(error)

    async def _run_once(self, item: RolloutRequest) -> Group:
        worker = await self._choose()
        if worker.calls is None:
            worker.calls = GroupCalls(worker.actor, partial(self._ask, worker, actor=worker.actor, timeout_s=None))
        worker.num_groups += 1
        limit = asyncio.timeout(self._group_timeout_s)
        try:
            async with limit:
                return await worker.calls.run(item)  # cancelled, it ends there too, and does not compete with its retry
        except TimeoutError as error:
            if not limit.expired():
                raise  # the worker's own
            asked = f"{worker.name} gave no answer to group {item.group_id}"
            raise NoAnswer(f"{asked} for {self._group_timeout_s:g} s; {TOO_SLOW}") from error
        finally:
            worker.num_groups -= 1

    async def evaluate(
        self, prompts: Sequence[Prompt], params: SamplingParams, engine: str, numbers: Sequence[int]
    ) -> list[Trajectory]:
        """One trajectory per prompt, all from the replica `engine`. Begins again where the worker is lost.

        Waits for: the answers, however long they take. Unblocked by: the caller's deadline, whose cancellation reaches
        the worker; `watch_loads`, which loses a worker that is silent; `close`.

        Raises:
            WorkerLost: no worker is left, and none comes back.
        """
        while True:
            worker = await self._choose()
            ref = worker.actor.evaluate.remote(list(prompts), params, engine, list(numbers))
            worker.num_groups += 1
            try:
                return await self._ask(worker, ref, timeout_s=None)
            except WorkerLost as error:
                log.warning("the evaluation begins again on another worker: %s", error)
            except asyncio.CancelledError:
                cancel_call(ref)
                raise
            finally:
                worker.num_groups -= 1

    async def replace(self, name: str, engine: Any) -> None:
        """All workers send to this engine actor what is meant for the replica `name`, quarantined or not."""
        self._standings[name] = _Standing(engine=engine)
        self._num_replaced += 1
        self.lost_engines.pop(name, None)
        await self._tell_all(lambda actor: actor.replace.remote(name, engine))

    async def rest(self, name: str) -> None:
        """No worker sends anything new to this replica until `resume`; what runs there goes on."""
        self._standing(name).is_resting = True
        await self._tell_all(lambda actor: actor.rest.remote(name))

    async def resume(self, name: str) -> None:
        """Ends a rest."""
        self._standing(name).is_resting = False
        await self._tell_all(lambda actor: actor.resume.remote(name))

    async def quarantine(self, name: str, reason: str) -> None:
        """No worker sends anything more to this replica; what runs there goes on elsewhere, from what it has."""
        self._standing(name).quarantine = reason
        await self._tell_all(lambda actor: actor.quarantine.remote(name, reason))

    def close(self) -> None:
        """The run is over: groups that are under way fail, the end of a worker is no loss, and nobody waits for one."""
        self._is_closed = True
        self._has_live.set()
        for worker in self._workers:
            if worker.calls is not None:
                worker.calls.close()

    async def watch_loads(self) -> None:
        """Keeps `load_record` and `lost_engines` new, and as many workers alive as there may be.

        Consumes: the workers' reports. Waits for: its interval, and each answer, which has a deadline. Unblocked by:
        cancellation, which ends the restarts too; they go on beside it, and have deadlines of their own.

        Raises:
            NoWorker: none is left, and none may be started.
        """
        restarts: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await self._look()
                self._restart_lost(restarts)
        finally:
            tasks = [*restarts.values(), *(worker.question for worker in self._workers if worker.question is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _restart_lost(self, restarts: dict[int, asyncio.Task[None]]) -> None:
        """Begins the restarts that are due, beside those that are under way: place -> task."""
        now = asyncio.get_running_loop().time()
        for index, worker in enumerate(self._workers):
            if index in restarts and restarts[index].done():
                restarts.pop(index).result()
            if not worker.lost:
                worker.live_since = now if worker.live_since is None else worker.live_since
                worker.num_spent = 0 if now - worker.live_since >= HEALTHY_S else worker.num_spent
            elif worker.num_spent < self._max_restarts and index not in restarts:
                worker.live_since = None
                restarts[index] = asyncio.create_task(self._try_restart(index, worker), name=f"restart {worker.name}")
        if not restarts and all(worker.lost for worker in self._workers):
            reasons = "; ".join(f"{worker.name} {worker.lost}" for worker in self._workers)
            raise NoWorker(
                f"no rollout worker is left after {self._max_restarts} restarts of each ({reasons}); what they "
                "printed is in actor_logs/; look at the memory of their host, and at your reward and agent loop"
            )

    async def _look(self) -> None:
        """Asks every live worker. One that does not answer at once is heard at a later look and holds up nobody."""
        for worker in self._workers:
            if not worker.lost and worker.question is None:
                worker.question = asyncio.create_task(self._loads(worker), name=f"loads of {worker.name}")
        if questions := [worker.question for worker in self._workers if worker.question is not None]:
            await asyncio.wait(questions, timeout=LOOK_S)
        self._hear_loads()

    async def _loads(self, worker: _Worker) -> tuple[int, LoadReport]:
        num_replaced = self._num_replaced
        report = await self._ask(worker, worker.actor.loads.remote(), timeout_s=self._silence_timeout_s)
        return num_replaced, report

    def _hear_loads(self) -> None:
        for worker in self._workers:
            if worker.question is None or not worker.question.done():
                continue
            answered, worker.question = worker.question, None
            error = answered.exception()
            if error is None:
                worker.report = answered.result()
            elif isinstance(error, TimeoutError):
                self._lose(worker, f"was silent for {self._silence_timeout_s:g} s")
            elif not worker.lost:
                log.warning("%s did not say how busy the engines are: %s", worker.name, one_line(first_cause(error)))
        said = [worker.report for worker in self._workers if worker.report is not None and not worker.lost]
        reports = [report for _, report in said]
        self.load_record = load_record(reports) if reports else {}
        if all(num_replaced == self._num_replaced for num_replaced, _ in said):
            # Else what was said may be of an engine that is gone.
            given_up = ((name, reason) for report in reports for name, reason in report.quarantined.items())
            self.lost_engines = {name: f"lost ({reason})" for name, reason in given_up}
        self.idle_engines.hear(engine_times(reports), self.lost_engines)

    async def _try_restart(self, index: int, worker: _Worker) -> None:
        assert self._restart is not None
        worker.num_restarts += 1
        worker.num_spent += 1
        attempt = f"restart {worker.num_spent} of {self._max_restarts}"
        log.warning("%s %s: %s", worker.name, worker.lost, attempt)
        try:
            actor = await self._restart(index, worker.num_restarts)
            # Asked for in one turn with its return to the others, so that it misses nothing they are told from here on.
            calls = [call for name, standing in self._standings.items() for call in standing.tell(name, actor)]
            if worker.question is not None:
                worker.question.cancel()  # it was for the one before
            worker.actor, worker.calls, worker.question, worker.report, worker.lost = actor, None, None, None, ""
            self._has_live.set()
            await asyncio.gather(*(self._ask(worker, call, timeout_s=GROUP_GRACE_S) for call in calls))
        except Exception as error:  # noqa: BLE001 - the run goes on with the other workers, whatever is wrong with it
            reason = one_line(first_cause(error))
            log.error("%s of %s failed: %s", attempt, worker.name, reason)
            self._lose(worker, f"did not start: {reason}")
            worker.lost = f"did not start: {reason}"  # newer than why the one before it was lost
            return
        log.info("%s is back", worker.name)

    async def _choose(self) -> _Worker:
        """Waits for: a live worker. Unblocked by: a restart; its deadline; `watch_loads`, which ends the run; `close`.

        Raises:
            WorkerLost: none came, or none will.
        """
        try:
            async with asyncio.timeout(self._group_timeout_s):
                while not (live := [worker for worker in self._workers if not worker.lost]):
                    if self._is_closed:
                        raise WorkerLost("no rollout worker is left, and none is started any more")
                    await self._has_live.wait()
        except TimeoutError as error:
            raise WorkerLost(f"no rollout worker lived for {self._group_timeout_s:g} s") from error
        return min(live, key=lambda worker: worker.num_groups)

    async def _ask(self, worker: _Worker, ref: Any, *, timeout_s: float | None, actor: Any = None) -> Any:
        """The answer of a worker. Raises what it raised, TimeoutError, or WorkerLost if it is gone."""
        actor = worker.actor if actor is None else actor
        try:
            return await answer(ref, timeout_s=timeout_s, who=worker.name, call="a call", do=HANGS)
        except Exception as error:
            if not is_actor_lost(error):
                raise
            reason = str(error).strip().splitlines()[0]
            if worker.actor is actor:  # else its place has been taken already
                self._lose(worker, f"died: {reason}")
            raise WorkerLost(f"{worker.name} died: {reason}") from error

    def _lose(self, worker: _Worker, reason: str) -> None:
        """It gets no more groups; its process ends, if it has not, and with it every call that still waits there."""
        if worker.lost:
            return
        worker.lost = reason
        if all(one.lost for one in self._workers):
            self._has_live.clear()
        log.error("%s %s; its %d groups go to others", worker.name, reason, worker.num_groups)
        kill_actor(worker.actor)

    async def _tell_all(self, call: Callable[[Any], Any]) -> None:
        """A worker that is lost on the way is told when it comes back."""
        live = [worker for worker in self._workers if not worker.lost]
        told = (self._ask(worker, call(worker.actor), timeout_s=GROUP_GRACE_S) for worker in live)
        for worker, result in zip(live, await asyncio.gather(*told, return_exceptions=True), strict=True):
            if isinstance(result, TimeoutError):
                self._lose(worker, f"was silent for {GROUP_GRACE_S:g} s")
            elif isinstance(result, BaseException) and not isinstance(result, WorkerLost):
                raise result

    def _standing(self, name: str) -> _Standing:
        return self._standings.setdefault(name, _Standing())


def load_record(reports: Sequence[LoadReport]) -> dict[str, float]:
    """Metrics of the engines' load, from what each worker sees. Pure.

    Limits and requests in flight, held, moved and rescued are summed over workers; what an engine says of itself is
    the same for all.
    """
    record: dict[str, float] = {
        "engine/held": sum(report.held for report in reports),
        "engine/moved_requests": sum(report.moved_requests for report in reports),
        "engine/moved_tokens": sum(report.moved_tokens for report in reports),
        "engine/rescued_requests": sum(report.rescued_requests for report in reports),
        "engine/rescued_tokens": sum(report.rescued_tokens for report in reports),
        "discarded/attempt_tokens": sum(report.lost_tokens for report in reports),
    }
    for name in reports[0].replicas:
        shares = [report.replicas[name] for report in reports]
        limits = [share.limit for share in shares if share.limit is not None]
        if limits:
            record[f"engine/limit/{name}"] = sum(limits)
        record[f"engine/in_flight/{name}"] = sum(share.in_flight for share in shares)
        record |= _said(name, shares)
    return record


def engine_times(reports: Sequence[LoadReport]) -> dict[str, EngineTimes]:
    """Of every replica that has said something what was said last, by its latest engine. Pure."""
    found: dict[str, EngineTimes] = {}
    for load, name in ((seen.load, name) for report in reports for name, seen in report.replicas.items()):
        if load is None or load.times is None:
            continue
        other = found.get(name)
        if other is None or (load.times.began_at, load.times.up_s) > (other.began_at, other.up_s):
            found[name] = load.times
    return found


def _said(name: str, shares: Sequence[ReplicaLoad]) -> dict[str, float]:
    load = next((share.load for share in shares if share.load is not None), None)
    if load is None:
        return {}
    said = {
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage_frac": load.kv_usage_frac,
        "preemptions": load.num_preemptions,
    }
    return {f"engine/{figure}/{name}": value for figure, value in said.items() if value is not None}
