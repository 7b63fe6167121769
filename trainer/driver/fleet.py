"""Engines and rollout workers as the driver sees them: who is there, what is sent to whom, and restarts of the lost.

    Fleet.watch ──poll──> engines                     each by itself, every `POLL_S`
        │       ──FleetView──> workers ──WorkerReport──> back
        └── restarts: RestartPolicy, one for engines, one for workers

The table of engines (`rollout.fleet.states`) has one writer, this module. Weight sync, the polls and the workers report
losses; evaluations pin engines; everything that needs to know whether an engine is there reads this table.

A worker is lost when it dies, or does not take a view for too long. A group whose worker is lost fails with
`WorkerLost`, which costs it no retry: the buffer hands it out again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.errors import WorkerLost
from rollout.fleet.engine_client import is_actor_lost
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import EngineRecord, EngineView, FleetView, apply
from rollout.worker.group_server import FLUSH_S
from trainer.driver.engine_monitor import POLL_S, SILENCE_S, EngineIdleMeter, EngineMonitor, load_record
from trainer.errors import first_cause, one_line
from trainer.remote import RemoteTimeout, call, cancel_call, kill_actor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from rollout.fleet.states import EventKind, WorkerReport
    from rollout.types import Group, Prompt, RolloutRequest, SamplingParams, Trajectory


log = logging.getLogger(__name__)

GROUP_GRACE_S = 60.0
"""A worker bounds generation and rewards itself; a live one has answered this much later."""
TOO_SLOW = (
    "generation or rewards take longer than their deadlines together, so look at its file in actor_logs/, or increase "
    "rollout.request_timeout_s (task.agent_timeout_s with an agent) or task.reward.queue_timeout_s"
)
HANGS = "its process hangs; look at its file in actor_logs/"
RESTART_RESET_S = 3600.0
"""What has been healthy for so long has all its restarts again: the few faults of a run of weeks are not to add up."""
WAIT_SLICE_S = 5.0
"""Longest single wait for an engine; the caller tries again then, and waits again."""
RETRY_S = 1.0
"""After a call that failed though the worker lives."""


class AllEnginesLost(Exception):
    """No engine is left, and none may be started any more."""


class AllWorkersLost(Exception):
    """No rollout worker is left, and none may be started any more."""


class RestartPolicy:
    """How often each place may be filled again: `max_restarts` times, until it has been healthy for
    `RESTART_RESET_S`. Times are the caller's."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_succeeded = 0
        self._spent: Counter[str] = Counter()
        self._tried: Counter[str] = Counter()
        self._healthy_since: dict[str, float] = {}

    def on_healthy(self, name: str, now: float) -> None:
        since = self._healthy_since.setdefault(name, now)
        if self._spent[name] and now - since >= RESTART_RESET_S:
            self._spent[name] = 0
            log.info("%s has been healthy for %.0f s: restart budget reset", name, now - since)

    def on_lost(self, name: str) -> None:
        self._healthy_since.pop(name, None)

    def is_spent(self, name: str) -> bool:
        return self._spent[name] >= self.max_restarts

    def begin(self, name: str) -> tuple[int, str]:
        """(number of the restart of this place in the whole run, "1 of 3")."""
        self._spent[name] += 1
        self._tried[name] += 1
        return self._tried[name], f"{self._spent[name]} of {self.max_restarts}"


