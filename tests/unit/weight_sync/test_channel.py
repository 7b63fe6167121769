"""The control line: members are served whatever strangers, former members and hostile frames do."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
import zmq

from tests.fakes.row_shards import row_shards
from tests.fakes.sync_world import PARAMS, FusedModel, LocalPublisher, World, full_weights, record_layout
from weight_sync import channel, deadlines
from weight_sync.channel import (
    CLIENT_FILES,
    MAX_REQUEST_BYTES,
    SPARE_FILES,
    ClientContext,
    ControlClient,
    ControlServer,
    Switchboard,
    make_room,
    make_run_keys,
)
from weight_sync.errors import PlanMismatch, PublisherLost, StaleEpoch, VersionUnavailable, WeightSyncError
from weight_sync.messages import (
    Check,
    Checked,
    Ok,
    OpenPublisher,
    OpenReceiver,
    PeerAddress,
    Pin,
    Ping,
    Pinned,
    PrefetchRequest,
    PublisherInfo,
    Request,
    Response,
    RunKeys,
    SlotAt,
    decode,
    decode_typed,
    encode,
)
from weight_sync.plan.agreement import share
from weight_sync.plan.planner import build_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEYS = make_run_keys("run")
OTHER_RUN = make_run_keys("other")
EPOCH = 3
CHECK = Check(worker=0, slot=7, generation=2)
PREFETCH = PrefetchRequest(version=7, slots=(SlotAt(0, 1, 2),), deadline_s=9.0)
MB = 1_000_000
ANSWER_S = 20.0


class Desk:
    """A handler that remembers what it was asked. A prefetch is answered when the test says so."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Request]] = []
        self.arrival: Future[Response] = Future()

    def __call__(self, sender: str, request: Request) -> Response | Future[Response]:
        self.seen.append((sender, request))
        match request:
            case Check(slot=7):
                return Checked(is_intact=True, digests=(2**64 - 1, len(self.seen)))
            case Pin():
                raise VersionUnavailable(f"version {request.version} is not held here")
            case PrefetchRequest():
                return self.arrival
            case _:
                return Ok()


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def server(desk: Desk) -> Iterator[ControlServer]:
    server = ControlServer(desk, KEYS, epoch=EPOCH)
    yield server
    server.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def client_of(
    context: zmq.Context, address: PeerAddress, keys: RunKeys = KEYS, *, epoch: int = EPOCH, sender: str = "r0/0"
) -> ControlClient:
    return ControlClient(context, address, keys, epoch=epoch, sender=sender)


def member_socket(context: zmq.Context, address: PeerAddress) -> zmq.Socket:
    """Of a process that has the keys of the run, and sends what it likes."""
    dealer = context.socket(zmq.DEALER)
    channel._set_up_client(dealer, KEYS, address)
    dealer.connect(address.endpoint)
    return dealer


def wait_for(counters: Callable[[], dict[str, int]], name: str, count: int) -> None:
    until = time.monotonic() + ANSWER_S
    while counters().get(name, 0) < count:
        assert time.monotonic() < until, f"{name} is {counters()}, expected {count}"
        time.sleep(0.005)


def serves_members(context: zmq.Context, server: ControlServer) -> bool:
    client = client_of(context, server.address, sender="r1/0")
    try:
        return client.ask(CHECK, Checked, deadline_s=ANSWER_S).is_intact
    finally:
        client.close()


# Answers


def test_an_answer_keeps_64_bit_digests_and_the_server_knows_who_asked(
    context: zmq.Context, server: ControlServer, desk: Desk
) -> None:
    assert client_of(context, server.address).ask(CHECK, Checked, deadline_s=ANSWER_S).digests == (2**64 - 1, 1)
    assert desk.seen == [("r0/0", CHECK)]


def test_a_refusal_keeps_its_type_and_message(context: zmq.Context, server: ControlServer) -> None:
    with pytest.raises(VersionUnavailable, match="version 9 is not held here"):
        client_of(context, server.address).ask(Pin(version=9, ttl_s=1.0), Pinned, deadline_s=ANSWER_S)


