"""Whole syncs: learners, replicas and their lines in one process, with real bytes."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes.sync_world import LocalReplica, World, full_weights, opened
from weight_sync import deadlines
from weight_sync.control import epoch
from weight_sync.control.epoch import _pair_line, _size
from weight_sync.errors import (
    DigestMismatch,
    PlanMismatch,
    PullTimeout,
    ReplicaDirty,
    VersionUnavailable,
    WeightSyncError,
)
from weight_sync.plan.routes import Stage, plan_routes
from weight_sync.transports.pair import PAIR_BYTES

STAGED_OR_NOT = pytest.mark.parametrize("commit", ["staged", "inplace"])


@STAGED_OR_NOT
@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (2, 1), (3, 2)])
async def test_engines_hold_the_learners_weights_bit_for_bit_at_addresses_that_never_change(
    commit: str, num_ranks: int, num_workers: int
) -> None:
    replica = LocalReplica("r0", num_workers)
    addresses = [p.data_ptr() for model in replica.models for p in model.parameters()]
    async with opened(num_ranks, [replica], commit=commit) as world:
        for version in range(3):
            await world.step(version)
            replica.assert_holds(world.full)
            await world.coordinator.self_test()
        assert replica.versions == [0, 1, 2]
        assert world.coordinator.live_versions == {"r0": 2}
    assert [p.data_ptr() for model in replica.models for p in model.parameters()] == addresses


async def test_calls_out_of_order_or_with_nonsense_are_refused() -> None:
    for names in ([], ["r0", "r0"]):
        with pytest.raises(ValueError, match="one replica with names of their own, got 1 ranks and replicas"):
            World(1, [LocalReplica(name) for name in names])
    world = World(1, 1)
    coordinator = world.coordinator
    with pytest.raises(WeightSyncError, match=r"version 1 is not published \(published: \[\]\)"):
        await coordinator.sync(1)
    with pytest.raises(WeightSyncError, match="weight sync is not open; call open first"):
        await coordinator.join(world.replicas[0])
    with pytest.raises(WeightSyncError, match="r0 is the last replica; close weight sync instead"):
        await coordinator.leave("r0")
    with pytest.raises(KeyError, match="r7"):
        await coordinator.leave("r7")
    for block in (coordinator.lease, coordinator.freeze):
        with pytest.raises(KeyError, match="r7"):
            async with block("r7"):
                pass


# Time


async def test_an_engine_too_busy_for_a_call_is_given_all_the_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host declares it dead when a call does not end in time, and its control thread shows that it lives."""
    monkeypatch.setattr(deadlines, "WATCH_AFTER_S", 0.05)
    replica, asked, was_asked = LocalReplica("r0"), list[float](), threading.Event()
    original = replica.call

    async def call(method: str, *args: object, timeout_s: float) -> Any:
        if method != "ws_status":
            return await original(method, *args, timeout_s=timeout_s)
        asked.append(timeout_s)
        was_asked.set()
        await asyncio.sleep(timeout_s)
        raise TimeoutError(f"{method} did not end within {timeout_s:.1f} s; the engine is declared dead")

    monkeypatch.setattr(replica, "call", call)
    async with opened(1, [replica], commit="staged") as world:
        opened_epoch: Any = replica.receivers[0]._epoch
        pull = opened_epoch.pull

        def slowly(*args: Any, **options: Any) -> Any:
            assert was_asked.wait(10)
            return pull(*args, **options)

        monkeypatch.setattr(opened_epoch, "pull", slowly)
        await world.step(1)
        replica.assert_holds(world.full)
        assert min(asked) > 10.0, "longer than the attempt"


