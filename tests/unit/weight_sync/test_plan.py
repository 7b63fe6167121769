"""The plan against a slow reference: pack and pull with byte arrays must equal slicing the full tensors."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.toy_transformer import (
    ToySpec,
    expected_params,
    random_tensors,
    run_manifest,
    worker_layouts,
)
from weight_sync.errors import PlanMismatch
from weight_sync.messages import manifest_from_bytes, manifest_to_bytes
from weight_sync.plan.geometry import num_uncovered
from weight_sync.plan.planner import ALIGN_BYTES, DTYPE_BYTES, build_manifest, manifest_digest, verify_manifest
from weight_sync.plan.types import EngineParam, Manifest, ParamMeta, RecordedCopy, Run, ShardDesc, WorkerLayout


def _chunked(params: tuple[ParamMeta, ...], num_ranks: int) -> tuple[ShardDesc, ...]:
    """torch.chunk over rows, written down once more."""
    descs = []
    for meta in params:
        step = -(-meta.shape[0] // num_ranks)
        for rank in range(num_ranks):
            rows = range(meta.shape[0])[rank * step : (rank + 1) * step]
            start = rows.start if len(rows) else 0
            descs.append(ShardDesc(param=meta.name, rank=rank, row_start=start, row_stop=start + len(rows)))
    return tuple(descs)


def _sizes(layouts: tuple[WorkerLayout, ...]) -> dict[int, dict[str, int]]:
    return {x.worker: {p.name: prod(p.shape) * DTYPE_BYTES[p.dtype] for p in x.params} for x in layouts}


@st.composite
def _specs(draw: st.DrawFn) -> ToySpec:
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8, 16) if n % tp == 0 or tp % n == 0]))
    return ToySpec(
        tp=tp,
        heads=int(np.lcm(tp, kv_heads)) * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)),
        hidden=draw(st.integers(1, 9)),
        intermediate=tp * draw(st.integers(1, 5)),
        vocab=draw(st.integers(1, 40)),
        vocab_multiple=draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 2)),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"])),
    )


@st.composite
def _shards(draw: st.DrawFn, params: tuple[ParamMeta, ...]) -> tuple[ShardDesc, ...]:
    """torch.chunk shards, or arbitrary cuts that give ranks their rows in any order and some of them nothing."""
    num_ranks = draw(st.integers(1, 5))
    if draw(st.booleans()):
        return _chunked(params, num_ranks)
    descs = []
    for meta in params:
        inner = draw(st.lists(st.integers(0, meta.shape[0]), min_size=num_ranks - 1, max_size=num_ranks - 1))
        cuts = [0, *sorted(inner), meta.shape[0]]
        ranks = draw(st.permutations(range(num_ranks)))
        for rank, (start, stop) in zip(ranks, pairwise(cuts), strict=True):
            descs.append(ShardDesc(param=meta.name, rank=rank, row_start=start, row_stop=stop))
    return tuple(descs)


@given(data=st.data(), spec=_specs(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=120, deadline=None)
def test_pulled_bytes_equal_slices_of_the_full_tensors(data: st.DataObject, spec: ToySpec, seed: int) -> None:
    params, layouts = spec.params(), worker_layouts(spec)
    shards = data.draw(_shards(params))
    full = random_tensors(params, np.random.default_rng(seed))
    manifest = build_manifest(epoch=3, params=params, shards=shards, workers=layouts)
    verify_manifest(manifest)
    engines = run_manifest(manifest, full=full, shards=shards, sizes=_sizes(layouts))
    for worker in range(spec.tp):
        for name, value in expected_params(spec, full, worker).items():
            np.testing.assert_array_equal(engines[worker][name], np.frombuffer(value.tobytes(), np.uint8), name)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_any_grid_of_boxes_lands_in_any_dimension_order(data: st.DataObject, seed: int) -> None:
    """Boxes that cut every dimension, handed to workers at random, stored with dimensions permuted."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    meta = ParamMeta(name="w", shape=shape, dtype="float16")
    shards = data.draw(_shards((meta,)))
    full = random_tensors((meta,), np.random.default_rng(seed))
    cuts = [[0, *sorted(data.draw(st.sets(st.integers(1, n), max_size=2)) - {n}), n] for n in shape]
    cells = [[]]
    for axis in cuts:
        cells = [[*cell, span] for cell in cells for span in pairwise(axis)]
    copies: dict[int, list[RecordedCopy]] = {0: [], 1: [], 2: []}
    expected: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
    for cell in cells:
        order = data.draw(st.permutations(range(len(shape))))
        box = full["w"][tuple(slice(a, b) for a, b in cell)]
        strides = np.empty(box.shape, np.uint16).transpose(order).copy().transpose(np.argsort(order)).strides
        for worker in data.draw(st.sets(st.integers(0, 2), min_size=1)):
            copies[worker].append(
                RecordedCopy(
                    src_param="w",
                    src_start=tuple(a for a, _ in cell),
                    src_size=box.shape,
                    dst_param="p",
                    dst_offset=sum(x.size for x in expected[worker]),
                    dst_stride=tuple(s // 2 for s in strides),
                )
            )
            expected[worker].append(box.transpose(order).reshape(-1))
    layouts = tuple(
        WorkerLayout(
            worker=w,
            params=(EngineParam(name="p", shape=(sum(x.size for x in expected[w]),), dtype="float16"),),
            copies=tuple(copies[w]),
        )
        for w in copies
    )
    manifest = build_manifest(epoch=0, params=(meta,), shards=shards, workers=layouts)
    verify_manifest(manifest)
    engines = run_manifest(manifest, full=full, shards=shards, sizes=_sizes(layouts))
    for w, parts in expected.items():
        want = np.concatenate([np.zeros(0, np.uint16), *parts])
        np.testing.assert_array_equal(engines[w]["p"].view(np.uint16), want)


_SPEC = ToySpec(
    tp=4, heads=8, kv_heads=2, head_dim=8, hidden=32, intermediate=64, vocab=50, vocab_multiple=16, layers=2, bias=True
)


def _manifest(spec: ToySpec = _SPEC, num_ranks: int = 2) -> Manifest:
    params = spec.params()
    shards = _chunked(params, num_ranks)
    return build_manifest(epoch=1, params=params, shards=shards, workers=worker_layouts(spec))


def test_box_needed_by_several_workers_is_packed_once() -> None:
    """2 KV heads over 4 workers: two workers read the same bytes, norms are read by all, the arena holds each once."""
    manifest = _manifest()
    total = sum(prod(meta.shape) * 2 for meta in manifest.params)
    assert sum(item.nbytes for plan in manifest.pack for item in plan.items) == total
    assert sum(plan.nbytes for plan in manifest.pull) > total


def test_one_publisher_and_one_worker_need_one_run_per_engine_parameter() -> None:
    spec = _changed(tp=1, kv_heads=8)
    manifest = _manifest(spec, num_ranks=1)
    (pull,) = manifest.pull
    assert sorted(run.dst_param for run in pull.runs) == sorted(spec.parts(0))


def test_fused_parameter_of_uneven_tiny_boxes_is_still_one_run() -> None:
    """q, k and v biases of 3, 1 and 1 bfloat16 elements: alignment must not tear the run apart."""
    spec = ToySpec(
        tp=1, heads=3, kv_heads=1, head_dim=1, hidden=5, intermediate=3, vocab=7, vocab_multiple=1, bias=True
    )
    manifest = _manifest(spec, num_ranks=1)
    assert sum(run.dst_param == "0.qkv.bias" for run in manifest.pull[0].runs) == 1


def test_row_parallel_strips_are_one_run_per_publisher() -> None:
    """A column strip is strided in the shard and contiguous in the engine, so packing makes it one run."""
    manifest = _manifest(num_ranks=3)
    for plan in manifest.pull:
        assert sum(run.dst_param == "0.down.weight" for run in plan.runs) == 3


def test_runs_start_at_aligned_bytes() -> None:
    for plan in _manifest().pull:
        assert all(run.src_off % ALIGN_BYTES == 0 for run in plan.runs)


def test_rank_without_rows_gets_an_empty_plan() -> None:
    params = (ParamMeta(name="w", shape=(2, 4), dtype="float32"),)
    layout = WorkerLayout(
        worker=0,
        params=(EngineParam(name="w", shape=(2, 4), dtype="float32"),),
        copies=(_copy("w", (2, 4)),),
    )
    manifest = build_manifest(epoch=0, params=params, shards=_chunked(params, 5), workers=(layout,))
    assert [(p.rank, p.arena_bytes) for p in manifest.pack] == [(0, 16), (1, 16), (2, 0), (3, 0), (4, 0)]


def test_scalar_parameter_travels() -> None:
    params = (ParamMeta(name="scale", shape=(), dtype="float32"),)
    shards = (ShardDesc(param="scale", rank=0, row_start=0, row_stop=1),)
    layout = WorkerLayout(
        worker=0, params=(EngineParam(name="s", shape=(1,), dtype="float32"),), copies=(_copy("scale", (), "s"),)
    )
    manifest = build_manifest(epoch=0, params=params, shards=shards, workers=(layout,))
    verify_manifest(manifest)
    assert manifest.pull[0].runs == (Run(src_rank=0, src_off=0, dst_param="s", dst_off=0, nbytes=4),)


def _changed(**changes: int) -> ToySpec:
    return ToySpec(**{**_SPEC.__dict__, **changes})


def _copy(name: str, size: tuple[int, ...], dst: str | None = None) -> RecordedCopy:
    stride = tuple(prod(size[d + 1 :]) for d in range(len(size)))
    return RecordedCopy(
        src_param=name,
        src_start=(0,) * len(size),
        src_size=size,
        dst_param=name if dst is None else dst,
        dst_offset=0,
        dst_stride=stride,
    )


def _pair(**engine: object) -> dict[str, tuple[object, ...]]:
    """A learner and an engine that agree on one [4, 2] parameter, up to changes of the recorded copy."""
    copy = msgspec.structs.replace(_copy("w", (4, 2)), **engine)
    layout = WorkerLayout(worker=0, params=(EngineParam(name="w", shape=(4, 2), dtype="bfloat16"),), copies=(copy,))
    params = (ParamMeta(name="w", shape=(4, 2), dtype="bfloat16"),)
    return {"params": params, "shards": _chunked(params, 2), "workers": (layout,)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"src_param": "v"}, ["worker 0: v -> w: the learner has no parameter of that name", "w (4, 2) is trained"]),
        ({"dst_param": "x"}, ["worker 0: w -> x: the engine lists no parameter"]),
        ({"src_size": (5, 2)}, ["size (5, 2) exceeds the learner's shape (4, 2)"]),
        ({"src_start": (0, 0, 0)}, ["recorded with 2 dimensions"]),
        ({"dst_offset": 1}, ["writes up to element 9 of 8"]),
        ({"dst_stride": (1, 1)}, ["3 elements of w are written more than once"]),
        ({"dst_stride": (-2, 1)}, ["must not be negative"]),
    ],
)
def test_copy_that_does_not_fit_is_refused_with_numbers(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PlanMismatch) as caught:
        build_manifest(epoch=0, **_pair(**change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_all_problems_are_listed_at_once() -> None:
    good = _pair()
    params = (
        ParamMeta(name="w", shape=(4, 2), dtype="float32"),
        ParamMeta(name="lm_head.weight", shape=(3, 3), dtype="bfloat16"),
        ParamMeta(name="odd", shape=(1,), dtype="complex64"),
    )
    shards = (
        ShardDesc(param="w", rank=0, row_start=0, row_stop=3),
        ShardDesc(param="w", rank=1, row_start=2, row_stop=4),
        ShardDesc(param="lm_head.weight", rank=0, row_start=1, row_stop=2),
        ShardDesc(param="lm_head.weight", rank=0, row_start=2, row_stop=9),
        ShardDesc(param="ghost", rank=2, row_start=0, row_stop=1),
    )
    (layout,) = good["workers"]
    idle = EngineParam(name="idle", shape=(7,), dtype="bfloat16")
    layout = msgspec.structs.replace(layout, params=(*layout.params, idle))
    with pytest.raises(PlanMismatch) as caught:
        build_manifest(epoch=0, params=params, shards=shards, workers=(layout, layout))
    message = str(caught.value)
    for part in (
        "worker 0 occurs 2 times",
        "odd has dtype 'complex64'",
        "rows 2-3 of w are held twice (at rank 1)",
        "rank 0 lists 2 shards of lm_head.weight",
        "rank 0 holds rows 2-9 of lm_head.weight, which has 3 rows",
        "rows 0-1 of lm_head.weight are held by no rank",
        "rows 2-3 of lm_head.weight are held by no rank",
        "rows 0-1 of odd are held by no rank",
        "rank 2 holds ghost",
        "w, w: the wire has float32, the engine stores bfloat16",
        "lm_head.weight (3, 3) is trained but no engine worker loads it",
        "idle of the engine (7 elements) receives nothing",
    ):
        assert part in message, (part, message)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_elements_in_no_box_are_counted_like_in_a_mask(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    mask = np.ones(shape, bool)
    boxes = []
    for _ in range(data.draw(st.integers(0, 6))):
        start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))
        boxes.append((start, size))
        mask[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] = False
    assert num_uncovered(shape, boxes) == mask.sum()


def _stages(spec: ToySpec) -> tuple[WorkerLayout, ...]:
    """Two pipeline stages out of the layout of one worker: layer 0 with the embedding, and the rest."""
    (whole,) = worker_layouts(spec)
    first = {p.name for p in whole.params if p.name.startswith(("0.", "embed"))}
    return tuple(
        WorkerLayout(
            worker=stage,
            params=tuple(p for p in whole.params if (p.name in first) == (stage == 0)),
            copies=tuple(c for c in whole.copies if (c.dst_param in first) == (stage == 0)),
        )
        for stage in range(2)
    )


def test_pipeline_stages_pull_their_own_layers_and_together_everything() -> None:
    spec = _changed(tp=1, kv_heads=8)
    params, full = spec.params(), random_tensors(spec.params(), np.random.default_rng(0))
    shards, stages = _chunked(params, 3), _stages(spec)
    manifest = build_manifest(epoch=0, params=params, shards=shards, workers=stages)
    verify_manifest(manifest)
    engines = run_manifest(manifest, full=full, shards=shards, sizes=_sizes(stages))
    assert not engines[0].keys() & engines[1].keys()
    for name, value in expected_params(spec, full, 0).items():
        (stage,) = (stage for stage in engines.values() if name in stage)
        np.testing.assert_array_equal(stage[name], np.frombuffer(value.tobytes(), np.uint8), name)
    assert sum(plan.nbytes for plan in manifest.pull) == sum(prod(meta.shape) * 2 for meta in params)


def test_layer_that_no_stage_loads_is_refused_by_name() -> None:
    spec = _changed(tp=1, kv_heads=8)
    params = spec.params()
    with pytest.raises(PlanMismatch) as caught:
        build_manifest(epoch=0, params=params, shards=_chunked(params, 2), workers=_stages(spec)[:1])
    missing = {meta.name for meta in params if not meta.name.startswith(("0.", "embed"))}
    assert missing
    assert str(caught.value).count("no engine worker loads it") == len(missing)
    assert all(f"{name} " in str(caught.value) for name in missing)


def test_part_of_a_parameter_that_no_worker_loads_is_refused_with_its_size() -> None:
    """Three of four tensor-parallel workers: a quarter of every split matrix would keep its old value."""
    params = _SPEC.params()
    with pytest.raises(PlanMismatch) as caught:
        build_manifest(epoch=0, params=params, shards=_chunked(params, 2), workers=worker_layouts(_SPEC)[:3])
    assert "512 of 2048 elements of 0.down.weight (32, 64) are trained but no engine worker loads them" in str(
        caught.value
    )
    assert "norm" not in str(caught.value)


def test_parameter_that_the_engine_keeps_in_float32_travels_in_float32() -> None:
    """Only where everything that it fills is float32; a float32 wire is never rounded."""
    engine = [EngineParam(name=n, shape=(4, 2), dtype=d) for n, d in (("w", "float32"), ("x", "bfloat16"))]
    copies = (_copy("w", (4, 2)), _copy("x", (4, 2)))
    layout = WorkerLayout(worker=0, params=tuple(engine), copies=copies)
    params = tuple(ParamMeta(name=n, shape=(4, 2), dtype="bfloat16") for n in "wx")
    manifest = build_manifest(epoch=0, params=params, shards=_chunked(params, 2), workers=(layout,))
    verify_manifest(manifest)
    assert [(p.name, p.dtype) for p in manifest.params] == [("w", "float32"), ("x", "bfloat16")]
    assert {i.param: i.nbytes for i in manifest.pack[0].items} == {"w": 16, "x": 8}
    both = msgspec.structs.replace(layout, copies=(_copy("w", (4, 2)), _copy("w", (4, 2), "x")))
    with pytest.raises(PlanMismatch, match="w, w: the wire has bfloat16, the engine stores float32"):
        build_manifest(epoch=0, params=params[:1], shards=_chunked(params[:1], 2), workers=(both,))


def test_scattered_destination_is_refused_instead_of_becoming_a_million_runs() -> None:
    params = (ParamMeta(name="w", shape=(2048, 1024), dtype="bfloat16"),)
    copy = msgspec.structs.replace(_copy("w", (2048, 1024)), dst_stride=(1, 2048))
    layout = WorkerLayout(
        worker=0, params=(EngineParam(name="w", shape=(1024, 2048), dtype="bfloat16"),), copies=(copy,)
    )
    with pytest.raises(PlanMismatch, match="2097152 runs of 1 elements"):
        build_manifest(epoch=0, params=params, shards=_chunked(params, 1), workers=(layout,))


def test_digest_does_not_depend_on_the_order_of_shards_and_workers() -> None:
    params, shards, layouts = _SPEC.params(), _chunked(_SPEC.params(), 3), worker_layouts(_SPEC)
    forward = build_manifest(epoch=1, params=params, shards=shards, workers=layouts)
    backward = build_manifest(epoch=1, params=params, shards=shards[::-1], workers=layouts[::-1])
    assert forward == backward


def test_digest_survives_the_wire_and_changes_with_the_contents() -> None:
    manifest = _manifest()
    received = manifest_from_bytes(manifest_to_bytes(manifest))
    assert received == manifest
    verify_manifest(received)
    other = msgspec.structs.replace(manifest, epoch=manifest.epoch + 1)
    assert manifest_digest(other) != manifest.digest
    with pytest.raises(PlanMismatch, match="digest"):
        verify_manifest(other)


def _tampered(
    manifest: Manifest, *, item: dict[str, object] | None = None, run: dict[str, object] | None = None
) -> Manifest:
    """A manifest with its first item or run changed and a digest that fits again."""
    if item is not None:
        first = manifest.pack[0]
        items = (msgspec.structs.replace(first.items[0], **item), *first.items[1:])
        manifest = msgspec.structs.replace(
            manifest, pack=(msgspec.structs.replace(first, items=items), *manifest.pack[1:])
        )
    if run is not None:
        head = manifest.pull[0]
        runs = (msgspec.structs.replace(head.runs[0], **run), *head.runs[1:])
        manifest = msgspec.structs.replace(
            manifest, pull=(msgspec.structs.replace(head, runs=runs), *manifest.pull[1:])
        )
    return msgspec.structs.replace(manifest, digest=manifest_digest(manifest))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"item": {"param": "x"}}, "no such parameter"),
        ({"item": {"start": (10**6, 0)}}, "exceeds"),
        ({"item": {"nbytes": 2}}, "2 bytes for"),
        ({"item": {"arena_off": 10**9}}, "of an arena of"),
        ({"item": {"arena_off": 1}}, "not aligned"),
        ({"item": {"arena_off": 64}}, "packed more than once"),
        ({"run": {"src_rank": 9}}, "reads bytes that are not packed"),
        ({"run": {"src_off": 2**62}}, "reads bytes that are not packed"),
        ({"run": {"nbytes": 0}}, "out of range"),
        ({"run": {"dst_off": 2**63}}, "out of range"),
        ({"run": {"dst_param": "0.down.weight"}}, "of 0.down.weight are written more than once"),
    ],
)
def test_inconsistent_manifest_is_refused_even_with_a_fitting_digest(
    change: dict[str, dict[str, object]], words: str
) -> None:
    with pytest.raises(PlanMismatch, match=words):
        verify_manifest(_tampered(_manifest(), **change))


def test_oversized_or_malformed_manifest_is_refused() -> None:
    data = manifest_to_bytes(_manifest())
    with pytest.raises(PlanMismatch, match=f"{len(data)} bytes, at most 100"):
        manifest_from_bytes(data, max_bytes=100)
    with pytest.raises(PlanMismatch, match="cannot be decoded"):
        manifest_from_bytes(data[:-1])
    with pytest.raises(PlanMismatch, match="cannot be decoded"):
        manifest_from_bytes(msgspec.msgpack.encode({"epoch": 1}))


def test_plan_imports_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, weight_sync.plan.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