def test_a_ping_is_answered_while_another_request_waits(
    context: zmq.Context, server: ControlServer, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "RESEND_S", 0.05)
    waiting, other = client_of(context, server.address), client_of(context, server.address, sender="r0/1")
    found: list[Ok] = []
    thread = threading.Thread(target=lambda: found.append(waiting.ask(PREFETCH, Ok, deadline_s=ANSWER_S)))
    thread.start()
    until = time.monotonic() + ANSWER_S
    while not desk.seen and time.monotonic() < until:
        time.sleep(0.005)
    for _ in range(5):
        other.ping(deadline_s=ANSWER_S)
        time.sleep(0.05)
    assert not found and [request for _, request in desk.seen] == [PREFETCH], "a repeated request that waits is one"
    desk.arrival.set_result(Ok())
    thread.join(ANSWER_S)
    assert found == [Ok()]


def test_a_late_answer_is_not_taken_for_that_of_the_next_request(
    context: zmq.Context, server: ControlServer, desk: Desk
) -> None:
    client = client_of(context, server.address)
    with pytest.raises(PublisherLost, match=r"did not answer PrefetchRequest within 0\.2 s"):
        client.ask(PREFETCH, Ok, deadline_s=0.2)
    desk.arrival.set_result(Ok())
    assert client.ask(CHECK, Checked, deadline_s=ANSWER_S).is_intact


def test_questions_to_one_server_may_be_on_their_way_together(
    context: zmq.Context, server: ControlServer, desk: Desk
) -> None:
    client = client_of(context, server.address)
    slow, quick = client.begin(PREFETCH), client.begin(CHECK)
    with pytest.raises(PublisherLost, match=r"did not answer PrefetchRequest within 0\.3 s"):
        client.finish(slow, Ok, deadline_s=0.3)  # the other answer comes meanwhile
    assert client.finish(quick, Checked, deadline_s=ANSWER_S).is_intact
    assert [request for _, request in desk.seen] == [PREFETCH, CHECK], "an answer that was here is asked for again"


