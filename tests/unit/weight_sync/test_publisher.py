"""A learner's end: what is packed into its slots, how, and what it says of it."""

from __future__ import annotations

import gc
import threading
import weakref
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.row_shards import row_shards
from tests.fakes.sync_world import DTYPE, PARAMS, FusedModel, LocalPublisher, full_weights, local_tensors, record_layout
from weight_sync.channel import make_run_keys
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import PlanMismatch, PullTimeout, SlotOverwritten, WeightSyncError
from weight_sync.messages import (
    OpenPublisher,
    PackReport,
    PublishedDigests,
    PublisherInfo,
    decode,
    encode,
)
from weight_sync.plan.agreement import share
from weight_sync.plan.planner import build_plan
from weight_sync.plan.types import PackPlan
from weight_sync.publish import packer as pack
from weight_sync.publish.packer import Packer, PackStep, in_parts
from weight_sync.publish.publisher import WeightPublisher, probe_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weight_sync.plan.types import Plan


def plan_of(num_ranks: int, num_workers: int) -> Plan:
    layouts = [record_layout(FusedModel(w, num_workers), PARAMS, worker=w) for w in range(num_workers)]
    return build_plan(epoch=1, params=PARAMS, shards=row_shards(PARAMS, num_ranks), workers=layouts)


def opening(plan: Plan, **changes: object) -> bytes:
    fields = {"keys": make_run_keys("run"), "epoch": 1, "plan": share(plan).for_learner[1],
              "transport": "shm", "num_slots": 2, "verify": True, "host": "127.0.0.1"}  # fmt: skip
    return encode(OpenPublisher(**{**fields, **changes}))


@pytest.fixture
def rank() -> Iterator[LocalPublisher]:
    rank = LocalPublisher(1, 3, full_weights(0))
    yield rank
    rank.ws_close()


def test_arena_holds_the_boxes_cast_to_the_rollout_dtype(rank: LocalPublisher) -> None:
    plan = plan_of(3, 2)
    rank.ws_open(opening(plan))
    report = decode(rank.ws_publish(1, 5.0), PackReport)
    arena = rank.publisher._epoch.end.slot(report.slot)
    shards = local_tensors(rank.full, rank=1, num_ranks=3)
    for item in plan.pack[1].items:
        box = shards[item.param][tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))]
        packed = arena[item.arena_off : item.arena_off + item.nbytes].view(DTYPE).view(item.size)
        assert torch.equal(packed, box.to(DTYPE))
    assert report.nbytes == sum(item.nbytes for item in plan.pack[1].items)


