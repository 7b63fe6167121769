"""An engine worker's end: pulls a version in the background and commits it between two steps of the engine.

    CLOSED ──open──> IDLE ──prefetch──> PULLING ──arrive──> READY ──commit──> COMMITTING ──> IDLE ─ ... ─> CLOSED

    The coordinator asks for a prefetch over the worker's own control line, which does not wait for the engine's loop.
    staged:  prefetch pulls into a staging buffer in a background thread while the engine generates, and verifies it;
             commit copies buffer -> parameters on the device. A failure leaves the old weights whole.
    inplace: prefetch only says where the version is; commit pulls straight into the parameters and verifies.
             A failure leaves a mixture: the worker is dirty until a full commit succeeds.

Parameters are written through byte views of their storage: addresses never change (captured graphs hold them), and it
does not matter whether the engine made them in inference mode.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import TYPE_CHECKING

import msgspec
import torch

from weight_sync.channel import ControlServer
from weight_sync.errors import DigestMismatch, PullTimeout, ReplicaDirty, WeightSyncError
from weight_sync.messages import (
    AwaitRequest,
    LinkRequest,
    Ok,
    OpenReceiver,
    PrefetchRequest,
    PullReport,
    ReceiverInfo,
    RecordedLayout,
    RecordRequest,
    Request,
    Response,
    RunDigests,
    SlotAt,
    TransportRequest,
    WorkerStatus,
    answer,
    decode,
    encode,
)
from weight_sync.node import node_id, reachable_host
from weight_sync.receive.epoch import Deadline, ReceiverEpoch, WorkerContext
from weight_sync.receive.quantized import Reloads
from weight_sync.receive.recorder import Recorded, record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.plan.types import ParamMeta, WorkerLayout
    from weight_sync.receive.epoch import Slots
    from weight_sync.receive.quantized import Ballots, Reloader


log = logging.getLogger(__name__)

SLACK_S = 5.0
"""A pull outlives its deadline by this much. The coordinator notices a little late that the deadline has passed, and
asks again: what the first attempt brought must not be thrown away in between."""
ABORT_WAIT_S = 30.0
"""How long an aborted pull may take to notice: one batch of copies."""
COMMIT_WAIT_S = 5.0
"""How long a pull waits for the end of a commit, which takes milliseconds."""


class ReceiverState(Enum):
    CLOSED = "closed"
    """In no epoch."""
    IDLE = "idle"
    """The parameters are all that is there."""
    PULLING = "pulling"
    """A version is on its way into the staging buffer."""
    READY = "ready"
    """A version can be committed: it is in the staging buffer or, in place, its slots are known."""
    COMMITTING = "committing"


CLOSED, IDLE, PULLING, READY, COMMITTING = ReceiverState
TRANSITIONS = {
    (CLOSED, "open"): IDLE,
    (IDLE, "prefetch"): PULLING,
    (READY, "prefetch"): PULLING,
    (PULLING, "arrive"): READY,
    (PULLING, "fail"): IDLE,
    (READY, "drop"): IDLE,
    (READY, "commit"): COMMITTING,
    (COMMITTING, "end"): IDLE,
    (IDLE, "close"): CLOSED,
    (READY, "close"): CLOSED,
}
"""Everything else is refused. What the parameters hold is apart from it: a version, or a mixture (`is_dirty`)."""


class Pull:
    """What is known of the version that is being pulled, was pulled, or could not be pulled."""

    def __init__(self, version: int, slots: Slots, deadline_at: float) -> None:
        self.version = version
        self.slots = slots
        self.deadline = Deadline(deadline_at, self._check)
        self.is_aborted = threading.Event()
        self.result: Future[PullReport] = Future()
        """What it cost, or the `WeightSyncError` that ended it."""

    def _check(self) -> None:
        if self.is_aborted.is_set():
            raise WeightSyncError(f"the pull of version {self.version} was aborted")


class WeightReceiver:
    """See the module docstring. Called by the worker's RPC loop and by its own control thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: Backend,
        *,
        worker: int,
        reloader: Reloader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reloader` loads modules whose live weights are derived; without it such engines are refused."""
        self._model = model
        self._backend = backend
        self._worker = worker
        self._reloader = reloader
        self._recorded: Recorded | None = None
        self._clock = clock
        device = next((p.device for p in model.parameters()), torch.device(backend.torch_device))
        if device.index is not None:
            # Drivers keep a current device per thread, and the control thread has not chosen one.
            backend.set_device(device.index)
        backend.check_layout(model.named_parameters())
        self._context = WorkerContext(model=model, backend=backend, worker=worker, device=device, clock=clock)
        self._server: ControlServer | None = None
        self._requests: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        """Guards what follows; notified whenever `state` changes."""
        self.state = CLOSED
        self._epoch: ReceiverEpoch | None = None
        self._pull: Pull | None = None
        self._live_version: int | None = None
        self._is_dirty = False
        self._num_commits = 0

    @property
    def is_dirty(self) -> bool:
        """The parameters are a mixture of versions: the engine must not generate from them."""
        return self._is_dirty

    @property
    def live_version(self) -> int | None:
        """The version the parameters hold; None before the first commit and while dirty."""
        return None if self._is_dirty else self._live_version

    def record(self, params: Sequence[ParamMeta]) -> WorkerLayout:
        """Let the engine's own loader show where every checkpoint element lands. Writes nothing."""
        self._recorded = record(self._model, params, worker=self._worker, reloader=self._reloader)
        return self._recorded.layout

    def open(self, request: OpenReceiver) -> ReceiverInfo:
        """Map the arenas, build the copies, ping every publisher and pull its probe. Closes an earlier epoch.

        Raises:
            PlanMismatch: the plan is damaged, learners have another, or a run does not fit the parameters.
            TransportUnusable: an arena cannot be mapped, or its probe arrives broken.
            PublisherLost: a publisher does not answer.
            PullTimeout: the probes did not arrive within `request.deadline_s`.
            WeightSyncError: (itself) a pull of the earlier epoch does not stop.
        """
        self.close()
        if self.state is not CLOSED:
            raise WeightSyncError(f"worker {self._worker} is still {self.state.value}; the engine must be restarted")
        epoch = ReceiverEpoch(request, self._context, reloads=self._reloads())
        try:
            epoch.connect_sources(deadline_s=request.deadline_s)
            host = reachable_host() if request.host is None else request.host
            server = ControlServer(self._handle, request.keys, epoch=request.epoch, host=host)
        except BaseException:
            epoch.close()
            raise
        with self._changed:
            self._requests = ThreadPoolExecutor(1, thread_name_prefix="weight-sync-requests")
            self._epoch, self._server = epoch, server
            # Versions of another epoch may be other weights under the same number.
            self._live_version = None
            self._apply("open")
        return ReceiverInfo(
            worker=self._worker,
            plan_root=epoch.plan_root,
            commit="staged" if epoch.targets.is_staged else "inplace",
            staging_bytes=0 if epoch.targets.buffer is None else epoch.targets.buffer.nbytes,
            pull_bytes=epoch.plan.nbytes,
            address=server.address,
            node=node_id(),
            transports=epoch.transports,
            reasons=epoch.reasons,
            relay=epoch.relay.handle(server.address),
        )

    def prefetch(self, version: int, slots: Iterable[SlotAt], *, deadline_s: float) -> Future[PullReport]:
        """Start to bring `version` here from these slots. The future ends when it has arrived, or with what made the
        pull fail; the parameters are untouched either way.

        Asking again for a version that is under way or has arrived only gives it more time, so a retry is safe.

        Raises:
            WeightSyncError: a commit, or an earlier pull that does not stop, is in the way.
        """
        places = {at.rank: at for at in slots}
        with self._changed:
            while True:
                # What a commit reads must not be overwritten under it.
                if not self._wait_while(COMMITTING, min(deadline_s, COMMIT_WAIT_S)):
                    raise WeightSyncError(
                        f"worker {self._worker} is still committing a version; prefetch {version} after that"
                    )
                epoch = self._opened()
                if self._extend(version, places, deadline_s):
                    assert self._pull is not None
                    return self._pull.result
                if self.state is not PULLING:
                    break
                if not self._stop_pull():
                    raise WeightSyncError(
                        f"worker {self._worker}: an earlier pull does not stop and still writes where version "
                        f"{version} would land; the engine must be restarted"
                    )
            self._apply("prefetch")
            pull = self._pull = Pull(version, places, self._clock() + deadline_s + SLACK_S)
            if epoch.targets.is_staged:
                name = f"weight-sync-pull-{version}"
                threading.Thread(target=self._bring_here, args=(epoch, pull), name=name, daemon=True).start()
            else:
                self._apply("arrive")
                pull.result.set_result(PullReport(worker=self._worker, version=version))
            return pull.result

    def commit(self, version: int, *, deadline_s: float) -> PullReport:
        """Make `version` the live weights; nothing to do if it is. The engine must not step meanwhile.

        Raises:
            PullTimeout, PublisherLost, DigestMismatch, SlotOverwritten: after a failure in place the worker `is_dirty`;
                after one of a staged prefetch it still holds the old weights.
            WeightSyncError: (other) the version was not prefetched.
        """
        self._num_commits += 1
        try:
            return self._commit(version, Deadline(self._clock() + deadline_s), deadline_s)
        finally:
            if (ballots := self._ballots()) is not None:
                ballots.vote(self._num_commits, is_ready=False)  # unless it has said that it is

    def _commit(self, version: int, deadline: Deadline, deadline_s: float) -> PullReport:
        with self._changed:
            if not self._wait_while(COMMITTING, deadline_s):
                raise PullTimeout(f"worker {self._worker} is still committing after {deadline_s:.1f} s")
            epoch, pull = self._opened(), self._pull
            if self.live_version == version:
                return PullReport(worker=self._worker, version=version, counters=self.counters())
            if pull is None or pull.version != version:
                raise WeightSyncError(
                    f"version {version} was not prefetched by worker {self._worker}; prefetch it first"
                )
            left_s = max(0.0, deadline.at - self._clock())
            if not self._wait_while(PULLING, left_s):
                raise PullTimeout(f"version {version} is still being pulled after {left_s:.1f} s more")
            if pull is not self._pull:
                raise WeightSyncError(f"the pull of version {version} was given up meanwhile; prefetch it again")
            report = pull.result.result(0)
            self._apply("commit")
            self._pull = None
        try:
            return self._write(epoch, pull, report, deadline)
        finally:
            with self._changed:
                self._apply("end")

    def invalidate(self) -> None:
        """What the parameters hold is gone (the engine slept): the next commit writes them, whatever its version."""
        self._live_version = None

    def abort(self) -> bool:
        """Stop a prefetch and forget what arrived; parameters are untouched. Idempotent. False if it does not stop."""
        with self._changed:
            if not self._stop_pull():
                return False  # kept, so that nobody takes its memory for free
            if self.state is READY:
                self._apply("drop")
            self._pull = None
            return True

    def parameter_digests(self) -> RunDigests:
        """Digest of every run as the live parameters hold it now.

        Raises:
            ReplicaDirty: the parameters are a mixture.
            DigestMismatch: a module that the engine loads itself does not hold what a reload of the same tensors gives.
        """
        epoch = self._opened()
        if self._is_dirty:
            raise ReplicaDirty(f"worker {self._worker} failed in the middle of a commit; commit a version again first")
        derived = epoch.targets.derived
        if derived is not None and (wrong := derived.verify()):
            raise DigestMismatch(f"worker {self._worker}: a second reload of {', '.join(wrong)} gives other weights")
        return RunDigests(version=self._live_version, by_rank=epoch.live_digests())

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            worker=self._worker,
            open=self._epoch is not None,
            live_version=self.live_version,
            dirty=self._is_dirty,
            counters=self.counters() if self._epoch is not None else {},
        )

    def counters(self) -> dict[str, int]:
        """What was allocated, mapped and opened since the epoch began."""
        return self._opened().counters()

    def close(self) -> None:
        """Abort, unmap, hang up. The parameters stay as they are. Idempotent. What a pull or a commit that does not
        stop still uses is kept.

        Raises:
            DeviceError: (or another) one thing could not be closed; everything else is.
        """
        server, self._server = self._server, None
        requests, self._requests = self._requests, None
        try:
            if server is not None:
                server.close()
            if requests is not None:
                requests.shutdown(wait=False, cancel_futures=True)
        finally:
            with self._changed:
                epoch = None
                if self.state is not CLOSED and self._wait_while(COMMITTING, ABORT_WAIT_S) and self._stop_pull():
                    self._apply("close")
                    epoch, self._epoch, self._pull = self._epoch, None, None
            if epoch is not None:
                epoch.close()

    def _apply(self, event: str) -> None:
        """The only writer of `state`. Holds the lock."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise WeightSyncError(f"worker {self._worker} is {self.state.value}, which does not allow {event}")
        self.state = after
        self._changed.notify_all()

    def _wait_while(self, state: ReceiverState, timeout_s: float) -> bool:
        """False if it does not end in time. Holds the lock, except while it waits."""
        return self._changed.wait_for(lambda: self.state is not state, timeout_s)

    def _stop_pull(self) -> bool:
        """Abort the pull that is under way; False if it does not stop. Holds the lock, except while it waits."""
        if self.state is PULLING and self._pull is not None:
            self._pull.is_aborted.set()
            if not self._wait_while(PULLING, ABORT_WAIT_S):
                log.error("the pull of version %d did not stop within %.0f s", self._pull.version, ABORT_WAIT_S)
                return False
        return True

    def _extend(self, version: int, slots: Slots, deadline_s: float) -> bool:
        """A retry that wants what is under way or here has until `deadline_s` from now. False if there is nothing to
        join: it wants something else, or the pull failed, or is about to, since its time is over."""
        pull, now = self._pull, self._clock()
        if pull is None or (version, slots) != (pull.version, pull.slots):
            return False
        if self.state is PULLING and now < pull.deadline.at and not pull.is_aborted.is_set():
            pull.deadline.at = max(pull.deadline.at, now + deadline_s + SLACK_S)
            return True
        return self.state is READY

    def _bring_here(self, epoch: ReceiverEpoch, pull: Pull) -> None:
        """A thread of its own."""
        try:
            self._context.choose_device()
            report = epoch.pull(pull.version, pull.slots, deadline=pull.deadline)
        except BaseException as error:  # noqa: BLE001 - a thread's edge: who waits for the result gets it
            epoch.invalidate()
            if not isinstance(error, WeightSyncError):
                error = WeightSyncError(f"the pull of version {pull.version} failed: {error!r}")
            with self._changed:
                self._apply("fail")
                pull.result.set_exception(error)
        else:
            with self._changed:
                self._apply("arrive")
                pull.result.set_result(report)

    def _write(self, epoch: ReceiverEpoch, pull: Pull, report: PullReport, deadline: Deadline) -> PullReport:
        """Bring the version into the parameters. `report` is of a staged pull."""
        is_staged = epoch.targets.is_staged
        require_intact = None
        if not is_staged:
            require_intact = epoch.ask_whether_intact(pull.version, pull.slots, deadline=deadline)
        try:
            epoch.check_addresses()
            # The engine's pause does not wait for the device; kernels of its last step may still read the weights.
            self._backend.synchronize()
            started = self._clock()
            if require_intact is not None:
                require_intact()  # before a byte is written
            self._is_dirty = True
            if is_staged:
                epoch.copy_from_buffer()
            else:
                report = epoch.pull(pull.version, pull.slots, deadline=deadline)
        except BaseException:
            epoch.invalidate()
            raise
        if epoch.targets.derived is not None:
            self._require_all_ready(pull.version, deadline)
            epoch.targets.derived.reload()
        self._backend.synchronize()
        self._is_dirty = False
        self._live_version = pull.version
        commit_s = self._clock() - started
        return msgspec.structs.replace(report, commit_s=commit_s, counters=self.counters())

    def _ballots(self) -> Ballots | None:
        """Of commits that may fail on one worker and not on others, before post-processing: those in place."""
        targets = None if self._epoch is None else self._epoch.targets
        is_asked = targets is not None and targets.derived is not None and not targets.is_staged
        return self._reloader.ballots if is_asked and self._reloader is not None else None

    def _require_all_ready(self, version: int, deadline: Deadline) -> None:
        """
        Raises:
            WeightSyncError: another worker of this replica did not get the version.
        """
        if (ballots := self._ballots()) is None:
            return
        ballots.vote(self._num_commits, is_ready=True)
        if not ballots.are_all_ready(self._num_commits, max(0.0, deadline.at - self._clock())):
            raise WeightSyncError(
                f"worker {self._worker} has version {version}, another worker of its replica does not; what is derived "
                "from it is not made, because that may wait for all of them"
            )

    def _handle(self, sender: str, request: Request) -> Response | Future[Response]:
        """Begin what the coordinator asks for, or answer a successor. Runs in the control thread, which must stay free
        to answer pings."""
        match request:
            case PrefetchRequest():
                return self._in_turn(lambda reply: self._bring(request, reply))
            case LinkRequest():
                return self._in_turn(lambda reply: reply.set_result(self._link(request)))
            case AwaitRequest() | TransportRequest():
                return self._opened().relay.answer(sender, request)
            case _:
                raise ValueError(f"{sender} sent a {type(request).__name__}, which an engine worker does not answer")

    def _in_turn(self, work: Callable[[Future[Response]], None]) -> Future[Response]:
        """A reply that `work` gives, now or later, after the requests before it were begun."""
        reply: Future[Response] = Future()
        requests = self._requests
        if requests is None:
            raise WeightSyncError(f"worker {self._worker} has no open epoch; the coordinator must open it first")

        def begin() -> None:
            try:
                work(reply)
            except Exception as error:  # noqa: BLE001 - the coordinator receives it
                reply.set_exception(error)

        requests.submit(begin)
        return reply

    def _bring(self, request: PrefetchRequest, reply: Future[Response]) -> None:
        def finish(pulled: Future[PullReport]) -> None:
            error = pulled.exception()
            if error is None:
                reply.set_result(Ok())
            else:
                reply.set_exception(error)

        self.prefetch(request.version, request.slots, deadline_s=request.deadline_s).add_done_callback(finish)

    def _link(self, request: LinkRequest) -> Ok:
        """Links change between two syncs, so a pull that is under way has no owner any more and ends: with its old
        links among the new ones of the others it could close a circle, and the memory that it reads may go away."""
        with self._changed:
            if self.state is PULLING and not self.abort():
                raise WeightSyncError(
                    f"worker {self._worker}: a pull does not stop and still reads by its old links; the engine must be "
                    "restarted"
                )
            self._opened().link(request)
            return Ok()

    def _reloads(self) -> Reloads | None:
        if self._reloader is None or self._recorded is None:
            return None
        return Reloads(self._model, self._reloader, self._recorded.reloaded)

    def _opened(self) -> ReceiverEpoch:
        if self._epoch is None:
            raise WeightSyncError(f"worker {self._worker} has no open epoch; the coordinator must open it first")
        return self._epoch


class WorkerCalls:
    """A receiver behind the calls that an engine's host can forward: bytes in, an encoded `Reply` out.

    It has no `__init__`, and every attribute begins with `ws_`, so that an engine's worker class can take it in. The
    receiver is made with the first call, so that a failure to make it is answered too.
    """

    ws_receiver: WeightReceiver | None = None

    def ws_make_receiver(self) -> WeightReceiver:
        raise NotImplementedError

    def ws_record(self, request: bytes) -> bytes:
        """`RecordRequest` -> `RecordedLayout`."""
        ask = decode(request, RecordRequest)
        return self.ws_answer(lambda receiver: RecordedLayout.of(receiver.record(ask.params), is_whole=ask.is_whole))

    def ws_open(self, request: bytes) -> bytes:
        """`OpenReceiver` -> `ReceiverInfo`."""
        return self.ws_answer(lambda receiver: receiver.open(decode(request, OpenReceiver)))

    def ws_commit(self, version: int, deadline_s: float) -> bytes:
        """Make a version live -> `PullReport`. The engine must be paused."""
        return self.ws_answer(lambda receiver: receiver.commit(version, deadline_s=deadline_s))

    def ws_invalidate(self) -> bytes:
        """The parameters hold no version any more."""
        return self.ws_answer(lambda receiver: receiver.invalidate())

    def ws_digests(self) -> bytes:
        """`RunDigests` of the live parameters."""
        return self.ws_answer(lambda receiver: receiver.parameter_digests())

    def ws_status(self) -> bytes:
        """`WorkerStatus`."""
        return self.ws_answer(lambda receiver: receiver.status())

    def ws_close(self) -> bytes:
        """Unmap and hang up; the weights stay."""
        return self.ws_answer(lambda receiver: receiver.close())

    def ws_answer(self, call: Callable[[WeightReceiver], object]) -> bytes:
        def run() -> bytes:
            if self.ws_receiver is None:
                self.ws_receiver = self.ws_make_receiver()
            return encode(call(self.ws_receiver))

        return answer(run, is_dirty=lambda: self.ws_receiver is not None and self.ws_receiver.is_dirty)


class WorkerService(WorkerCalls):
    """For hosts of one's own."""

    def __init__(self, make_receiver: Callable[[], WeightReceiver]) -> None:
        self.ws_make_receiver = make_receiver
