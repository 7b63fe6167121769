"""Engines and rollout workers as the driver sees them: who is there, what is sent to whom, and restarts of the lost.

    Fleet.watch ──poll──> engines                     each on its own, every `POLL_S`
        │       ──FleetView──> workers ──WorkerReport──> back
        └── restarts: RestartPolicy, one for engines, one for workers

This module alone writes the table of engines (`rollout.fleet.states`). Weight sync, polls and workers report losses;
evaluations pin engines. A worker is lost when it dies, or does not take a view for too long; its groups fail with
`WorkerLost`, which costs no retry: the buffer hands them out again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.errors import WorkerLost
from rollout.fleet.engine_client import is_actor_lost
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import EngineRecord, EngineView, FleetView, apply
from rollout.worker.group_server import FLUSH_S
from trainer.driver.engine_monitor import POLL_S, PROMPT_S, EngineIdleMeter, EngineProbe, load_metrics
from trainer.errors import first_cause, one_line
from trainer.remote import ACTOR_OUTPUT, RemoteTimeout, call, cancel_call, kill_actor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from rollout.engine.interface import EngineStatus
    from rollout.fleet.states import EventKind, WorkerReport
    from rollout.types import Group, Prompt, RolloutRequest, SamplingParams, Trajectory


log = logging.getLogger(__name__)

GROUP_GRACE_S = 60.0
"""A worker bounds generation and rewards itself; a live one responds this much later at most."""
TOO_SLOW = (
    "generation or rewards take longer than their deadlines together: increase rollout.request_timeout_s "
    f"(task.agent_timeout_s with an agent) or task.reward.queue_timeout_s; its output is in {ACTOR_OUTPUT}"
)
HANGS = f"its process hangs; its output is in {ACTOR_OUTPUT}"
RESTART_RESET_S = 3600.0
"""After this long in health all restarts are back: the few faults of a run of weeks must not add up."""
WAIT_SLICE_S = 5.0
"""Longest single wait for an engine, after which the caller tries again."""
RETRY_S = 1.0
"""After a call that failed though the worker lives."""


class AllEnginesLost(Exception):
    """No engine is left, and none may be started again."""


class AllWorkersLost(Exception):
    """No rollout worker is left, and none may be started again."""


class RestartPolicy:
    """Each place may be filled again `max_restarts` times, and as often again after `RESTART_RESET_S` in health."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_succeeded = 0
        self._spent, self._tried = Counter[str](), Counter[str]()
        self._healthy_since: dict[str, float] = {}

    def on_healthy(self, name: str, now: float) -> None:
        since = self._healthy_since.setdefault(name, now)
        if self._spent[name] and now - since >= RESTART_RESET_S:
            self._spent[name] = 0
            log.info("%s has been healthy for %.0f s: restart budget reset", name, now - since)

    def is_spent(self, name: str) -> bool:
        return self._spent[name] >= self.max_restarts

    def begin(self, name: str) -> tuple[int, str]:
        """Returns (number of the restart of this place in the whole run, "1 of 3")."""
        self._healthy_since.pop(name, None)
        self._spent[name] += 1
        self._tried[name] += 1
        return self._tried[name], f"{self._spent[name]} of {self.max_restarts}"