class WorkerClient:
    """The other end of a worker's `GroupServer`. Of use until the worker is lost.

    Args:
        actor: the rollout worker's actor.
        ask: the result of a remote call to it; raises what it raised, or WorkerLost if the actor is gone.
    """

    def __init__(self, actor: Any, ask: Callable[[Any], Awaitable[Any]]) -> None:
        self._actor = actor
        self._ask = ask
        self._call_ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Group]] = {}
        self._to_begin: dict[int, RolloutRequest] = {}
        self._cancelled: list[int] = []
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
        call_id, future = next(self._call_ids), asyncio.get_running_loop().create_future()
        self._waiting[call_id], self._to_begin[call_id] = future, item
        self._keep_running("send", self._send)
        self._keep_running("receive", self._receive)
        try:
            return await future
        finally:
            del self._waiting[call_id]
            if future.cancelled() and self._to_begin.pop(call_id, None) is None and self._lost is None:
                self._cancelled.append(call_id)
                self._keep_running("send", self._send)

    def close(self) -> None:
        """The run is over: groups that are under way fail, and the end of the worker is no loss."""
        self._fail((), WorkerLost("the run is over"))
        for task in self._tasks.values():
            task.cancel()

    def _keep_running(self, name: str, coroutine: Callable[[], Any]) -> None:
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(coroutine(), name=f"groups {name}")

    async def _send(self) -> None:
        """Consumes: groups to begin and to cancel. Waits for: the worker to take them, and `FLUSH_S`.

        Unblocked by: the loss of the worker, which the fleet watches.
        """
        while self._to_begin or self._cancelled:
            items, self._to_begin = self._to_begin, {}
            cancelled, self._cancelled = self._cancelled, []
            try:
                await self._ask(self._actor.submit.remote(items, cancelled))
            except Exception as error:  # noqa: BLE001 - each of these groups gets it
                self._cancelled += cancelled  # with the next call
                self._fail(items, error)
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(FLUSH_S)

    async def _receive(self) -> None:
        """Consumes: what has ended in the worker. Waits for: it. Unblocked by: the loss of the worker, as `_send`."""
        while self._waiting and self._lost is None:
            try:
                self._settle(await self._ask(self._actor.ended.remote()))
            except Exception as error:  # noqa: BLE001 - whose answer it was is unknown, so each that waits gets it
                begun = self._waiting.keys() - self._to_begin.keys()
                self._cancelled += begun
                self._fail(begun, error)
                self._keep_running("send", self._send)
                await asyncio.sleep(RETRY_S)

    def _settle(self, ended: Mapping[int, Group | Exception]) -> None:
        for call_id, outcome in ended.items():
            future = self._waiting.get(call_id)
            if future is None or future.done():
                continue  # it was cancelled, with the reason, while the answer was on its way
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _fail(self, call_ids: Iterable[int], error: Exception) -> None:
        """A lost worker is never called again, and all its groups fail."""
        if isinstance(error, WorkerLost):
            self._lost = error
            self._to_begin.clear()
            self._cancelled.clear()
            call_ids = self._waiting
        for call_id in call_ids:
            future = self._waiting.get(call_id)
            if future is not None and not future.done():
                future.set_exception(error)


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A rollout worker's place, and who has it."""

    name: str
    actor: Any
    client: WorkerClient | None = None
    """Of this actor; None before the first group."""
    num_groups: int = 0
    """In flight."""
    lost: str = ""
    """Why; empty while it lives."""
    update: asyncio.Task[None] | None = None
    """The view that is on its way to it."""
    epoch: int = -1
    """Of the newest view that it has."""
    engines: dict[str, int] = field(default_factory=dict)
    """Engine -> the incarnation that this actor was told of."""
    report: WorkerReport | None = None


