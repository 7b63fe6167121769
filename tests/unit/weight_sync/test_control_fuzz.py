"""A publisher's control port under 1,000 hostile frames: nothing crashes, nothing changes, each is accounted for."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from tests.fakes.sync_world import PARAMS, FusedModel, LocalPublisher, full_weights
from weight_sync import channel as control
from weight_sync.channel import MAC_BYTES, MAX_REQUEST_BYTES, QUESTION, ControlClient, Membership, connected
from weight_sync.errors import PlanMismatch
from weight_sync.messages import (
    LeaseGranted,
    LeaseRequest,
    OpenPublisher,
    PublisherInfo,
    Renewed,
    RenewRequest,
    decode,
    encode,
    manifest_to_bytes,
)
from weight_sync.plan.planner import build_manifest
from weight_sync.publish.shards import shard_descs
from weight_sync.receive.recorder import record_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_FRAMES = 1000
MEMBER = Membership(run_id="run", epoch=3, secret=b"s" * 32)
STRANGER = Membership(run_id="run", epoch=3, secret=b"x" * 32)
FATES = ("malformed", "unauthentic", "replayed", "retried", "refused", "answered", "sessions")
"""Every frame ends as one of these; `stale` ones are among the refused."""
Frames = list[bytes]


def question(**changes: Any) -> bytes:
    """The bytes of an envelope; `changes` may make nonsense of it."""
    fields = {"run_id": "run", "epoch": 3, "sender": "r9/0", "session": b"no session", "seq": 1, "request_id": 1,
              "request": {"type": "renew", "lease_id": 1, "ttl_s": 1.0}}  # fmt: skip
    return msgspec.msgpack.encode({**fields, **changes})


def signed(payload: bytes, member: Membership = MEMBER) -> Frames:
    return [member.seal(QUESTION, payload)]


class Fuzzer:
    """Hostile frames of every kind. `recorded` are frames of a legitimate client; `session` is a session of our own."""

    def __init__(self, seed: int, recorded: list[Frames], session: bytes) -> None:
        self._random = random.Random(seed)
        self._recorded = recorded
        self._session = session
        self._seq = 10
        self.kinds: tuple[Callable[[], Frames], ...] = (
            self.noise, self.truncated, self.flipped, self.unauthenticated, self.replayed, self.wrong_type,
            self.unknown_field, self.huge_number, self.nested, self.bad_text, self.other_run, self.senseless,
            self.cut_and_signed, self.wrong_count,
        )  # fmt: skip

    def frame(self, number: int) -> Frames:
        return self.kinds[number % len(self.kinds)]()

    def noise(self) -> Frames:
        return [self._random.choice([b"", self._bytes(), self._bytes() + self._random.randbytes(32)])]

    def wrong_count(self) -> Frames:
        return [self._bytes() for _ in range(self._random.choice([2, 3, 4, 7]))]

    def truncated(self) -> Frames:
        (frame,) = self._random.choice(self._recorded)
        return [frame[: self._random.randrange(len(frame))]]

    def cut_and_signed(self) -> Frames:
        (frame,) = self._random.choice(self._recorded)
        return signed(frame[: self._random.randrange(len(frame) - MAC_BYTES)])

    def flipped(self) -> Frames:
        frames = [bytearray(frame) for frame in self._random.choice(self._recorded)]
        hit = self._random.choice(frames)
        hit[self._random.randrange(len(hit))] ^= 1 << self._random.randrange(8)
        return [bytes(frame) for frame in frames]

    def unauthenticated(self) -> Frames:
        return signed(question(), STRANGER)

    def replayed(self) -> Frames:
        return self._random.choice(self._recorded)

    def wrong_type(self) -> Frames:
        name = self._random.choice(["run_id", "epoch", "sender", "session", "seq", "request_id", "request"])
        value = self._random.choice([None, 1.5, [], {}, "text", b"\xff", -1, True, {"type": "lease"}, [["x"]]])
        return signed(question(**{name: value}))

    def unknown_field(self) -> Frames:
        if self._random.random() < 0.5:
            return signed(question(admin=True))
        return signed(question(request={"type": "renew", "lease_id": 1, "ttl_s": 1.0, "admin": self._bytes()}))

    def huge_number(self) -> Frames:
        big = self._random.choice([2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf")])
        request: dict[str, Any] = {"type": "release", "lease_id": big, "slot": big, "generation": big}
        if self._random.random() < 0.5:
            request = {"type": "lease", "version": big, "worker": 0, "ttl_s": 1.0}
        return self._in_session(request)

    def nested(self) -> Frames:
        depth = self._random.choice([100, 2_000, 50_000])
        inner = self._random.choice([b"\x91", b"\x81\x01"]) * depth + b"\x01"
        request = msgspec.msgpack.encode({"type": "renew", "lease_id": 1, "ttl_s": 1.0, "z": 0})
        return signed(question(request=msgspec.Raw(request[:-1] + inner)))

    def bad_text(self) -> Frames:
        payload = question(sender="?" * 8)
        return signed(payload.replace(b"?" * 8, self._random.choice([b"\xff" * 8, b"\xed\xa0\x80" + b"a" * 5])))

    def other_run(self) -> Frames:
        return signed(question(**self._random.choice([{"run_id": "other"}, {"epoch": 2}, {"run_id": ""}])))

    def senseless(self) -> Frames:
        """Well formed, in a session, and nothing that a publisher can do."""
        choices: list[dict[str, Any]] = [
            {"type": "lease", "version": 1, "worker": 99, "ttl_s": 1.0},
            {"type": "lease", "version": 1, "worker": 0, "ttl_s": float("nan")},
            {"type": "lease", "version": 1, "worker": 0, "ttl_s": -1.0},
            {"type": "lease", "version": -5, "worker": 0, "ttl_s": 1.0},
            {"type": "renew", "lease_id": 10**9, "ttl_s": 1.0},
            {"type": "release", "lease_id": 10**9, "slot": -1, "generation": 0},
            {"type": "prefetch", "version": 1, "deadline_s": 1.0},
            {"type": "poll", "version": 1},
            {"type": "pair_send", "group": b"", "number": 0, "slot": 9, "ranges": [[0, 2**62]]},
            {"type": "pair_watch", "group": self._bytes()},
        ]
        return self._in_session(self._random.choice(choices))

    def _in_session(self, request: dict[str, Any]) -> Frames:
        self._seq += 1
        return signed(question(session=self._session, seq=self._seq, request_id=self._seq, request=request))

    def _bytes(self) -> bytes:
        return self._random.randbytes(self._random.randrange(200))


class Recorder:
    """A socket that lets someone listen on the line."""

    def __init__(self, socket: Any, record: list[Frames]) -> None:
        self._socket, self._record = socket, record

    def send(self, frame: bytes, flags: int) -> None:
        self._record.append([frame])
        self._socket.send(frame, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[LocalPublisher]:
    """One rank with version 1 sealed."""
    publisher = LocalPublisher(0, 1, full_weights(0))
    manifest = build_manifest(
        epoch=3, params=PARAMS, shards=shard_descs(PARAMS, num_ranks=1),
        workers=[record_layout(FusedModel(), PARAMS, worker=0)],
    )  # fmt: skip
    opening = OpenPublisher(
        run_id="run", secret=MEMBER.secret, epoch=3, manifest=manifest_to_bytes(manifest), transport="shm",
        num_slots=2, verify=True, host="127.0.0.1",
    )  # fmt: skip
    publisher.endpoint = decode(publisher.ws_open(encode(opening)), PublisherInfo).endpoint
    publisher.ws_publish(1, 5.0)
    publisher.ws_digests(1)  # sealed, that is
    yield publisher
    publisher.ws_close()


def dealer(context: zmq.Context, publisher: LocalPublisher) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    connected(socket, publisher.endpoint, MEMBER)
    return socket


def open_session(socket: zmq.Socket) -> bytes:
    socket.send_multipart(signed(question(request={"type": "hello", "nonce": b"fuzzer"})))
    assert socket.poll(5000)
    return msgspec.msgpack.decode(socket.recv()[:-MAC_BYTES])["response"]["session"]


def fates(publisher: LocalPublisher) -> int:
    counters = publisher.publisher.counters()
    return sum(counters.get(f"control_{fate}", 0) for fate in FATES)


def arena_state(publisher: LocalPublisher) -> tuple[Any, ...]:
    epoch = publisher.publisher._epoch
    slots = epoch.arena._table.slots
    contents = [bytes(epoch.end.slot(slot.index).numpy()) for slot in slots]
    return tuple((slot.version, slot.generation, sorted(slot.leases)) for slot in slots), contents


def test_thousand_hostile_frames_change_nothing(context: zmq.Context, publisher: LocalPublisher) -> None:
    recorded: list[Frames] = []
    client = ControlClient(context, publisher.endpoint, membership=MEMBER, sender="r0/0")
    client._dealer = Recorder(client._dealer, recorded)
    lease = client.ask(LeaseRequest(version=1, worker=0, ttl_s=600.0), LeaseGranted, deadline_s=5.0)
    renewal = RenewRequest(lease_id=lease.lease_id, ttl_s=600.0)
    client.ask(renewal, Renewed, deadline_s=5.0)
    socket = dealer(context, publisher)
    fuzzer = Fuzzer(20, list(recorded), open_session(socket))
    before, accounted, num_legitimate = arena_state(publisher), fates(publisher), 0
    num_answers = 0
    for number in range(NUM_FRAMES):
        socket.send_multipart(fuzzer.frame(number))
        while socket.poll(0):
            num_answers += len(socket.recv_multipart()) > 0
        if number % 50 == 0:
            client.ask(renewal, Renewed, deadline_s=5.0)
            num_legitimate += 1
    until = time.monotonic() + 20.0
    while fates(publisher) < accounted + NUM_FRAMES + num_legitimate:
        assert time.monotonic() < until, publisher.publisher.counters()
        time.sleep(0.01)
    counters = publisher.publisher.counters()
    assert fates(publisher) == accounted + NUM_FRAMES + num_legitimate, counters
    for fate in ("malformed", "unauthentic", "replayed", "refused", "stale"):
        assert counters[f"control_{fate}"] >= NUM_FRAMES / 30, f"the fuzzer hardly sends what ends as {fate}"
    assert counters["control_sessions"] == 2, "the client's and the fuzzer's own"
    assert arena_state(publisher) == before
    client.ask(renewal, Renewed, deadline_s=5.0)
    assert arena_state(publisher) == before
    publisher.ws_publish(2, 5.0)
    client.close()


def test_oversized_frames_cost_their_sender_the_connection_and_nobody_else(
    context: zmq.Context, publisher: LocalPublisher
) -> None:
    client = ControlClient(context, publisher.endpoint, membership=MEMBER, sender="r0/0")
    client.hello(deadline_s=5.0)
    before, accounted = arena_state(publisher), fates(publisher)
    for _ in range(5):
        dealer(context, publisher).send_multipart(signed(question(sender="x" * (MAX_REQUEST_BYTES + 1))))
    lease = LeaseRequest(version=1, worker=0, ttl_s=600.0)
    assert client.ask(lease, LeaseGranted, deadline_s=5.0).slot == 0
    assert fates(publisher) == accounted + 1
    assert arena_state(publisher)[1] == before[1]
    client.close()


def test_sessions_and_remembered_answers_are_bounded(
    context: zmq.Context, publisher: LocalPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_SESSIONS", 8)
    socket = dealer(context, publisher)
    session = open_session(socket)
    server = publisher.publisher._epoch.server
    for number in range(100):
        socket.send_multipart(signed(question(request={"type": "hello", "nonce": number.to_bytes(16, "big")})))
        renew = {"type": "release", "lease_id": 10**9, "slot": -1, "generation": 0}
        socket.send_multipart(signed(question(session=session, seq=number + 2, request_id=number + 2, request=renew)))
    until = time.monotonic() + 10.0
    while fates(publisher) < 201:
        assert time.monotonic() < until, publisher.publisher.counters()
        time.sleep(0.01)
    assert len(server._sessions) == len(server._nonces) == 8
    assert max(len(known.answers) for known in server._sessions.values()) <= control.ANSWERS_KEPT


@pytest.mark.parametrize("payload", [b"\x81\xa4rank\xa1\xff", b"\x81\xa1z" + b"\x91" * 100_000 + b"\x01"])
def test_what_is_no_message_is_a_plan_mismatch(payload: bytes) -> None:
    with pytest.raises(PlanMismatch, match="message is not a PublisherInfo"):
        decode(payload, PublisherInfo)