class WorkerClient:
    """The driver's end of one rollout worker; its restarted successor gets a new client."""

    def __init__(self, name: str, actor: Any, *, on_lost: Callable[[], None]) -> None:
        self.name, self.actor = name, actor
        self.num_groups = 0
        """Groups and evaluations in flight."""
        self.lost = ""
        """Why; empty while it lives."""
        self.update: asyncio.Task[None] | None = None
        """Sends it the newest view."""
        self.epoch = -1
        """Of the newest view that it has."""
        self.engines: dict[str, int] = {}
        """Engine -> the incarnation whose handle it has."""
        self.report: WorkerReport | None = None
        self._on_lost = on_lost
        self._call_ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Group]] = {}
        self._to_begin: dict[int, RolloutRequest] = {}
        self._cancelled: list[int] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._end: WorkerLost | None = None
        """What every group gets from now on."""

    async def call(self, ref: Any, *, timeout_s: float | None = None) -> Any:
        """Raises what its actor raised, RemoteTimeout, or WorkerLost if it is gone."""
        try:
            return await call(ref, timeout_s=timeout_s, who=self.name, what="a call", hint=HANGS)
        except Exception as error:
            if not is_actor_lost(error):
                raise
            reason = f"died: {str(error).strip().splitlines()[0]}"
            self.lose(reason)
            raise WorkerLost(f"{self.name} {reason}") from error

    async def run(self, item: RolloutRequest) -> Group:
        """Generate and reward one group; a cancellation ends it in the worker too. Raises what the worker raised, or
        WorkerLost.

        Waits for: the worker. Unblocked by: the caller's deadline; the loss of the worker.
        """
        if self._end is not None:
            raise self._end
        call_id, future = next(self._call_ids), asyncio.get_running_loop().create_future()
        self._waiting[call_id], self._to_begin[call_id] = future, item
        self._keep_running("send", self._send)
        self._keep_running("receive", self._receive)
        try:
            return await future
        finally:
            del self._waiting[call_id]
            if future.cancelled() and self._to_begin.pop(call_id, None) is None and self._end is None:
                self._cancelled.append(call_id)
                self._keep_running("send", self._send)

    def lose(self, reason: str) -> None:
        """Fail its groups and kill its process, which ends all open calls. It is never called again."""
        if self.lost:
            return
        self.lost = reason
        log.error("%s %s; reassigning its %d groups", self.name, reason, self.num_groups)
        self._end_groups(WorkerLost(f"{self.name} {reason}"))
        kill_actor(self.actor)
        self._on_lost()

    def close(self) -> None:
        """The run is over: fail its groups; its end is no loss."""
        self._end_groups(WorkerLost("the run is over"))
        for task in self._tasks.values():
            task.cancel()

    def _end_groups(self, error: WorkerLost) -> None:
        self._end = error
        self._to_begin.clear()
        self._cancelled.clear()
        self._settle(dict.fromkeys(self._waiting, error))

    def _keep_running(self, name: str, coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(coroutine(), name=f"groups {name}")

    async def _send(self) -> None:
        """Consumes: groups to begin and to cancel. Waits for: the worker to take them, then `FLUSH_S`. Unblocked by:
        the loss of the worker, which the fleet watches."""
        while self._to_begin or self._cancelled:
            items, self._to_begin = self._to_begin, {}
            cancelled, self._cancelled = self._cancelled, []
            try:
                await self.call(self.actor.submit.remote(items, cancelled))
            except WorkerLost:
                return
            except Exception as error:  # noqa: BLE001 - each of these groups gets it
                self._cancelled += cancelled  # with the next call
                self._settle(dict.fromkeys(items, error))
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(FLUSH_S)

    async def _receive(self) -> None:
        """Consumes: what has ended in the worker. Waits for: it. Unblocked by: the loss of the worker, as `_send`."""
        while self._waiting and self._end is None:
            try:
                self._settle(await self.call(self.actor.ended.remote()))
            except WorkerLost:
                return
            except Exception as error:  # noqa: BLE001 - its groups are unknown, so each that waits gets it
                begun = self._waiting.keys() - self._to_begin.keys()
                self._cancelled += begun
                self._settle(dict.fromkeys(begun, error))
                self._keep_running("send", self._send)
                await asyncio.sleep(RETRY_S)

    def _settle(self, ended: Mapping[int, Group | Exception]) -> None:
        for call_id, outcome in ended.items():
            future = self._waiting.get(call_id)
            if future is None or future.done():
                continue  # it was cancelled, with the reason, while the result was on its way
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


class Fleet:
    """One per run. Each group goes to the live worker with the fewest groups in flight."""

    def __init__(
        self,
        engines: Mapping[str, Any],
        workers: Sequence[Any],
        *,
        group_timeout_s: float,
        heartbeat_timeout_s: float,
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
            restart_engine: (engine, number of the restart) replaces the engine by one with the newest weights, and
                returns their version. Has a deadline.
            restart_worker: (place, number of the restart) -> a new worker actor, started. Has a deadline.
            sync_states: engine -> "live", or how weight sync lost it.
        """
        self._engines = engines
        self._workers = [self._client(f"rollout worker {index}", actor) for index, actor in enumerate(workers)]
        self._group_timeout_s, self._heartbeat_timeout_s = group_timeout_s + GROUP_GRACE_S, heartbeat_timeout_s
        # Half, because an engine whose stream a silent worker does not read looks silent too.
        self._worker_timeout_s = heartbeat_timeout_s / 2
        self._restart_engine_actor, self._restart_worker_actor = restart_engine, restart_worker
        self._engine_policy = RestartPolicy(0 if restart_engine is None else max_engine_restarts)
        self._worker_policy = RestartPolicy(0 if restart_worker is None else max_worker_restarts)
        self._sync_states = sync_states
        self._table = {name: EngineRecord() for name in engines}
        self._probes = {name: self._probe(name) for name in engines}
        self._epoch = 0
        self._away: set[str] = set()
        """Engines that were not there at some time since the last record."""
        self._restarts: dict[str, asyncio.Task[None]] = {}
        """Under way, of engines and workers."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, whenever an engine or a worker is lost or back, or a worker has a view."""
        self._is_closed = False
        self.idle_engines = EngineIdleMeter()

    def _client(self, name: str, actor: Any) -> WorkerClient:
        return WorkerClient(name, actor, on_lost=self._notify)

    def _probe(self, name: str) -> EngineProbe:
        lose = partial(self._lose_engine, name, self._table[name].incarnation)
        return EngineProbe(name, self._engines[name], heartbeat_timeout_s=self._heartbeat_timeout_s, on_lost=lose)

    # What others read

    def engine_states(self) -> dict[str, str]:
        """Engine -> "live", or why it is not there. A pinned engine is live."""
        return {
            name: "live" if record.is_there else f"{record.state} ({record.reason})"
            for name, record in self._table.items()
        }

    @property
    def lost_engines(self) -> dict[str, str]:
        """Engine -> why it is not there."""
        return {name: state for name, state in self.engine_states().items() if state != "live"}

    def take_record(self) -> dict[str, float]:
        """Metrics since the last call; those of the engines' load once a worker has reported it."""
        away, self._away = self._away, set(self.lost_engines)
        reports = [worker.report for worker in self._workers if worker.report is not None and not worker.lost]
        return {
            "fleet/engines_lost": len(away),
            "fleet/engine_restarts": self._engine_policy.num_succeeded,
            "fleet/worker_restarts": self._worker_policy.num_succeeded,
            **(load_metrics(reports, self._loads()) if reports else {}),
        }

    def _loads(self) -> dict[str, EngineStatus]:
        return {name: probe.load for name, probe in self._probes.items() if probe.load is not None}

    # Groups and evaluations

    async def run_group(self, item: RolloutRequest) -> Group:
        """Generate and reward one group. Without an engine it waits for one and begins again, at the cost of no retry.

        Raises:
            NoReplica: no engine is left, and none comes back.
            TimeoutError: it took too long, and was cancelled in the worker.
            WorkerLost: the worker died with the group, or never had it.
            Exception: what the worker raised.
        """
        while True:
            worker = await self._choose()
            worker.num_groups += 1
            limit = asyncio.timeout(self._group_timeout_s)
            try:
                async with limit:  # cancelled, it ends in the worker too, and does not compete with its retry
                    return await worker.run(item)
            except NoReplica as error:
                no_engine = error
            except TimeoutError as error:
                if not limit.expired():
                    raise  # the worker's own
                what = f"group {item.group_id} timed out after {self._group_timeout_s:g} s on {worker.name}"
                raise RemoteTimeout(f"{what}; {TOO_SLOW}") from error
            finally:
                worker.num_groups -= 1
            await self.wait_for_engine(no_engine)

    async def evaluate(
        self, prompts: Sequence[Prompt], params: SamplingParams, engine: str, numbers: Sequence[int]
    ) -> list[Trajectory]:
        """One trajectory per prompt, all from `engine`; begins again where the worker is lost. `numbers` are the places
        of the prompts in the evaluation. Raises WorkerLost where no worker is left and none comes back.

        Waits for: the responses, however long they take. Unblocked by: the caller's deadline, whose cancellation
        reaches the worker; `watch`, which loses a silent worker; `close`.
        """
        while True:
            worker = await self._choose()
            ref = worker.actor.evaluate.remote(list(prompts), params, engine, list(numbers))
            worker.num_groups += 1
            try:
                return await worker.call(ref)
            except WorkerLost as error:
                log.warning("the evaluation begins again on another worker: %s", error)
            except asyncio.CancelledError:
                cancel_call(ref)
                raise
            finally:
                worker.num_groups -= 1

    async def _choose(self) -> WorkerClient:
        """The live worker with the fewest groups. Raises WorkerLost where none came, or none will.

        Waits for: one to live. Unblocked by: a restart; its deadline; `watch`, which ends the run; `close`.
        """
        try:
            async with asyncio.timeout(self._group_timeout_s):
                while not (live := [worker for worker in self._workers if not worker.lost]):
                    if self._is_closed:
                        raise WorkerLost("no rollout worker is left, and none will be restarted")
                    await self._changed.wait()
        except TimeoutError as error:
            raise WorkerLost(f"no rollout worker lived for {self._group_timeout_s:g} s") from error
        return min(live, key=lambda worker: worker.num_groups)

    # Pins and losses of engines

    async def pin(self, name: str) -> None:
        """Until `unpin` no worker sends new training requests to this engine; what runs there continues. Raises
        RemoteTimeout, without a pin, if some worker lives and takes no view.

        Waits for: every live worker to have the view. Unblocked by: the loss of a silent worker; its deadline.
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
        """End a pin. An engine that was lost meanwhile stays so."""
        self._apply(name, "unpin")

    def exclude_lost_engines(self) -> None:
        """To be called whenever the states of weight sync have changed. Engines that it has lost have old weights or
        none, and get no requests."""
        for name, state in self._sync_states().items():
            if state != "live":
                self._lose_engine(name, self._table[name].incarnation, f"weight sync: {state}")

    def _lose_engine(self, name: str, incarnation: int, reason: str) -> None:
        if self._table[name].is_there:
            self._apply(name, "lost", incarnation=incarnation, reason=reason)

    def _apply(self, name: str, event: EventKind, *, incarnation: int | None = None, reason: str = "") -> bool:
        """Whether the table has changed; if so, every worker gets the new view."""
        record = self._table[name]
        changed = apply(
            record, event, incarnation=record.incarnation if incarnation is None else incarnation, reason=reason
        )
        if changed is None:
            return False
        self._table[name] = changed
        if not changed.is_there:
            self._away.add(name)
        self._epoch += 1
        for worker in self._workers:
            self._push(worker)
        return True

    # Views and reports

    def _push(self, worker: WorkerClient) -> None:
        """Begin to send the view to this worker, unless a view is on its way: the newest follows it."""
        if not worker.lost and (worker.update is None or worker.update.done()):
            worker.update = asyncio.create_task(self._update(worker), name=f"view for {worker.name}")

    async def _update(self, worker: WorkerClient) -> None:
        """Send the newest view until the worker has it."""
        while True:
            view, known = self._view(worker), {name: record.incarnation for name, record in self._table.items()}
            try:
                report = await worker.call(worker.actor.update.remote(view), timeout_s=self._worker_timeout_s)
            except WorkerLost:
                return
            except TimeoutError:
                worker.lose(f"missed heartbeats for {self._worker_timeout_s:g} s")
                return
            except Exception as error:  # noqa: BLE001 - the next view may be taken
                log.warning("%s did not take a view of the engines: %s", worker.name, one_line(first_cause(error)))
                return
            worker.epoch, worker.report = view.epoch, report
            worker.engines |= {name: known[name] for name in view.handles}
            self._notify()
            for name, (incarnation, reason) in report.lost_engines.items():
                self._lose_engine(name, incarnation, reason)
            if worker.epoch == self._epoch:
                return

    def _view(self, worker: WorkerClient) -> FleetView:
        engines, handles = dict[str, EngineView](), dict[str, Any]()
        for name, record in self._table.items():
            probe = self._probes[name]
            engines[name] = EngineView(
                incarnation=record.incarnation,
                state=record.state,
                reason=record.reason,
                load=probe.load_now,
                num_polls=probe.num_polls,
                num_elsewhere=sum(
                    other.report.in_flight.get(name, 0)
                    for other in self._workers
                    if other is not worker and other.report is not None and not other.lost
                ),
            )
            if record.is_there and record.incarnation > worker.engines.get(name, 0):
                handles[name] = self._engines[name]
        return FleetView(epoch=self._epoch, engines=engines, handles=handles)

    # Restarts

    async def watch(self, *, needs_groups: Callable[[], bool], needs_engines: Callable[[], bool]) -> None:
        """Keeps the table and the workers' views new, and as many engines and workers alive as there may be.

        Consumes: polls of engines, reports of workers. Waits for: its interval. Unblocked
        by: cancellation, which ends the restarts too; they have deadlines of their own.

        Args:
            needs_groups: whether the run fails without a worker; later an evaluation that waits for one does.
            needs_engines: whether a lost engine is started again; later a loss is only logged.

        Raises:
            AllEnginesLost, AllWorkersLost: none is left, none may be started, and the run needs one.
        """
        try:
            while True:
                await asyncio.sleep(POLL_S)
                self._watch_engines(needs_engines)
                if polls := [probe.poll for probe in self._probes.values() if probe.poll is not None]:
                    await asyncio.wait(polls, timeout=PROMPT_S)  # after which others are not held up
                self._watch_workers(needs_groups())
        finally:
            polls, updates = (probe.poll for probe in self._probes.values()), (w.update for w in self._workers)
            tasks = [task for task in (*self._restarts.values(), *polls, *updates) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _watch_workers(self, needs_groups: bool) -> None:
        now = asyncio.get_running_loop().time()
        for index, worker in enumerate(self._workers):
            if not worker.lost:
                self._worker_policy.on_healthy(worker.name, now)
                self._push(worker)
            elif worker.name not in self._restarts and not self._worker_policy.is_spent(worker.name):
                self._begin_restart(worker.name, self._restart_worker(index, worker))
        if self._is_closed or any(not worker.lost or worker.name in self._restarts for worker in self._workers):
            return
        reasons = "; ".join(f"{worker.name} {worker.lost}" for worker in self._workers)
        error = AllWorkersLost(
            f"no rollout worker is left after {self._worker_policy.max_restarts} restarts of each ({reasons}); "
            f"their output is in {ACTOR_OUTPUT}; look at the memory of their host, and at your reward and agent loop"
        )
        if needs_groups:
            raise error
        log.error("no more evaluations; the run ends anyway: %s", error)
        self.close()

    def _watch_engines(self, needs_engines: Callable[[], bool]) -> None:
        now, is_over = asyncio.get_running_loop().time(), not needs_engines()
        if not is_over and self._are_engines_lost_for_good():
            states = "; ".join(f"{name} is lost: {record.reason}" for name, record in self._table.items())
            raise AllEnginesLost(
                f"no engine is left, and each had its {self._engine_policy.max_restarts} restarts "
                f"(rollout.max_engine_restarts): {states}; their output is in {ACTOR_OUTPUT}; start again with "
                "the same run_dir"
            )
        for name, record in self._table.items():
            if record.is_there:
                self._engine_policy.on_healthy(name, now)
                self._probes[name].begin()
            elif (restart := self._restarts.get(name)) is not None:
                if is_over and restart.cancel():
                    log.warning("the restart of %s is cancelled: training is over", name)
            elif record.state == "lost":
                if is_over or self._engine_policy.is_spent(name):
                    end = "training is over" if is_over else "no restart is left"
                    log.warning("%s is lost (%s); %s, so it is not started again", name, record.reason, end)
                    self._apply(name, "retire")
                else:
                    self._begin_restart(name, self._restart_engine(name, record.reason, needs_engines))
        times = {name: load.times for name, load in self._loads().items() if load.times is not None}
        self.idle_engines.add(times, self.lost_engines)

    async def wait_for_engine(self, error: Exception) -> None:
        """Call it after this error, with no engine found, and then try again. Raises the error if no engine is left and
        none may be restarted.

        Waits for: an engine that comes back. Unblocked by: that, and `WAIT_SLICE_S`.
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

    def _begin_restart(self, name: str, restart: Coroutine[Any, Any, None]) -> None:
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
        if (poll := self._probes[name].poll) is not None:
            poll.cancel()
        self._probes[name] = self._probe(name)
        self._apply(name, "joined")
        self.exclude_lost_engines()  # weight sync may have lost it since
        log.info("%s is back with version %s", name, version)
        self._notify()

    async def _restart_worker(self, index: int, lost: WorkerClient) -> None:
        assert self._restart_worker_actor is not None
        number, attempt = self._worker_policy.begin(lost.name)
        log.warning("%s %s: restart %s", lost.name, lost.lost, attempt)
        try:
            actor = await self._restart_worker_actor(index, number)
        except Exception as error:  # noqa: BLE001 - the run continues with the other workers, whatever is wrong with it
            reason = one_line(first_cause(error))
            log.error("restart %s of %s failed: %s", attempt, lost.name, reason)
            lost.lost = f"did not start: {reason}"  # newer than why the one before it was lost
            return
        self._workers[index] = worker = self._client(lost.name, actor)
        self._push(worker)
        self._worker_policy.num_succeeded += 1
        log.info("%s is back", worker.name)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """The run is over: groups fail, the end of a worker is no loss, and nothing waits for a restart."""
        self._is_closed = True
        self._notify()
        for worker in self._workers:
            worker.close()
