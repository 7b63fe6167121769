"""The fallback: who needs it is found out and said, and what it loads equals a load from the start, bit for bit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.derived_engine import DerivedEngine, Layer, ToyReloader, checkpoint_params
from tests.fakes.row_shards import held_by, row_shards, rows_of
from tests.fakes.sync_world import LocalPublisher, LocalReplica
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import DigestMismatch, PlanMismatch, WeightSyncError
from weight_sync.plan.planner import build_plan, check_plan
from weight_sync.plan.types import ParamMeta
from weight_sync.receive.quantized import (
    Fallback,
    ReloadedModule,
    ReloadGroup,
    Tensors,
    bucketed,
    decision_lines,
    derived_modules,
    grouped,
    plan_buckets,
)
from weight_sync.receive.receiver import WeightReceiver, WorkerService
from weight_sync.receive.recorder import record
from weight_sync.receive.staging import Landing, Reloads, build_landing, parameter_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weight_sync.messages import CommitMode

PARAMS = checkpoint_params()
RANKS = 3
DERIVED = [f"layers.{i}" for i, kind in enumerate(DerivedEngine.KINDS) if kind != "plain"]


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {meta.name: torch.randn(meta.shape, generator=generator).bfloat16() for meta in PARAMS}


class _World:
    """Learner ranks, plan and one landing per worker, without processes."""

    def __init__(self, num_workers: int, commit: CommitMode) -> None:
        self.models = [DerivedEngine(worker, num_workers) for worker in range(num_workers)]
        self.reloaders = [ToyReloader(model) for model in self.models]
        recorded = [
            record(model, PARAMS, worker=w, reloader=reloader)
            for w, (model, reloader) in enumerate(zip(self.models, self.reloaders, strict=True))
        ]
        layouts = [entry.layout for entry in recorded]
        self.plan = build_plan(epoch=1, params=PARAMS, shards=row_shards(PARAMS, RANKS), workers=layouts)
        check_plan(self.plan)
        self.landings: list[Landing] = [
            build_landing(
                self.plan.pull[w], parameter_bytes(model), CpuBackend(), commit=commit,
                reloads=Reloads(model, reloader, entry.reloaded), params=PARAMS,
            )
            for w, (model, reloader, entry) in enumerate(zip(self.models, self.reloaders, recorded, strict=True))
        ]  # fmt: skip

    def fallback(self, worker: int = 0) -> Fallback:
        fallback = self.landings[worker].fallback
        assert fallback is not None
        return fallback

    def pull(self, full: dict[str, torch.Tensor]) -> None:
        """Pack, move, and the direct part of the commit."""
        for plan in self.plan.pack:
            rows = held_by(full, rows_of(PARAMS, plan.rank, RANKS))
            arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
            for item in plan.items:
                box = tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))
                packed = rows[item.param][box].contiguous().view(-1).view(torch.uint8)
                arena[item.arena_off : item.arena_off + item.nbytes].copy_(packed)
            for landing in self.landings:
                for piece in landing.pieces.get(plan.rank, ()):
                    piece.dst.copy_(arena[piece.src_off : piece.src_off + piece.dst.numel()])
        for landing in self.landings:
            for target, arrived in landing.moves:
                target.copy_(arrived)

    def sync(self, full: dict[str, torch.Tensor]) -> None:
        self.pull(full)
        for worker in range(len(self.landings)):
            self.fallback(worker).reload()

    def close(self) -> None:
        for landing in self.landings:
            landing.close()


def _assert_equal(model: DerivedEngine, fresh: DerivedEngine) -> None:
    want = dict(fresh.named_parameters())
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, want[name]), f"{name} differs"
    x = torch.ones(2, 4)
    for ours, theirs in zip(model.layers, fresh.layers, strict=True):
        assert isinstance(ours, Layer)
        assert isinstance(theirs, Layer)
        assert torch.equal(ours.output(x), theirs.output(x)), f"a layer of kind {ours.kind} computes something else"


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("commit", ["staged", "inplace"])
def test_reloaded_and_direct_modules_equal_a_fresh_load_and_never_move(commit: CommitMode, num_workers: int) -> None:
    world = _World(num_workers, commit)
    addresses = [{n: p.data_ptr() for n, p in model.named_parameters()} for model in world.models]
    for seed in (1, 2, 1):
        world.sync(_weights(seed))
        for worker, model in enumerate(world.models):
            _assert_equal(model, model.loaded(_weights(seed)))
            assert world.fallback(worker).verify() == []
    assert addresses == [{n: p.data_ptr() for n, p in model.named_parameters()} for model in world.models]
    world.close()


class _Learner(LocalPublisher):
    def ws_describe(self) -> bytes:
        return self.publisher.describe(PARAMS, rows_of(PARAMS, self.rank, self.num_ranks), {})

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        tensors = held_by(self.full, rows_of(PARAMS, self.rank, self.num_ranks))
        return self.publisher.publish(version, tensors, deadline_s=deadline_s)


class _Replica(LocalReplica):
    def __init__(self, name: str, num_workers: int) -> None:
        super().__init__(name, num_workers)
        self.engines = [DerivedEngine(worker, num_workers) for worker in range(num_workers)]
        receivers = [
            WeightReceiver(engine, CpuBackend(), worker=worker, reloader=ToyReloader(engine))
            for worker, engine in enumerate(self.engines)
        ]
        self.services = [WorkerService(lambda receiver=receiver: receiver) for receiver in receivers]


@pytest.mark.asyncio
@pytest.mark.parametrize("commit", ["staged", "inplace"])
async def test_whole_sync_of_derived_engines_passes_the_self_test(
    commit: CommitMode, caplog: pytest.LogCaptureFixture
) -> None:
    learners = [_Learner(rank, 2, _weights(0)) for rank in range(2)]
    replicas = [_Replica(name, 2) for name in "ab"]
    options = SyncOptions(timeout_s=20.0, transport="shm", commit=commit)
    coordinator = SyncCoordinator(learners, replicas, options=options)
    with caplog.at_level(logging.DEBUG):
        await coordinator.open()
    assert "layers.* x1: fallback (post-processing rearranges or scales weight)" in caplog.text
    try:
        for version in (1, 2):
            for learner in learners:
                learner.full = _weights(version)
            await coordinator.publish(version)
            await coordinator.sync(version)
            for engine in (engine for replica in replicas for engine in replica.engines):
                _assert_equal(engine, engine.loaded(_weights(version)))
            await coordinator.self_test()
        shuffled: Any = replicas[1].engines[0].layers[2]
        shuffled.weight.data.zero_()
        with pytest.raises(DigestMismatch, match=r"a second reload of layers\.2 gives other weights"):
            await coordinator.self_test()
    finally:
        await coordinator.close()


def test_self_test_tells_which_modules_are_derived_and_why_and_leaves_no_trace() -> None:
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


def test_layout_sends_whole_tensors_of_derived_modules_and_boxes_of_the_others() -> None:
    model = DerivedEngine(worker=1, num_workers=2)
    recorded = record(model, PARAMS, worker=1, reloader=ToyReloader(model))
    assert [entry.module for entry in recorded.reloaded] == DERIVED
    assert recorded.reloaded[0].tensors == ("layers.1.q", "layers.1.k", "layers.1.bias")
    virtual = {f"ws_fallback/{name}" for entry in recorded.reloaded for name in entry.tensors}
    assert {p.name for p in recorded.layout.params} == virtual | {"layers.0.weight", "layers.0.bias"}
    for copy in recorded.layout.copies:
        if copy.dst_param in virtual:
            assert copy.dst_param == f"ws_fallback/{copy.src_param}"
            assert (set(copy.src_start), copy.src_size) == (
                {0},
                next(p.shape for p in PARAMS if p.name == copy.src_param),
            )
        else:
            assert copy.src_start[0] == 3, "worker 1 of 2 takes the second half of the rows"
    quantised = "weight is int8 (4, 6) with strides (1, 4), its loader fills bfloat16 (6, 4)"
    assert recorded.layout.decisions[0] == "layers.* x1: direct (its loader's copies cover it exactly once)"
    assert f"layers.* x2: fallback ({quantised})" in recorded.layout.decisions


class _ReusesTooEarly(Fallback):
    """Deliberately bad: every tensor travels through the same small buffer, whether or not its module is complete."""

    def _load(self, bucket: Tensors, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        weights = list(weights)
        buffer = torch.empty(max(tensor.numel() for _, tensor in weights), dtype=torch.bfloat16)

        def streamed() -> Any:
            for name, tensor in weights:
                yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

        super()._load(bucket, streamed() if self.is_bad else weights)

    is_bad = True


def test_buffer_that_is_reused_before_a_module_is_complete_corrupts_and_verify_sees_it() -> None:
    world = _World(1, "staged")
    model, good = world.models[0], world.fallback()
    bad = _ReusesTooEarly(good._backend, good._reloader, block=good._block, buckets=good._buckets)
    world.pull(_weights(1))
    bad.reload()
    with pytest.raises(AssertionError, match=r"differs|computes something else"):
        _assert_equal(model, model.loaded(_weights(1)))
    bad.is_bad = False  # the reference has buffers of its own; only what `reload` left is bad
    assert set(bad.verify()) >= {"layers.1", "layers.2", "layers.4", "layers.5"}
    good.reload()
    _assert_equal(model, model.loaded(_weights(1)))
    assert good.verify() == []
    world.close()


def test_one_staged_bucket_serves_all_groups_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_sync.receive.staging.BUCKET_BYTES", 1)
    staged, inplace = _World(1, "staged"), _World(1, "inplace")
    assert inplace.fallback().nbytes == staged.fallback().nbytes * len(DERIVED)
    for world in (staged, inplace):
        world.sync(_weights(3))
        assert world.reloaders[0].num_reloads == len(DERIVED)
        _assert_equal(world.models[0], world.models[0].loaded(_weights(3)))
        world.close()


def test_reload_that_moves_a_live_tensor_is_an_error() -> None:
    world = _World(1, "staged")
    world.reloaders[0].moves = True
    world.pull(_weights(1))
    with pytest.raises(WeightSyncError, match="moved or dropped bias; captured graphs"):
        world.fallback().reload()
    world.close()


modules = st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True), max_size=8)


@given(modules, st.integers(1, 60))
def test_groups_and_buckets_hold_every_tensor_once_and_every_module_whole(reads: list[list[str]], limit: int) -> None:
    reloaded = [ReloadedModule(f"m{i}", "", tuple(tensors)) for i, tensors in enumerate(reads)]
    sizes = {name: 10 + i for i, name in enumerate("abcdefgh")}
    groups = grouped(reloaded)
    for parts in (groups, bucketed(groups, sizes, max_bytes=limit)):
        names = [name for part in parts for name in part.tensors]
        assert sorted(names) == sorted({name for tensors in reads for name in tensors})
        assert sorted(name for part in parts for name in part.modules) == sorted(entry.module for entry in reloaded)
        home = {module: set(part.tensors) for part in parts for module in part.modules}
        assert all(set(entry.tensors) <= home[entry.module] for entry in reloaded)
    for part in bucketed(groups, sizes, max_bytes=limit):
        fits = sum(sizes[name] for name in part.tensors) <= limit
        assert fits or part in groups


def test_plan_of_buckets_never_overlaps_tensors_of_one_bucket() -> None:
    reloaded = [ReloadedModule("a", "", ("x", "y")), ReloadedModule("b", "", ("z",))]
    params = [ParamMeta(name=n, shape=(300,), dtype="uint8") for n in "xyz"]
    staged = plan_buckets(reloaded, params, is_staged=True, max_bytes=700)
    assert staged.buckets == (ReloadGroup(("a",), ("x", "y")), ReloadGroup(("b",), ("z",)))
    assert (staged.offsets, staged.nbytes) == ({"x": 0, "y": 512, "z": 0}, 1024)
    inplace = plan_buckets(reloaded, params, is_staged=False, max_bytes=700)
    assert (inplace.offsets, inplace.nbytes) == ({"x": 0, "y": 512, "z": 1024}, 1536)


class _Engine(torch.nn.Module):
    """Any loader as a function of (module, name, tensor); parameters of module `part` by name."""

    def __init__(self, loader: Any, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.part: Any = torch.nn.Module()
        self.loader = loader
        for name, shape in shapes.items():
            self.part.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.loader(self.part, name, tensor)


class _AnyReloader(ToyReloader):
    def __init__(self) -> None:
        super().__init__(DerivedEngine())


def _through_temporary(m: Any, n: str, t: torch.Tensor) -> None:
    if n == "t":
        m.held = torch.empty(6, 4)
        m.held[1:3].copy_(t[1:3])
    else:
        m.w.data.copy_(m.held * 2)


def _rebinds(m: Any, n: str, t: torch.Tensor) -> None:
    if n == "t":
        fresh = torch.nn.Parameter(torch.empty(6, 4), requires_grad=False)
        fresh.data.copy_(t)
        m.w = fresh


_GIVEN_UP: dict[str, tuple[Any, str, set[str]]] = {
    "arithmetic": (lambda m, n, t: n == "t" and m.w.data.copy_(t + 1), "aten.add.Tensor computes with t", {"t"}),
    "concatenation": (lambda m, n, t: n == "t" and m.w.data.copy_(torch.cat([t[3:], t[:3]])), "combines t", {"t"}),
    "narrower dtype": (lambda m, n, t: n == "t" and m.w.data.copy_(t.half()), "rounds t from torch.float32", {"t"}),
    "other bytes": (lambda m, n, t: n == "t" and m.w.data.view(torch.int32).copy_(t), "only whole elements", {"t"}),
    "sum of two": (lambda m, n, t: m.w.data.add_(t), "combines t", {"t", "u"}),
    "temporary": (_through_temporary, "its loader computes with what it loads", {"t"}),
    "twice": (lambda m, n, t: m.w.data.copy_(t), "24 elements of part.w are written more than once", {"t", "u"}),
    "fill afterwards": (
        lambda m, n, t: n == "t" and [m.w.data.copy_(t), m.w.data[1:3].fill_(0)],
        "8 elements of part.w are overwritten",
        {"t"},
    ),
    "written over": (
        lambda m, n, t: n == "t" and [m.w.data.copy_(t), m.w.data.mul_(2)],
        "aten.mul_.Tensor changes part.w",
        {"t"},
    ),
    "composed": (
        lambda m, n, t: n == "t" and [m.w.data.copy_(t), m.w.data.copy_(m.w.data + 1)],
        "writes something into part.w",
        {"t"},
    ),
    "rebinding": (_rebinds, "its loader moves part.w to other memory", {"t"}),
}


@pytest.mark.parametrize("case", _GIVEN_UP)
def test_module_whose_loader_does_more_than_copy_is_given_to_the_fallback(case: str) -> None:
    loader, why, sources = _GIVEN_UP[case]
    engine = _Engine(loader, w=(6, 4))
    held = engine.part.w
    metas = tuple(ParamMeta(name=name, shape=(6, 4), dtype="float32") for name in "tu")
    recorded = record(engine, metas, worker=0, reloader=_AnyReloader())
    (entry,) = recorded.reloaded
    assert (entry.module, set(entry.tensors)) == ("part", sources)
    assert why in entry.why
    assert {copy.dst_param for copy in recorded.layout.copies} == {f"ws_fallback/{name}" for name in sources}
    assert engine.part.w is held
    assert not held.any(), "recording wrote into the engine"


_DRIFT: dict[str, tuple[Any, str]] = {
    "half": (lambda m, n, t: m.w.data[:2].copy_(t[:2]), "16 are never written"),
    "missing": (lambda m, n, t: None, "part.w .* 24 are never written"),
    "wrong shape": (lambda m, n, t: m.w.data[:5].copy_(t), "does not fit"),
    "unknown name": (lambda m, n, t: m.get_parameter(n), "AttributeError"),
    "item": (lambda m, n, t: m.w.data.fill_(t[0, 0].item()), "_local_scalar_dense.* t"),
    "into checkpoint": (lambda m, n, t: t.mul_(2), "into the checkpoint"),
}


@pytest.mark.parametrize("case", _DRIFT)
def test_drift_between_learner_and_engine_is_refused_also_with_a_fallback(case: str) -> None:
    loader, words = _DRIFT[case]
    metas = (ParamMeta(name="t", shape=(6, 4), dtype="float32"),)
    with pytest.raises(PlanMismatch, match=words):
        record(_Engine(loader, w=(6, 4)), metas, worker=0, reloader=_AnyReloader())


def test_derived_module_of_which_a_tensor_is_missing_is_refused() -> None:
    model = DerivedEngine()
    for missing in ("layers.1.k", "layers.4.bias"):
        params = tuple(meta for meta in PARAMS if meta.name != missing)
        with pytest.raises(PlanMismatch, match=rf"layers.{missing[7]}.* are never written"):
            record(model, params, worker=0, reloader=ToyReloader(model))


def test_parameter_of_another_dtype_than_the_wire_goes_through_its_loader() -> None:
    engine = _Engine(lambda m, n, t: m.w.data.copy_(t), w=(6, 4))
    wider = (ParamMeta(name="t", shape=(6, 4), dtype="bfloat16"),)
    assert record(engine, wider, worker=0, reloader=_AnyReloader()).reloaded == (), "the planner sends it in float32"
    engine.part.w.data = engine.part.w.data.bfloat16()
    params = (ParamMeta(name="t", shape=(6, 4), dtype="float32"),)
    recorded = record(engine, params, worker=0, reloader=_AnyReloader())
    assert [entry.why for entry in recorded.reloaded] == ["part.w is bfloat16, t is sent as float32"]


def test_decisions_are_one_line_for_all_layers_that_differ_only_in_their_number() -> None:
    reloaded = [ReloadedModule(f"layers.{i}.mlp", "fp8", ()) for i in range(3)]
    assert decision_lines(["layers.0.norm", "layers.1.norm", ""], reloaded) == (
        "layers.*.norm x2: direct (its loader's copies cover it exactly once)",
        "the model itself x1: direct (its loader's copies cover it exactly once)",
        "layers.*.mlp x3: fallback (fp8)",
    )
