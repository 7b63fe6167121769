from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
import zmq

from weight_sync import channel as control
from weight_sync.channel import (
    MAX_REQUEST_BYTES,
    QUESTION,
    AsyncControlClient,
    ControlClient,
    ControlServer,
    Membership,
    connected,
)
from weight_sync.errors import PublisherLost, StaleEpoch, VersionUnavailable
from weight_sync.messages import (
    Envelope,
    Hello,
    LeaseGranted,
    LeaseRequest,
    Released,
    ReleaseRequest,
    Request,
    Response,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMBER = Membership(run_id="run", epoch=3, secret=b"s" * 32)
LEASE = LeaseRequest(version=7, worker=0, ttl_s=1.0)


class Desk:
    """A handler that remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Request]] = []
        self.block_first = threading.Event()
        self.block_first.set()

    def __call__(self, sender: str, request: Request) -> Response:
        self.seen.append((sender, request))
        if len(self.seen) == 1:
            self.block_first.wait(5.0)
        match request:
            case LeaseRequest(version=7):
                return LeaseGranted(lease_id=len(self.seen), slot=1, generation=2, digests=(2**64 - 1, 0), seal_s=0.0)
            case LeaseRequest():
                raise VersionUnavailable(f"version {request.version} is not held here")
            case _:
                return Released(is_intact=True)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def server(desk: Desk) -> Iterator[ControlServer]:
    server = ControlServer(desk, MEMBER)
    yield server
    server.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def client_of(context: zmq.Context, server: ControlServer, member: Membership = MEMBER) -> ControlClient:
    return ControlClient(context, server.endpoint, membership=member, sender="r0/0")


def raw_socket(context: zmq.Context, server: ControlServer) -> zmq.Socket:
    """Of somebody who knows the secret of the run, and sends what he likes."""
    dealer = context.socket(zmq.DEALER)
    connected(dealer, server.endpoint, MEMBER)
    return dealer


def wait_for(server: ControlServer, name: str, count: int) -> None:
    until = time.monotonic() + 20.0
    while server.counters().get(name, 0) < count:
        assert time.monotonic() < until, f"{name} is {server.counters()}, expected {count}"
        time.sleep(0.005)


def test_answers_come_back_with_64_bit_digests(context: zmq.Context, server: ControlServer, desk: Desk) -> None:
    granted = client_of(context, server).ask(LEASE, LeaseGranted, deadline_s=5.0)
    assert granted.digests == (2**64 - 1, 0)
    assert desk.seen == [("r0/0", LEASE)]


def test_refusal_keeps_its_type_and_message(context: zmq.Context, server: ControlServer) -> None:
    with pytest.raises(VersionUnavailable, match="version 9 is not held here"):
        client_of(context, server).ask(LeaseRequest(version=9, worker=0, ttl_s=1.0), LeaseGranted, deadline_s=5.0)


def test_frame_under_another_secret_gets_no_answer(context: zmq.Context, server: ControlServer, desk: Desk) -> None:
    stranger = Membership(run_id="run", epoch=3, secret=b"x" * 32)
    with pytest.raises(PublisherLost, match=r"did not answer Hello within 0\.3 s"):
        client_of(context, server, stranger).ask(LEASE, LeaseGranted, deadline_s=0.3)
    assert desk.seen == [] and "control_sessions" not in server.counters()
    dealer = raw_socket(context, server)
    dealer.send(stranger.seal(QUESTION, b"a question"))
    wait_for(server, "control_unauthentic", 1)
    assert desk.seen == []


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
MB = 1_000_000


@pytest.mark.parametrize("part", [b"\x01\x00", b"\x03" + (65536).to_bytes(8, "big") + b"x" * 65536])
def test_a_stranger_whose_message_never_ends_costs_no_memory(
    context: zmq.Context, server: ControlServer, part: bytes
) -> None:
    """Every part says that one more follows: the empty ones make a process grow by thirty times what is sent."""
    process, many = psutil.Process(), part * max(1, 65536 // len(part))
    before, sent = process.memory_info().rss, 0
    port = int(server.endpoint.rpartition(":")[2])
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0) as line:
        line.sendall(GREETING)
        line.recv(64)
        line.sendall(b"\x04" + bytes([len(READY)]) + READY)
        while sent < 40 * MB:
            line.sendall(many)
            sent += len(many)
    assert sent < 40 * MB, "the connection is closed at the handshake"
    assert process.memory_info().rss - before < 20 * MB
    assert client_of(context, server).ask(LEASE, LeaseGranted, deadline_s=5.0).slot == 1


def test_half_handshakes_are_closed(context: zmq.Context, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HANDSHAKE_S", 0.2)
    server = ControlServer(desk, MEMBER)
    port = int(server.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as line:
        line.sendall(GREETING[:20])
        while line.recv(64):  # its greeting, then the end
            pass
    assert client_of(context, server).ask(LEASE, LeaseGranted, deadline_s=5.0).slot == 1
    server.close()


async def test_a_coordinator_that_gets_no_answer_says_from_whom_and_for_how_long(server: ControlServer) -> None:
    stranger = Membership(run_id="run", epoch=3, secret=b"x" * 32)
    client = AsyncControlClient(server.endpoint, membership=stranger, sender="coordinator")
    try:
        with pytest.raises(TimeoutError, match=r"did not answer LeaseRequest within 0\.3 s") as caught:
            await client.ask(LEASE, LeaseGranted, deadline_s=0.3)
    finally:
        client.close()
    assert server.endpoint in str(caught.value) and "weight_sync.timeout_s" in str(caught.value)


async def test_a_deadline_holds_also_behind_a_question_that_gets_no_answer(server: ControlServer) -> None:
    stranger = Membership(run_id="run", epoch=3, secret=b"x" * 32)
    client = AsyncControlClient(server.endpoint, membership=stranger, sender="coordinator")
    first = asyncio.create_task(client.ask(LEASE, LeaseGranted, deadline_s=60.0))
    try:
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
            await asyncio.wait_for(client.ask(LEASE, LeaseGranted, deadline_s=0.2), 20)
        assert not first.done()
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        client.close()


@pytest.mark.parametrize("member", [Membership(run_id="run", epoch=2, secret=MEMBER.secret),
                                    Membership(run_id="other", epoch=3, secret=MEMBER.secret)])  # fmt: skip
def test_other_epoch_or_run_is_told_so(
    context: zmq.Context, server: ControlServer, desk: Desk, member: Membership
) -> None:
    with pytest.raises(StaleEpoch, match="open the receiver again"):
        client_of(context, server, member).ask(LEASE, LeaseGranted, deadline_s=5.0)
    assert desk.seen == []


def test_malformed_frames_are_counted_and_do_no_harm(context: zmq.Context, server: ControlServer) -> None:
    socket = raw_socket(context, server)
    bad = b"\xc1 not msgpack"
    shape = msgspec.msgpack.encode({"run_id": 5, "unknown": True})
    frames = [
        [b""],
        [b"only one frame"],
        [bad, b"short mac"],
        [MEMBER.seal(QUESTION, bad)],
        [MEMBER.seal(QUESTION, shape)],
        [b"a", b"b", b"c"],
    ]
    for frame in frames:
        socket.send_multipart(frame)
    wait_for(server, "control_malformed", len(frames))
    assert client_of(context, server).ask(LEASE, LeaseGranted, deadline_s=5.0).slot == 1


def test_too_large_frame_is_dropped_with_its_connection(
    context: zmq.Context, server: ControlServer, desk: Desk
) -> None:
    socket = raw_socket(context, server)
    big = b"x" * (MAX_REQUEST_BYTES + 1)
    socket.send(MEMBER.seal(QUESTION, big))
    assert client_of(context, server).ask(LEASE, LeaseGranted, deadline_s=5.0).slot == 1
    assert len(desk.seen) == 1


def test_replayed_frame_is_refused(context: zmq.Context, server: ControlServer, desk: Desk) -> None:
    recorded: list[list[bytes]] = []
    client = client_of(context, server)
    client._dealer = Recorder(client._dealer, recorded)
    client.ask(LEASE, LeaseGranted, deadline_s=5.0)
    assert len(recorded) == 2  # hello and lease
    attacker = raw_socket(context, server)
    for frame in recorded:
        attacker.send(frame)
    wait_for(server, "control_replayed", 2)
    assert not attacker.poll(100), "a replayed frame must not be answered"
    assert len(desk.seen) == 1


class Recorder:
    """A socket that lets someone listen on the line."""

    def __init__(self, socket: zmq.Socket, record: list[list[bytes]]) -> None:
        self._socket, self._record = socket, record

    def send(self, frame: bytes, flags: int) -> None:
        self._record.append(frame)
        self._socket.send(frame, flags)

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)


def test_retried_request_is_executed_once(
    context: zmq.Context, server: ControlServer, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_sync.channel.RETRY_S", 0.05)
    client = client_of(context, server)
    client.hello(deadline_s=5.0)
    desk.block_first.clear()
    threading.Timer(0.4, desk.block_first.set).start()
    granted = client.ask(LEASE, LeaseGranted, deadline_s=5.0)
    assert granted.lease_id == 1
    wait_for(server, "control_retried", 1)
    assert len(desk.seen) == 1
    released = client.ask(ReleaseRequest(lease_id=1, slot=1, generation=2), Released, deadline_s=5.0)
    assert released.is_intact, "a late answer to the retried question must not answer this one"


def test_reflected_question_is_no_answer() -> None:
    payload = b"anything"
    assert MEMBER.open(QUESTION, MEMBER.seal(QUESTION, payload)) == payload
    assert MEMBER.open(b"A", MEMBER.seal(QUESTION, payload)) is None


def test_two_servers_never_share_an_endpoint(desk: Desk) -> None:
    first, second = ControlServer(desk, MEMBER), ControlServer(desk, MEMBER)
    assert first.endpoint != second.endpoint
    first.close()
    second.close()


def test_close_ends_the_thread_and_the_client_finds_out_in_time(context: zmq.Context, desk: Desk) -> None:
    server = ControlServer(desk, MEMBER)
    client = client_of(context, server)
    client.hello(deadline_s=5.0)
    before = threading.active_count()
    server.close()
    server.close()
    assert threading.active_count() == before - 1
    started = time.monotonic()
    with pytest.raises(PublisherLost, match="dead, stopped or unreachable"):
        client.ask(LEASE, LeaseGranted, deadline_s=0.3)
    assert time.monotonic() - started < 5.0


def test_secret_is_not_printed() -> None:
    assert "ssss" not in repr(MEMBER)


def test_ipv6_endpoint_works(context: zmq.Context, desk: Desk) -> None:
    try:
        server = ControlServer(desk, MEMBER, host="::1")
    except zmq.ZMQError:
        pytest.skip("this host has no IPv6 loopback")
    assert "[::1]" in server.endpoint
    assert client_of(context, server).ask(LEASE, LeaseGranted, deadline_s=5.0).slot == 1
    server.close()


def test_hello_flood_is_bounded(context: zmq.Context, server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_sync.channel.MAX_SESSIONS", 2)
    socket = raw_socket(context, server)
    for i in range(5):
        hello = Envelope(run_id="run", epoch=3, sender="x", session=b"", seq=1, request_id=1,
                         request=Hello(nonce=bytes([i]) * 16))  # fmt: skip
        payload = msgspec.msgpack.encode(hello)
        socket.send(MEMBER.seal(QUESTION, payload))
    wait_for(server, "control_replayed", 3)
    assert server.counters()["control_sessions"] == 2
