"""What a receiver does in each state with each thing that may be asked of it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import FusedModel
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import PullTimeout, WeightSyncError
from weight_sync.messages import LinkRequest, PullReport, SlotAt
from weight_sync.receive import receiver as module
from weight_sync.receive.receiver import TRANSITIONS, ReceiverState, WeightReceiver

if TYPE_CHECKING:
    from collections.abc import Iterator


class Epoch:
    """One in which pulls and commits take until they may end."""

    def __init__(self) -> None:
        self.targets = SimpleNamespace(is_staged=True, derived=None)
        self.plan = SimpleNamespace(nbytes=1, runs=())
        self.pull_may_end, self.commit_may_end, self.is_closed = threading.Event(), threading.Event(), False
        self.linked = self.num_invalidated = 0

    def pull(self, _version: int, _slots: Any, *, deadline: Any) -> PullReport:
        while not self.pull_may_end.wait(0.001):
            deadline.check()
        return PullReport(worker=0, version=_version)

    def copy_from_buffer(self) -> None:
        assert self.commit_may_end.wait(20)

    def check_addresses(self) -> None: ...

    def link(self, _request: LinkRequest) -> None:
        self.linked += 1

    def invalidate(self) -> None:
        self.num_invalidated += 1

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.is_closed = True


class Asked:
    """A receiver in some state."""

    def __init__(self, state: str) -> None:
        self.receiver, self.epoch = WeightReceiver(FusedModel(), CpuBackend(), worker=0), Epoch()
        self.committing: list[threading.Thread] = []
        if state == "closed":
            return
        with self.receiver._changed:
            self.receiver._epoch = self.epoch  # type: ignore[assignment]
            self.receiver._apply("open")
        if state == "idle":
            return
        self.pulled = self.prefetch(2)
        if state == "pulling":
            return
        self.epoch.pull_may_end.set()
        self.pulled.result(20)
        self.epoch.pull_may_end.clear()
        if state == "committing":
            self.committing.append(threading.Thread(target=self.receiver.commit, args=(2,), kwargs={"deadline_s": 20}))
            self.committing[0].start()
            self.wait_for("committing")

    def prefetch(self, version: int) -> Any:
        return self.receiver.prefetch(version, [SlotAt(0, 0, version)], deadline_s=20.0)

    def wait_for(self, state: str) -> None:
        until = time.monotonic() + 20
        while self.receiver.state.value != state:
            assert time.monotonic() < until
            time.sleep(0.001)

    def ask(self, what: str) -> Any:
        match what:
            case "prefetch 2" | "prefetch 3":
                return self.prefetch(int(what[-1]))
            case "commit 2" | "commit 3":
                self.epoch.commit_may_end.set() if self.receiver.state.value == "ready" else None
                return self.receiver.commit(int(what[-1]), deadline_s=0.05)
            case "link":
                return self.receiver._link(LinkRequest(stages=(), predecessors=(), readers=()))
            case _:
                return getattr(self.receiver, what)()

    def close(self) -> None:
        self.epoch.commit_may_end.set()
        for thread in self.committing:
            thread.join(20)
        self.receiver.close()


@pytest.fixture
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(module, "COMMIT_WAIT_S", 0.05)
    made = Asked(request.param)
    yield made
    made.close()


NOT_OPEN, UNKNOWN = "no open epoch", "was not prefetched"
OUTCOMES = {
    ("closed", "prefetch 2"): ("closed", NOT_OPEN),
    ("closed", "commit 2"): ("closed", NOT_OPEN),
    ("closed", "link"): ("closed", NOT_OPEN),
    ("closed", "abort"): ("closed", ""),
    ("closed", "close"): ("closed", ""),
    ("idle", "prefetch 2"): ("pulling", ""),
    ("idle", "commit 2"): ("idle", UNKNOWN),
    ("idle", "link"): ("idle", ""),
    ("idle", "abort"): ("idle", ""),
    ("idle", "close"): ("closed", ""),
    ("pulling", "prefetch 2"): ("pulling", ""),
    ("pulling", "prefetch 3"): ("pulling", ""),
    ("pulling", "commit 2"): ("pulling", "still being pulled"),
    ("pulling", "commit 3"): ("pulling", UNKNOWN),
    ("pulling", "link"): ("idle", ""),
    ("pulling", "abort"): ("idle", ""),
    ("pulling", "close"): ("closed", ""),
    ("ready", "prefetch 2"): ("ready", ""),
    ("ready", "prefetch 3"): ("pulling", ""),
    ("ready", "commit 2"): ("idle", ""),
    ("ready", "commit 3"): ("ready", UNKNOWN),
    ("ready", "link"): ("ready", ""),
    ("ready", "abort"): ("idle", ""),
    ("ready", "close"): ("closed", ""),
    ("committing", "prefetch 2"): ("committing", "still committing"),
    ("committing", "prefetch 3"): ("committing", "still committing"),
    ("committing", "commit 2"): ("committing", "still committing"),
    ("committing", "link"): ("committing", ""),
    ("committing", "abort"): ("committing", ""),
}


@pytest.mark.parametrize(
    ("asked", "what", "after", "refusal"),
    [pytest.param(state, what, *out, id=f"{state}-{what}") for (state, what), out in OUTCOMES.items()],
    indirect=["asked"],
)
def test_each_request_is_granted_or_refused_as_the_state_says(
    asked: Asked, what: str, after: str, refusal: str
) -> None:
    before, is_open = asked.receiver.state.value, asked.receiver.state.value != "closed"
    try:
        result = asked.ask(what)
    except (WeightSyncError, PullTimeout) as error:
        assert refusal and refusal in str(error)
    else:
        assert not refusal
        match (before, what):
            case ("pulling" | "ready", "prefetch 2"):
                assert result is asked.pulled, "the retry joined what was there"
            case ("ready", "commit 2"):
                assert (result.version, asked.receiver.live_version) == (2, 2)
                assert asked.receiver.commit(2, deadline_s=0.05).nbytes == 0, "it is live already"
    assert asked.receiver.state.value == after
    if before == "pulling" and what not in ("prefetch 2", "commit 2", "commit 3"):
        with pytest.raises(WeightSyncError, match="the pull of version 2 was aborted"):
            asked.pulled.result(20)
        assert asked.epoch.num_invalidated == 1, "others would read what is of no version"
    assert asked.epoch.is_closed == (is_open and after == "closed")
    assert asked.epoch.linked == (what == "link" and is_open)


def test_every_state_can_be_reached_and_left() -> None:
    assert {state for state, _ in TRANSITIONS} == set(ReceiverState) == set(TRANSITIONS.values())


@pytest.mark.parametrize("asked", ["committing"], indirect=True)
def test_an_epoch_whose_memory_is_in_use_is_not_closed_and_no_other_opens(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ABORT_WAIT_S", 0.05)
    asked.receiver.close()
    assert not asked.epoch.is_closed
    with pytest.raises(WeightSyncError, match="still committing; the engine must be restarted"):
        asked.receiver.open(None)  # type: ignore[arg-type]
    asked.epoch.commit_may_end.set()
    asked.wait_for("idle")
    asked.receiver.close()
    assert asked.epoch.is_closed