def test_an_unexpected_error_of_a_handler_is_answered_and_logged(
    context: zmq.Context, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(sender: str, request: Request) -> Response:
        raise KeyError(f"{sender} {type(request).__name__}")

    server = ControlServer(broken, KEYS, epoch=EPOCH)
    with pytest.raises(WeightSyncError, match="KeyError: 'r0/0 Check'"):
        client_of(context, server.address).ask(CHECK, Checked, deadline_s=ANSWER_S)
    assert "a control request failed" in caplog.text
    server.close()


def test_close_ends_the_thread_and_a_client_finds_out_in_time(context: zmq.Context, desk: Desk) -> None:
    server = ControlServer(desk, KEYS, epoch=EPOCH)
    client = client_of(context, server.address)
    client.ping(deadline_s=ANSWER_S)
    started = time.monotonic()
    server.close()
    server.close()
    assert not server._thread.is_alive()
    with pytest.raises(PublisherLost, match="dead, stopped or unreachable"):
        client.ask(CHECK, Checked, deadline_s=0.3)
    assert time.monotonic() - started < ANSWER_S


def test_an_answer_that_comes_after_the_end_goes_nowhere(context: zmq.Context, desk: Desk, tmp_path: Path) -> None:
    """Not to the file either that has the number of the server's own descriptor by then."""
    server = ControlServer(desk, KEYS, epoch=EPOCH)
    with pytest.raises(PublisherLost):
        client_of(context, server.address).ask(PREFETCH, Ok, deadline_s=0.5)
    number = server._wake_fd
    server.close()
    files = [(tmp_path / str(i)).open("wb") for i in range(50)]
    assert number in [file.fileno() for file in files]
    desk.arrival.set_result(Ok())
    for file in files:
        file.close()
    assert not [path for path in tmp_path.iterdir() if path.stat().st_size]


def test_an_address_of_another_host_is_refused_and_leaves_nothing(desk: Desk) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(zmq.ZMQError):
        ControlServer(desk, KEYS, epoch=EPOCH, host="192.0.2.1")
    assert psutil.Process().num_fds() <= before, "fewer is fine: those of earlier tests are closed some time"


def test_an_ipv6_endpoint_works(context: zmq.Context, desk: Desk) -> None:
    try:
        server = ControlServer(desk, KEYS, epoch=EPOCH, host="::1")
    except zmq.ZMQError:
        pytest.skip("this host has no IPv6 loopback")
    assert "[::1]" in server.address.endpoint and serves_members(context, server)
    server.close()


# Who gets in


def test_another_epoch_of_the_run_is_refused_with_what_to_do(
    context: zmq.Context, server: ControlServer, desk: Desk
) -> None:
    with pytest.raises(StaleEpoch, match="r0/0 is in epoch 2, this process serves epoch 3 of run 'run'; open the"):
        client_of(context, server.address, epoch=2).ask(CHECK, Checked, deadline_s=ANSWER_S)
    assert desk.seen == []


def test_a_worker_of_another_run_is_not_let_in(context: zmq.Context, server: ControlServer, desk: Desk) -> None:
    """It even knows the server's key."""
    with pytest.raises(PublisherLost, match=r"did not answer Check within 0\.5 s"):
        client_of(context, server.address, OTHER_RUN).ask(CHECK, Checked, deadline_s=0.5)
    assert desk.seen == [] and server.counters()["control_unauthentic"] >= 1
    assert serves_members(context, server)


def test_a_server_on_a_reused_port_is_never_spoken_to(context: zmq.Context, server: ControlServer, desk: Desk) -> None:
    """It is of the same run even: a client expects the very process that its set-up named."""
    predecessor = PeerAddress(endpoint=server.address.endpoint, public_key=zmq.curve_keypair()[0])
    with pytest.raises(PublisherLost):
        client_of(context, predecessor).ask(CHECK, Checked, deadline_s=0.5)
    assert desk.seen == []


def test_clients_under_one_name_do_not_take_each_others_answers(context: zmq.Context, server: ControlServer) -> None:
    """A worker that was restarted, and its predecessor that still runs."""
    clients = [client_of(context, server.address) for _ in range(20)]
    for _ in range(3):
        numbers = [client.ask(CHECK, Checked, deadline_s=ANSWER_S).digests[1] for client in clients]
        assert numbers == list(range(numbers[0], numbers[0] + 20))


def test_a_server_remembers_nothing_about_clients_that_are_gone(server: ControlServer) -> None:
    for _ in range(50):
        with zmq.Context() as context:
            client = client_of(context, server.address)
            client.ask(CHECK, Checked, deadline_s=ANSWER_S)
            client.close()
    assert not server._waiting and server.counters()["control_connections"] >= 50


async def test_a_client_reaches_the_successor_of_a_server(desk: Desk) -> None:
    """As a coordinator does when an engine was restarted under its old name."""
    lines = Switchboard(KEYS, epoch=EPOCH)
    for _ in range(3):
        server = ControlServer(desk, KEYS, epoch=EPOCH)
        line = lines.dial("r0/0", server.address)
        assert (await lines.ask(line, CHECK, Checked, deadline_s=ANSWER_S)).is_intact
        await asyncio.to_thread(server.close)
    lines.close()


# The coordinator's lines


async def test_one_socket_reaches_many_workers_concurrently(desk: Desk) -> None:
    servers = [ControlServer(desk, KEYS, epoch=EPOCH) for _ in range(20)]
    lines = Switchboard(KEYS, epoch=EPOCH)
    dialled = [lines.dial(f"r{number}/0", server.address) for number, server in enumerate(servers)]
    asking = [lines.ask(line, CHECK, Checked, deadline_s=ANSWER_S) for line in dialled]
    assert {checked.is_intact for checked in await asyncio.gather(*asking)} == {True}
    ports = {int(server.address.endpoint.rpartition(":")[2]) for server in servers}
    connections = psutil.Process().net_connections("tcp")
    assert sum(bool(one.raddr) and one.raddr.port in ports for one in connections) == 20, "one to each"
    lines.hang_up(dialled[3])
    lines.hang_up(dialled[3])
    with pytest.raises(WeightSyncError, match="the line to r3/0 is closed"):
        await lines.ask(dialled[3], Ping(), Ok, deadline_s=ANSWER_S)
    await lines.ask(dialled[4], Ping(), Ok, deadline_s=ANSWER_S)
    lines.close()
    lines.close()
    for server in servers:
        server.close()


async def test_a_worker_that_does_not_answer_is_named_and_holds_nobody_up(server: ControlServer, desk: Desk) -> None:
    lines = Switchboard(KEYS, epoch=EPOCH)
    line = lines.dial("r0/0", PeerAddress(endpoint=server.address.endpoint, public_key=zmq.curve_keypair()[0]))
    first = asyncio.create_task(lines.ask(line, CHECK, Checked, deadline_s=60.0))
    with pytest.raises(TimeoutError, match=r"did not answer Check within 0\.3 s") as caught:
        await asyncio.wait_for(lines.ask(line, CHECK, Checked, deadline_s=0.3), ANSWER_S)
    for part in ("r0/0", server.address.endpoint, "weight_sync.timeout_s"):
        assert part in str(caught.value)
    assert not first.done()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    lines.close()


# Strangers

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32
CURVE_GREETING = GREETING.replace(b"NULL", b"CURVE")[:64]
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
STREAMS = {
    "multipart without data": GREETING + b"\x04" + bytes([len(READY)]) + READY + b"\x01\x00" * 32768,
    "multipart with data": GREETING + b"\x04" + bytes([len(READY)]) + READY
    + (b"\x03" + (65536).to_bytes(8, "big") + b"x" * 65536),
    "no protocol at all": random.Random(1).randbytes(65536),
    "a command without end": CURVE_GREETING + b"\x06" + (2**62).to_bytes(8, "big") + b"\x05HELLO" + b"x" * 65536,
}  # fmt: skip


def connect(server: ControlServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.address.endpoint.rpartition(":")[2])), timeout=10.0)


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_a_stranger_who_never_stops_sending_costs_no_memory(
    context: zmq.Context, server: ControlServer, stream: bytes
) -> None:
    process = psutil.Process()
    before, sent = process.memory_info().rss, 0
    with contextlib.suppress(OSError), connect(server) as line:
        while sent < 40 * MB:
            line.sendall(stream)
            sent += len(stream)
    assert sent < 40 * MB, "the connection is closed at the handshake"
    assert process.memory_info().rss - before < 20 * MB
    assert serves_members(context, server)


