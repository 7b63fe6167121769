"""The control plane: small authenticated questions, and the server that answers them. No tensor bytes pass here.

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

import hmac
import logging
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.utils.z85

from weight_sync.decoding import decode_typed
from weight_sync.errors import StaleEpoch, WeightSyncError
from weight_sync.types import RelayHandle  # noqa: TC001 - msgspec reads the annotations

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


class DropRequest(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """End the lease that I have, if I have one: perhaps the answer to a question that I waited for no longer."""


class PrefetchRequest(msgspec.Struct, frozen=True, kw_only=True, tag="prefetch"):
    version: int
    deadline_s: float


class PollRequest(msgspec.Struct, frozen=True, kw_only=True, tag="poll"):
    version: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    version: int
    is_done: bool


class Pending(msgspec.Struct, frozen=True, kw_only=True, tag="pending"):
    """The version is packed and being sealed: ask again in a moment."""


class LinkRequest(msgspec.Struct, frozen=True, kw_only=True, tag="link"):
    """From the next pull on, bring the sources in this order, and some of them from another replica. A pull that is
    under way ends."""

    order: tuple[int, ...]
    relayed: tuple[int, ...]
    predecessor: RelayHandle | None
    is_read: bool
    """Somebody reads from you."""


class Linked(msgspec.Struct, frozen=True, kw_only=True, tag="linked"):
    is_relayed: bool
    """False if the predecessor's memory cannot be mapped: everything comes from the learners."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    session: bytes


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True, tag="granted"):
    lease_id: int
    slot: int
    generation: int
    digests: tuple[int, ...]
    """One per run of the asking worker on this rank, in plan order; empty if the run does not verify."""
    seal_s: float
    """What digesting and sealing the version took, beside training."""


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag="renewed"):
    pass


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    is_intact: bool
    """The slot still holds what was leased, so what was read is whole."""


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    pass


class PairMeet(msgspec.Struct, frozen=True, kw_only=True, tag="pair_meet"):
    """Build group `group` (a nonce) of two, or go on building it: what my store holds that yours may lack."""

    group: bytes
    entries: dict[str, bytes]


class PairSend(msgspec.Struct, frozen=True, kw_only=True, tag="pair_send"):
    """Send these parts of a slot over the group, each as a message of its own, in this order."""

    group: bytes
    number: int
    """Counts the orders given to this group, from 0, so that a repeated one is not carried out twice."""
    slot: int
    ranges: tuple[tuple[int, int], ...]
    """(offset in the slot, bytes)."""


class PairWatch(msgspec.Struct, frozen=True, kw_only=True, tag="pair_watch"):
    """How far are you, and does the group still stand?"""

    group: bytes


class PairDrop(msgspec.Struct, frozen=True, kw_only=True, tag="pair_drop"):
    """Abort the group; I have left it."""

    group: bytes


class PairMet(msgspec.Struct, frozen=True, kw_only=True, tag="pair_met"):
    entries: dict[str, bytes]
    error: str
    """Why the group will not come about; empty while it may."""


class PairState(msgspec.Struct, frozen=True, kw_only=True, tag="pair_state"):
    num_sent: int
    """Orders carried out."""
    error: str
    """Why the group fell; empty while it stands."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    error: str
    message: str


TransportRequest = PairMeet | PairSend | PairWatch | PairDrop
"""What a two-sided transport asks; `PublisherEnd.answer` answers."""
TransportResponse = PairMet | PairState
Request = (
    Hello
    | LeaseRequest
    | RenewRequest
    | ReleaseRequest
    | DropRequest
    | PrefetchRequest
    | PollRequest
    | LinkRequest
    | TransportRequest
)
Response = (
    Welcome | LeaseGranted | Pending | Renewed | Released | Dropped | Progress | Linked | Refused | TransportResponse
)
Handler = Callable[[str, Request], Response]
"""(sender, request) -> response. May raise WeightSyncError or ValueError, which the asker gets as `Refused`."""


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