async def test_the_loop_goes_on_while_routes_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of workers take a while. To open, to lease and to close all plan routes, and once for all members."""
    loop, went_on = asyncio.get_running_loop(), list[bool]()

    def plan(*args: Any, **options: Any) -> Any:
        ticked = threading.Event()
        loop.call_soon_threadsafe(ticked.set)
        went_on.append(ticked.wait(2))
        return plan_routes(*args, **options)

    monkeypatch.setattr(epoch, "plan_routes", plan)
    async with opened(1, 3) as world:
        await world.step(1)
        assert went_on == [True]
        async with world.coordinator.lease("r0"):
            await world.step(2)
        assert len(went_on) > 1
        num_before_close = len(went_on)
    assert len(went_on) == num_before_close + 1
    assert all(went_on)


async def test_a_worker_that_fails_ends_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, may_end = LocalReplica("r0", 2), threading.Event()
    async with opened(1, [replica], commit="staged", timeout_s=60.0) as world:
        await world.step(1)

        def fail(*_: Any, **__: Any) -> Any:
            raise DigestMismatch("its memory is broken")

        def wait(*_: Any, **__: Any) -> Any:
            assert may_end.wait(30)
            raise PullTimeout("late")

        for receiver, pull in zip(replica.receivers, (fail, wait), strict=True):
            monkeypatch.setattr(receiver._epoch, "pull", pull)
        try:
            with pytest.raises(WeightSyncError, match="r0: its memory is broken"):
                await asyncio.wait_for(world.step(2), 20)
        finally:
            may_end.set()


@STAGED_OR_NOT
async def test_a_report_says_when_each_replica_pulled_and_went_live(commit: str) -> None:
    async with opened(2, 2, commit=commit) as world:
        report = await world.step(1)
        assert report.version_lag == 0
        assert set(report.replicas) == {"r0", "r1"}
        for times in report.replicas.values():
            assert times.is_staged == (commit == "staged")
            assert 0 < times.live_at_s <= report.end_to_end_s
            paused_at_s, pulled_at_s = times.live_at_s - times.pause_s, times.pull_at_s + times.pull_s
            assert 0 < times.pull_at_s < pulled_at_s < times.live_at_s
            # Staged bytes move before the pause, those in place in it.
            assert (pulled_at_s <= paused_at_s) == (commit == "staged")
        # No two may pause at once: at most half of the group, here one, commits at a time.
        first, second = sorted(report.replicas.values(), key=lambda times: times.live_at_s)
        assert first.live_at_s <= second.live_at_s - second.pause_s + 0.001


async def test_replicas_are_never_all_paused_at_once() -> None:
    board: list[str] = []
    replicas = [LocalReplica(f"r{i}", board=board) for i in range(3)]
    for replica in replicas:
        replica.commit_delay_s = 0.02
    async with opened(2, replicas) as world:
        await world.step(1)
        world.assert_all_hold(1)
    paused: set[str] = set()
    for entry in board:
        word, name = entry.split()
        (paused.add if word == "pause" else paused.remove)(name)
        assert len(paused) <= 1


async def test_replicas_that_stand_still_anyway_commit_all_at_once() -> None:
    board, all_paused = list[str](), asyncio.Event()
    replicas = [LocalReplica(f"r{i}", board=board) for i in range(3)]

    def note() -> None:
        if len(board) == len(replicas):
            all_paused.set()

    def held(replica: LocalReplica) -> Any:
        call = replica.call

        async def call_when_all_paused(method: str, *args: object, timeout_s: float) -> list[Any]:
            if method == "ws_commit":
                await asyncio.wait_for(all_paused.wait(), timeout_s)
            return await call(method, *args, timeout_s=timeout_s)

        return call_when_all_paused

    for replica in replicas:
        replica.before_commit, replica.call = note, held(replica)
    async with opened(1, replicas, commit="inplace", rolling=False) as world:
        await world.step(1)
    assert sorted(board[:3]) == ["pause r0", "pause r1", "pause r2"], board


async def test_a_silent_replica_ends_the_sync_at_its_deadline() -> None:
    async with opened(1, 1) as world:
        world.hurry(1.0)
        replica = world.replicas[0]
        call, server = replica.call, replica.receivers[0]._server
        assert server is not None

        async def hang(*_: object, timeout_s: float) -> list[bytes]:
            await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
            raise AssertionError

        replica.call = hang
        server.close()
        started = asyncio.get_running_loop().time()
        with pytest.raises((TimeoutError, PullTimeout)):
            await world.step(1)
        assert asyncio.get_running_loop().time() - started < 15.0
        assert world.coordinator.members == {"r0": "dead"}
        with pytest.raises(ReplicaDirty, match="no live replica is left"):
            await world.step(2)
        replica.call = call


async def test_version_that_is_overtaken_while_it_waits_harms_no_replica() -> None:
    async with opened(1, 1) as world:
        await world.step(1)
        coordinator = world.coordinator
        await coordinator.publish(2)
        async with coordinator._membership_lock:  # somebody joins
            waiting = asyncio.create_task(coordinator.sync(2))
            await asyncio.sleep(0.05)
            for version in (3, 4):
                await coordinator.publish(version)
        with pytest.raises(VersionUnavailable, match="version 2 is not held here"):
            await waiting
        assert coordinator.members == {"r0": "live"}
        await coordinator.sync(4)
        world.assert_all_hold(1)


# What is left behind


@STAGED_OR_NOT
async def test_nothing_is_allocated_after_the_first_sync(commit: str) -> None:
    async with opened(2, [LocalReplica("r0", 2)], commit=commit) as world:
        first = await world.step(1)
        for version in range(2, 21):
            report = await world.step(version)
            if version == 10:
                files, threads = open_files(), own_threads()
        names = ("allocations", "registrations", "sockets", "control_connections")
        assert {n: report.counters[n] for n in names} == {n: first.counters[n] for n in names}
        # Fewer is fine: sockets and threads of earlier tests end some time.
        assert open_files() <= files
        assert own_threads() <= threads


def own_threads() -> int:
    """Without the event loop's pool, which grows lazily to its fixed size."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Failures of a replica


