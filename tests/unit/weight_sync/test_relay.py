from __future__ import annotations

import itertools
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.relay_process import NUM_PIECES, SOURCES, RelayProcess, Replica, nothing
from weight_sync.device.base import Capabilities
from weight_sync.errors import DeviceError, PlanMismatch, PullTimeout, RelayStalled
from weight_sync.messages import LinkRequest, RelayHandle, decode, make_error
from weight_sync.receive import relay
from weight_sync.receive import relay as progress
from weight_sync.receive.relay import RelayEnds, RelayInlet, RelayOutlet, map_shadow
from weight_sync.transports import base
from weight_sync.transports.base import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PIECE = 1000


@pytest.fixture(autouse=True)
def small_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces a report; copies of a piece and a half, so that they do not end where pieces do."""
    monkeypatch.setattr(base, "BATCH_BYTES", 2 * PIECE + 300)
    monkeypatch.setattr(relay, "PIECE_BYTES", PIECE * 3 // 2)


def ticking() -> Callable[[], float]:
    """A clock by which every look takes a second, however busy this machine is."""
    return itertools.count(0.0).__next__


class Pair:
    """A predecessor and its successor in this process."""

    def __init__(self, *, patience_s: float = 50.0, clock: Callable[[], float] | None = None) -> None:
        self.first, self.second = Replica(), Replica()
        self.outlet = RelayOutlet(self.first.backend, self.first.map, owner="A/0")
        self.inlet = RelayInlet(
            self.second.backend, self.outlet.handle, self.second.map, patience_s=patience_s, clock=clock or ticking()
        )

    def close(self) -> None:
        self.inlet.close()
        self.outlet.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_a_source_that_is_complete_arrives_whole_and_alone(pair: Pair) -> None:
    pair.outlet.begin(3)
    pair.first.fill(2, 3)
    pair.first.fill(5, 3)
    pair.outlet.advance(5, NUM_PIECES)
    pair.inlet.pull(5, 3, check=nothing)
    assert pair.second.holds(5, 3)
    assert not any(piece.dst.any() for piece in pair.second.pieces[2])


def test_what_arrived_while_nobody_read_is_there_for_a_reader_that_comes_later(pair: Pair) -> None:
    """A replica whose lease ended reads the version from a neighbour that has it already."""
    ends = RelayEnds(pair.first.backend, pair.first.map, pair.outlet)
    ends.link(LinkRequest(order=SOURCES, relayed=(), predecessor=None, is_read=False))
    ends.begin(3)
    for rank in SOURCES:
        pieces = pair.first.pieces[rank]
        ends.pull(
            rank,
            pieces,
            version=3,
            direct=lambda _pieces, _told, rank=rank: pair.first.fill(rank, 3),
            check=nothing,
            may_relay=True,
        )
    for rank in SOURCES:
        pair.inlet.pull(rank, 3, check=nothing)
        assert pair.second.holds(rank, 3)


def test_what_arrives_is_offered_to_the_next_in_line_in_batches(pair: Pair) -> None:
    told: list[int] = []
    own = RelayOutlet(pair.second.backend, pair.second.map, owner="B/0")
    own.begin(0)
    advance = own.advance
    own.advance = lambda source, done: (told.append(done), advance(source, done))[1]  # type: ignore[method-assign]
    third = Replica()
    inlet = RelayInlet(third.backend, own.handle, third.map)
    pair.outlet.begin(0)
    pair.first.fill(2, 0)
    pair.outlet.advance(2, NUM_PIECES)
    pair.inlet.pull(2, 0, check=nothing, outlet=own)
    assert told == list(range(2, NUM_PIECES + 1, 2))
    inlet.pull(2, 0, check=nothing)
    assert third.holds(2, 0)
    inlet.close()
    own.close()


def test_only_what_is_there_is_read(pair: Pair) -> None:
    pair.outlet.begin(1)
    pair.first.fill(2, 1)
    pair.outlet.advance(2, 7)
    with pytest.raises(RelayStalled, match=r"A/0.*version 1.*no progress for 50\.0 s") as stalled:
        pair.inlet.pull(2, 1, check=nothing)
    assert stalled.value.pieces_done == 7
    assert pair.second.holds(2, 1, 7)
    assert not any(piece.dst.any() for piece in pair.second.pieces[2][7:])


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(SOURCES), st.integers(0, 6), st.sampled_from([0, 0, 0.0004])), max_size=20)
)
def test_a_pull_beside_a_filling_shadow_never_runs_ahead_of_it(steps: list[tuple[int, int, float]]) -> None:
    pair = Pair(patience_s=20.0, clock=time.monotonic)

    def produce() -> None:
        done = dict.fromkeys(SOURCES, 0)
        for rank, count, pause_s in [*steps, *((rank, NUM_PIECES, 0.0) for rank in SOURCES)]:
            upto = min(NUM_PIECES, done[rank] + count)
            pair.first.fill(rank, 4, slice(done[rank], upto))
            done[rank] = upto
            pair.outlet.advance(rank, upto)
            time.sleep(pause_s)

    # What is not filled in holds another version: running ahead would bring bytes of that.
    for rank in SOURCES:
        pair.first.fill(rank, 3)
    pair.outlet.begin(4)
    producer = threading.Thread(target=produce)
    producer.start()
    try:
        for rank in reversed(SOURCES):
            pair.inlet.pull(rank, 4, check=nothing)
            assert pair.second.holds(rank, 4)
    finally:
        producer.join(10)
        pair.close()


def test_an_older_version_is_waited_out_and_a_newer_one_is_not(pair: Pair) -> None:
    pair.outlet.begin(6)
    pair.outlet.advance(2, NUM_PIECES)
    with pytest.raises(RelayStalled, match="no progress"):
        pair.inlet.pull(2, 7, check=nothing)
    with pytest.raises(RelayStalled, match="went on to version 6"):
        pair.inlet.pull(2, 5, check=nothing)


def test_what_is_overwritten_during_a_copy_does_not_count(pair: Pair) -> None:
    """The predecessor begins its next version between the order to copy and the end of that copy."""
    orders: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = {"one": [], "two": []}
    waits = [0]

    def order(dst: torch.Tensor, src: torch.Tensor, stream: object) -> None:
        orders[stream].append((dst, src))

    def carry_out(stream: object) -> None:
        waits[0] += 1
        if waits[0] == 4:
            pair.outlet.begin(2)
            pair.first.fill(2, 2)
        for dst, src in orders[stream]:
            dst.copy_(src)
        orders[stream].clear()

    pair.second.backend.copy_async = order  # type: ignore[method-assign]
    pair.second.backend.synchronize = carry_out  # type: ignore[method-assign]
    pair.inlet._streams = ("one", "two")
    pair.outlet.begin(1)
    pair.first.fill(2, 1)
    pair.outlet.advance(2, NUM_PIECES)
    with pytest.raises(RelayStalled, match="went on to version 2") as stalled:
        pair.inlet.pull(2, 1, check=nothing)
    assert stalled.value.pieces_done == 6, "three reports of two pieces each"
    assert pair.second.holds(2, 1, 6)
    assert not pair.second.holds(2, 1, 8), "the copy was not disturbed, so this shows nothing"


@pytest.mark.parametrize(
    ("leave", "why"),
    [(RelayOutlet.end, "gave that version up"), (RelayOutlet.close, "has closed its epoch")],
)
def test_a_predecessor_that_gives_up_says_so_at_once(leave: Callable[[RelayOutlet], None], why: str) -> None:
    pair = Pair(patience_s=60.0, clock=time.monotonic)
    pair.outlet.begin(1)
    pair.first.fill(2, 1)
    pair.outlet.advance(2, 4)
    timer = threading.Timer(0.05, leave, (pair.outlet,))
    timer.start()
    started = time.monotonic()
    with pytest.raises(RelayStalled, match=why) as stalled:
        pair.inlet.pull(2, 1, check=nothing)
    assert time.monotonic() - started < 30, "it lost its patience of 60 s first"
    assert stalled.value.pieces_done == 4
    timer.join()
    pair.close()


def test_any_sign_of_life_is_waited_for(pair: Pair) -> None:
    """Busy with another source, or waiting itself: both last longer than the patience, neither is a stall."""
    looks = [0]

    def live() -> None:
        looks[0] += 1
        if looks[0] % 20 == 0:
            beats_only = looks[0] >= 20 * NUM_PIECES
            pair.outlet.beat() if beats_only else pair.outlet.advance(5, looks[0] // 20)
        if looks[0] == 20 * NUM_PIECES + 200:
            pair.first.fill(2, 1)
            pair.outlet.advance(2, NUM_PIECES)

    pair.outlet.begin(1)
    pair.inlet.pull(2, 1, check=live)
    assert pair.second.holds(2, 1)


def test_a_predecessor_that_only_beats_may_wait_for_us_and_costs_five_patiences_once_per_version(pair: Pair) -> None:
    looks = [0]

    def beat() -> None:
        looks[0] += 1
        assert looks[0] < 1000, "it is waited for without end"
        pair.outlet.beat()

    def looks_until_stalled(source: int, version: int) -> int:
        looks[0] = 0
        with pytest.raises(RelayStalled, match="has waited itself") as stalled:
            pair.inlet.pull(source, version, check=beat)
        assert stalled.value.pieces_done == (0 if version == 2 else 7)
        assert pair.second.holds(source, version, stalled.value.pieces_done)
        return looks[0]

    pair.outlet.begin(1)
    for source in SOURCES:
        pair.first.fill(source, 1)
    pair.outlet.advance(2, 7)
    assert 250 <= looks_until_stalled(2, 1) < 275
    pair.outlet.advance(5, 7)
    assert looks_until_stalled(5, 1) < 25, "what is there is read, and nothing is waited for"
    assert 250 <= looks_until_stalled(2, 2) < 275, "another version is another chance"


def test_a_silent_predecessor_costs_its_patience_once_per_version(pair: Pair) -> None:
    looks = [0]

    def count() -> None:
        looks[0] += 1

    def looks_until_stalled(source: int, version: int) -> int:
        looks[0] = 0
        with pytest.raises(RelayStalled, match="no progress"):
            pair.inlet.pull(source, version, check=count)
        return looks[0]

    pair.outlet.begin(1)
    assert looks_until_stalled(2, 1) == 50
    assert looks_until_stalled(5, 1) == 1
    assert looks_until_stalled(2, 2) == 50, "another version is another chance"


def test_check_is_called_while_waiting_and_stops_the_pull(pair: Pair) -> None:
    looks = [0]

    def check() -> None:
        looks[0] += 1
        if looks[0] == 20:
            raise PullTimeout("out of time")

    pair.outlet.begin(1)
    with pytest.raises(PullTimeout):
        pair.inlet.pull(2, 1, check=check)


def test_no_copy_is_under_way_when_a_pull_fails(pair: Pair) -> None:
    """On a device with streams: whoever takes over writes to the same places."""
    waited: list[object] = []
    pair.second.backend.synchronize = lambda stream=None: waited.append(stream)  # type: ignore[method-assign]
    pair.inlet._streams = ("one", "two")

    def check() -> None:
        if pair.second.block.tensor.any():
            raise PullTimeout("stop")

    pair.outlet.begin(1)
    pair.first.fill(2, 1)
    pair.outlet.advance(2, NUM_PIECES)
    with pytest.raises(PullTimeout):
        pair.inlet.pull(2, 1, check=check)
    assert waited[-2:] == ["one", "two"]


def test_another_layout_is_refused_before_anything_is_mapped(pair: Pair) -> None:
    stranger = Replica()
    shifted = {rank: each[:-1] for rank, each in stranger.pieces.items()}
    other = map_shadow(stranger.block, shifted)
    assert other.digest != stranger.map.digest == pair.first.map.digest
    with pytest.raises(PlanMismatch, match="A/0 lays out its shadow as"):
        RelayInlet(stranger.backend, pair.outlet.handle, other)


def test_a_map_refuses_what_is_not_one_rising_stretch_per_source() -> None:
    replica = Replica()
    two, five = replica.pieces[2], replica.pieces[5]
    with pytest.raises(ValueError, match="must rise"):
        map_shadow(replica.block, {2: two[::-1]})
    with pytest.raises(ValueError, match="behind each other"):
        map_shadow(replica.block, {2: (two[0], five[0]), 5: two[1:]})
    with pytest.raises(ValueError, match="outside the shadow block"):
        map_shadow(replica.block, {2: [Piece(0, torch.zeros(8, dtype=torch.uint8))]})


def test_a_backend_that_cannot_share_memory_has_no_outlet(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    lonely = Capabilities(ipc=False, streams=False, sleep_mode=False, graphs=False, engine_forks=False)
    monkeypatch.setattr(pair.first.backend, "capabilities", lambda: lonely)
    with pytest.raises(DeviceError, match="B/0 cannot relay"):
        RelayOutlet(pair.first.backend, pair.first.map, owner="B/0")


def test_words_keep_the_largest_version_and_count_apart() -> None:
    writer = progress.ProgressWriter([progress.MAX_PIECES, 1])
    reader = progress.ProgressReader(writer.handle, owner="A/0", patience_s=1.0, clock=time.monotonic)
    for version in (0, 1, progress.MAX_VERSION):
        writer.begin(version)
        writer.advance(0, progress.MAX_PIECES)
        reader.start(version)
        assert [reader.ready(track, landed=0) for track in (0, 1)] == [progress.MAX_PIECES, 0]
    for wrong in (-1, progress.MAX_VERSION + 1):
        with pytest.raises(ValueError, match="version must be"):
            writer.begin(wrong)
    with pytest.raises(ValueError, match=r"pieces_done must be in \[0, 1\]"):
        writer.advance(1, 2)
    writer.end()
    with pytest.raises(ValueError, match="call begin first"):
        writer.advance(1, 1)
    with pytest.raises(ValueError, match="at most"):
        progress.ProgressWriter([progress.MAX_PIECES + 1])
    reader.close()
    writer.close()


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(0, 40))
def test_batches_cover_the_rest_in_order_and_are_small(sizes: list[int], done: int) -> None:
    pieces = [Piece(0, torch.empty(size, dtype=torch.uint8)) for size in sizes]
    found = list(base.batched(pieces, done=min(done, len(pieces))))
    assert [id(piece) for _, batch in found for piece in batch] == [id(piece) for piece in pieces[done:]]
    for upto, batch in found:
        assert batch[-1] is pieces[upto - 1]
        assert len(batch) == 1 or sum(piece.dst.numel() for piece in batch) <= base.BATCH_BYTES


def test_a_closed_end_touches_no_memory(pair: Pair) -> None:
    pair.outlet.begin(1)
    for _ in range(2):
        pair.inlet.close()
        pair.outlet.close()
    pair.outlet.beat()
    with pytest.raises(ValueError, match="call begin first"):
        pair.outlet.advance(2, 1)
    with pytest.raises(RelayStalled):
        pair.inlet.pull(2, 1, check=nothing)


def test_a_stall_travels_as_its_own_type() -> None:
    assert isinstance(make_error("RelayStalled", "A/0 is silent"), RelayStalled)


# ------------------------------------------------------------------------------------------- in processes of their own


@pytest.fixture
def predecessor() -> Iterator[RelayProcess]:
    process = RelayProcess("A/0")
    yield process
    process.close()


class Follower:
    """A successor of `handle` whose pull of source 2 runs in a thread."""

    def __init__(self, handle: RelayHandle, *, patience_s: float) -> None:
        self.replica = Replica()
        self.outlet = RelayOutlet(self.replica.backend, self.replica.map, owner="B/0")
        self.inlet = RelayInlet(self.replica.backend, handle, self.replica.map, patience_s=patience_s)

    def start(self, version: int) -> None:
        self.stalled: RelayStalled | None = None
        self.stalled_at = 0.0
        self.outlet.begin(version)
        self.thread = threading.Thread(target=self._pull, args=(version,))
        self.thread.start()

    def _pull(self, version: int) -> None:
        try:
            self.inlet.pull(2, version, check=nothing, outlet=self.outlet)
        except RelayStalled as stalled:
            self.stalled, self.stalled_at = stalled, time.monotonic()

    def join(self) -> None:
        self.thread.join(40)
        assert not self.thread.is_alive()

    def read_on_from_the_learner(self, version: int) -> None:
        assert self.stalled is not None
        before = self.stalled.pieces_done
        for done, _ in base.batched(self.replica.pieces[2], done=before):
            self.replica.fill(2, version, slice(before, done))
            self.outlet.advance(2, done)
            before = done
        assert before == NUM_PIECES

    def close(self) -> None:
        self.inlet.close()
        self.outlet.close()


def test_a_predecessor_killed_in_mid_stream_is_noticed_long_before_patience_ends(predecessor: RelayProcess) -> None:
    handle = decode(predecessor.handle(), RelayHandle)
    follower = Follower(handle, patience_s=60.0)
    predecessor.ask("begin", 1)
    follower.start(1)
    predecessor.ask("fill", 5)
    predecessor.ask("fill", 6)
    killed_at = time.monotonic()
    predecessor.signal(signal.SIGKILL)
    follower.join()
    assert "A/0" in str(follower.stalled)
    assert "has ended" in str(follower.stalled)
    assert follower.stalled_at - killed_at < 30
    assert follower.stalled is not None
    assert follower.stalled.pieces_done == 11
    assert follower.replica.holds(2, 1, 11)
    follower.read_on_from_the_learner(1)
    assert follower.replica.holds(2, 1)
    predecessor.process.join(10)
    with pytest.raises(DeviceError):
        RelayInlet(follower.replica.backend, handle, follower.replica.map)
    follower.close()


def test_only_the_neighbour_of_a_stopped_predecessor_loses_patience(predecessor: RelayProcess) -> None:
    neighbour = Follower(decode(predecessor.handle(), RelayHandle), patience_s=2.2)
    last = Follower(neighbour.outlet.handle, patience_s=1.1)
    predecessor.ask("begin", 1)
    neighbour.start(1)
    last.start(1)
    predecessor.ask("fill", 10)
    predecessor.signal(signal.SIGSTOP)
    neighbour.join()
    assert "no progress" in str(neighbour.stalled)
    assert neighbour.stalled is not None
    assert neighbour.stalled.pieces_done == 10
    neighbour.read_on_from_the_learner(1)
    last.join()
    assert last.stalled is None, "it stays in line behind its neighbour"
    assert last.replica.holds(2, 1)
    # Awake again, it is followed again.
    predecessor.signal(signal.SIGCONT)
    predecessor.ask("begin", 2)
    neighbour.start(2)
    predecessor.ask("fill", NUM_PIECES)
    neighbour.join()
    assert neighbour.stalled is None
    assert neighbour.replica.holds(2, 2)
    last.close()
    neighbour.close()
