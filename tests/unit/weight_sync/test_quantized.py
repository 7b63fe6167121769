"""Modules whose live weights are derived: which ones is found out and said; a worker pulls its own shard of them, and
what it makes of it equals a load from the start, bit for bit, in memory that never moves."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.derived_engine import DerivedEngine, Layer, ToyReloader, checkpoint_params
from tests.fakes.sync_world import LocalPublisher, LocalReplica
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import DigestMismatch, PlanMismatch, WeightSyncError
from weight_sync.messages import SlotAt
from weight_sync.plan.types import EngineParam
from weight_sync.receive.quantized import (
    Ballots,
    ModuleReload,
    ReloadedModule,
    Reloads,
    bucketed,
    decision_lines,
    derived_modules,
    sizes_of,
)
from weight_sync.receive.receiver import WeightReceiver, WorkerService
from weight_sync.receive.recorder import record

if TYPE_CHECKING:
    from weight_sync.messages import CommitMode

PARAMS = checkpoint_params()


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {meta.name: torch.randn(meta.shape, generator=generator).bfloat16() for meta in PARAMS}


def _assert_equal(model: DerivedEngine, fresh: DerivedEngine) -> None:
    want = dict(fresh.named_parameters())
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, want[name]), f"{name} differs"
    assert torch.equal(model.absorbed.transposed, fresh.absorbed.transposed), "MLA reads old weights"
    x = torch.ones(2, 4)
    for ours, theirs in zip(model.layers, fresh.layers, strict=True):
        assert isinstance(ours, Layer)
        assert isinstance(theirs, Layer)
        assert torch.equal(ours.output(x), theirs.output(x)), f"a layer of kind {ours.kind} computes something else"


def _addresses(model: DerivedEngine) -> dict[str, int]:
    """Of every tensor that a captured graph may read, also those that are no parameters."""
    packed: Any = model.layers[3]
    others = {"packed": packed.cached(), "transposed": model.absorbed.transposed}
    return {name: tensor.data_ptr() for name, tensor in {**dict(model.named_parameters()), **others}.items()}


class _Replica(LocalReplica):
    def __init__(self, name: str, num_workers: int) -> None:
        super().__init__(name, num_workers)
        self.engines = [DerivedEngine(worker, num_workers) for worker in range(num_workers)]
        store = dist.HashStore()
        ballots = [Ballots(store, rank=worker, num_workers=num_workers) for worker in range(num_workers)]
        self.receivers = [
            WeightReceiver(engine, CpuBackend(), worker=worker, reloader=ToyReloader(engine, ballots[worker]))
            for worker, engine in enumerate(self.engines)
        ]
        self.services = [WorkerService(lambda receiver=receiver: receiver) for receiver in self.receivers]


@pytest.mark.parametrize("bucket_bytes", [1, 64 << 20], ids=["bucket per module", "one bucket"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("commit", ["staged", "inplace"])
async def test_synced_engine_equals_a_fresh_load_and_nothing_moves(
    commit: CommitMode,
    num_workers: int,
    bucket_bytes: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weight_sync.receive.quantized.BUCKET_BYTES", bucket_bytes)
    learners = [LocalPublisher(rank, 2, _weights(0), PARAMS) for rank in range(2)]
    replica = _Replica("a", num_workers)
    coordinator = SyncCoordinator(learners, [replica], options=SyncOptions(transport="shm", commit=commit))
    with caplog.at_level(logging.DEBUG):
        await coordinator.open()
    assert "layers.* x1: reload of its shard (post-processing rearranges or scales weight)" in caplog.text
    addresses = [_addresses(engine) for engine in replica.engines]
    try:
        for version in (1, 2, 3):
            for learner in learners:
                learner.full = _weights(version % 2)
            await coordinator.publish(version)
            await coordinator.sync(version)
            for engine in replica.engines:
                _assert_equal(engine, engine.loaded(_weights(version % 2)))
            await coordinator.self_test()
        assert [_addresses(engine) for engine in replica.engines] == addresses
        for module in ("layers.2.weight", "layers.6.weight", "absorbed.halved"):
            spoilt = replica.engines[-1].get_parameter(module).data
            held = spoilt.clone()
            spoilt.zero_()
            with pytest.raises(DigestMismatch, match=f"a second reload of {module.rpartition('.')[0]} gives other"):
                await coordinator.self_test()
            spoilt.copy_(held)
        await coordinator.self_test()
    finally:
        await coordinator.close()


@pytest.mark.parametrize("trouble", ["its pull fails", "it was not asked to prefetch", "it is silent"])
async def test_no_worker_post_processes_what_another_one_did_not_get(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place: the engine's post-processing may have collectives, which would wait for that worker for ever."""
    replica = _Replica("a", 2)
    coordinator = SyncCoordinator(
        [LocalPublisher(0, 1, _weights(1), PARAMS)], [replica], options=SyncOptions(timeout_s=20.0, commit="inplace")
    )
    await coordinator.open()
    healthy, failing = replica.receivers
    together, processed = threading.Barrier(2), list[Any]()

    def collective(reloader: ToyReloader, module: Any) -> bool:
        processed.append(module)
        together.wait(10)
        return True

    def commit(receiver: WeightReceiver) -> Any:
        return asyncio.to_thread(receiver.commit, 1, deadline_s=3.0)

    try:
        await coordinator.publish(1)
        slots = [SlotAt(0, *await _pinned(coordinator, 1))]
        for receiver in replica.receivers if trouble != "it was not asked to prefetch" else [healthy]:
            receiver.prefetch(1, slots, deadline_s=5.0).result(5)
        with monkeypatch.context() as broken:
            broken.setattr(ToyReloader, "post_process", collective)
            if trouble == "its pull fails":
                broken.setattr(failing._epoch, "pull", lambda *_, **__: _raise(DigestMismatch("its memory is broken")))
            commits = [commit(healthy)] if trouble == "it is silent" else [commit(healthy), commit(failing)]
            results = await asyncio.gather(*commits, return_exceptions=True)
        assert "another worker of its replica does not" in str(results[0])
        assert all(isinstance(result, WeightSyncError) for result in results)
        assert processed == [] and healthy.is_dirty
        if trouble == "its pull fails":  # once both get it, both take it
            for receiver in replica.receivers:
                receiver.prefetch(1, slots, deadline_s=5.0).result(5)
            await asyncio.gather(*map(commit, replica.receivers))
            for engine in replica.engines:
                _assert_equal(engine, engine.loaded(_weights(1)))
    finally:
        await coordinator.close()


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_a_ballot_is_unanimous_or_it_is_not_and_the_first_vote_counts(kind: str) -> None:
    """Over the kind of store that vLLM's workers have, and the one of the test before."""
    hashed, tcp = dist.HashStore, dist.TCPStore
    store = hashed() if kind == "hash" else tcp("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (Ballots(dist.PrefixStore("engine", store), rank=rank, num_workers=2) for rank in (0, 1))
    for number in range(1, 12):
        first.vote(number, is_ready=True)
        assert not first.are_all_ready(number, 0.01), "the other has not voted"
        second.vote(number, is_ready=number % 2 == 0)
        second.vote(number, is_ready=number % 2 == 1)
        assert [each.are_all_ready(number, 5.0) for each in (first, second)] == [number % 2 == 0] * 2


async def _pinned(coordinator: SyncCoordinator, version: int) -> tuple[int, int]:
    pin = coordinator._pin_of(version)
    await pin.hold("test", 5.0)
    return pin.slots[0][1:]


def _raise(error: Exception) -> Any:
    raise error


def test_trial_tells_which_modules_are_derived_and_why_and_leaves_no_trace() -> None:
    model = DerivedEngine()
    model = model.loaded(_weights(1))
    before = [dict(vars(layer)) for layer in model.layers]
    tensors = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
    found = derived_modules(model, ToyReloader(model))
    assert found == {
        "layers.1": "weight is int8 (4, 12) with strides (1, 4), its loader fills bfloat16 (12, 4)",
        "layers.2": "post-processing rearranges or scales weight",
        "layers.3": "post-processing keeps something of the weights in cached",
        "layers.4": "weight of its loader is gone",
        "layers.5": "weight is int8 (4, 12) with strides (1, 4), its loader fills bfloat16 (12, 4)",
    }
    for layer, state in zip(model.layers, before, strict=True):
        assert vars(layer).keys() == state.keys()
        assert all(vars(layer)[key] is value for key, value in state.items())
    for name, (tensor, bits) in tensors.items():
        assert model.get_parameter(name) is tensor
        assert torch.equal(tensor, bits)


def test_a_worker_is_sent_its_shard_and_whole_tensors_only_where_the_loader_computes() -> None:
    model = DerivedEngine(worker=1, num_workers=2)
    recorded = record(model, PARAMS, worker=1, reloader=ToyReloader(model))
    found = {entry.module: entry for entry in recorded.reloaded}
    assert [*found] == [f"layers.{i}" for i in range(1, 7)]
    assert [entry.module for entry in recorded.reloaded if entry.is_whole] == ["layers.6"]
    assert [p.name for p in found["layers.6"].params] == [f"ws_whole/layers.6.{name}" for name in ("q", "k", "bias")]
    assert found["layers.1"].params == (
        EngineParam(name="ws_reload/layers.1.weight", shape=(6, 4), dtype="bfloat16"),
        EngineParam(name="ws_reload/layers.1.bias", shape=(3,), dtype="bfloat16"),
    )
    names = {param.name for entry in recorded.reloaded for param in entry.params}
    assert {p.name for p in recorded.layout.params} == names | {"layers.0.weight", "layers.0.bias"}
    for copy in recorded.layout.copies:
        is_whole = copy.dst_param.startswith("ws_whole/")
        assert copy.src_start[0] == (0 if is_whole else 3), "worker 1 of 2 takes the second half of the rows"
    assert "layers.* x1: direct (its loader's copies cover it exactly once)" in recorded.layout.decisions
    assert "absorbed x1: derived again from other modules' weights" in recorded.layout.decisions


@pytest.mark.parametrize(("value", "is_whole"), [(0.0, False), (7.0, True)])
def test_padding_of_a_derived_module_is_zero_or_its_loader_runs_again(value: float, is_whole: bool) -> None:
    model = DerivedEngine()
    layer: Any = model.layers[1]
    load = layer.load

    def padded(source: str, tensor: torch.Tensor) -> None:
        if source in layer.sources:
            load(source, tensor)
        else:
            layer.bias.data[:4].copy_(tensor[:4])
            layer.bias.data[4:].fill_(value)

    vars(layer)["load"] = padded
    found = {entry.module: entry for entry in record(model, PARAMS, worker=0, reloader=ToyReloader(model)).reloaded}
    assert found["layers.1"].is_whole == is_whole
    assert ("fills a part of layers.1.bias with 7.0" in found["layers.1"].why) == is_whole


def test_tensor_that_comes_out_in_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DerivedEngine()
    reload = ModuleReload(Reloads(model, ToyReloader(model), ()), CpuBackend(), arrivals=None)
    reload.reload()
    plain: Any = model.layers[0]
    monkeypatch.setattr(plain.weight, "data", torch.ones(13, 4, dtype=torch.bfloat16))
    with pytest.raises(PlanMismatch, match=r"absorbed: halved is bfloat16 \(4, 12\).* again it is bfloat16 \(4, 13\)"):
        reload.reload()
    assert reload.nbytes == 0, "nothing arrives for modules that are derived from others"


modules = st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True), max_size=8)