async def test_rebound_parameter_is_noticed_before_anything_is_written() -> None:
    async with opened(1, 1) as world:
        await world.step(1)
        replica = world.replicas[0]
        model = replica.models[0]
        model.norm = torch.nn.Parameter(model.norm.clone(), requires_grad=False)
        with pytest.raises(WeightSyncError, match="norm"):
            await world.step(2)
        assert replica.receivers[0].live_version == 1


async def test_failing_replica_is_left_out_and_the_others_go_on() -> None:
    def die() -> None:
        raise ConnectionError("engine process is gone")

    async with opened(2, 2) as world:
        await world.step(1)
        failing, other = world.replicas
        seen: list[dict[str, str]] = []
        world.coordinator.on_change(lambda: seen.append(world.coordinator.members))
        failing.before_commit = die
        report = await world.step(2)
        assert seen == [{"r0": "dead", "r1": "live"}]
        assert (report.replicas_live, report.replicas_skipped) == (1, 1)
        assert world.coordinator.members == {"r0": "dead", "r1": "live"}
        other.assert_holds(world.full)
        assert not failing.is_paused
        failing.before_commit = lambda: None
        await world.coordinator.open()  # a new epoch takes it in again
        assert (await world.step(3)).replicas_live == 2
        failing.assert_holds(world.full)
        await world.coordinator.leave("r1")
        assert seen[-1] == {"r0": "live"}


async def test_self_test_names_the_parameter_that_differs() -> None:
    replica = LocalReplica("r0", 2)
    async with opened(2, [replica]) as world:
        await world.step(1)
        await world.coordinator.self_test()
        replica.models[1].down.data[0, 0] += 1
        with pytest.raises(DigestMismatch, match=r"r0/1 differs from the learner in down at version 1"):
            await world.coordinator.self_test()


def flip_after_pull(replica: LocalReplica, *, times: int) -> None:
    """Damage the first byte that arrives, `times` times, between the copy and the digest."""
    epoch: Any = replica.receivers[0]._epoch
    end = next(iter(epoch.readers.values()))
    original, left = end.pull, [times]

    def pull(slot: int, pieces: tuple, **kwargs: object) -> None:
        original(slot, pieces, **kwargs)
        if left[0] > 0:
            left[0] -= 1
            pieces[0].dst[0] ^= 1

    end.pull = pull


async def test_flipped_byte_is_pulled_again_and_committed_right() -> None:
    async with opened(2, 1) as world:
        flip_after_pull(world.replicas[0], times=1)
        assert (await world.step(1)).num_retries == 1
        world.assert_all_hold(1)


