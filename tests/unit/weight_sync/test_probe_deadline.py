"""Opening takes no longer than it may, and blames nobody who lives."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalPublisher
from tests.unit.weight_sync.test_receiver import OLD, Pair, ask_local, closing
from weight_sync.channel import ControlClient
from weight_sync.errors import PublisherLost, PullTimeout
from weight_sync.receive import sources
from weight_sync.receive.sources import ReceiverEpoch

if TYPE_CHECKING:
    from weight_sync.receive.sources import Source

__all__ = ["closing"]


def opened_by(num_ranks: int, closing: list[Any]) -> Pair:
    """A receiver that reads from that many learners."""
    publishers = [LocalPublisher(rank, num_ranks, OLD) for rank in range(num_ranks)]
    closing.extend(publisher.publisher for publisher in publishers)
    pair = Pair(publishers, ask_local, commit="staged")
    closing.append(pair.receiver)
    return pair


@pytest.mark.parametrize("slow", [0, 1])
def test_probes_share_the_deadline_of_the_epochs_opening(
    slow: int, closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = opened_by(2, closing)
    late_s, is_late = 0.0, threading.Event()
    pair.receiver._host = replace(pair.receiver._host, clock=lambda: time.monotonic() + late_s)
    probe = ReceiverEpoch._probe

    def probe_slowly(self: ReceiverEpoch, source: Source, *rest: Any) -> None:
        nonlocal late_s
        if source.info.rank != slow:
            assert is_late.wait(5)
        probe(self, source, *rest)
        if source.info.rank == slow:
            late_s += pair.request.deadline_s
            is_late.set()

    monkeypatch.setattr(ReceiverEpoch, "_probe", probe_slowly)
    with pytest.raises(PullTimeout, match=rf"learner {1 - slow} by shm: r0/0 did not get .* weight_sync\.timeout_s"):
        pair.receiver.open(pair.request)
    monkeypatch.undo()
    pair.receiver.open(pair.request)


@pytest.mark.parametrize("step", ["ping", "probe"])
def test_sources_are_reached_side_by_side_but_not_all_at_once(
    step: str, closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = opened_by(4, closing)
    monkeypatch.setattr(sources, "REACHED_AT_ONCE", 2)
    together, lock = threading.Barrier(2), threading.Lock()
    owner, name = {"ping": (ControlClient, "ping"), "probe": (ReceiverEpoch, "_probe")}[step]
    original, inside, most = getattr(owner, name), 0, 0

    def meet(*args: Any, **kwargs: Any) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait(5)
        original(*args, **kwargs)
        with lock:
            inside -= 1

    monkeypatch.setattr(owner, name, meet)
    pair.receiver.open(pair.request)
    assert most == 2
    assert list(pair.receiver._epoch.transports) == [0, 1, 2, 3]


def test_one_source_that_cannot_be_reached_ends_the_wait_for_the_others(
    closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = opened_by(3, closing)
    probe, is_waiting = ReceiverEpoch._probe, threading.Event()

    def fail_or_wait(self: ReceiverEpoch, source: Source, give_up: Any, end: Any) -> None:
        match source.info.rank:
            case 0:
                is_waiting.set()
                while True:
                    give_up.check()
                    time.sleep(0.005)
            case 1:
                assert is_waiting.wait(5)
                raise PublisherLost("learner 1 is gone")
            case _:
                probe(self, source, give_up, end)

    monkeypatch.setattr(ReceiverEpoch, "_probe", fail_or_wait)
    started = time.monotonic()
    with pytest.raises(PublisherLost, match="learner 1 is gone"):
        pair.receiver.open(pair.request)
    assert time.monotonic() - started < pair.request.deadline_s / 2
    monkeypatch.undo()
    pair.receiver.open(pair.request)
