from __future__ import annotations

import dataclasses
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.relay_process import NUM_PIECES, SOURCES, RelayProcess, Worker, link_ring
from weight_sync.channel import make_run_keys
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import PullTimeout
from weight_sync.receive import relay
from weight_sync.receive.relay import Patience, stretches_of
from weight_sync.transports import base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

PIECE = 1000
KEYS = make_run_keys("ring")
HASTY = Patience(news_s=0.1, ping_s=0.4, stuck_s=1.0)
PATIENT = Patience(news_s=0.1, ping_s=20.0, stuck_s=30.0)
"""Of workers whose neighbours do what they should, on a machine that may be busy."""


@pytest.fixture(autouse=True)
def small_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces a report; copies of a piece and a half, so that they do not end where pieces do."""
    monkeypatch.setattr(base, "BATCH_BYTES", 2 * PIECE + 300)
    monkeypatch.setattr(relay, "PIECE_BYTES", PIECE * 3 // 2)


@pytest.fixture
def chain() -> Iterator[list[Worker]]:
    """b reads from a, c from b and, where that fails, from a; all begin version 1."""
    a, b, c = workers = [Worker(name, KEYS, patience=PATIENT) for name in "abc"]
    a.follow(readers=["b/0", "c/0"])
    b.follow(a.handle, readers=["c/0"])
    c.follow(b.handle, a.handle)
    for worker in workers:
        worker.relay.begin(1)
    yield workers
    for worker in reversed(workers):
        worker.close()


POOL = ThreadPoolExecutor(4)


def test_a_source_arrives_whole_and_alone_and_is_offered_to_the_next_in_line(chain: list[Worker]) -> None:
    a, b, c = chain
    a.fill(2, 1, 7)
    pulls = [POOL.submit(worker.pull, 1, 2) for worker in (b, c)]
    while not c.holds(1, 2, num_pieces=6):
        time.sleep(0.001)
    assert not any(piece.dst.any() for piece in b.pieces[2][8:]), "no more than what is there is read"
    a.fill(2, 1)
    assert [pull.result(20) for pull in pulls] == [0, 0]
    for worker in (b, c):
        assert worker.holds(1, 2)
        assert not any(piece.dst.any() for piece in worker.pieces[5])
        assert worker.direct_pieces == 0


def test_what_arrived_while_nobody_read_is_there_for_a_reader_that_comes_later(chain: list[Worker]) -> None:
    """A replica whose lease ended reads the version from a neighbour that has it already."""
    a, b, _ = chain
    a.follow()
    a.pull(1)
    assert (b.pull(1), b.direct_pieces) == (0, 0)
    assert b.holds(1)


@settings(max_examples=10, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(SOURCES), st.integers(0, 6)), max_size=12))
def test_a_pull_beside_a_filling_buffer_never_runs_ahead_of_it(steps: list[tuple[int, int]]) -> None:
    a, b = Worker("a", KEYS), Worker("b", KEYS)
    # What is not filled in holds another version: running ahead would bring bytes of that.
    for rank in SOURCES:
        a.fill(rank, 3)
    a.relay.begin(4)
    b.relay.begin(4)
    b.follow(a.handle)
    pull = POOL.submit(b.pull, 4, *reversed(SOURCES))
    done: dict[int, int] = dict.fromkeys(SOURCES, 0)
    try:
        for rank, count in [*steps, *((rank, NUM_PIECES) for rank in SOURCES)]:
            done[rank] = min(NUM_PIECES, done[rank] + count)
            a.fill(rank, 4, done[rank])
        assert pull.result(20) == 0
        assert b.holds(4)
    finally:
        b.close()
        a.close()


def test_an_older_version_is_waited_out_and_a_newer_one_is_not(chain: list[Worker]) -> None:
    a, b, _ = chain
    b.relay.begin(2)
    pull = POOL.submit(b.pull, 2, 2)
    time.sleep(0.2)
    a.relay.begin(2)
    a.fill(2, 2)
    assert (pull.result(20), b.direct_pieces) == (0, 0)
    b.relay.begin(1)
    assert (b.pull(1, 2), b.direct_pieces) == (1, NUM_PIECES)
    assert b.holds(1, 2)


def test_what_is_overwritten_during_a_copy_does_not_count(chain: list[Worker]) -> None:
    """The predecessor begins its next version after a batch was ordered, before it is copied."""
    a, b, _ = chain
    a.fill(2, 1)
    copy, copies = b.backend.copy_async, [0]

    def overwritten(dst: torch.Tensor, src: torch.Tensor, stream: object) -> None:
        copies[0] += 1
        if copies[0] == 4:
            a.relay.begin(2)
            a.fill(2, 2)
        copy(dst, src, stream)

    b.backend.copy_async = overwritten  # type: ignore[method-assign]
    assert b.pull(1, 2) == 1
    assert b.holds(1, 2), "the learner gave what was read in vain"
    assert 0 < b.direct_pieces < NUM_PIECES


@pytest.mark.parametrize(
    "leave", [lambda a: a.relay.invalidate(), lambda a: a.relay.close()], ids=["gives up", "closes"]
)
def test_who_gives_up_says_so_at_once_and_the_one_before_him_is_asked(
    leave: Callable[[Worker], None], chain: list[Worker]
) -> None:
    a, b, c = chain
    c.relay._patience = Patience(news_s=30.0)
    b.fill(2, 1, 4)
    pull = POOL.submit(c.pull, 1)
    time.sleep(0.05)
    for rank in SOURCES:
        a.fill(rank, 1)
    leave(b)
    assert pull.result(20) == 2, "it is not waited for again, for another source"
    assert (c.holds(1), c.direct_pieces) == (True, 0)


def test_who_lives_and_brings_nothing_is_waited_for_long_but_once_per_version(chain: list[Worker]) -> None:
    a, b, _ = chain
    b.relay._patience = HASTY
    for version in (1, 2):
        for worker in (a, b):
            worker.relay.begin(version)
        a.fill(2, version, 7)
        began = time.monotonic()
        assert b.pull(version) == 2
        assert HASTY.stuck_s < time.monotonic() - began < 2 * HASTY.stuck_s
        assert b.holds(version)
    assert b.direct_pieces == 2 * (2 * NUM_PIECES - 7)


def test_check_is_called_while_waiting_and_stops_the_pull(chain: list[Worker]) -> None:
    looks = [0]

    def check() -> None:
        looks[0] += 1
        if looks[0] == 5:
            raise PullTimeout("out of time")

    with pytest.raises(PullTimeout):
        chain[1].pull(1, check=check)
    assert chain[1].direct_pieces == 0


def test_whose_memory_cannot_be_read_is_passed_by(chain: list[Worker], caplog: pytest.LogCaptureFixture) -> None:
    a, b, c = chain
    for rank in SOURCES:
        a.fill(rank, 1)
    other = msgspec.structs.replace(b.handle, layout="another")
    c.follow(other, a.handle)
    assert (c.pull(1), c.direct_pieces) == (2, 0)
    assert "cannot read from b/0, others give everything: it lays out its staging buffer as another" in caplog.text
    far = msgspec.structs.replace(b.handle, node="far", arenas=b.handle.arenas[:1])
    c.follow(far, a.handle)
    c.relay.begin(1)
    assert (c.pull(1), c.direct_pieces) == (2, 0)
    assert "it is on another node, and cannot send" in caplog.text


def test_pieces_that_do_not_rise_are_no_stretch(chain: list[Worker]) -> None:
    with pytest.raises(ValueError, match="source 2 must rise"):
        stretches_of(chain[0].block, {2: chain[0].pieces[2][::-1]})


def test_memory_that_can_be_read_from_nowhere_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    lonely = dataclasses.replace(CpuBackend().capabilities(), ipc=False)
    monkeypatch.setattr(CpuBackend, "capabilities", lambda _: lonely)
    worker = Worker("a", KEYS)
    assert [arena.transport for arena in worker.handle.arenas] == ["gloo"]
    worker.close()
    monkeypatch.setattr(relay, "CpuBackend", type("Other", (), {"name": "other"}))
    worker = Worker("a", KEYS)
    assert worker.relay.handle(worker.server.address) is None
    worker.close()


# ------------------------------------------------------------------------------------------- in processes of their own


@pytest.fixture
def ring(request: pytest.FixtureRequest) -> Iterator[dict[str, RelayProcess]]:
    """Four workers; on four nodes they send to each other, on one they map each other's memory."""
    nodes, patience = request.param
    ring = {name: RelayProcess(name, KEYS, node, patience=patience) for name, node in zip("abcd", nodes, strict=True)}
    link_ring(ring)
    yield ring
    for member in ring.values():
        member.close()


