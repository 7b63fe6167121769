"""The control line: a server on each party, and the clients that ask it, authenticated per run.

    receiver (DEALER)                              publisher (ROUTER, its own thread)
      hello(nonce) ─────────────────────────────────> welcome(session)
      lease(version, worker, ttl) ──────────────────> lease(slot, generation, digests of this worker's runs) or pending
      renew(lease, ttl) ────────────────────────────> renewed
      release(lease, slot, generation) ─────────────> released(intact?)
      drop() ───────────────────────────────────────> dropped

    coordinator (DEALER)                           receiver (ROUTER, its own thread)
      prefetch(version, deadline) ──────────────────> progress(done?)
      poll(version) ────────────────────────────────> progress(done?) or the error that ended it
      link(routes) ─────────────────────────────────> linked

Every message is one frame, msgpack(Envelope) + HMAC-SHA256 under the secret of the run. (One, not two: cut off in
the middle of a message of several frames, libzmq was seen to end the sending process, in session_base.cpp.) An envelope
names run, epoch, sender, session, a sequence number that grows with every frame and a request id that a retry keeps: a
repeated frame is refused, a repeated request is answered from memory and not executed again. The server binds an
ephemeral port and tells it (`endpoint`), so no two processes ever have to compute the same name. Frames that are
malformed, too large or not authentic are counted and get no answer.

Lines are encrypted (CurveZMQ), and the server's key follows from the secret of the run. Who does not know it does not
get past the handshake: libzmq keeps the parts of a message until the last one has come, and no option bounds that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.z85

from weight_sync.errors import PublisherLost, StaleEpoch, WeightSyncError
from weight_sync.messages import (
    Answer,
    Envelope,
    Hello,
    Refused,
    Request,
    Response,
    Welcome,
    decode,
    decode_typed,
    make_error,
)

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1024 * 1024
"""A receiver that reads run by run names each of its runs; a 70B model has some thousands."""
MAX_RESPONSE_BYTES = 256 * 1024 * 1024
"""A lease answer carries one 64-bit digest per run."""
MAX_SESSIONS = 4096
ANSWERS_KEPT = 16
"""Answers remembered per session, for retries."""
MAC_BYTES = 32
HANDSHAKE_S = 5.0
"""A line that has not shown its key by then is closed."""


Handler = Callable[[str, Request], Response]
"""(sender, request) -> response. May raise WeightSyncError or ValueError, which the asker gets as `Refused`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Which conversation a frame belongs to. `secret` stays out of logs."""

    run_id: str
    epoch: int
    secret: bytes = field(repr=False)

    def seal(self, direction: bytes, payload: bytes) -> bytes:
        """A frame: the payload and its signature. `direction` keeps an answer from being reflected as a question."""
        return payload + self._sign(direction, payload)

    def open(self, direction: bytes, frame: bytes) -> bytes | None:
        """The payload of a frame; None if it is not authentic."""
        payload, mac = frame[:-MAC_BYTES], frame[-MAC_BYTES:]
        return payload if hmac.compare_digest(self._sign(direction, payload), mac) else None

    def server_keys(self) -> tuple[bytes, bytes]:
        """(public, secret) of the lines to servers of this run, as Z85 text."""
        secret = zmq.utils.z85.encode(hmac.digest(self.secret, b"server of weight sync", "sha256"))
        return zmq.curve_public(secret), secret

    def _sign(self, direction: bytes, payload: bytes) -> bytes:
        return hmac.digest(self.secret, direction + payload, "sha256")


QUESTION, ANSWER = b"Q", b"A"


@dataclass(slots=True)
class Session:
    last_seq: int = 0
    answers: OrderedDict[int, bytes] = field(default_factory=OrderedDict)


class ControlServer:
    """Answers receivers from its own thread until `close`."""

    def __init__(self, handler: Handler, membership: Membership, *, host: str = "127.0.0.1") -> None:
        self._handler = handler
        self._membership = membership
        self._sessions: dict[bytes, Session] = {}
        self._nonces: set[bytes] = set()
        self._counts: Counter[str] = Counter()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_S))
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, membership.server_keys()[1])
        self._router.setsockopt(zmq.IPV6, int(":" in host))
        self._router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop_send = self._context.socket(zmq.PAIR)
        self._stop_recv = self._context.socket(zmq.PAIR)
        self._stop_send.bind("inproc://stop")
        self._stop_recv.connect("inproc://stop")
        self._thread = threading.Thread(target=self._serve, name="weight-sync-control", daemon=True)
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """Frames by fate: answered, malformed, unauthentic, replayed, stale, retried."""
        return {f"control_{fate}": count for fate, count in sorted(self._counts.copy().items())}

    def close(self, deadline_s: float = 5.0) -> None:
        """Stop the thread and free the port. Idempotent."""
        if self._context.closed:
            return
        self._stop_send.send(b"")
        self._thread.join(deadline_s)
        self._stop_send.close(0)
        if self._thread.is_alive():
            log.error(
                "control thread did not end within %.1f s; its port stays bound until this process exits", deadline_s
            )
            return
        self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stop_recv, zmq.POLLIN)
        try:
            while self._stop_recv not in dict(poller.poll()):
                identity, *frames = self._router.recv_multipart()
                answer = self._receive(frames)
                if answer is not None:
                    frame = self._membership.seal(ANSWER, msgspec.msgpack.encode(answer))
                    self._router.send_multipart([identity, frame])
        finally:
            self._router.close(0)
            self._stop_recv.close(0)

    def _receive(self, frames: list[bytes]) -> Answer | None:
        if len(frames) != 1 or len(frames[0]) < MAC_BYTES:
            self._counts["malformed"] += 1
            return None
        payload = self._membership.open(QUESTION, frames[0])
        if payload is None:
            self._counts["unauthentic"] += 1
            return None
        try:
            envelope = decode_typed(payload, Envelope)
        # Text that is no UTF-8 and unknown fields nested too deep fail with errors that are not msgspec's own.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._counts["malformed"] += 1
            return None
        if envelope.run_id != self._membership.run_id or envelope.epoch != self._membership.epoch:
            self._counts["stale"] += 1
            return self._refuse(envelope, StaleEpoch(self._describe_stale(envelope)))
        if isinstance(envelope.request, Hello):
            return self._welcome(envelope, envelope.request)
        return self._answer(envelope)

    def _welcome(self, envelope: Envelope, hello: Hello) -> Answer | None:
        if hello.nonce in self._nonces or len(self._sessions) >= MAX_SESSIONS:
            self._counts["replayed"] += 1
            return None
        self._nonces.add(hello.nonce)
        session = secrets.token_bytes(16)
        self._sessions[session] = Session()
        self._counts["sessions"] += 1
        return Answer(session=hello.nonce, request_id=envelope.request_id, response=Welcome(session=session))

    def _answer(self, envelope: Envelope) -> Answer | None:
        session = self._sessions.get(envelope.session)
        if session is None or envelope.seq <= session.last_seq:
            self._counts["replayed"] += 1
            return None
        session.last_seq = envelope.seq
        known = session.answers.get(envelope.request_id)
        if known is not None:
            self._counts["retried"] += 1
            return decode_typed(known, Answer)
        try:
            response = self._handler(envelope.sender, envelope.request)
        except (WeightSyncError, ValueError) as error:
            answer = self._refuse(envelope, error)
        except Exception as error:
            log.exception("control request %s of %s failed", type(envelope.request).__name__, envelope.sender)
            answer = self._refuse(envelope, error)
        else:
            self._counts["answered"] += 1
            answer = Answer(session=envelope.session, request_id=envelope.request_id, response=response)
        session.answers[envelope.request_id] = msgspec.msgpack.encode(answer)
        if len(session.answers) > ANSWERS_KEPT:
            session.answers.popitem(last=False)
        return answer

    def _refuse(self, envelope: Envelope, error: Exception) -> Answer:
        self._counts["refused"] += 1
        request = envelope.request
        session = request.nonce if isinstance(request, Hello) else envelope.session
        response = Refused(error=type(error).__name__, message=str(error))
        return Answer(session=session, request_id=envelope.request_id, response=response)

    def _describe_stale(self, envelope: Envelope) -> str:
        mine = self._membership
        return (
            f"{envelope.sender} speaks for run {envelope.run_id!r} epoch {envelope.epoch}, "
            f"this publisher serves run {mine.run_id!r} epoch {mine.epoch}; open the receiver again"
        )


RETRY_S = 1.0
CHECK_S = 0.05
"""Between two looks at whether the answer is still wanted."""
R = TypeVar("R")
Clock = Callable[[], float]
Check = Callable[[], None]


class Conversation:
    """Frames of one asker. Not thread-safe."""

    def __init__(self, membership: Membership, sender: str) -> None:
        self._membership = membership
        self._sender = sender
        self._session = b""
        self._seq = 0
        self._num_requests = 0

    @property
    def is_greeted(self) -> bool:
        return bool(self._session)

    def next_request(self) -> int:
        """An id for a new question; its retries keep it."""
        self._num_requests += 1
        return self._num_requests

    def frame(self, request: Request, request_id: int) -> bytes:
        self._seq += 1
        envelope = Envelope(
            run_id=self._membership.run_id,
            epoch=self._membership.epoch,
            sender=self._sender,
            session=self._session,
            seq=self._seq,
            request_id=request_id,
            request=request,
        )
        return self._membership.seal(QUESTION, msgspec.msgpack.encode(envelope))

    def response_in(self, frame: bytes, request: Request, request_id: int) -> Response | None:
        """What `frame` answers to this question; None if it is forged, damaged or answers an earlier one."""
        payload = self._membership.open(ANSWER, frame)
        if payload is None:
            return None
        answer = decode(payload, Answer)
        expected = request.nonce if isinstance(request, Hello) else self._session
        if answer.session != expected or answer.request_id != request_id:
            return None
        return answer.response

    def hello(self) -> Hello:
        return Hello(nonce=secrets.token_bytes(16))

    def greeted(self, response: Response, endpoint: str) -> None:
        self._session = checked(response, Welcome, endpoint).session


def checked(response: Response, kind: type[R], endpoint: str) -> R:
    """
    Raises:
        WeightSyncError: (its subclass) the server refused, or answered something else than `kind`.
    """
    if isinstance(response, Refused):
        raise make_error(response.error, response.message)
    if not isinstance(response, kind):
        raise WeightSyncError(f"{endpoint} answered {type(response).__name__}, wanted {kind.__name__}")
    return response


def connected(socket: Any, endpoint: str, membership: Membership) -> None:
    """Set up a DEALER as every line has it. Its own key is new: whoever knows the server's belongs to the run."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, membership.server_keys()[0])
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_RESPONSE_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.connect(endpoint)