@pytest.mark.parametrize(("commit", "state"), [("staged", "dead"), ("inplace", "dirty")])
async def test_byte_that_stays_flipped_is_never_committed(commit: str, state: str) -> None:
    async with opened(1, 1, commit=commit) as world:
        await world.step(1)
        replica = world.replicas[0]
        flip_after_pull(replica, times=100)
        with pytest.raises(WeightSyncError, match="differ from what was packed, twice"):
            await world.step(2)
        assert world.coordinator.members == {"r0": state}
        assert replica.receivers[0].is_dirty == (state == "dirty")
        assert replica.is_paused == (state == "dirty"), "a dirty engine must not generate"
        if state == "dead":
            replica.assert_holds(full_weights(1))


# What an open says and refuses


async def test_drift_is_refused_before_a_byte_moves() -> None:
    world = World(1, 1)
    model = world.replicas[0].models[0]
    model.norm = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(PlanMismatch, match="norm"):
        await world.coordinator.open()
    assert all(not bool(p.any()) for p in model.parameters())
    await world.coordinator.close()


async def test_replicas_that_split_the_model_differently_are_refused_and_only_one_sends_its_layout() -> None:
    sizes: list[int] = []

    class Watched(LocalReplica):
        async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
            replies = await super().call(method, *args, timeout_s=timeout_s)
            if method == "ws_record":
                sizes.append(sum(map(len, replies)))
            return replies

    world = World(1, [Watched("r0", 2), LocalReplica("r1", 1)])
    with pytest.raises(PlanMismatch, match="replicas r0 and r1 split the model differently; start them alike"):
        await world.coordinator.open()
    async with opened(1, [Watched("r0", 2), Watched("r1", 2)]) as world:
        with pytest.raises(PlanMismatch, match="replica r2 splits the model differently"):
            await world.coordinator.join(LocalReplica("r2", 1))
        await world.coordinator.join(Watched("r3", 2))
    assert sum(size < 300 for size in sizes) == 2 == sum(size > 1000 for size in sizes), sizes


@STAGED_OR_NOT
async def test_memory_is_printed_before_any_of_it_is_allocated(commit: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "weight_sync")
    world = World(2, [LocalReplica("r0", 2)], commit=commit, num_slots=3)
    printed: list[str] = []
    opening = world.publishers[1].ws_open

    def open_later(request: bytes) -> bytes:
        printed.append(caplog.text)
        return opening(request)

    world.publishers[1].ws_open = open_later  # type: ignore[method-assign]
    await world.coordinator.open()
    try:
        epochs: list[Any] = [publisher.publisher._epoch for publisher in world.publishers]
        workers: list[Any] = [receiver._epoch for receiver in world.replicas[0].receivers]
        lines = [line for line in printed[0].splitlines() if "memory of " in line]
        for rank, own in enumerate(epochs):
            slot = _size(own.plan.arena_bytes)
            assert f"rank {rank} 3 x {slot}, with the probe {_size(own.end.block.nbytes)}" in lines[0]
        for worker, own in enumerate(workers if commit == "staged" else []):
            assert f"worker {worker} {_size(own.targets.buffer.nbytes)}" in lines[1]
        assert ("no staging buffer" in lines[1]) == (commit == "inplace")
    finally:
        await world.coordinator.close()


def test_groups_of_two_are_counted_by_the_routes_before_they_are_built() -> None:
    """r0 reads both learners, one of them by mapping it, and hands on to r1 on its node and r2 on another."""
    reads, homes = {0: "nccl", 1: "ipc"}, {"r0": "a", "r1": "a", "r2": "b"}
    infos: Any = {name: [SimpleNamespace(worker=0, node=node, transports=reads)] for name, node in homes.items()}
    giver: Any = SimpleNamespace(owner="r0/0", node="a", arenas=[SimpleNamespace(transport=t) for t in ("ipc", "nccl")])
    direct = SimpleNamespace(stages=(Stage(ranks=(0, 1)),), predecessors=())
    behind = SimpleNamespace(stages=(Stage(ranks=(0, 1), via=(0,)),), predecessors=(giver,))
    requests: Any = {"r0": [direct], "r1": [behind], "r2": [behind]}
    of_r0, total = 2 * PAIR_BYTES["nccl"], 4 * PAIR_BYTES["nccl"]
    expected = f"memory of groups of two: {_size(of_r0)} of the device of r0/0, {_size(total)} in all"
    assert _pair_line(infos, requests) == expected
    assert _pair_line({"r1": infos["r1"]}, {"r1": requests["r1"]}) == ""
