"""One worker fed by one learner, without a coordinator in between. With processes that die: tests/integration."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from tests.fakes.row_shards import row_shards
from tests.fakes.sync_world import PARAMS, LocalPublisher, LocalReplica, full_weights
from weight_sync import deadlines
from weight_sync.channel import ControlClient, make_run_keys
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import (
    PlanMismatch,
    PublisherLost,
    PullTimeout,
    ReplicaDirty,
    SlotOverwritten,
)
from weight_sync.messages import (
    OpenPublisher,
    OpenReceiver,
    Pin,
    Pinned,
    PublisherInfo,
    Reply,
    SlotAt,
    decode,
    encode,
    reply_state,
)
from weight_sync.plan.agreement import share
from weight_sync.plan.planner import build_plan
from weight_sync.publish.publisher import WeightPublisher
from weight_sync.receive import receiver as prefetch
from weight_sync.receive import staging
from weight_sync.transports.mapped import MappedReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from weight_sync.messages import PullReport
    from weight_sync.plan.agreement import SharedPlan
    from weight_sync.receive.receiver import WeightReceiver

KEYS = make_run_keys("run")
OLD, NEW = full_weights(0), full_weights(1)


def plan_of(receiver: WeightReceiver, *, epoch: int = 1) -> SharedPlan:
    layouts = [receiver.record(PARAMS)]
    return share(build_plan(epoch=epoch, params=PARAMS, shards=row_shards(PARAMS, 1), workers=layouts))


class Pair:
    def __init__(self, publisher: LocalPublisher, commit: str, **changes: object) -> None:
        self.replica = LocalReplica("r0")
        self.receiver: WeightReceiver = self.replica.receivers[0]
        plan = plan_of(self.receiver)
        shared = {"keys": KEYS, "epoch": 1, "verify": True}
        opening = OpenPublisher(**shared, plan=plan.for_learner[0], transport="shm", num_slots=2, host="127.0.0.1")
        self.info = decode(publisher.ws_open(encode(opening)), PublisherInfo)
        fields = {**shared, "plan": plan.for_replica, "replica": "r0", "host": "127.0.0.1", "relay": False,
                  "commit": commit, "publishers": (self.info,), "deadline_s": 10.0, **changes}  # fmt: skip
        self.request = OpenReceiver(**fields)
        self.receiver.open(self.request)

    def pinned(self, version: int) -> list[SlotAt]:
        """As the coordinator does."""
        client = ControlClient(zmq.Context.instance(), self.info.address, KEYS, epoch=1, sender="coordinator")
        at = client.ask(Pin(version=version, ttl_s=30.0), Pinned, deadline_s=20.0)
        client.close()
        return [SlotAt(0, at.slot, at.generation)]

    def prefetch(self, version: int, deadline_s: float = 10.0) -> Future[Any]:
        return self.receiver.prefetch(version, self.pinned(version), deadline_s=deadline_s)

    def fetch(self, version: int, deadline_s: float = 10.0) -> None:
        self.prefetch(version, deadline_s).result(60)

    def take(self, version: int) -> PullReport:
        self.fetch(version)
        return self.receiver.commit(version, deadline_s=5.0)

    def after_pull(self, action: Callable[[], None]) -> None:
        """Run `action` once, after the bytes of the first source were copied and before they are checked."""
        end = next(iter(self.receiver._epoch.readers.values()))
        original, left = end.pull, [action]

        def pull(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if left:
                left.pop()()

        end.pull = pull


@pytest.fixture
def local() -> Iterator[LocalPublisher]:
    publisher = LocalPublisher(0, 1, OLD)
    yield publisher
    publisher.ws_close()


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    things: list[Any] = []
    yield things
    for thing in things:
        thing.close()


def open_pair(publisher: LocalPublisher, closing: list[Any], commit: str, **changes: object) -> Pair:
    pair = Pair(publisher, commit, **changes)
    closing.append(pair.receiver)
    publisher.ws_publish(1, 5.0)
    pair.take(1)
    publisher.full = NEW
    publisher.ws_publish(2, 5.0)
    return pair


def test_staged_weights_are_untouched_until_the_commit(local: LocalPublisher, closing: list[Any]) -> None:
    pair = open_pair(local, closing, "staged")
    pair.fetch(2)
    pair.replica.assert_holds(OLD)
    report = pair.receiver.commit(2, deadline_s=5.0)
    pair.replica.assert_holds(NEW)
    assert report.nbytes == sum(run.nbytes for run in pair.receiver._epoch.plan.runs)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("commit", ["staged", "inplace"])
def test_torn_read_is_never_committed(closing: list[Any], commit: str, verify: bool) -> None:
    """The coordinator is gone, the pin runs out, and the learner packs the slot again under the reader."""
    now = [0.0]
    publisher = LocalPublisher(0, 1, OLD)
    publisher.publisher = WeightPublisher(CpuBackend(), rank=0, clock=lambda: now[0])
    closing.append(publisher.publisher)
    pair = open_pair(publisher, closing, commit, verify=verify)

    def pack_twice_more() -> None:
        now[0] += 1000.0
        for version in (3, 4):
            publisher.ws_publish(version, 5.0)

    pair.after_pull(pack_twice_more)
    with pytest.raises(SlotOverwritten, match="torn and is not committed"):
        pair.fetch(2)
        pair.receiver.commit(2, deadline_s=5.0)
    assert pair.receiver.is_dirty == (commit == "inplace")
    if commit == "staged":
        pair.replica.assert_holds(OLD)
        assert pair.receiver.live_version == 1


def test_a_commit_in_place_whose_slot_was_packed_again_writes_nothing(
    local: LocalPublisher, closing: list[Any]
) -> None:
    pair = open_pair(local, closing, "inplace")
    pair.fetch(2)
    local.publisher._epoch.table.unpin(2)
    for version in (3, 4):
        local.ws_publish(version, 5.0)
    with pytest.raises(SlotOverwritten):
        pair.receiver.commit(2, deadline_s=5.0)
    assert not pair.receiver.is_dirty
    assert pair.receiver.live_version == 1
    pair.replica.assert_holds(OLD)


def test_a_commit_of_the_live_version_leaves_the_prefetch_of_the_next_alone(
    local: LocalPublisher, closing: list[Any]
) -> None:
    pair = open_pair(local, closing, "staged")
    pair.fetch(2)
    pair.receiver.commit(1, deadline_s=5.0)
    pair.receiver.commit(2, deadline_s=5.0)
    pair.replica.assert_holds(NEW)


def test_dirty_worker_becomes_clean_with_a_full_commit(local: LocalPublisher, closing: list[Any]) -> None:
    pair = open_pair(local, closing, "inplace")

    def break_off() -> None:
        raise PullTimeout("cut here")

    pair.after_pull(break_off)
    with pytest.raises(PullTimeout):
        pair.take(2)
    assert pair.receiver.is_dirty
    assert pair.receiver.live_version is None
    with pytest.raises(ReplicaDirty, match="commit a version again"):
        pair.receiver.parameter_digests()
    pair.take(2)
    assert not pair.receiver.is_dirty
    pair.replica.assert_holds(NEW)


def test_runs_that_did_not_change_are_not_read_again_unless_the_staging_buffer_lost_them(
    closing: list[Any], local: LocalPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SKIP_GAP_BYTES", 0)
    pair = Pair(local, "staged")
    closing.append(pair.receiver)
    num_read = [0]
    read = MappedReader.pull

    def counted(reader: Any, slot: int, pieces: Any, **others: Any) -> None:
        num_read[0] += sum(piece.dst.numel() for piece in pieces)
        read(reader, slot, pieces, **others)

    monkeypatch.setattr(MappedReader, "pull", counted)

    def take(version: int, weights: dict[str, Any]) -> tuple[int, int, int]:
        local.full = weights
        local.ws_publish(version, 5.0)
        num_read[0] = 0
        report = pair.take(version)
        local.publisher._epoch.table.unpin(version)
        pair.replica.assert_holds(weights)
        return num_read[0], report.skipped_bytes, report.num_retries

    name = next(iter(OLD))
    partly = {**OLD, name: NEW[name]}
    whole, *_ = take(1, OLD)
    nbytes = pair.receiver._epoch.plan.nbytes  # less than `whole`, which has padding between runs
    assert take(2, OLD) == (whole, 0, 0), "nobody knew that runs may stay as they are"
    assert take(3, OLD) == (0, nbytes, 0)
    few, skipped, _ = take(4, partly)
    assert 0 < few < nbytes == few + skipped
    block = pair.receiver._epoch.targets.buffer
    block.tensor.add_(1)
    assert take(5, OLD) == (few + whole, 0, 1), "what is there is verified, and read again as a whole"
    assert take(6, NEW)[1:] == (0, 0)
    assert take(7, OLD) == (whole, 0, 0), "no run of the version before had stayed"


class Watched:
    """A pair whose pulls of the second version do what they are told, on a clock that can be put forward."""

    def __init__(self, pair: Pair, *pulls: Callable[[Callable[[], None]], None]) -> None:
        self.pair, self.receiver, self.late_s, self.num_pulls = pair, pair.receiver, 0.0, 0
        clock = lambda: time.monotonic() + self.late_s  # noqa: E731
        self.receiver._clock = clock
        self.receiver._epoch.context = replace(self.receiver._context, clock=clock)
        end = next(iter(self.receiver._epoch.readers.values()))
        original, left = end.pull, list(pulls)

        def pull(*args: Any, check: Callable[[], None], **kwargs: Any) -> None:
            self.num_pulls += 1
            if left:
                left.pop(0)(check)
            original(*args, check=check, **kwargs)

        end.pull = pull

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < give_up, "it never came to that"
            time.sleep(0.002)


def test_a_pull_over_its_deadline_stops_and_writes_nothing(closing: list[Any], local: LocalPublisher) -> None:
    def dawdle(check: Callable[[], None]) -> None:
        watched.late_s = 5.0 + prefetch.SLACK_S + 1.0
        check()

    watched = Watched(open_pair(local, closing, "staged"), dawdle)
    with pytest.raises(PullTimeout, match="did not arrive in time"):
        watched.pair.fetch(2, deadline_s=5.0)
    watched.pair.replica.assert_holds(OLD)


def test_a_pull_goes_on_while_its_retry_is_on_its_way(closing: list[Any], local: LocalPublisher) -> None:
    """The coordinator notices a little late that the first attempt had no time left; the pull looked before."""
    may_look, has_looked, may_go_on = (threading.Event() for _ in range(3))

    def look(check: Callable[[], None]) -> None:
        assert may_look.wait(30)
        try:
            check()
        finally:
            has_looked.set()
        assert may_go_on.wait(30)

    watched = Watched(open_pair(local, closing, "staged"), look)
    watched.pair.prefetch(2, deadline_s=5.0)
    watched.late_s = 6.0
    may_look.set()
    assert has_looked.wait(30)
    second = watched.pair.prefetch(2, deadline_s=60.0)
    watched.late_s = 60.0
    may_go_on.set()
    second.result(30)
    assert watched.num_pulls == 1, "what had arrived was thrown away"
    watched.receiver.commit(2, deadline_s=5.0)
    assert watched.receiver.live_version == 2


def test_a_retry_does_not_join_a_pull_whose_time_is_over(closing: list[Any], local: LocalPublisher) -> None:
    def hang(check: Callable[[], None]) -> None:
        assert has_begun.wait(30)
        assert watched.receiver._pull.is_aborted.wait(20), "the retry joined it"
        check()

    has_begun = threading.Event()
    watched = Watched(open_pair(local, closing, "staged"), hang)
    watched.pair.prefetch(2, deadline_s=5.0)
    watched.wait_for(lambda: watched.num_pulls == 1)
    has_begun.set()
    watched.late_s = 5.0 + prefetch.SLACK_S + 1.0
    second = watched.pair.prefetch(2, deadline_s=30.0)
    second.result(30)
    assert watched.num_pulls == 2


def test_other_plan_than_the_learners_is_refused(local: LocalPublisher, closing: list[Any]) -> None:
    pair = open_pair(local, closing, "staged")
    other = plan_of(pair.receiver, epoch=2)
    request = msgspec.structs.replace(pair.request, epoch=2, plan=other.for_replica)
    with pytest.raises(PlanMismatch, match="every party must open the same epoch"):
        pair.receiver.open(request)


@pytest.mark.parametrize("commit", ["staged", "inplace"])
def test_a_learner_that_goes_silent_in_mid_pull_is_lost_long_before_the_deadline_and_may_wake(
    local: LocalPublisher, closing: list[Any], monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    monkeypatch.setattr(deadlines, "PEER_TIMEOUT_S", 0.5)
    pair = open_pair(local, closing, commit)
    slots, server = pair.pinned(2), local.publisher._epoch.server
    started = time.monotonic()
    with monkeypatch.context() as silent:
        pair.after_pull(lambda: silent.setattr(server, "_receive", lambda *_: None))
        with pytest.raises(PublisherLost, match="dead, stopped or unreachable"):
            pair.receiver.prefetch(2, slots, deadline_s=60.0).result(60)
            pair.receiver.commit(2, deadline_s=60.0)
    assert time.monotonic() - started < 30.0
    assert pair.receiver.is_dirty == (commit == "inplace")
    if commit == "staged":
        pair.replica.assert_holds(OLD)
        assert pair.receiver.live_version == 1
    pair.take(2)
    pair.replica.assert_holds(NEW)


@pytest.mark.parametrize("commit", ["staged", "inplace"])
def test_an_abort_waits_for_no_learner_that_says_nothing(
    local: LocalPublisher, closing: list[Any], monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    monkeypatch.setattr(prefetch, "ABORT_WAIT_S", 5.0)  # less than the patience with a silent learner
    pair = open_pair(local, closing, commit)
    slots, server, asked = pair.pinned(2), local.publisher._epoch.server, threading.Event()
    with monkeypatch.context() as silent:
        silent.setattr(server, "_receive", lambda *_: asked.set())
        pair.receiver.prefetch(2, slots, deadline_s=60.0)
        assert commit == "inplace" or asked.wait(10)
        assert pair.receiver.state.value == ("pulling" if commit == "staged" else "ready")
        assert pair.receiver.abort()
        pair.replica.assert_holds(OLD)
    pair.take(2)
    pair.replica.assert_holds(NEW)


@pytest.mark.parametrize("commit", ["staged", "inplace"])
def test_a_learner_that_there_is_no_time_to_ask_is_not_called_lost(
    local: LocalPublisher, closing: list[Any], monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    """The run would end with it, though a slow engine was all that failed."""
    monkeypatch.setattr(prefetch, "SLACK_S", 0.0)
    pair = open_pair(local, closing, commit)
    source = next(iter(pair.receiver._epoch.sources.values()))

    def say_nothing(request: object, kind: object, *, deadline_s: float, check: object = None) -> None:
        raise PublisherLost(f"no answer within {deadline_s:.1f} s")

    monkeypatch.setattr(source.client, "finish", say_nothing)

    def take(deadline_s: float) -> None:
        pair.fetch(2, deadline_s)
        pair.receiver.commit(2, deadline_s=deadline_s)

    with pytest.raises(PullTimeout, match="says nothing about whether it lives"):
        take(3.0)
    with pytest.raises(PublisherLost, match=r"within 10\.0 s"):
        take(60.0)


def test_epoch_opened_again_believes_nothing_it_held_before(local: LocalPublisher, closing: list[Any]) -> None:
    """A resumed learner may publish other weights under a number that was live before."""
    pair = open_pair(local, closing, "staged")
    pair.take(2)
    pair.receiver.open(pair.request)
    assert pair.receiver.live_version is None
    assert pair.take(2).nbytes > 0
    pair.receiver.invalidate()
    assert pair.take(2).nbytes > 0, "what slept is written again"


def test_workers_that_disagree_about_a_commit_are_a_mixture() -> None:
    ok, failed = encode(Reply(ok=True)), encode(Reply(ok=False, error="X", message=""))
    assert reply_state([ok, ok]) == "ok"
    assert reply_state([failed, failed]) == "failed"
    assert reply_state([ok, failed]) == reply_state([failed, ok]) == "dirty"
    assert reply_state([encode(Reply(ok=False, dirty=True))]) == "dirty"
