"""The control line: a server on each party, and the clients that ask it. Only holders of the run's keys get in.

    receiver (DEALER)                              publisher (ROUTER, its own thread)
      check(worker, slot, generation) ──────────────> checked(intact?, digests of this worker's runs)

    coordinator (one ROUTER for all)               publisher
      pin(version, ttl), again to renew ────────────> pinned(slot, generation), once it is sealed
      unpin(version) ───────────────────────────────> ok
      replica_left(name) ───────────────────────────> ok
                                                   receiver (ROUTER, its own thread)
      prefetch(version, slots, deadline) ───────────> arrived, once it has; or the error that ended the pull
      link(routes) ─────────────────────────────────> linked
      ping ─────────────────────────────────────────> pong, immediately whatever else the process does

Lines are encrypted and authenticated by CurveZMQ. Every server makes a key pair of its own and returns the public half
when it is opened, so a client speaks to exactly that process, never to another one on a reused port. Clients use the
key pair of the run (`RunKeys`), the only one that a server accepts. Without the server's key a stranger does not get
past the handshake, which libzmq ends after `HANDSHAKE_S`; a recorded frame cannot be replayed into another connection.

A message is one frame, msgpack. (libzmq ends a process on some messages of several frames that are cut off.) A request
has an epoch, the name of its sender and an id. It is sent again until it is answered, under the same id: every request
may be executed twice. A server keeps nothing about a client but the requests that wait for their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.z85

from weight_sync import deadlines
from weight_sync.errors import PublisherLost, StaleEpoch, WeightSyncError
from weight_sync.messages import (
    Answer,
    Envelope,
    Ok,
    PeerAddress,
    Ping,
    Refused,
    Request,
    Response,
    RunKeys,
    decode,
    decode_typed,
    make_error,
)

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1024 * 1024
"""A receiver that reads run by run names each of its runs; a 70B model has some thousands."""
MAX_RESPONSE_BYTES = 256 * 1024 * 1024
"""The answer to a check carries one 64-bit digest per run."""
CHECK_S = 0.05
"""Interval at which a waiting client calls its `check`."""
SPARE_FILES = 256
"""Opened by others in a process while an epoch lasts."""
CLIENTS_BETWEEN_LOOKS = 64
"""A server does not know how many clients it will have (replicas join), so it makes room for them as they come."""
ZAP = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a client's key is allowed (RFC 27)."""

R = TypeVar("R")
Clock = Callable[[], float]
Check = Callable[[], None]
Handler = Callable[[str, Request], "Response | Future[Any]"]
"""(sender, request) -> response, or a future of it. Must not block: the thread answers everyone. What it raises, or the
future, reaches the client as `Refused`; errors of this package keep their type."""