class ControlClient:
    """One receiver's line to one publisher. Says hello with its first question. Safe to use from several threads, which
    then wait for each other."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        membership: Membership,
        sender: str,
        clock: Clock = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self._clock = clock
        self._lock = threading.Lock()
        self._talk = Conversation(membership, sender)
        self._dealer = context.socket(zmq.DEALER)
        connected(self._dealer, endpoint, membership)

    def ask(self, request: Request, kind: type[R], *, deadline_s: float, check: Check | None = None) -> R:
        """The publisher's answer, of type `kind`.

        Args:
            check: called while there is no answer; may raise to stop waiting.

        Raises:
            PublisherLost: no answer within `deadline_s`.
            WeightSyncError: (its subclass) the publisher refused.
        """
        give_up = self._clock() + deadline_s
        with self._lock:
            self._greet(give_up, deadline_s, check)
            return checked(self._exchange(request, give_up, deadline_s, check), kind, self.endpoint)

    def hello(self, *, deadline_s: float) -> None:
        """Open the session, if it is not open.

        Raises:
            PublisherLost: no answer within `deadline_s`: dead, unreachable, or it does not share our secret.
            StaleEpoch: it serves another run or epoch.
        """
        with self._lock:
            self._greet(self._clock() + deadline_s, deadline_s, None)

    def close(self) -> None:
        """Hang up. Waits for a question in flight, which has a deadline."""
        with self._lock:
            self._dealer.close(0)

    def _greet(self, give_up: float, deadline_s: float, check: Check | None) -> None:
        if not self._talk.is_greeted:
            self._talk.greeted(self._exchange(self._talk.hello(), give_up, deadline_s, check), self.endpoint)

    def _exchange(self, request: Request, give_up: float, deadline_s: float, check: Check | None) -> Response:
        request_id = self._talk.next_request()
        # A hello is not repeated: under one nonce it would be a replay, and TCP does not lose it.
        retry_s = deadline_s if isinstance(request, Hello) else RETRY_S
        while (left_s := give_up - self._clock()) > 0:
            # A full queue means a dead publisher: nothing to do here, the deadline of the caller speaks.
            with contextlib.suppress(zmq.Again):
                self._dealer.send(self._talk.frame(request, request_id), zmq.NOBLOCK)
            response = self._receive(request, request_id, min(retry_s, left_s), check)
            if response is not None:
                return response
        raise _lost(self.endpoint, request, deadline_s)

    def _receive(self, request: Request, request_id: int, timeout_s: float, check: Check | None) -> Response | None:
        """The answer to `request_id`; late answers to earlier questions are thrown away."""
        until = self._clock() + timeout_s
        while (left_s := until - self._clock()) > 0:
            if check is not None:
                check()
                left_s = min(left_s, CHECK_S)
            if not self._dealer.poll(max(1, int(left_s * 1000))):
                continue
            response = self._talk.response_in(self._dealer.recv(), request, request_id)
            if response is not None:
                return response
        return None


class AsyncControlClient:
    """The same line in an event loop: the coordinator's to one engine worker. One question at a time."""

    def __init__(
        self,
        endpoint: str,
        *,
        membership: Membership,
        sender: str,
    ) -> None:
        self.endpoint = endpoint
        self._talk = Conversation(membership, sender)
        self._lock = asyncio.Lock()
        # The process's own context: one of ours, if nobody closes it, would wait for its sockets when it is collected.
        self._dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        connected(self._dealer, endpoint, membership)

    async def ask(self, request: Request, kind: type[R], *, deadline_s: float) -> R:
        """
        Raises:
            TimeoutError: no answer within `deadline_s`.
            WeightSyncError: (its subclass) the worker refused.
        """
        try:
            async with asyncio.timeout(deadline_s), self._lock:
                if not self._talk.is_greeted:
                    self._talk.greeted(await self._exchange(self._talk.hello()), self.endpoint)
                return checked(await self._exchange(request), kind, self.endpoint)
        except TimeoutError as error:
            raise TimeoutError(
                f"worker {self.endpoint} did not answer {type(request).__name__} within {deadline_s:.1f} s; its "
                "process is dead, stopped or unreachable, or weight_sync.timeout_s is too short"
            ) from error

    def close(self) -> None:
        self._dealer.close(0)

    async def _exchange(self, request: Request) -> Response:
        request_id = self._talk.next_request()
        retry_s = None if isinstance(request, Hello) else RETRY_S
        while True:
            await self._dealer.send(self._talk.frame(request, request_id))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_s):
                    while True:
                        frame = await self._dealer.recv()
                        response = self._talk.response_in(frame, request, request_id)
                        if response is not None:
                            return response


def _lost(endpoint: str, request: Request, deadline_s: float) -> PublisherLost:
    return PublisherLost(
        f"publisher {endpoint} did not answer {type(request).__name__} within {deadline_s:.1f} s; "
        "its process is dead, stopped or unreachable"
    )
