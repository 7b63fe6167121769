"""The plan against a slow reference: pack and pull with byte arrays must equal slicing the full tensors."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections import Counter
from itertools import pairwise, product
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.row_shards import row_shards, rows_of
from tests.fakes.toy_transformer import (
    ToySpec,
    expected_params,
    random_tensors,
    run_plan,
    worker_layouts,
)
from weight_sync.errors import PlanMismatch
from weight_sync.plan.agreement import SharedPlan, open_pack, open_pull, share
from weight_sync.plan.checks import pack_problems, pull_problems
from weight_sync.plan.geometry import num_uncovered
from weight_sync.plan.planner import ALIGN_BYTES, build_plan, check_plan
from weight_sync.plan.types import (
    DTYPE_BYTES,
    EngineParam,
    PackPlan,
    ParamMeta,
    Plan,
    PullPlan,
    RankShards,
    RecordedCopy,
    Run,
    ShardBox,
    Table,
    WorkerLayout,
    from_wire,
    to_wire,
)


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
def _shards(draw: st.DrawFn, params: tuple[ParamMeta, ...]) -> list[RankShards]:
    """torch.chunk shards, perhaps with replicas; or grids cut anywhere in all dimensions, whose cells ranks hold in any
    order, some of them twice and some of the ranks none."""
    num_ranks = draw(st.integers(1, 5))
    if draw(st.booleans()):
        replicas = draw(st.integers(1, 3))
        return [RankShards.of(rank, params, rows_of(params, rank % num_ranks, num_ranks))
                for rank in range(num_ranks * replicas)]  # fmt: skip
    boxes: dict[int, list[ShardBox]] = {}
    for meta in params:
        cuts = [[0, *sorted(draw(st.sets(st.integers(0, n), max_size=1)) - {0, n}), n] for n in meta.shape]
        cells = list(product(*map(pairwise, cuts)))
        ranks = draw(st.permutations(range(len(cells) + num_ranks)))
        for rank, cell in zip(ranks, (*cells, *cells[:num_ranks]), strict=False):
            box = ShardBox(meta.name, tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
            boxes.setdefault(rank, []).append(box)
    return [RankShards.of(rank, params, boxes.get(rank, [])) for rank in range(max(boxes, default=0) + 2)]


@given(data=st.data(), spec=_specs(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_pulled_bytes_equal_slices_of_the_full_tensors(data: st.DataObject, spec: ToySpec, seed: int) -> None:
    params, layouts = spec.params(), worker_layouts(spec)
    shards = data.draw(_shards(params))
    full = random_tensors(params, np.random.default_rng(seed))
    plan = build_plan(epoch=3, params=params, shards=shards, workers=layouts)
    check_plan(plan)
    engines = run_plan(plan, full=full, shards=shards, sizes=_sizes(layouts))
    for worker in range(spec.tp):
        for name, value in expected_params(spec, full, worker).items():
            np.testing.assert_array_equal(engines[worker][name], np.frombuffer(value.tobytes(), np.uint8), name)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
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
    plan = build_plan(epoch=0, params=(meta,), shards=shards, workers=layouts)
    check_plan(plan)
    engines = run_plan(plan, full=full, shards=shards, sizes=_sizes(layouts))
    for w, parts in expected.items():
        want = np.concatenate([np.zeros(0, np.uint16), *parts])
        np.testing.assert_array_equal(engines[w]["p"].view(np.uint16), want)


_SPEC = ToySpec(
    tp=4, heads=8, kv_heads=2, head_dim=8, hidden=32, intermediate=64, vocab=50, vocab_multiple=16, layers=2, bias=True
)


def _plan(spec: ToySpec = _SPEC, num_ranks: int = 2) -> Plan:
    params = spec.params()
    shards = row_shards(params, num_ranks)
    return build_plan(epoch=1, params=params, shards=shards, workers=worker_layouts(spec))


def test_box_needed_by_several_workers_is_packed_once() -> None:
    """2 KV heads over 4 workers: two workers read the same bytes, norms are read by all, the arena holds each once."""
    plan = _plan()
    total = sum(prod(meta.shape) * 2 for meta in plan.params)
    assert sum(item.nbytes for pack in plan.pack for item in pack.items) == total
    assert sum(pull.nbytes for pull in plan.pull) > total


def test_one_publisher_and_one_worker_need_one_run_per_engine_parameter() -> None:
    spec = _changed(tp=1, kv_heads=8)
    plan = _plan(spec, num_ranks=1)
    (pull,) = plan.pull
    assert sorted(run.dst_param for run in pull.runs) == sorted(spec.parts(0))


def test_fused_parameter_of_uneven_tiny_boxes_is_still_one_run() -> None:
    """q, k and v biases of 3, 1 and 1 bfloat16 elements: alignment must not tear the run apart."""
    spec = ToySpec(
        tp=1, heads=3, kv_heads=1, head_dim=1, hidden=5, intermediate=3, vocab=7, vocab_multiple=1, bias=True
    )
    plan = _plan(spec, num_ranks=1)
    assert sum(run.dst_param == "0.qkv.bias" for run in plan.pull[0].runs) == 1


def test_row_parallel_strips_are_one_run_per_publisher() -> None:
    """A column strip is strided in the shard and contiguous in the engine, so packing makes it one run."""
    for pull in _plan(num_ranks=3).pull:
        assert sum(run.dst_param == "0.down.weight" for run in pull.runs) == 3


def test_runs_start_at_aligned_bytes() -> None:
    for plan in _plan().pull:
        assert all(run.src_off % ALIGN_BYTES == 0 for run in plan.runs)


def test_rank_without_rows_gets_an_empty_plan() -> None:
    params = (ParamMeta(name="w", shape=(2, 4), dtype="float32"),)
    layout = WorkerLayout(
        worker=0,
        params=(EngineParam(name="w", shape=(2, 4), dtype="float32"),),
        copies=(_copy("w", (2, 4)),),
    )
    plan = build_plan(epoch=0, params=params, shards=row_shards(params, 5), workers=(layout,))
    assert [(p.rank, p.arena_bytes) for p in plan.pack] == [(0, 64), (1, 64), (2, 0), (3, 0), (4, 0)]


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_replicas_pack_equal_shares_and_each_byte_once(replicas: int) -> None:
    spec = _changed(layers=6)
    params, total = spec.params(), sum(prod(meta.shape) * 2 for meta in spec.params())
    held = [rows_of(params, rank % 2, 2) for rank in range(2 * replicas)]
    shards = [RankShards.of(rank, params, boxes) for rank, boxes in enumerate(held)]
    plan = build_plan(epoch=1, params=params, shards=shards, workers=worker_layouts(spec))
    packed = [sum(item.nbytes for item in pack.items) for pack in plan.pack]
    row = 2 * max(prod(meta.shape[1:]) for meta in params)
    assert sum(packed) == total
    assert all(abs(nbytes - total / (2 * replicas)) <= 2 * row for nbytes in packed), packed
    torn = Counter(item.param for pack in plan.pack for item in pack.items)
    whole = Counter(item.param for pack in _plan(spec).pack for item in pack.items)
    assert sum((torn - whole).values()) <= 2 * (replicas - 1) * spec.tp, "only boxes where shares meet are torn"


def test_scalar_parameter_travels() -> None:
    params = (ParamMeta(name="scale", shape=(), dtype="float32"),)
    shards = row_shards(params, 1)
    layout = WorkerLayout(
        worker=0, params=(EngineParam(name="s", shape=(1,), dtype="float32"),), copies=(_copy("scale", (), "s"),)
    )
    plan = build_plan(epoch=0, params=params, shards=shards, workers=(layout,))
    check_plan(plan)
    assert plan.pull[0].runs == (Run(src_rank=0, src_off=0, dst_param="s", dst_off=0, nbytes=4),)


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


_W = ParamMeta(name="w", shape=(4, 2), dtype="bfloat16")
_HEAD = ParamMeta(name="head", shape=(3, 3), dtype="bfloat16")
_STORED = EngineParam(name="w", shape=(4, 2), dtype="bfloat16")
_ROWS = {0: [ShardBox("w", (0, 0), (2, 2))], 1: [ShardBox("w", (2, 0), (2, 2))]}
_LARGE = {
    "params": (ParamMeta(name="w", shape=(2048, 1024), dtype="bfloat16"),),
    "boxes": {0: [ShardBox("w", (0, 0), (2048, 1024))]},
    "engine": (EngineParam(name="w", shape=(1024, 2048), dtype="bfloat16"),),
    "copies": (msgspec.structs.replace(_copy("w", (2048, 1024)), dst_stride=(1, 2048)),),
}


def _whole(**changes: Any) -> dict[str, Any]:
    """The copy of all of `w`, changed."""
    return {"copies": (msgspec.structs.replace(_copy("w", (4, 2)), **changes),)}


def _boxes(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> dict[str, Any]:
    """Of `w`, one on each rank."""
    return {"boxes": {rank: [ShardBox("w", *box)] for rank, box in enumerate(boxes)}}


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "source unknown": (_whole(src_param="v"), "worker 0: v -> w: the learner has no parameter of that name"),
    "target unknown": (_whole(dst_param="x"), "worker 0: w -> x: the engine lists no parameter of that name"),
    "box too large": (_whole(src_size=(5, 2)), "box at (0, 0) of size (5, 2) exceeds the learner's shape (4, 2)"),
    "other dimensions": (_whole(src_start=(0, 0, 0)), "recorded with 2 dimensions, the learner's shape is (4, 2)"),
    "beyond the end": (_whole(dst_offset=1), "w -> w: writes up to element 9 of 8 (shape (4, 2))"),
    "written twice": (_whole(dst_stride=(1, 1)), "worker 0: 3 elements of w are written more than once"),
    "backwards": (_whole(dst_stride=(-2, 1)), "destination offset 0 and strides (-2, 1) must not be negative"),
    "half is loaded": (
        _whole(src_size=(2, 2)),
        "4 of 8 elements of w (4, 2) are trained but no engine worker loads them; they would silently keep their old",
    ),
    "scattered": (_LARGE, "2097152 runs of 1 elements; at most 1048576 are allowed; the engine stores it in another"),
    "trained, not loaded": (
        {"params": (_W, _HEAD), "boxes": {**_ROWS, 0: [*_ROWS[0], ShardBox("head", (0, 0), (3, 3))]}},
        "head (3, 3) is trained but no engine worker loads it; it would silently keep its old value",
    ),
    "stored, not trained": (
        {"engine": (_STORED, EngineParam(name="idle", shape=(7,), dtype="bfloat16"))},
        "idle of the engine (7 elements) receives nothing from the learner",
    ),
    "listed twice": ({"params": (_W, _W)}, "w is listed 2 times by the learner"),
    "other dtype": (
        {"params": (msgspec.structs.replace(_W, dtype="float32"),)},
        "w, w: the wire has float32, the engine stores bfloat16; send what the engine stores (rollout dtype)",
    ),
    "dtype that cannot travel": (
        {"params": (_W, ParamMeta(name="odd", shape=(1,), dtype="complex64"))},
        "odd has dtype 'complex64'; allowed: float64, float32,",
    ),
    "impossible shape": (
        {"params": (_W, ParamMeta(name="odd", shape=(-1,), dtype="bfloat16"))},
        "odd has the impossible shape (-1,)",
    ),
    "rows twice": (_boxes(((0, 0), (2, 2)), ((1, 0), (3, 2))), "rows 1-2 of w are held twice (at rank 1)"),
    "rows nowhere": (_boxes(((0, 0), (2, 2)), ((3, 0), (1, 2))), "rows 2-3 of w are held by no rank (at rank 1)"),
    "rows missing at the end": (_boxes(((0, 0), (3, 2))), "rows 3-4 of w are held by no rank"),
    "more rows than there are": (
        _boxes(((0, 0), (2, 2)), ((2, 0), (7, 2))),
        "rank 1 holds [2:9, 0:2] of w, whose shape is (4, 2)",
    ),
    "an element nowhere": (
        _boxes(((0, 0), (4, 1)), ((0, 1), (3, 1))),
        "1 of 8 elements of w are held by no rank",
    ),
    "boxes that overlap": (
        _boxes(((0, 0), (4, 1)), ((0, 1), (4, 1)), ((3, 0), (1, 2))),
        "2 elements of w are held in boxes that overlap",
    ),
    "two shards of one rank": (
        {"boxes": {0: [*_ROWS[0], *_ROWS[1]]}},
        "rank 0 lists more than one shard of w; one is allowed",
    ),
    "a shard of nothing": (
        {"boxes": {**_ROWS, 2: [ShardBox("v", (0,), (1,))]}},
        "rank 2 holds v, which the learner's parameters do not list",
    ),
    "replicas that differ": (
        {"boxes": {rank: [ShardBox("w", (0, 0), (4, 2))] for rank in range(3)}, "digests": {2: {"w": 7}}},
        "(1 problem):\n  - ranks 1 and 2 are replicas, but hold different values of w",
    ),
    "no worker": ({"num_workers": 0}, "no engine worker; a plan needs at least one"),
    "a worker twice": ({"num_workers": 2}, "worker 0 occurs 2 times"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_does_not_fit_together_is_refused_by_name(case: str) -> None:
    changes, words = _REFUSED[case]
    given = {"params": (_W,), "boxes": _ROWS, "engine": (_STORED,), "num_workers": 1, "digests": {}, **_whole()}
    given |= changes
    layout = WorkerLayout(worker=0, params=given["engine"], copies=given["copies"])
    with pytest.raises(PlanMismatch, match=re.escape(words)):
        shards = [
            RankShards.of(rank, given["params"], boxes, given["digests"].get(rank, {}))
            for rank, boxes in given["boxes"].items()
        ]
        build_plan(epoch=1, params=given["params"], shards=shards, workers=[layout] * given["num_workers"])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
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
    shards, stages = row_shards(params, 3), _stages(spec)
    plan = build_plan(epoch=0, params=params, shards=shards, workers=stages)
    check_plan(plan)
    engines = run_plan(plan, full=full, shards=shards, sizes=_sizes(stages))
    assert not engines[0].keys() & engines[1].keys()
    for name, value in expected_params(spec, full, 0).items():
        (stage,) = (stage for stage in engines.values() if name in stage)
        np.testing.assert_array_equal(stage[name], np.frombuffer(value.tobytes(), np.uint8), name)
    assert sum(pull.nbytes for pull in plan.pull) == sum(prod(meta.shape) * 2 for meta in params)


def test_parameter_that_the_engine_keeps_in_float32_travels_in_float32() -> None:
    """Only where everything that it fills is float32; a float32 wire is never rounded."""
    engine = [EngineParam(name=n, shape=(4, 2), dtype=d) for n, d in (("w", "float32"), ("x", "bfloat16"))]
    copies = (_copy("w", (4, 2)), _copy("x", (4, 2)))
    layout = WorkerLayout(worker=0, params=tuple(engine), copies=copies)
    params = tuple(ParamMeta(name=n, shape=(4, 2), dtype="bfloat16") for n in "wx")
    plan = build_plan(epoch=0, params=params, shards=row_shards(params, 2), workers=(layout,))
    check_plan(plan)
    assert [(p.name, p.dtype) for p in plan.params] == [("w", "float32"), ("x", "bfloat16")]
    assert {i.param: i.nbytes for i in plan.pack[0].items} == {"w": 16, "x": 8}
    both = msgspec.structs.replace(layout, copies=(_copy("w", (4, 2)), _copy("w", (4, 2), "x")))
    with pytest.raises(PlanMismatch, match="w, w: the wire has bfloat16, the engine stores float32"):
        build_plan(epoch=0, params=params[:1], shards=row_shards(params[:1], 2), workers=(both,))


def _part(share_: SharedPlan, worker: int = 0) -> tuple[str, PullPlan]:
    return open_pull(share_.for_replica, epoch=1, worker=worker)


def test_every_party_gets_its_own_part_and_the_same_root() -> None:
    plan = _plan(num_ranks=3)
    shared = share(plan)
    opened = [open_pack(shared.for_learner[pack.rank], epoch=1, rank=pack.rank) for pack in plan.pack]
    assert [to_wire(own) for _, own in opened] == [to_wire(pack) for pack in plan.pack]
    assert [own.items for _, own in opened] == [pack.items for pack in plan.pack]
    for pull in plan.pull:
        root, own = _part(shared, pull.worker)
        assert root == shared.root
        assert own.runs == pull.runs == shared.pull(pull.worker).runs
        assert shared.sources[pull.worker] == tuple(sorted({run.src_rank for run in pull.runs}))
    assert {root for root, _ in opened} == {shared.root}
    with pytest.raises(PlanMismatch, match="this is learner 1, the plan has parts for learner 0"):
        open_pack(shared.for_learner[0], epoch=1, rank=1)
    with pytest.raises(PlanMismatch, match="for epoch 1, not 2"):
        open_pull(shared.for_replica, epoch=2, worker=0)


def test_root_depends_on_the_epoch_and_not_on_the_order_of_parties() -> None:
    params, layouts = _SPEC.params(), worker_layouts(_SPEC)
    shards = row_shards(params, 3)

    def root(epoch: int, step: int) -> str:
        plan = build_plan(epoch=epoch, params=params, shards=shards[::step], workers=layouts[::step])
        return share(plan).root

    assert root(1, 1) == root(1, -1) != root(2, 1)


def test_any_flipped_byte_is_refused_or_changes_the_root() -> None:
    """A party that is given something else than the others cannot come to the same root."""
    shared = share(_plan(num_ranks=1))
    data = shared.for_learner[0]
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        try:
            root, _ = open_pack(bytes(damaged), epoch=1, rank=0)
        except PlanMismatch:
            continue
        assert root != shared.root, at


def test_a_part_of_another_plan_is_refused() -> None:
    """It is whole and consistent, but not what the others agreed on."""
    (epoch, leaves, _), (_, _, parts) = (
        msgspec.msgpack.decode(share(plan).for_learner[0]) for plan in (_plan(), _plan(_changed(layers=1)))
    )
    with pytest.raises(PlanMismatch, match="the digest of learner 0's plan is not the one that was agreed on"):
        open_pack(msgspec.msgpack.encode((epoch, leaves, parts)), epoch=1, rank=0)


def _changed_table(plan: Any, name: str, row: int, column: int, value: int) -> Any:
    table = getattr(plan, name).copy()
    table[row, column] = value
    return msgspec.structs.replace(plan, **{name: table})


@pytest.mark.parametrize(
    ("table", "column", "value", "words"),
    [
        ("table", 0, 10**6, "no such parameter"),
        ("table", 1, 10**9, "ends beyond the arena"),
        ("table", 1, 1, "not aligned"),
        ("table", 1, 64, "packed more than once"),
        ("table", 2, 10**6, "exceeds the parameter's shape"),
        ("table", 4, 2**62, "exceeds the parameter's shape"),
        ("segments", 0, 2**62, "not packed"),
        ("segments", 1, 0, "not packed"),
        ("readers", 1, 10**6, "not listed"),
    ],
)
def test_a_learner_refuses_a_part_that_is_not_consistent(table: str, column: int, value: int, words: str) -> None:
    plan = _changed_table(_plan().pack[0], table, 0, column, value)
    assert any(words in problem for problem in pack_problems(plan)), pack_problems(plan)
    with pytest.raises(PlanMismatch, match=words):
        check_plan(dataclasses.replace(_plan(), pack=(plan, _plan().pack[1])))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        (0, -1, "out of range"),
        (1, 2**62, "out of range"),
        (2, 99, "no such parameter"),
        (3, 2**62, "out of range"),
        (4, 0, "out of range"),
        (2, 1, "are written more than once"),
    ],
)
def test_a_worker_refuses_a_part_that_is_not_consistent(column: int, value: int, words: str) -> None:
    plan = _changed_table(_plan().pull[0], "table", 0, column, value)
    assert any(words in problem for problem in pull_problems(plan)), pull_problems(plan)


@pytest.mark.parametrize(("column", "value"), [(0, 1), (1, 64), (4, 2)])
def test_planner_refuses_runs_that_their_learner_does_not_serve(column: int, value: int) -> None:
    plan = _plan()
    pull = _changed_table(plan.pull[0], "table", 0, column, value)
    with pytest.raises(PlanMismatch, match="learners serve other runs than the ones that workers read"):
        share(dataclasses.replace(plan, pull=(pull, *plan.pull[1:])))


def test_oversized_or_malformed_parts_are_refused() -> None:
    data = to_wire(_plan().pack[0])
    assert from_wire(data, PackPlan).rank == 0
    with pytest.raises(PlanMismatch, match="cut off, or larger than 100 bytes"):
        from_wire(data, PackPlan, max_bytes=100)
    for broken in (data[:-1], b"", zlib.compress(b"nonsense"), to_wire(PullPlan.of(0, []))):
        with pytest.raises(PlanMismatch, match="cannot be decoded"):
            from_wire(broken, PackPlan)
    with pytest.raises(PlanMismatch, match="came with 8 bytes"):
        Table(2, 2, bytes(8)).values()
    with pytest.raises(PlanMismatch, match="cannot be decoded"):
        open_pull(b"nonsense", epoch=1, worker=0)


def test_parts_of_a_large_plan_stay_small() -> None:
    """70B over 64 learner ranks and 8 workers, 190,000 runs: as maps they took 30 MB for every party."""
    spec = ToySpec(
        tp=8, heads=64, kv_heads=8, head_dim=128, hidden=8192, intermediate=28672, vocab=128256, vocab_multiple=64,
        layers=80,
    )  # fmt: skip
    shared = share(_plan(spec, num_ranks=64))
    assert sum(len(shared.pull(worker).table) for worker in shared.sources) > 100_000
    assert len(shared.for_replica) < 250_000
    assert max(map(len, shared.for_learner.values())) < 25_000