def bring(ring: dict[str, RelayProcess], version: int, *, pause_s: float = 0.002, dies_at: int | None = None) -> None:
    for name, member in ring.items():
        member.ask("begin", version, pause_s, dies_at if name == "b" else None)
    for member in ring.values():
        member.tell("bring", version)


@pytest.mark.parametrize("tenths", [(1, 5, 9), pytest.param(range(1, 10), marks=pytest.mark.full)])
@pytest.mark.parametrize("ring", [("nnnn", HASTY), ("wxyz", HASTY)], ids=["mapped", "sent"], indirect=True)
def test_a_worker_killed_at_any_tenth_of_a_version_keeps_nobody_from_it(
    ring: dict[str, RelayProcess], tenths: Sequence[int]
) -> None:
    bring(ring, 1)
    counts = [member.told(30.0)[:2] for member in ring.values()]
    assert [stalls for stalls, _ in counts] == [0] * 4
    assert sum(direct for _, direct in counts) == 2 * NUM_PIECES, "every source entered the ring once"
    for version, tenth in enumerate(tenths, start=2):
        bring(ring, version, dies_at=2 * NUM_PIECES * tenth // 10)
        ring["b"].await_loss()
        lost_at = time.monotonic()
        survivors = {name: member for name, member in ring.items() if name != "b"}
        ended = [member.told(30.0)[3] for member in survivors.values()]
        assert all(member.ask("whole", version) for member in survivors.values()), f"killed at {tenth}/10"
        assert max(ended) - lost_at < 2.0, f"killed at {tenth}/10"
        node = ring["b"].node
        ring["b"].close()
        ring["b"] = RelayProcess("b", KEYS, node, patience=HASTY)
        link_ring(ring)


@pytest.mark.parametrize("ring", [("wxyz", None)], ids=["sent"], indirect=True)
def test_only_the_neighbours_of_a_stopped_worker_lose_patience(ring: dict[str, RelayProcess]) -> None:
    """With the patience of the product: two seconds."""
    for name, member in ring.items():
        member.ask("begin", 1, 0.002, None)
        if name != "b":
            member.tell("bring", 1)
    ring["b"].signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    survivors = [ring[name] for name in "cda"]
    results = [member.told(30.0) for member in survivors]
    assert max(result[3] for result in results) - stopped_at < 4.0
    assert sum(result[0] > 0 for result in results) <= 2, "the others stay in line behind them"
    assert all(member.ask("whole", 1) for member in survivors)
    # Awake again, it takes part again.
    ring["b"].signal(signal.SIGCONT)
    bring(ring, 2)
    assert [member.told(30.0)[0] for member in ring.values()] == [0] * 4