def test_half_handshakes_are_closed(context: zmq.Context, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "HANDSHAKE_S", 0.2)
    server = ControlServer(desk, KEYS, epoch=EPOCH)
    with connect(server) as line:
        line.sendall(CURVE_GREETING[:20])
        while line.recv(64):  # its greeting, then the end
            pass
    assert serves_members(context, server)
    server.close()


CROWD = """
import contextlib, socket, sys
lines = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=30) for _ in range(int(sys.argv[2]))]
for number, line in enumerate(lines):
    with contextlib.suppress(OSError):
        line.sendall(bytes.fromhex(sys.argv[3])[: number % 64])
print("all there", flush=True)
sys.stdin.read()
"""


def test_a_crowd_at_the_door_keeps_no_member_out(context: zmq.Context, server: ControlServer) -> None:
    process, port = psutil.Process(), server.address.endpoint.rpartition(":")[2]
    count = min(5000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500)
    before = process.memory_info().rss
    command = [sys.executable, "-c", CROWD, port, str(count), CURVE_GREETING.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdin is not None and crowd.stdout is not None
        try:
            assert crowd.stdout.readline().strip() == "all there"
            assert serves_members(context, server)
            assert process.memory_info().rss - before < 20 * MB
        finally:
            crowd.stdin.close()


# Members that send nonsense


def frame(**changes: Any) -> bytes:
    """The bytes of a request; `changes` may make nonsense of it."""
    fields = {"epoch": EPOCH, "sender": "r9/0", "request_id": 1, "request": ["pin", 9, 1.0]}
    return msgspec.msgpack.encode(list({**fields, **changes}.values()))


SENSELESS: list[list[Any]] = [
    ["pin", 1, 99.0], ["pin", 1, float("nan")], ["pin", 1, -1.0], ["pin", -5, 1.0], ["unpin", 10**9],
    ["check", 99, 0, 0], ["check", 0, 10**9, -1], ["prefetch", 1, [], 1.0], ["pair_send", b"", 0, 9, [[0, 2**62]]],
    ["pair_watch", b"nobody"],
]  # fmt: skip
"""Well formed, and nothing that a publisher can do."""
VALUES = (None, 1.5, [], {}, "text", b"\xff", True, ["pin"], [["x"]])
HUGE = (2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"))


def nonsense(number: int, rng: random.Random) -> list[bytes]:
    """Frames that a member should not send; every kind in turn."""
    noise, whole = rng.randbytes(rng.randrange(200)), frame()
    match number % 11:
        case 0:
            return [rng.choice([b"", b"\xc1" + noise, b"\x93" + noise])]
        case 1:
            return [noise] * rng.choice([2, 3, 4, 7])
        case 2:
            return [whole[: rng.randrange(len(whole))]]
        case 3:
            flipped = bytearray(frame(request=["check", 0, 10**9, -1]))
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return [bytes(flipped)]
        case 4:
            return [frame(**{rng.choice(["epoch", "sender", "request_id", "request"]): rng.choice(VALUES)})]
        case 5:
            return [rng.choice([frame(admin=True), frame(request=["no such request", 1, noise])])]
        case 6:
            huge = rng.choice(HUGE)
            return [frame(request_id=number, request=rng.choice([["check", huge, huge, huge], ["pin", huge, 1.0]]))]
        case 7:
            nested = rng.choice([b"\x91", b"\x81\x01"]) * rng.choice([100, 2_000, 50_000]) + b"\x01"
            return [frame(request=msgspec.Raw(b"\x94\xa3pin\x01\xcb" + bytes(8) + nested))]
        case 8:
            return [frame(request=msgspec.Raw(b"\x93\xa5" + b"\xff" * 5 + b"\x01\x01"))]  # a text that is none
        case 9:
            return [frame(epoch=2)]
        case _:
            return [frame(request_id=number, request=rng.choice(SENSELESS))]


@pytest.fixture
def publisher() -> Iterator[LocalPublisher]:
    """One rank with version 1 sealed."""
    publisher = LocalPublisher(0, 1, full_weights(0))
    plan = build_plan(
        epoch=EPOCH, params=PARAMS, shards=row_shards(PARAMS, 1),
        workers=[record_layout(FusedModel(), PARAMS, worker=0)],
    )  # fmt: skip
    opening = OpenPublisher(
        keys=KEYS, epoch=EPOCH, plan=share(plan).for_learner[0], transport="shm",
        num_slots=2, verify=True, host="127.0.0.1",
    )  # fmt: skip
    publisher.address = decode(publisher.ws_open(encode(opening)), PublisherInfo).address
    publisher.ws_publish(1, 5.0)
    publisher.ws_digests(1, 5.0)  # sealed, that is
    yield publisher
    publisher.ws_close()


def slots_of(publisher: LocalPublisher) -> tuple[Any, ...]:
    epoch = publisher.publisher._epoch
    slots = epoch.table.slots
    contents = [bytes(epoch.end.slot(slot.index).numpy()) for slot in slots]
    return tuple((slot.version, slot.generation, slot.state) for slot in slots), contents


def test_a_thousand_senseless_frames_of_a_member_change_nothing(
    context: zmq.Context, publisher: LocalPublisher
) -> None:
    client = client_of(context, publisher.address)
    pin = Pin(version=1, ttl_s=60.0)
    client.ask(pin, Pinned, deadline_s=ANSWER_S)
    line, rng, before = member_socket(context, publisher.address), random.Random(20), slots_of(publisher)
    for number in range(1000):
        line.send_multipart(nonsense(number, rng))
        while line.poll(0):
            line.recv_multipart()
        if number % 50 == 0:
            client.ask(pin, Pinned, deadline_s=ANSWER_S)
    client.ask(pin, Pinned, deadline_s=ANSWER_S)
    counters = publisher.publisher.counters
    for fate in ("malformed", "refused", "stale"):
        wait_for(counters, f"control_{fate}", 1000 // 30)
    wait_for(lambda: {"all": sum(counters()[f"control_{fate}"] for fate in ("malformed", "refused", "answered"))},
             "all", 1000)  # fmt: skip
    assert slots_of(publisher) == before
    publisher.ws_publish(2, 5.0)
    client.close()


def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(
    context: zmq.Context, publisher: LocalPublisher
) -> None:
    client = client_of(context, publisher.address)
    client.ping(deadline_s=ANSWER_S)
    before = slots_of(publisher)[1]
    for _ in range(5):
        member_socket(context, publisher.address).send(b"x" * (MAX_REQUEST_BYTES + 1))
    assert client.ask(Pin(version=1, ttl_s=60.0), Pinned, deadline_s=ANSWER_S).slot == 0
    assert slots_of(publisher)[1] == before
    client.close()


@pytest.mark.parametrize("payload", [b"\x81\xa4rank\xa1\xff", b"\x81\xa1z" + b"\x91" * 100_000 + b"\x01"])
def test_what_is_no_message_is_a_plan_mismatch(payload: bytes) -> None:
    with pytest.raises(PlanMismatch, match="message is not a PublisherInfo"):
        decode(payload, PublisherInfo)
    with pytest.raises(msgspec.DecodeError, match="int"):
        decode_typed(msgspec.msgpack.encode("text"), int)


MANY_FIRST_TIMES = """
import sys, threading
import msgspec
from weight_sync.messages import decode_typed

sys.setswitchinterval(1e-6)
for _ in range(200):
    inner = [msgspec.defstruct(f"Inner{i}", [(f"f{j}", int) for j in range(20)]) for i in range(10)]
    outer = msgspec.defstruct("Outer", [(f"f{i}", kind) for i, kind in enumerate(inner)])
    other = msgspec.defstruct("Other", [(f"f{i}", kind) for i, kind in enumerate(inner)])
    data = msgspec.msgpack.encode({f"f{i}": {f"f{j}": j for j in range(20)} for i in range(10)})
    together = threading.Barrier(4)
    wrong = []

    def decode(kind):
        together.wait()
        try:
            assert decode_typed(data, kind).f9.f19 == 19
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=decode, args=(kind,)) for kind in (outer, other, outer, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
print("whole")
"""


def test_first_use_in_several_threads_does_not_end_the_process() -> None:
    """`msgspec.msgpack.decode(data, type=kind)` in its place dies of a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", MANY_FIRST_TIMES], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stderr[-2000:]


# The keys of the run


def test_a_library_without_encryption_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(WeightSyncError, match="libzmq has no CURVE encryption; install pyzmq from PyPI"):
        make_run_keys("run")


async def test_the_secret_key_is_in_no_log_representation_or_error(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    world, heard = World(1, 1, commit="staged"), list[bytes]()
    for party in (world.publishers[0], world.replicas[0].services[0]):
        opening = party.ws_open
        monkeypatch.setattr(
            party, "ws_open", lambda request, opening=opening: heard.append(request) or opening(request)
        )

    def fail() -> None:
        raise RuntimeError("the engine is gone")

    await world.coordinator.open()
    await world.step(1)
    world.replicas[0].before_commit = fail
    with contextlib.suppress(WeightSyncError):
        await world.step(2)
    await world.coordinator.close()
    openings = decode(heard[0], OpenPublisher), decode(heard[1], OpenReceiver)
    secret = openings[0].keys.secret
    assert len(secret) == 40 and openings[1].keys.secret == secret and caplog.records
    spellings = (secret.decode(), repr(secret)[2:-1], secret.hex(), base64.b64encode(secret).decode(), str([*secret]))
    texts = (
        "".join(capfd.readouterr()) + caplog.text, repr(openings), str(openings), repr(openings[0].keys),
        repr(world.coordinator), repr(vars(world.coordinator)),
    )  # fmt: skip
    assert not [spelling for text in texts for spelling in spellings if spelling in text]


def test_a_process_that_may_open_too_few_files_raises_its_limit_or_says_what_to_do() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        make_room(1500, whom="1500 workers")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1500
        with pytest.raises(WeightSyncError, match=r"needs \d+ open files to reach all of them and may have \d+"):
            make_room(before[1], whom="all of them")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_makes_room_for_its_clients_as_they_come(context: zmq.Context) -> None:
    """A learner has a connection of every worker of every replica, of those that join later too."""
    before, num_files = resource.getrlimit(resource.RLIMIT_NOFILE), len(list(Path("/proc/self/fd").iterdir()))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files + 40, before[1]))
        server = ControlServer(Desk(), KEYS, epoch=EPOCH)
        clients: list[ControlClient] = []
        for number in range(120):
            clients.append(client_of(context, server.address, sender=f"r{number}/0"))
            clients[-1].ping(deadline_s=ANSWER_S)
        server.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.full
def test_a_worker_may_read_from_more_learners_than_libzmq_allows_sockets(server: ControlServer) -> None:
    before, num_learners = resource.getrlimit(resource.RLIMIT_NOFILE), 1100
    make_room((CLIENT_FILES + 1) * num_learners, whom="learners")
    context, num_files = ClientContext(), len(list(Path("/proc/self/fd").iterdir()))
    try:
        clients: list[ControlClient] = []
        for number in range(num_learners):
            clients.append(client_of(context, server.address, sender=f"r{number}/0"))
            clients[-1].ping(deadline_s=ANSWER_S)
        opened = len(list(Path("/proc/self/fd").iterdir())) - num_files
        assert opened <= (CLIENT_FILES + 1) * num_learners + SPARE_FILES, "one more each at the server"
    finally:
        context.destroy(linger=0)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