class Fleet:
    """One per run. Each group goes to the live worker with the fewest groups in flight."""

    def __init__(
        self,
        engines: Mapping[str, Any],
        workers: Sequence[Any],
        *,
        group_timeout_s: float,
        heartbeat_timeout_s: float = SILENCE_S,
        max_engine_restarts: int = 0,
        max_worker_restarts: int = 0,
        restart_engine: Callable[[str, int], Awaitable[int | None]] | None = None,
        restart_worker: Callable[[int, int], Awaitable[Any]] | None = None,
        sync_states: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """
        Args:
            engines: actors by name, all with the live weights; `restart_engine` puts new ones in here.
            group_timeout_s: longest time that a worker may take for a group, rewards included.
            heartbeat_timeout_s: of an engine; a worker has half of it.
            restart_engine: (engine, number of the restart) ends the old engine and puts a new one in its place, with
                the newest weights; returns their version. Has a deadline.
            restart_worker: (place, number of the restart) -> a new worker actor, started. Has a deadline.
            sync_states: engine -> "live", or how weight sync lost it.
        """
        self._engines = engines
        self._workers = [_Worker(name=f"rollout worker {index}", actor=actor) for index, actor in enumerate(workers)]
        self._group_timeout_s = group_timeout_s + GROUP_GRACE_S
        # Half: an engine seems to wait for a worker that does not read its stream, and would look silent with it.
        self._worker_timeout_s = heartbeat_timeout_s / 2
        self._restart_engine_actor, self._restart_worker_actor = restart_engine, restart_worker
        self._engine_policy = RestartPolicy(0 if restart_engine is None else max_engine_restarts)
        self._worker_policy = RestartPolicy(0 if restart_worker is None else max_worker_restarts)
        self._sync_states = sync_states
        self._table = {name: EngineRecord() for name in engines}
        self._epoch = 0
        self._monitor = EngineMonitor(heartbeat_timeout_s=heartbeat_timeout_s, on_lost=self._lose_engine)
        self._restarts: dict[str, asyncio.Task[None]] = {}
        """Under way, of engines and workers."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, whenever an engine or a worker is lost or back, or a worker has a view."""
        self._is_closed = False
        self.idle_engines = EngineIdleMeter()

    # What others read

    def engine_states(self) -> dict[str, str]:
        """Engine -> "live", or why it is not there. A pinned engine is live."""
        self._hear_weight_sync()
        return {
            name: "live" if record.is_there else f"{record.state} ({record.reason})"
            for name, record in self._table.items()
        }

    @property
    def lost_engines(self) -> dict[str, str]:
        """Engine -> why it is not there."""
        return {name: state for name, state in self.engine_states().items() if state != "live"}

    def takes_training(self, name: str) -> bool:
        return self._table[name].state == "live"

    @property
    def load_record(self) -> dict[str, float]:
        """Metrics of the engines' load as they are now; empty before the first report."""
        reports = [worker.report for worker in self._workers if worker.report is not None and not worker.lost]
        if not reports:
            return {}
        restarts = {
            "fleet/engine_restarts": self._engine_policy.num_succeeded,
            "fleet/worker_restarts": self._worker_policy.num_succeeded,
        }
        return {**load_record(reports, self._monitor.loads), **restarts}

    # Groups and evaluations

    async def run_group(self, item: RolloutRequest) -> Group:
        """Generate and reward one group. Raises what the worker raised.

        Where no engine is left it waits for one and begins again, which costs the group no retry.

        Raises:
            NoReplica: no engine is left, and none comes back.
            TimeoutError: it took too long, and was cancelled in the worker.
            WorkerLost: the worker died with the group, or never had it.
        """
        while True:
            try:
                return await self._run_once(item)
            except NoReplica as error:
                await self.wait_for_engine(error)

    async def _run_once(self, item: RolloutRequest) -> Group:
        worker = await self._choose()
        if worker.client is None:
            worker.client = WorkerClient(worker.actor, partial(self._call, worker, actor=worker.actor, timeout_s=None))
        worker.num_groups += 1
        limit = asyncio.timeout(self._group_timeout_s)
        try:
            async with limit:
                return await worker.client.run(
                    item
                )  # cancelled, it ends there too, and does not compete with its retry
        except TimeoutError as error:
            if not limit.expired():
                raise  # the worker's own
            what = f"group {item.group_id} timed out after {self._group_timeout_s:g} s on {worker.name}"
            raise RemoteTimeout(f"{what}; {TOO_SLOW}") from error
        finally:
            worker.num_groups -= 1

    async def evaluate(
        self, prompts: Sequence[Prompt], params: SamplingParams, engine: str, numbers: Sequence[int]
    ) -> list[Trajectory]:
        """One trajectory per prompt, all from `engine`. Begins again where the worker is lost.

        Waits for: the responses, however long they take. Unblocked by: the caller's deadline, whose cancellation
        reaches the worker; `watch`, which loses a worker that is silent; `close`.

        Raises:
            WorkerLost: no worker is left, and none comes back.
        """
        while True:
            worker = await self._choose()
            ref = worker.actor.evaluate.remote(list(prompts), params, engine, list(numbers))
            worker.num_groups += 1
            try:
                return await self._call(worker, ref, timeout_s=None)
            except WorkerLost as error:
                log.warning("the evaluation begins again on another worker: %s", error)
            except asyncio.CancelledError:
                cancel_call(ref)
                raise
            finally:
                worker.num_groups -= 1

    async def _choose(self) -> _Worker:
        """Waits for: a live worker. Unblocked by: a restart; its deadline; `watch`, which ends the run; `close`.

        Raises:
            WorkerLost: none came, or none will.
        """
        try:
            async with asyncio.timeout(self._group_timeout_s):
                while not (live := [worker for worker in self._workers if not worker.lost]):
                    if self._is_closed:
                        raise WorkerLost("no rollout worker is left, and none is started any more")
                    await self._changed.wait()
        except TimeoutError as error:
            raise WorkerLost(f"no rollout worker lived for {self._group_timeout_s:g} s") from error
        return min(live, key=lambda worker: worker.num_groups)

    # Pins and losses of engines

    async def pin(self, name: str) -> None:
        """No worker sends anything new of training to this engine until `unpin`; what runs there continues.

        Waits for: every live worker to know. Unblocked by: the loss of a worker that is silent; its deadline.

        Raises:
            RemoteTimeout: some worker lives and takes no view; the engine is not pinned.
        """
        if not self._apply(name, "pin"):
            return
        epoch, limit_s = self._epoch, 3 * self._worker_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while any(not worker.lost and worker.epoch < epoch for worker in self._workers):
                    await self._changed.wait()
        except BaseException as error:
            self._apply(name, "unpin")
            if isinstance(error, TimeoutError):
                what = f"a pin of {name} timed out after {limit_s:g} s on a rollout worker"
                raise RemoteTimeout(f"{what}; {HANGS}") from error
            raise

    def unpin(self, name: str) -> None:
        """Ends a pin. An engine that has missed a version by then is lost, and stays out."""
        self._hear_weight_sync()
        self._apply(name, "unpin")

    def exclude_lost_engines(self) -> None:
        """A sync has ended: engines that it has lost have old weights or no version at all, and get no requests."""
        self._hear_weight_sync()

    def _hear_weight_sync(self) -> None:
        for name, state in self._sync_states().items():
            if state != "live" and self._table[name].is_there:
                self._apply(name, "lost", reason=f"weight sync: {state}")

    def _lose_engine(self, name: str, incarnation: int, reason: str) -> None:
        if self._table[name].is_there:
            self._apply(name, "lost", incarnation=incarnation, reason=reason)

    def _apply(self, name: str, event: EventKind, *, incarnation: int | None = None, reason: str = "") -> bool:
        """Returns whether the table has changed; then every worker gets the new view."""
        record = self._table[name]
        changed = apply(
            record, event, incarnation=record.incarnation if incarnation is None else incarnation, reason=reason
        )
        if changed is None:
            return False
        self._table[name] = changed
        self._epoch += 1
        for worker in self._workers:
            self._push(worker)
        return True

    # Views and reports

    def _push(self, worker: _Worker) -> None:
        """Begin to send the view to this worker. One that has not taken the last one gets the newest after that."""
        if not worker.lost and (worker.update is None or worker.update.done()):
            worker.update = asyncio.create_task(self._update(worker), name=f"view for {worker.name}")

    async def _update(self, worker: _Worker) -> None:
        """Send the newest view until the worker has it."""
        actor = worker.actor
        while True:
            view, known = self._view(worker), {name: record.incarnation for name, record in self._table.items()}
            try:
                report = await self._call(worker, actor.update.remote(view), timeout_s=self._worker_timeout_s)
            except WorkerLost:
                return
            except TimeoutError:
                self._lose(worker, f"missed heartbeats for {self._worker_timeout_s:g} s", actor)
                return
            except Exception as error:  # noqa: BLE001 - the next view may be taken
                log.warning("%s did not take a view of the engines: %s", worker.name, one_line(first_cause(error)))
                return
            if worker.actor is not actor:
                return
            worker.epoch, worker.report = view.epoch, report
            worker.engines |= {name: known[name] for name in view.handles}
            self._notify()
            for name, (incarnation, reason) in report.lost_engines.items():
                self._lose_engine(name, incarnation, reason)
            if worker.epoch == self._epoch:
                return

    def _view(self, worker: _Worker) -> FleetView:
        engines = {
            name: EngineView(
                incarnation=record.incarnation,
                state=record.state,
                reason=record.reason,
                load=self._monitor.load_now(name),
                num_polls=self._monitor.num_polls[name],
                num_elsewhere=sum(
                    other.report.in_flight.get(name, 0)
                    for other in self._workers
                    if other is not worker and other.report is not None and not other.lost
                ),
            )
            for name, record in self._table.items()
        }
        new = [n for n, r in self._table.items() if r.is_there and r.incarnation > worker.engines.get(n, 0)]
        return FleetView(epoch=self._epoch, engines=engines, handles={name: self._engines[name] for name in new})

    # Life and death

    async def watch(
        self,
        *,
        needs_groups: Callable[[], bool] = lambda: True,
        needs_engines: Callable[[], bool] = lambda: True,
    ) -> None:
        """Keeps the table and the workers' views new, and as many engines and workers alive as there may be.

        Consumes: polls of engines, reports of workers, the states of weight sync. Waits for: its interval. Unblocked
        by: cancellation, which ends the restarts too; they run beside it, and have deadlines of their own.

        Args:
            needs_groups: whether the run fails without a worker; later an evaluation that waits for one does.
            needs_engines: whether an engine that is lost is started again. Later a loss is logged and no more.

        Raises:
            AllEnginesLost, AllWorkersLost: none is left, none may be started, and the run needs one.
        """
        try:
            while True:
                await asyncio.sleep(POLL_S)
                self._watch_engines(needs_engines)
                await self._monitor.heard()
                self._watch_workers(needs_groups())
        finally:
            updates = [worker.update for worker in self._workers if worker.update is not None]
            tasks = [*self._restarts.values(), *updates]
            for task in tasks:
                task.cancel()
            await asyncio.gather(self._monitor.close(), *tasks, return_exceptions=True)

    def _watch_workers(self, needs_groups: bool) -> None:
        now = asyncio.get_running_loop().time()
        for index, worker in enumerate(self._workers):
            if not worker.lost:
                self._worker_policy.on_healthy(worker.name, now)
                self._push(worker)
            elif worker.name not in self._restarts and not self._worker_policy.is_spent(worker.name):
                self._worker_policy.on_lost(worker.name)
                self._begin_restart(worker.name, self._restart_worker(index, worker))
        if self._is_closed or any(not worker.lost or worker.name in self._restarts for worker in self._workers):
            return
        reasons = "; ".join(f"{worker.name} {worker.lost}" for worker in self._workers)
        error = AllWorkersLost(
            f"no rollout worker is left after {self._worker_policy.max_restarts} restarts of each ({reasons}); what "
            "they printed is in actor_logs/; look at the memory of their host, and at your reward and agent loop"
        )
        if needs_groups:
            raise error
        log.error("no more evaluations, while the run ends anyway: %s", error)
        self.close()

    def _watch_engines(self, needs_engines: Callable[[], bool]) -> None:
        self._hear_weight_sync()
        now, is_over = asyncio.get_running_loop().time(), not needs_engines()
        if not is_over and self._are_engines_lost_for_good():
            states = "; ".join(f"{name} is lost: {record.reason}" for name, record in self._table.items())
            raise AllEnginesLost(
                f"no engine is left, and each had its {self._engine_policy.max_restarts} restarts "
                f"(rollout.max_engine_restarts): {states}; what they printed is in actor_logs/; start again with the "
                "same run_dir"
            )
        for name, record in self._table.items():
            if record.is_there:
                self._engine_policy.on_healthy(name, now)
                self._monitor.poll(name, record.incarnation, self._engines[name])
            elif (restart := self._restarts.get(name)) is not None:
                if is_over and restart.cancel():
                    log.warning("the restart of %s is cancelled: training is over", name)
            elif record.state == "lost":
                self._engine_policy.on_lost(name)
                if is_over or self._engine_policy.is_spent(name):
                    end = "training is over" if is_over else "no restart is left"
                    log.warning("%s is lost (%s); %s, so it is not started again", name, record.reason, end)
                    self._apply(name, "retire")
                else:
                    self._begin_restart(name, self._restart_engine(name, record.reason, needs_engines))
        times = {name: load.times for name, load in self._monitor.loads.items() if load.times is not None}
        self.idle_engines.hear(times, self.lost_engines)

    async def wait_for_engine(self, error: Exception) -> None:
        """For one that found no engine to work with: returns when one has come back, or after a moment; then try again.

        Waits for: the end of a restart. Unblocked by: that, and `WAIT_SLICE_S`.

        Raises:
            Exception: `error`, if none is left and none may be started again. `watch` fails first, with the reasons.
        """
        lost = self.lost_engines.keys()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SLICE_S):
                while lost <= self.lost_engines.keys():
                    await self._changed.wait()
        if self._are_engines_lost_for_good():
            raise error

    def _are_engines_lost_for_good(self) -> bool:
        return bool(self._table) and all(
            record.state == "retired"
            or (record.state == "lost" and name not in self._restarts and self._engine_policy.is_spent(name))
            for name, record in self._table.items()
        )

    def _begin_restart(self, name: str, restart: Any) -> None:
        self._restarts[name] = task = asyncio.create_task(restart, name=f"restart {name}")
        task.add_done_callback(lambda _: self._restarts.pop(name))

    async def _restart_engine(self, name: str, reason: str, needs_engines: Callable[[], bool]) -> None:
        assert self._restart_engine_actor is not None
        number, attempt = self._engine_policy.begin(name)
        if any(record.is_there for record in self._table.values()):
            log.warning("%s is lost (%s): restart %s", name, reason, attempt)
        else:
            log.warning("all engines lost; waiting for %s (%s) to restart (attempt %s)", name, reason, attempt)
        self._apply(name, "restart")
        try:
            version = await self._restart_engine_actor(name, number)
        except BaseException as error:
            self._apply(name, "lost", reason=reason)
            if not isinstance(error, Exception):
                raise
            left = needs_engines() and not self._engine_policy.is_spent(name)
            next_step = "it is tried again" if left else "it stays out of this run"
            log.error("restart %s failed (%s): %s; %s", attempt, name, one_line(first_cause(error)), next_step)
            return
        self._engine_policy.num_succeeded += 1
        self._apply(name, "joined")
        log.info("%s is back with version %s", name, version)
        self._notify()

    async def _restart_worker(self, index: int, worker: _Worker) -> None:
        assert self._restart_worker_actor is not None
        number, attempt = self._worker_policy.begin(worker.name)
        log.warning("%s %s: restart %s", worker.name, worker.lost, attempt)
        try:
            actor = await self._restart_worker_actor(index, number)
        except Exception as error:  # noqa: BLE001 - the run continues with the other workers, whatever is wrong with it
            reason = one_line(first_cause(error))
            log.error("restart %s of %s failed: %s", attempt, worker.name, reason)
            worker.lost = f"did not start: {reason}"  # newer than why the one before it was lost
            return
        if worker.update is not None:
            worker.update.cancel()  # it was for the one before
        worker.actor, worker.client, worker.update, worker.report = actor, None, None, None
        worker.epoch, worker.engines, worker.lost = -1, {}, ""
        self._push(worker)
        self._worker_policy.num_succeeded += 1
        log.info("%s is back", worker.name)
        self._notify()

    async def _call(self, worker: _Worker, ref: Any, *, timeout_s: float | None, actor: Any = None) -> Any:
        """The result of a call to a worker. Raises what it raised, TimeoutError, or WorkerLost if it is gone."""
        actor = worker.actor if actor is None else actor
        try:
            return await call(ref, timeout_s=timeout_s, who=worker.name, what="a call", hint=HANGS)
        except Exception as error:
            if not is_actor_lost(error):
                raise
            reason = str(error).strip().splitlines()[0]
            self._lose(worker, f"died: {reason}", actor)
            raise WorkerLost(f"{worker.name} died: {reason}") from error

    def _lose(self, worker: _Worker, reason: str, actor: Any) -> None:
        """It gets no more groups; its process ends, if it has not, and with it every call that still waits there."""
        if worker.lost or worker.actor is not actor:
            return  # its place has been taken already
        worker.lost = reason
        log.error("%s %s; reassigning its %d groups", worker.name, reason, worker.num_groups)
        kill_actor(actor)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """The run is over: groups that are under way fail, the end of a worker is no loss, and none is waited for."""
        self._is_closed = True
        self._notify()
        for worker in self._workers:
            if worker.client is not None:
                worker.client.close()
