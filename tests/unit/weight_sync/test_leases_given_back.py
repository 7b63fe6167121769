"""After whatever happened to a pull or a commit, no learner keeps a slot for it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fakes.sync_world import LocalPublisher, LocalReplica
from tests.unit.weight_sync.test_coordinator import opened
from tests.unit.weight_sync.test_receiver import NEW, OLD, Pair, ask_local, closing, local, open_pair
from weight_sync.errors import LeaseExpired, PlanMismatch, PullTimeout, VersionUnavailable
from weight_sync.messages import Renewed, RenewRequest

if TYPE_CHECKING:
    from weight_sync.publish.slots import Lease

__all__ = ["closing", "local"]


def live_leases(publisher: LocalPublisher) -> list[Lease]:
    epoch = publisher.publisher._epoch
    assert epoch is not None
    return epoch.arena._table.live_leases(time.monotonic())


@pytest.mark.parametrize("asks_again", [False, True])
@pytest.mark.parametrize("commit", ["staged", "inplace"])
def test_an_abort_in_a_learners_stall_leaves_no_lease_that_nobody_knows_of(
    local: LocalPublisher, closing: list[Any], commit: str, asks_again: bool
) -> None:
    pair = open_pair(local, closing, commit)
    server = local.publisher._epoch.server
    handler, has_asked, may_answer = server._handler, threading.Event(), threading.Event()

    def stalled(sender: str, request: Any) -> Any:
        has_asked.set()
        assert may_answer.wait(20)
        return handler(sender, request)

    server._handler = stalled
    pair.receiver.prefetch(2, deadline_s=60.0)
    assert has_asked.wait(20)
    assert pair.receiver.abort()
    may_answer.set()
    if asks_again:
        pair.fetch(2, 60.0)
        pair.receiver.commit(2, deadline_s=5.0)
    else:
        (source,) = pair.receiver._epoch._sources.values()
        with pytest.raises(LeaseExpired):  # once it has answered this, it has read all that came before
            source.client.ask(RenewRequest(lease_id=0, ttl_s=1.0), Renewed, deadline_s=20.0)
    assert live_leases(local) == []


async def test_a_worker_that_has_the_version_already_keeps_no_lease_of_the_retry_for_another() -> None:
    replica = LocalReplica("r0", 2)
    async with opened(1, [replica], commit="inplace", num_slots=1) as world:
        await world.step(1)
        end = next(iter(replica.receivers[1]._epoch._readers.values()))
        original, failures = end.pull, iter([PullTimeout("cut here")])

        def pull(*args: Any, **kwargs: Any) -> None:
            for failure in failures:
                raise failure
            original(*args, **kwargs)

        end.pull = pull
        report: Any = await world.step(2)
        assert report.num_retries == 1
        replica.assert_holds(world.full)
        assert live_leases(world.publishers[0]) == []


def test_a_commit_of_the_live_version_leaves_the_prefetch_of_the_next_alone(
    local: LocalPublisher, closing: list[Any]
) -> None:
    pair = open_pair(local, closing, "staged")
    pair.fetch(2)
    pair.receiver.commit(1, deadline_s=5.0)
    pair.receiver.commit(2, deadline_s=5.0)
    pair.replica.assert_holds(NEW)


def test_a_commit_in_place_that_one_learner_refuses_keeps_nothing_at_the_others(closing: list[Any]) -> None:
    publishers = [LocalPublisher(rank, 2, OLD) for rank in range(2)]
    closing.extend(publisher.publisher for publisher in publishers)
    pair = Pair(publishers, ask_local, commit="inplace")
    closing.append(pair.receiver)
    for version in (1, 2, 3):
        publishers[1].ws_publish(version, 5.0)
    publishers[0].ws_publish(1, 5.0)
    with pytest.raises(VersionUnavailable):
        pair.receiver.commit(1, deadline_s=60.0)
    assert not pair.receiver.is_dirty
    assert [live_leases(publisher) for publisher in publishers] == [[], []]


def test_a_commit_in_place_that_finds_a_parameter_rebound_gives_back_what_the_prefetch_leased(
    local: LocalPublisher, closing: list[Any]
) -> None:
    pair = open_pair(local, closing, "inplace")
    pair.fetch(2)
    assert len(live_leases(local)) == 1
    model = pair.replica.models[0]
    model.norm = torch.nn.Parameter(model.norm.clone(), requires_grad=False)
    with pytest.raises(PlanMismatch, match="norm"):
        pair.receiver.commit(2, deadline_s=60.0)
    assert live_leases(local) == []
