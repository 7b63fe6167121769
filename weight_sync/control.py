"""The control plane: small authenticated questions from receivers to publishers. No tensor bytes pass here.

    receiver (DEALER)                              publisher (ROUTER, its own thread)
      hello(nonce) ─────────────────────────────────> welcome(session)
      lease(version, worker, ttl) ──────────────────> lease(slot, generation, digests of this worker's runs)
      renew(lease, ttl) ────────────────────────────> renewed
      release(lease, slot, generation) ─────────────> released(intact?)

Every frame is `[msgpack(Envelope), HMAC-SHA256]` under the secret of the run. An envelope names run, epoch, sender,
session, a sequence number that grows with every frame and a request id that a retry keeps: a repeated frame is refused,
a repeated request is answered from memory and not executed again. The server binds an ephemeral port and tells it
(`endpoint`), so no two processes ever have to compute the same name. Frames that are malformed, too large or not
authentic are counted and get no answer.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import zmq

from weight_sync.errors import PublisherLost, StaleEpoch, WeightSyncError
from weight_sync.wire import decode, make_error

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 1024
MAX_RESPONSE_BYTES = 256 * 1024 * 1024
"""A lease answer carries one 64-bit digest per run."""
MAX_SESSIONS = 4096
ANSWERS_KEPT = 16
"""Answers remembered per session, for retries."""
RETRY_S = 1.0
MAC_BYTES = 32


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    nonce: bytes


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    version: int
    worker: int
    ttl_s: float


class RenewRequest(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    lease_id: int
    ttl_s: float


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    lease_id: int
    slot: int
    generation: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    session: bytes


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True, tag="granted"):
    lease_id: int
    slot: int
    generation: int
    digests: tuple[int, ...]
    """One per run of the asking worker on this rank, in plan order; empty if the run does not verify."""


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag="renewed"):
    pass


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    is_intact: bool
    """The slot still holds what was leased, so what was read is whole."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    error: str
    message: str


Request = Hello | LeaseRequest | RenewRequest | ReleaseRequest
Response = Welcome | LeaseGranted | Renewed | Released | Refused
Handler = Callable[[str, Request], Response]
"""(sender, request) -> response. May raise WeightSyncError or ValueError, which the asker gets as `Refused`."""
R = TypeVar("R")


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: str
    epoch: int
    sender: str
    session: bytes
    seq: int
    request_id: int
    request: Request


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    session: bytes
    """Of the asker; for a welcome, the nonce of its hello."""
    request_id: int
    response: Response


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Which conversation a frame belongs to. `secret` stays out of logs."""

    run_id: str
    epoch: int
    secret: bytes = field(repr=False)

    def sign(self, direction: bytes, payload: bytes) -> bytes:
        """`direction` keeps an answer from being reflected as a question."""
        return hmac.digest(self.secret, direction + payload, "sha256")

    def is_authentic(self, direction: bytes, payload: bytes, mac: bytes) -> bool:
        return hmac.compare_digest(self.sign(direction, payload), mac)


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
                    payload = msgspec.msgpack.encode(answer)
                    mac = self._membership.sign(ANSWER, payload)
                    self._router.send_multipart([identity, payload, mac])
        finally:
            self._router.close(0)
            self._stop_recv.close(0)

    def _receive(self, frames: list[bytes]) -> Answer | None:
        if len(frames) != 2 or len(frames[1]) != MAC_BYTES:
            self._counts["malformed"] += 1
            return None
        if not self._membership.is_authentic(QUESTION, frames[0], frames[1]):
            self._counts["unauthentic"] += 1
            return None
        try:
            envelope = msgspec.msgpack.decode(frames[0], type=Envelope)
        except msgspec.DecodeError:
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
            return msgspec.msgpack.decode(known, type=Answer)
        try:
            response = self._handler(envelope.sender, envelope.request)
        except (WeightSyncError, ValueError) as error:
            return self._refuse(envelope, error)
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


class ControlClient:
    """One receiver's line to one publisher. Says hello with its first question. Safe to use from several threads, which
    then wait for each other."""

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        *,
        membership: Membership,
        sender: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self._membership = membership
        self._sender = sender
        self._clock = clock
        self._lock = threading.Lock()
        self._session = b""
        self._seq = 0
        self._num_requests = 0
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, MAX_RESPONSE_BYTES)
        self._dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._dealer.connect(endpoint)

    def ask(self, request: Request, kind: type[R], *, deadline_s: float) -> R:
        """The publisher's answer, of type `kind`.

        Raises:
            PublisherLost: no answer within `deadline_s`.
            WeightSyncError: (its subclass) the publisher refused.
        """
        give_up = self._clock() + deadline_s
        with self._lock:
            self._greet(give_up, deadline_s)
            return self._checked(self._exchange(request, give_up, deadline_s), kind)

    def hello(self, *, deadline_s: float) -> None:
        """Open the session, if it is not open.

        Raises:
            PublisherLost: no answer within `deadline_s`: dead, unreachable, or it does not share our secret.
            StaleEpoch: it serves another run or epoch.
        """
        with self._lock:
            self._greet(self._clock() + deadline_s, deadline_s)

    def close(self) -> None:
        """Hang up. Waits for a question in flight, which has a deadline."""
        with self._lock:
            self._dealer.close(0)

    def _greet(self, give_up: float, deadline_s: float) -> None:
        if not self._session:
            hello = Hello(nonce=secrets.token_bytes(16))
            self._session = self._checked(self._exchange(hello, give_up, deadline_s), Welcome).session

    def _checked(self, response: Response, kind: type[R]) -> R:
        if isinstance(response, Refused):
            raise make_error(response.error, response.message)
        if not isinstance(response, kind):
            raise PublisherLost(f"publisher {self.endpoint} answered {type(response).__name__}, wanted {kind.__name__}")
        return response

    def _exchange(self, request: Request, give_up: float, deadline_s: float) -> Response:
        self._num_requests += 1
        request_id = self._num_requests
        # A hello is not repeated: under one nonce it would be a replay, and TCP does not lose it.
        retry_s = deadline_s if isinstance(request, Hello) else RETRY_S
        while (left_s := give_up - self._clock()) > 0:
            self._send(request, request_id)
            response = self._receive(request, request_id, min(retry_s, left_s))
            if response is not None:
                return response
        raise PublisherLost(
            f"publisher {self.endpoint} did not answer {type(request).__name__} within {deadline_s:.1f} s; "
            "its process is dead, stopped or unreachable"
        )

    def _send(self, request: Request, request_id: int) -> None:
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
        payload = msgspec.msgpack.encode(envelope)
        # A full queue means a dead publisher: nothing to do here, the deadline of the caller speaks.
        with contextlib.suppress(zmq.Again):
            self._dealer.send_multipart([payload, self._membership.sign(QUESTION, payload)], zmq.NOBLOCK)

    def _receive(self, request: Request, request_id: int, timeout_s: float) -> Response | None:
        """The answer to `request_id`; late answers to earlier questions are thrown away."""
        expected = request.nonce if isinstance(request, Hello) else self._session
        until = self._clock() + timeout_s
        while (left_s := until - self._clock()) > 0:
            if not self._dealer.poll(max(1, int(left_s * 1000))):
                continue
            frames = self._dealer.recv_multipart()
            if len(frames) != 2 or not self._membership.is_authentic(ANSWER, frames[0], frames[1]):
                continue
            answer = decode(frames[0], Answer)
            if answer.session == expected and answer.request_id == request_id:
                return answer.response
        return None