def make_run_keys(run_id: str) -> RunKeys:
    """
    Raises:
        WeightSyncError: this libzmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise WeightSyncError("libzmq has no CURVE encryption; install pyzmq from PyPI, whose wheels have it")
    public, secret = zmq.curve_keypair()
    return RunKeys(run_id=run_id, public=public, secret=secret)


class ControlServer:
    """Answers clients from its own thread until `close`."""

    def __init__(self, handler: Handler, keys: RunKeys, *, epoch: int, host: str = "127.0.0.1") -> None:
        self._handler = handler
        self._keys = keys
        self._epoch = epoch
        self._counts: Counter[str] = Counter()
        self._late: SimpleQueue[tuple[bytes, int, Future[Response]]] = SimpleQueue()
        """Answers whose futures are done."""
        self._waiting: set[tuple[bytes, int]] = set()
        """(client, request id) whose futures are not."""
        self._is_closing = False
        self._wake_lock = threading.Lock()
        """A descriptor that was closed must not be written to: its number may belong to another file by then."""
        make_room(0, whom="its clients")
        public, secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP)
        self._router = self._context.socket(zmq.ROUTER)
        _set_up(self._router, host, max_bytes=MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.BACKLOG, 1024)  # hundreds of workers connect at the same moment
        self._router.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * deadlines.HANDSHAKE_S))
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._router.setsockopt_string(zmq.ZAP_DOMAIN, "weight_sync")
        try:
            self._router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
        except zmq.ZMQError:
            self._context.destroy(0)
            raise
        self.address = PeerAddress(endpoint=self._router.getsockopt_string(zmq.LAST_ENDPOINT), public_key=public)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="weight-sync-control", daemon=True)
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """Frames by fate: answered, refused, malformed, stale; and clients: connections, unauthentic."""
        return {f"control_{fate}": count for fate, count in sorted(self._counts.copy().items())}

    def close(self, deadline_s: float = 5.0) -> None:
        """Stop the thread and free the port. Idempotent."""
        if self._context.closed:
            return
        self._is_closing = True
        self._wake()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            log.error(
                "control thread did not end within %.1f s; its port stays bound until this process exits", deadline_s
            )
            return
        self._context.term()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:  # otherwise the server is closed
                os.eventfd_write(self._wake_fd, 1)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._zap, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_closing:
                ready = dict(poller.poll())
                if self._zap in ready:
                    self._admit(self._zap.recv_multipart())
                if self._router in ready:
                    client, *frames = self._router.recv_multipart()
                    self._receive(client, frames)
                if self._wake_fd in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                    while not self._late.empty():
                        self._finish(*self._late.get())
        finally:
            self._router.close(0)
            self._zap.close(0)

    def _admit(self, question: list[bytes]) -> None:
        """Let a client in if it has the key of the run."""
        version, request_id, *rest = question
        is_ours = len(rest) == 5 and rest[3] == b"CURVE" and rest[4] == zmq.utils.z85.decode(self._keys.public)
        self._counts["connections" if is_ours else "unauthentic"] += 1
        if is_ours and self._counts["connections"] % CLIENTS_BETWEEN_LOOKS == 0:
            try:
                make_room(0, whom="its clients")
            except WeightSyncError as error:
                log.error("%s", error)
        verdict = (b"200", b"OK") if is_ours else (b"400", b"not a key of this run")
        self._zap.send_multipart([version, request_id, *verdict, b"", b""])

    def _receive(self, client: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise msgspec.DecodeError(f"{len(frames)} frames")
            envelope = decode_typed(frames[0], Envelope)
        # Text that is no UTF-8 and fields nested too deep fail with errors that are not msgspec's own.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._counts["malformed"] += 1
            return
        asked = (client, envelope.request_id)
        if envelope.epoch != self._epoch:
            self._counts["stale"] += 1
            self._refuse(*asked, StaleEpoch(
                f"{envelope.sender} is in epoch {envelope.epoch}, this process serves epoch {self._epoch} of run "
                f"{self._keys.run_id!r}; open the receiver again"
            ))  # fmt: skip
        elif isinstance(envelope.request, Ping):
            self._reply(*asked, Ok())
        elif asked not in self._waiting:
            self._answer(*asked, envelope)

    def _answer(self, client: bytes, request_id: int, envelope: Envelope) -> None:
        try:
            response = self._handler(envelope.sender, envelope.request)
        except Exception as error:  # noqa: BLE001 - the edge of this process: the client is told
            self._refuse(client, request_id, error)
            return
        if isinstance(response, Future):
            self._waiting.add((client, request_id))
            response.add_done_callback(lambda future: (self._late.put((client, request_id, future)), self._wake()))
        else:
            self._reply(client, request_id, response)

    def _finish(self, client: bytes, request_id: int, future: Future[Response]) -> None:
        self._waiting.discard((client, request_id))
        error = future.exception()
        if error is None:
            self._reply(client, request_id, future.result())
        else:
            self._refuse(client, request_id, error)

    def _reply(self, client: bytes, request_id: int, response: Response) -> None:
        self._counts["answered"] += 1
        self._send(client, Answer(request_id=request_id, response=response))

    def _refuse(self, client: bytes, request_id: int, error: BaseException) -> None:
        self._counts["refused"] += 1
        if not isinstance(error, WeightSyncError | ValueError):
            log.error("a control request failed", exc_info=error)
        refused = Refused(error=type(error).__name__, message=str(error))
        self._send(client, Answer(request_id=request_id, response=refused))

    def _send(self, client: bytes, answer: Answer) -> None:
        # A client that is gone, or reads nothing, is not waited for; if it lives it asks again.
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._router.send_multipart([client, msgspec.msgpack.encode(answer)], zmq.NOBLOCK)


def make_room(num_files: int, *, whom: str) -> None:
    """Let this process have so many open files more than it has.

    Raises:
        WeightSyncError: it may not; names `whom` it could not reach.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + num_files + SPARE_FILES  # noqa: PTH208 - names of numbers
    if soft != resource.RLIM_INFINITY and needed > soft:
        if hard != resource.RLIM_INFINITY and needed > hard:
            raise WeightSyncError(
                f"this process needs {needed} open files to reach {whom} and may have {hard}; raise the hard limit "
                "(ulimit -Hn) where it is started"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        log.info("this process may now have %d open files instead of %d, for %s", needed, soft, whom)


class ClientContext(zmq.Context[zmq.Socket[bytes]]):
    """Of all clients of a process (`instance`), which have a socket each: libzmq allows 1,023 unless it is asked."""

    _instance = None

    def __init__(self, io_threads: int = 1) -> None:
        super().__init__(io_threads)
        self.set(zmq.MAX_SOCKETS, self.get(zmq.SOCKET_LIMIT))


CLIENT_FILES = 2
"""Of a client: its connection, and what wakes its socket."""


class Asked(NamedTuple):
    """A question on its way."""

    request_id: int
    request: Request


class ControlClient:
    """One receiver's line to one publisher. Safe to use from several threads, which then wait for each other."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: PeerAddress,
        keys: RunKeys,
        *,
        epoch: int,
        sender: str,
        clock: Clock = time.monotonic,
    ) -> None:
        self.endpoint = address.endpoint
        self._epoch = epoch
        self._sender = sender
        self._clock = clock
        self._lock = threading.Lock()
        self._num_requests = 0
        self._begun: set[int] = set()
        self._early: dict[int, Response] = {}
        """Answers to questions that are begun, received while another one was waited for."""
        self._dealer = context.socket(zmq.DEALER)
        _set_up_client(self._dealer, keys, address)
        self._dealer.connect(address.endpoint)

    def ask(self, request: Request, kind: type[R], *, deadline_s: float, check: Check | None = None) -> R:
        """`begin` and `finish` in one."""
        return self.finish(self.begin(request), kind, deadline_s=deadline_s, check=check)

    def begin(self, request: Request) -> Asked:
        """Send a question, without waiting. Pass the result to `finish`."""
        with self._lock:
            self._num_requests += 1
            asked = Asked(self._num_requests, request)
            self._begun.add(asked.request_id)
            self._send(asked)
        return asked

    def finish(self, asked: Asked, kind: type[R], *, deadline_s: float, check: Check | None = None) -> R:
        """The publisher's answer, of type `kind`.

        Args:
            check: called while there is no answer; may raise to stop waiting.

        Raises:
            PublisherLost: no answer within `deadline_s`: dead, stopped, unreachable, or of another run.
            WeightSyncError: (its subclass) the publisher refused.
        """
        give_up = self._clock() + deadline_s
        with self._lock:
            try:
                while (left_s := give_up - self._clock()) > 0:
                    response = self._receive(asked.request_id, min(deadlines.RESEND_S, left_s), check)
                    if response is not None:
                        return _checked(response, kind, self.endpoint)
                    self._send(asked)
            finally:
                self._begun.discard(asked.request_id)
        raise PublisherLost(
            f"publisher {self.endpoint} did not answer {type(asked.request).__name__} within {deadline_s:.1f} s; its "
            "process is dead, stopped or unreachable, or weight_sync.timeout_s is too short"
        )

    def ping(self, *, deadline_s: float) -> None:
        """
        Raises:
            PublisherLost: no answer within `deadline_s`: dead, stopped, unreachable, or of another run.
            StaleEpoch: it serves another epoch.
        """
        self.ask(Ping(), Ok, deadline_s=deadline_s)

    def close(self) -> None:
        """Hang up. Waits for a question in flight, which has a deadline."""
        with self._lock:
            self._dealer.close(0)

    def _send(self, asked: Asked) -> None:
        # A full queue means a dead publisher: nothing to do here, the deadline ends it.
        with contextlib.suppress(zmq.Again):
            self._dealer.send(_frame(self._epoch, self._sender, *asked), zmq.NOBLOCK)

    def _receive(self, request_id: int, timeout_s: float, check: Check | None) -> Response | None:
        """The answer to `request_id`; those to others that are begun are kept, late ones are thrown away."""
        if request_id in self._early:
            return self._early.pop(request_id)
        until = self._clock() + timeout_s
        while (left_s := until - self._clock()) > 0:
            if check is not None:
                check()
                left_s = min(left_s, CHECK_S)
            if not self._dealer.poll(max(1, int(left_s * 1000))):
                continue
            answer = decode(self._dealer.recv(), Answer)
            if answer.request_id == request_id:
                return answer.response
            if answer.request_id in self._begun:
                self._early[answer.request_id] = answer.response
        return None


class Line(NamedTuple):
    """The coordinator's connection to one worker."""

    peer: str
    endpoint: str
    routing_id: bytes


class PeerSilent(TimeoutError):
    """A peer does not answer pings, so it is dead, stopped or unreachable."""


class Switchboard:
    """The coordinator's lines to all workers and learners: one socket of its event loop."""

    def __init__(self, keys: RunKeys, *, epoch: int, sender: str = "coordinator") -> None:
        self._keys = keys
        self._epoch = epoch
        self._sender = sender
        self._lines: set[Line] = set()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Response]] = {}
        self._router: Any = None
        self._reading: asyncio.Task[None] | None = None

    def dial(self, peer: str, address: PeerAddress) -> Line:
        """Connect to the worker called `peer` at `address`. Call in the event loop."""
        if self._router is None:
            # The process's own context: one of ours, if nobody closes it, would wait for its sockets when collected.
            self._router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._reading = asyncio.ensure_future(self._read(self._router))
        # Never the same twice: libzmq ends the process if a routing id is used while an old pipe still has it.
        line = Line(peer, address.endpoint, f"{peer}#{next(self._numbers)}".encode())
        _set_up_client(self._router, self._keys, address)
        self._router.setsockopt(zmq.CONNECT_ROUTING_ID, line.routing_id)
        self._router.connect(address.endpoint)
        self._lines.add(line)
        return line

    def hang_up(self, line: Line) -> None:
        """Idempotent."""
        if line in self._lines:
            self._lines.discard(line)
            if all(other.endpoint != line.endpoint for other in self._lines):
                with contextlib.suppress(zmq.ZMQError):
                    self._router.disconnect(line.endpoint)

    async def ask(self, line: Line, request: Request, kind: type[R], *, deadline_s: float) -> R:
        """
        Raises:
            TimeoutError: no answer within `deadline_s`.
            WeightSyncError: (its subclass) the worker refused, or the line was hung up.
        """
        if line not in self._lines:
            raise WeightSyncError(f"the line to {line.peer} is closed; it must join the epoch again")
        request_id = next(self._numbers)
        answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
        frame = _frame(self._epoch, self._sender, request_id, request)
        try:
            async with asyncio.timeout(deadline_s):
                while not answer.done():
                    if line not in self._lines:
                        raise WeightSyncError(f"the line to {line.peer} was hung up")
                    # Not to be routed: the connection is being made. Full: the worker reads nothing.
                    with contextlib.suppress(zmq.Again, zmq.ZMQError):
                        await self._router.send_multipart([line.routing_id, frame], zmq.NOBLOCK)
                    await asyncio.wait({answer}, timeout=deadlines.RESEND_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"worker {line.peer} at {line.endpoint} did not answer {type(request).__name__} within "
                f"{deadline_s:.1f} s; its process is dead, stopped or unreachable, or weight_sync.timeout_s is too "
                "short"
            ) from error
        finally:
            del self._answers[request_id]
        return _checked(answer.result(), kind, line.peer)

    async def ask_patiently(self, line: Line, request: Request, kind: type[R], *, deadline_s: float) -> R:
        """As `ask`, for what takes a while: a peer that answers nothing else is pinged meanwhile.

        Raises:
            PeerSilent: it does not answer pings for `PEER_TIMEOUT_S`.
        """
        asking = asyncio.ensure_future(self.ask(line, request, kind, deadline_s=deadline_s))
        try:
            while not (await asyncio.wait({asking}, timeout=deadlines.PING_S))[0]:
                pinging = asyncio.ensure_future(self.ask(line, Ping(), Ok, deadline_s=deadlines.PEER_TIMEOUT_S))
                try:
                    await asyncio.wait({asking, pinging}, return_when=asyncio.FIRST_COMPLETED)
                    if not asking.done() and isinstance(pinging.exception(), TimeoutError):
                        raise PeerSilent(str(pinging.exception()))
                finally:
                    pinging.cancel()
            return asking.result()
        finally:
            asking.cancel()

    def close(self) -> None:
        """Hang up everywhere. Idempotent."""
        self._lines.clear()
        reading, self._reading = self._reading, None
        if reading is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                reading.cancel()
        if self._router is not None:
            self._router.close(0)
            self._router = None

    async def _read(self, router: Any) -> None:
        while True:
            _, *frames = await router.recv_multipart()
            with contextlib.suppress(WeightSyncError):  # not an answer: the request is sent again
                answer = decode(frames[-1], Answer)
                waiting = self._answers.get(answer.request_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer.response)


def _frame(epoch: int, sender: str, request_id: int, request: Request) -> bytes:
    return msgspec.msgpack.encode(Envelope(epoch=epoch, sender=sender, request_id=request_id, request=request))


def _checked(response: Response, kind: type[R], peer: str) -> R:
    """
    Raises:
        WeightSyncError: (its subclass) the server refused, or answered with something else than `kind`.
    """
    if isinstance(response, Refused):
        raise make_error(response.error, response.message)
    if not isinstance(response, kind):
        raise WeightSyncError(f"{peer} answered with {type(response).__name__}, expected {kind.__name__}")
    return response


def _set_up(socket: Any, host: str, *, max_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * deadlines.HEARTBEAT_S))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * deadlines.HEARTBEAT_TIMEOUT_S))


def _set_up_client(socket: Any, keys: RunKeys, address: PeerAddress) -> None:
    _set_up(socket, "::" if "[" in address.endpoint else "", max_bytes=MAX_RESPONSE_BYTES)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, address.public_key)