def test_a_publish_walks_no_plan(rank: LocalPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner waits for it: what the plan says is worked out when the epoch opens."""
    rank.ws_open(opening(plan_of(3, 2)))
    monkeypatch.setattr(PackPlan, "items", property(lambda _: pytest.fail("the plan is walked")))
    assert decode(rank.ws_publish(1, 5.0), PackReport).nbytes > 0


def test_digests_are_those_of_the_bytes_each_worker_pulls(rank: LocalPublisher) -> None:
    plan = plan_of(3, 2)
    rank.ws_open(opening(plan))
    slot = decode(rank.ws_publish(1, 5.0), PackReport).slot
    arena, digest = rank.publisher._epoch.end.slot(slot), CpuBackend().digest
    found = decode(rank.ws_digests(1, 5.0), PublishedDigests).by_worker
    for pull in plan.pull:
        runs = [run for run in pull.runs if run.src_rank == 1]
        assert list(found[pull.worker]) == [digest(arena[r.src_off : r.src_off + r.nbytes].clone()) for r in runs]


def test_range_that_two_workers_pull_is_digested_once() -> None:
    pack = plan_of(1, 2).pack[0]
    assert len(np.unique(pack.segments, axis=0)) == len(pack.segments)
    read = pack.segments_of_workers()
    assert set(read[0]) & set(read[1]), "embedding and norm go to both"


def test_publishing_a_held_version_again_changes_nothing(rank: LocalPublisher) -> None:
    rank.ws_open(opening(plan_of(3, 1)))
    first = rank.ws_publish(1, 5.0)
    before = decode(rank.ws_digests(1, 5.0), PublishedDigests)
    rank.full = full_weights(9)
    assert decode(rank.ws_publish(1, 5.0), PackReport) == decode(first, PackReport)
    assert decode(rank.ws_digests(1, 5.0), PublishedDigests) == before


def test_a_self_test_whose_slot_is_packed_again_meanwhile_says_so(
    rank: LocalPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.ws_open(opening(plan_of(3, 1), num_slots=1))
    rank.ws_publish(1, 5.0)
    sealer = rank.publisher._epoch.sealer
    sealer.wait(5.0)
    digests_of = sealer.digests_of

    def hang(slot: int) -> tuple[int, ...]:
        monkeypatch.undo()
        rank.full = full_weights(2)
        rank.ws_publish(2, 0.0)
        return digests_of(slot)

    monkeypatch.setattr(sealer, "digests_of", hang)
    with pytest.raises(SlotOverwritten, match=r"digested version 1 while its slot was packed again"):
        rank.ws_digests(1, 6.0)


def test_a_self_test_waits_for_a_seal_no_longer_than_it_may(
    rank: LocalPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.ws_open(opening(plan_of(3, 1)))
    may_seal = threading.Event()
    monkeypatch.setattr(rank.publisher._epoch.sealer, "digests_of", lambda _: may_seal.wait(20) and ())
    rank.ws_publish(1, 5.0)
    with pytest.raises(PullTimeout, match=r"still sealing version 1 after 0\.1 s"):
        rank.ws_digests(1, 0.1)
    may_seal.set()


def test_wrong_shape_is_refused_and_the_slot_stays_usable(rank: LocalPublisher) -> None:
    rank.ws_open(opening(plan_of(3, 1), num_slots=1))
    good = rank.full
    rank.full = {**good, "down.weight": torch.zeros(5, 7)}
    with pytest.raises(PlanMismatch, match=r"down.weight.*the model changed"):
        rank.ws_publish(1, 5.0)
    rank.full = good
    assert decode(rank.ws_publish(1, 5.0), PackReport).version == 1


def test_missing_tensor_is_named(rank: LocalPublisher) -> None:
    rank.ws_open(opening(plan_of(3, 1)))
    with pytest.raises(PlanMismatch, match=r"weight: .*gave no local shard"):
        rank.publisher.publish(1, {}, deadline_s=1.0)


def test_rank_that_was_not_planned_is_refused() -> None:
    stranger = WeightPublisher(CpuBackend(), rank=7)
    with pytest.raises(PlanMismatch, match=r"this is learner 7, the plan has parts for learner 1"):
        stranger.open(opening(plan_of(3, 1)))


def test_publish_needs_an_open_epoch(rank: LocalPublisher) -> None:
    with pytest.raises(WeightSyncError, match="no open epoch"):
        rank.ws_publish(1, 1.0)


def test_probe_differs_between_ranks_and_is_written_before_anything_is_served(rank: LocalPublisher) -> None:
    info = decode(rank.ws_open(opening(plan_of(3, 1))), PublisherInfo)
    page = rank.publisher._epoch.end.probe
    assert page.numel() == info.probe_bytes
    assert CpuBackend().digest(page.clone()) == info.probe_digest
    assert not torch.equal(probe_pattern(4096, rank=0), probe_pattern(4096, rank=1))


# Shards that live elsewhere than the slots


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(4, 400))
def test_parts_cover_a_tensor_once_and_are_no_larger_than_they_may(shape: list[int], limit: int) -> None:
    source = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    target = torch.full_like(source, -1)
    for to, part in in_parts(target, source, limit_bytes=limit):
        assert part.nbytes <= limit
        assert (to == -1).all(), "it was there already"
        to.copy_(part)
    assert torch.equal(target, source)


class Arrivals(TorchDispatchMode):
    """Bytes of everything that is brought to the device of the slots."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.sizes.append(found.nbytes)
        return found


def test_shards_on_the_host_pass_the_device_in_parts_and_nothing_of_them_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The meta device stands in for an accelerator: it has no bytes, but it is another one."""
    monkeypatch.setattr(pack, "PIECE_BYTES", 64)
    backend = CpuBackend()
    copies: list[Any] = []
    monkeypatch.setattr(pack, "BatchCopy", lambda *args: copies.append(args))
    views = tuple(torch.empty(10, 4, dtype=torch.bfloat16, device="meta") for _ in range(2))
    steps = [PackStep("w", (slice(0, 10), slice(0, 4)), views)]
    packer = Packer(backend, steps, num_slots=2)
    shard = torch.ones(10, 4)
    with Arrivals() as arrivals:
        packer.pack(0, {"w": shard})
        packer.pack(1, {"w": shard})
    assert arrivals.sizes == [64, 64, 32] * 2
    assert copies == [], "batch copies keep what they read alive"
    left = weakref.ref(shard)
    del shard
    gc.collect()
    assert left() is None