@given(modules, st.integers(1, 60))
def test_buckets_hold_every_module_whole_and_no_tensor_twice(reads: list[list[str]], limit: int) -> None:
    params = {name: EngineParam(name=name, shape=(10 + i,), dtype="uint8") for i, name in enumerate("abcdefgh")}
    reloaded = [ReloadedModule(f"m{i}", "", tuple(map(params.__getitem__, names))) for i, names in enumerate(reads)]
    buckets = bucketed(reloaded, max_bytes=limit)
    names = [param.name for bucket in buckets for param in bucket.params]
    assert sorted(names) == sorted({name for tensors in reads for name in tensors})
    assert sorted(name for bucket in buckets for name in bucket.modules) == sorted(e.module for e in reloaded)
    home = {module: set(bucket.params) for bucket in buckets for module in bucket.modules}
    assert all(set(entry.params) <= home[entry.module] for entry in reloaded)
    smallest = bucketed(reloaded, max_bytes=0)
    assert all(sum(sizes_of(b.params).values()) <= limit or b in smallest for b in buckets)


def test_derived_module_of_which_a_tensor_is_missing_is_refused() -> None:
    model = DerivedEngine()
    for missing in ("layers.1.k", "layers.4.bias"):
        params = tuple(meta for meta in PARAMS if meta.name != missing)
        with pytest.raises(PlanMismatch, match=rf"layers.{missing[7]}.* are never written"):
            record(model, params, worker=0, reloader=ToyReloader(model))


def test_decisions_are_one_line_for_all_layers_that_differ_only_in_their_number() -> None:
    reloaded = [ReloadedModule(f"layers.{i}.mlp", "fp8", ()) for i in range(3)]
    assert decision_lines(["layers.0.norm", "layers.1.norm", ""], reloaded) == (
        "layers.*.norm x2: direct (its loader's copies cover it exactly once)",
        "the model itself x1: direct (its loader's copies cover it exactly once)",
        "layers.*.mlp x3: reload of its shard (fp8)",
    )
