"""What a two-sided transport does when either end dies, stops or gives up in the middle of a transfer.

All ends are real processes. The publisher sends slowly, so that a test can strike while bytes are on their way; that
they are is seen by the first of them having arrived.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from tests.contract.transports.world import (
    KEYS,
    PRELOAD,
    QUICK,
    SLOW_MESSAGE_BYTES,
    Kind,
    Local,
    Remote,
    VictimReceiver,
    pattern,
    slow_pieces,
)
from tests.fakes.process_life import wait_until
from tests.fakes.processes import Child
from tests.fakes.relay_process import nothing
from weight_sync.errors import PublisherLost, PullTimeout, WeightSyncError
from weight_sync.messages import encode
from weight_sync.transports.base import Piece
from weight_sync.transports.pair import PairReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weight_sync.transports.base import SourceReader

DEADLINE_S = 30.0
"""Of a pull here. What these tests look for takes about three seconds; CI machines are slow."""


class World:
    """Three publishers of one kind, two of them to be lost, and a receiver that knows all of them."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.remotes = [remote.wait() for remote in [Remote(kind) for _ in range(3)]]
        self.survivor, *self.victims = self.remotes

    def close(self) -> None:
        for remote in self.remotes:
            remote.close()


@pytest.fixture(scope="module")
def world(slow_kind: Kind) -> Iterator[World]:
    world = World(slow_kind)
    yield world
    world.close()


@pytest.fixture
def local(world: World) -> Iterator[Local]:
    local = Local(world.kind)
    yield local
    local.close()


def once_received(landing: torch.Tensor, strike: Callable[[], None]) -> Callable[[], None]:
    """A `check` that strikes when the first bytes are there, and gives the pull DEADLINE_S from then."""
    struck_at: list[float] = []

    def check() -> None:
        if not struck_at and bool(landing[0]):
            strike()
            struck_at.append(time.monotonic())
        if struck_at and time.monotonic() > struck_at[0] + DEADLINE_S:
            raise PullTimeout("it was not noticed")

    return check


def require_pull(local: Local, end: SourceReader, *, slot: int = 2) -> None:
    """A short pull from a slow publisher arrives whole."""
    landing = local.empty(4 * SLOW_MESSAGE_BYTES)
    end.pull(slot, slow_pieces(landing), check=nothing)
    assert torch.equal(landing.cpu(), pattern(slot, landing.numel()))


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_publisher_lost_in_mid_transfer_is_noticed_and_others_still_serve(
    world: World, local: Local, blow: signal.Signals
) -> None:
    victim = world.victims[0 if blow == signal.SIGKILL else 1]
    end, other = local.open_one(victim), local.open_one(world.survivor)
    landing = local.empty(world.kind.slot_bytes)
    # A broken connection does not show whether the publisher is lost; a silent control line does.
    with pytest.raises(PublisherLost if blow == signal.SIGSTOP else WeightSyncError):
        end.pull(1, slow_pieces(landing), check=once_received(landing, lambda: victim.signal(blow)))
    left = landing.clone()
    assert not bool(left[-1]), "the transfer was over before the blow"
    require_pull(local, other)
    if blow == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        time.sleep(0.5)
        require_pull(local, end, slot=0)
        assert end.counters()["communicators"] == 2
    assert torch.equal(landing, left), "a late message was written after the pull had failed"


@pytest.mark.parametrize("rest_s", [0.0, 0.5])
def test_a_stopped_pull_leaves_its_memory_alone_and_the_next_one_has_a_new_communicator(
    world: World, local: Local, rest_s: float
) -> None:
    """The next pull begins at once, while messages of the stopped one are under way, or after they would have come."""

    def out_of_time() -> None:
        raise PullTimeout("the version has a deadline")

    end = local.open_one(world.survivor)
    require_pull(local, end)
    before, before_remote = end.counters(), world.survivor.ask("see_counters")
    landing = local.empty(world.kind.slot_bytes)
    with pytest.raises(PullTimeout):
        end.pull(1, slow_pieces(landing), check=once_received(landing, out_of_time))
    left = landing.clone()
    assert not bool(left[-1])
    time.sleep(rest_s)
    assert torch.equal(landing, left)
    require_pull(local, end, slot=2)
    assert torch.equal(landing, left)
    assert end.counters() == {**before, "communicators": before["communicators"] + 1}
    assert world.survivor.ask("see_counters") == {**before_remote, "communicators": before_remote["communicators"] + 1}


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_lost_in_mid_transfer_holds_up_nobody_and_leaves_no_thread(
    world: World, local: Local, blow: signal.Signals
) -> None:
    publisher = world.survivor
    args = (world.kind, encode(publisher.handle), encode(publisher.address), KEYS)
    victim = Child("victim", VictimReceiver, *args, num_lines=2, preload=PRELOAD)
    try:
        victim.tell("pull")
        wait_until(lambda: victim.lines[1].ask("see_first_byte"), within_s=60.0, what="no byte arrived")
        assert publisher.threads_to("victim/0") == ["weight-sync-to-victim/0"]
        victim.signal(blow)
        end = local.open_one(publisher)
        require_pull(local, end)
        within_s = QUICK.stall_s + DEADLINE_S
        wait_until(lambda: not publisher.threads_to("victim/0"), within_s=within_s, what="a thread is left")
    finally:
        victim.kill()


def test_receivers_are_served_side_by_side(world: World) -> None:
    receivers = [Local(world.kind, name=f"together/{number}") for number in range(2)]
    threads = [
        threading.Thread(target=require_pull, args=(local, local.open_one(world.survivor)), kwargs={"slot": slot})
        for slot, local in enumerate(receivers, start=1)
    ]
    errors: list[object] = []
    threading.excepthook, before = lambda failure: errors.append(failure.exc_value), threading.excepthook
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        threading.excepthook = before
    assert errors == []
    for local in receivers:
        local.close()


def test_bytes_travel_between_the_addresses_that_the_ends_were_given() -> None:
    remote = Remote(Kind("gloo", host="127.0.0.2")).wait()
    local = Local(remote.kind)
    line = local.line(remote.address)
    end = PairReceiver(local.backend, remote.handle, line, host="127.0.0.3")
    landing = local.empty()
    end.pull(1, [Piece(0, landing)], check=nothing)
    assert torch.equal(landing, pattern(1))
    connections = psutil.Process().net_connections("tcp4")
    assert "127.0.0.3" in {connection.laddr[0] for connection in connections if not connection.raddr}
    assert "127.0.0.2" in {connection.raddr[0] for connection in connections if connection.raddr}
    assert KEYS.secret not in encode(remote.handle)
    end.close()
    local.close()
    remote.close()
