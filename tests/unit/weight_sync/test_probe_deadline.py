"""Opening takes no longer than it may, and blames nobody who lives."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalPublisher
from tests.unit.weight_sync.test_receiver import OLD, Pair, ask_local, closing
from weight_sync.errors import PullTimeout
from weight_sync.receive.sources import ReceiverEpoch

if TYPE_CHECKING:
    from weight_sync.receive.sources import Source

__all__ = ["closing"]


@pytest.mark.parametrize("slow", [0, 1])
def test_probes_share_the_deadline_of_the_epochs_opening(
    slow: int, closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    publishers = [LocalPublisher(rank, 2, OLD) for rank in range(2)]
    closing.extend(publisher.publisher for publisher in publishers)
    pair = Pair(publishers, ask_local, commit="staged")
    closing.append(pair.receiver)
    late_s = 0.0
    pair.receiver._host = replace(pair.receiver._host, clock=lambda: time.monotonic() + late_s)
    probe = ReceiverEpoch._probe

    def probe_slowly(self: ReceiverEpoch, source: Source, *rest: Any) -> None:
        nonlocal late_s
        if slow == 0:
            probe(self, source, *rest)
        late_s += pair.request.deadline_s
        if slow == 1:
            probe(self, source, *rest)

    monkeypatch.setattr(ReceiverEpoch, "_probe", probe_slowly)
    with pytest.raises(PullTimeout, match=rf"learner {1 - slow} by shm: r0/0 did not get .* weight_sync\.timeout_s"):
        pair.receiver.open(pair.request)
    monkeypatch.undo()
    pair.receiver.open(pair.request)
