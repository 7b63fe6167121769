"""The recorder: every style of loader is followed, nothing is written, what cannot be followed is refused by name.

`_replay` is the slow reference: it applies recorded copies to a fresh set of engine tensors, and the result must equal
what the very same loader writes when it gets real tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.derived_engine import DerivedEngine, ToyReloader
from tests.fakes.sync_world import record_layout
from weight_sync.errors import PlanMismatch
from weight_sync.plan.geometry import row_major_strides
from weight_sync.plan.types import ParamMeta, WorkerLayout
from weight_sync.receive.recorder import record

Loader = Callable[[torch.nn.Module, str, torch.Tensor], Any]
_POISON = -7.0


class _Engine(torch.nn.Module):
    """An engine of one module, `part`, whose loader is a function of (module, name, tensor)."""

    def __init__(self, loader: Loader, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self._loader = loader
        self.part: Any = torch.nn.Module()
        for name, shape in shapes.items():
            self.part.register_parameter(name, torch.nn.Parameter(torch.full(shape, _POISON), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._loader(self.part, name, tensor)


class _Reloader(ToyReloader):
    """Loads a module from whole tensors where its copies cannot be followed."""

    def __init__(self) -> None:
        super().__init__(DerivedEngine())

    def dependents(self) -> dict[str, torch.nn.Module]:
        return {}


def _metas(**shapes: tuple[int, ...]) -> tuple[ParamMeta, ...]:
    return tuple(ParamMeta(name=name, shape=shape, dtype="float32") for name, shape in shapes.items())


def _values(metas: tuple[ParamMeta, ...]) -> dict[str, torch.Tensor]:
    values, at = {}, 1
    for meta in metas:
        values[meta.name] = torch.arange(at, at + prod(meta.shape), dtype=torch.float32).reshape(meta.shape)
        at += prod(meta.shape)
    return values


def _replay(layout: WorkerLayout, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Element by element, with index arithmetic of its own."""
    tensors = {param.name: torch.full((prod(param.shape),), _POISON) for param in layout.params}
    for copy in layout.copies:
        box = values[copy.src_param][tuple(slice(a, a + n) for a, n in zip(copy.src_start, copy.src_size, strict=True))]
        assert tuple(box.shape) == copy.src_size
        tensors[copy.dst_param].as_strided(copy.src_size, copy.dst_stride, copy.dst_offset).copy_(box)
    return {param.name: tensors[param.name].reshape(param.shape) for param in layout.params}


def _check(loader: Loader, metas: tuple[ParamMeta, ...], **shapes: tuple[int, ...]) -> WorkerLayout:
    """Record, prove that nothing was written, replay, and compare with a real load."""
    engine = _Engine(loader, **shapes)
    addresses = [p.data_ptr() for p in engine.parameters()]
    layout = record_layout(engine, metas, worker=0)
    assert all((p == _POISON).all() for p in engine.parameters()), "the recorder wrote into the engine"
    assert [p.data_ptr() for p in engine.parameters()] == addresses
    replayed = _replay(layout, _values(metas))
    engine.load_weights(_values(metas).items())
    for name, param in engine.named_parameters():
        padding = param == 0
        torch.testing.assert_close(replayed[name][~padding], param[~padding], rtol=0, atol=0)
    return layout


def _fused(rank: int) -> Loader:
    """Rank `rank` of 2 of a fused qkv with 4 query rows, 2 key and 2 value rows per rank."""
    offsets, sizes = {"q": 0, "k": 4, "v": 6}, {"q": 4, "k": 2, "v": 2}

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        n = sizes[name]
        model.get_parameter("qkv").data.narrow(0, offsets[name], n).copy_(tensor.narrow(0, rank * n, n))

    return load


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_parameter_is_recorded_as_one_box_per_part(rank: int) -> None:
    layout = _check(_fused(rank), _metas(q=(8, 3), k=(4, 3), v=(4, 3)), qkv=(8, 3))
    boxes = [(c.src_param, c.src_start, c.src_size, c.dst_offset, c.dst_stride) for c in layout.copies]
    assert boxes == [
        ("q", (4 * rank, 0), (4, 3), 0, (3, 1)),
        ("k", (2 * rank, 0), (2, 3), 12, (3, 1)),
        ("v", (2 * rank, 0), (2, 3), 18, (3, 1)),
    ]


def test_padded_vocabulary_counts_as_covered_and_is_not_copied() -> None:
    """vLLM's embedding: rows that exist are copied, the rest is filled with zeros."""

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        param, part = model.get_parameter("w"), tensor.narrow(0, 4, 3)
        param[: part.shape[0]].data.copy_(part)
        param[part.shape[0] :].data.fill_(0)

    layout = _check(load, _metas(embed=(7, 5)), w=(4, 5))
    assert [c.src_size for c in layout.copies] == [(3, 5)]


def test_zero_fill_before_the_copies_is_no_double_write() -> None:
    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        model.get_parameter("w").data.zero_()
        model.get_parameter("w").data[:3].copy_(tensor)

    _check(load, _metas(embed=(3, 2)), w=(5, 2))


_STYLES: dict[str, Loader] = {
    "whole": lambda m, n, t: m.w.data.copy_(t),
    "slice": lambda m, n, t: m.w.data[0:6].copy_(t[:, :]),
    "torch.narrow": lambda m, n, t: [torch.narrow(m.w.data, 1, c, 1).copy_(torch.narrow(t, 1, c, 1)) for c in range(4)],
    "chunk": lambda m, n, t: [d.copy_(s) for d, s in zip(m.w.data.chunk(4), t.chunk(4), strict=False)],
    "split": lambda m, n, t: [d.copy_(s) for d, s in zip(m.w.data.split([1, 5]), t.split([1, 5]), strict=True)],
    "rows": lambda m, n, t: [m.w.data[i].copy_(row) for i, row in enumerate(t)],
    "unbind": lambda m, n, t: [m.w.data[:, i].copy_(column) for i, column in enumerate(t.unbind(1))],
    "reshape": lambda m, n, t: m.w.data.view(2, 3, 4).copy_(t.reshape(2, 3, 4)),
    "flatten": lambda m, n, t: m.w.data.view(-1).copy_(t.flatten()),
    "flat middle": lambda m, n, t: [
        m.w.data.view(-1)[a:b].copy_(t.reshape(-1)[a:b]) for a, b in ((0, 2), (2, 10), (10, 15), (15, 24))
    ],
    "transposed twice": lambda m, n, t: m.w.data.t().copy_(t.t()),
    "transposed": lambda m, n, t: m.w.data.view(4, 6).copy_(t.t()),
    "permuted": lambda m, n, t: m.w.data.view(3, 2, 4).copy_(t.view(2, 3, 4).permute(1, 0, 2)),
    "even rows": lambda m, n, t: [m.w.data.view(2, 3, 4)[i].copy_(t[i::2]) for i in (0, 1)],
    "interleaved": lambda m, n, t: m.w.data.view(3, 2, 4).copy_(t.view(2, 3, 4).transpose(0, 1)),
    "unsqueeze": lambda m, n, t: m.w.data.unsqueeze(0).copy_(t[None]),
    "squeeze": lambda m, n, t: m.w.data.copy_(t.unsqueeze(1).squeeze(1)),
    "contiguous strip": lambda m, n, t: [m.w.data[:, i : i + 2].copy_(t[:, i : i + 2].contiguous()) for i in (0, 2)],
    "clone": lambda m, n, t: m.w.data.copy_(t.clone().detach()),
    "to": lambda m, n, t: m.w.data.copy_(t.to(torch.float32).to("cpu").to(m.w.device)),
    "wider": lambda m, n, t: m.w.data.copy_(t.to(torch.float64)),
    "expand": lambda m, n, t: m.w.data.copy_(t.expand(6, 4)),
    "asserts": lambda m, n, t: (
        m.w.data.copy_(t) if t.shape == m.w.shape and t.dtype == m.w.dtype and t.device == m.w.device else 1 / 0
    ),
    "no_grad": lambda m, n, t: torch.no_grad()(lambda: m.w.copy_(t.data))(),
    "attribute": lambda m, n, t: (setattr(t, "shard_id", 0), m.w.data.copy_(t)),
}


@pytest.mark.parametrize("style", _STYLES)
def test_loader_style_is_followed(style: str) -> None:
    layout = _check(_STYLES[style], _metas(t=(6, 4)), w=(6, 4))
    engine = _Engine(_STYLES[style], w=(6, 4))
    with torch.inference_mode():  # how a worker's RPC may call us
        assert record_layout(engine, _metas(t=(6, 4)), worker=0) == layout


@pytest.mark.parametrize("style", ["whole", "reshape", "flatten", "transposed twice", "contiguous strip", "unsqueeze"])
def test_reshaped_views_stay_one_box(style: str) -> None:
    layout = _check(_STYLES[style], _metas(t=(6, 4)), w=(6, 4))
    assert len(layout.copies) == (2 if style == "contiguous strip" else 1)


def test_scalar_lands_in_a_one_element_parameter() -> None:
    layout = _check(lambda m, n, t: m.w.data.copy_(t.view(m.w.shape)), _metas(scale=()), w=(1,))
    assert layout.copies[0].src_size == ()


def test_empty_tensor_is_no_copy() -> None:
    layout = _check(lambda m, n, t: getattr(m, n).data.copy_(t), _metas(w=(2,), none=(0, 3)), w=(2,), none=(0, 3))
    assert [c.src_param for c in layout.copies] == ["w"]


def test_tied_parameters_are_listed_once_under_the_first_name() -> None:
    engine = _Engine(lambda m, n, t: m.head.data.copy_(t), embed=(3, 2))
    engine.part.head = torch.nn.Parameter(engine.part.embed.data, requires_grad=False)
    layout = record_layout(engine, _metas(embed=(3, 2)), worker=4)
    assert layout.worker == 4
    assert [p.name for p in layout.params] == ["part.embed"]
    assert layout.copies[0].dst_param == "part.embed"


def test_buffer_is_listed_only_if_the_loader_writes_it() -> None:
    engine = _Engine(lambda m, n, t: getattr(m, n).copy_(t), w=(2,))
    engine.part.register_buffer("scale", torch.ones(3))
    engine.part.register_buffer("table", torch.ones(4))
    layout = record_layout(engine, _metas(w=(2,), scale=(3,)), worker=0)
    assert [p.name for p in layout.params] == ["part.w", "part.scale"]
    assert torch.equal(engine.part.scale, torch.ones(3))


def _swallow(model: Any, name: str, tensor: torch.Tensor) -> None:
    try:
        model.w.data.copy_(tensor * 2)
    except PlanMismatch:
        model.w.data.copy_(tensor)


_GIVEN_UP: dict[str, tuple[Loader, str, str]] = {
    "arithmetic": (lambda m, n, t: m.w.data.copy_(t + 1), r"add.Tensor computes with t \(6, 4\); only views, cop", ""),
    "concatenation": (
        lambda m, n, t: m.w.data.copy_(torch.cat([t[:3], t[3:]])),
        "combines t .* with other tensors",
        "",
    ),
    "index": (lambda m, n, t: m.w.data.copy_(t[torch.arange(5, -1, -1)]), "aten.index.Tensor computes with t", ""),
    "narrower dtype": (
        lambda m, n, t: m.w.data.copy_(t.bfloat16()),
        "rounds t from torch.float32 to torch.bfloat16; send it as the engine has it",
        "",
    ),
    "other bytes": (lambda m, n, t: m.w.data.copy_(t.view(torch.int32)), "reads the bytes of t .* as another", ""),
    "its bytes": (
        lambda m, n, t: m.w.data.view(torch.int32).copy_(t),
        r"writes torch.int32 \(6, 4\) at byte 0 of part.w, which holds torch.float32 \(6, 4\); only whole elements",
        "",
    ),
    "temporary": (
        lambda m, n, t: m.w.data.copy_(torch.empty(6, 4).copy_(t)),
        r"puts t into \(6, 4\) of memory that belongs to no parameter or buffer of the engine; use the reload path",
        "its loader computes with what it loads",
    ),
    "added": (lambda m, n, t: m.w.data.add_(t), "aten.add_.Tensor combines t", ""),
    "caught": (_swallow, "aten.mul.Tensor computes with t", ""),
    "twice": (
        lambda m, n, t: [m.w.data.copy_(t), m.w.data[5].copy_(t[5])],
        "24 come from the checkpoint, 0 are constant padding, 0 are never written, 4 are written more than once",
        "4 elements of part.w are written more than once",
    ),
    "filled afterwards": (
        lambda m, n, t: [m.w.data.copy_(t), m.w.data[1:3].fill_(0)],
        "8 elements of part.w are overwritten with a constant after they were loaded",
        "",
    ),
    "changed afterwards": (
        lambda m, n, t: [m.w.data.copy_(t), m.w.data.mul_(2)],
        "aten.mul_.Tensor changes part.w",
        "",
    ),
    "composed": (
        lambda m, n, t: [m.w.data.copy_(t), m.w.data.copy_(m.w.data + 1)],
        "writes something into part.w",
        "",
    ),
    "rebinding": (
        lambda m, n, t: [setattr(m, "w", torch.nn.Parameter(torch.empty(6, 4))), m.w.data.copy_(t)],
        "puts t into",
        "its loader moves part.w to other memory",
    ),
}
"""The loader, why its copies cannot be followed, and what is said of it where a reloader can load the module from whole
tensors; the same, if that is empty."""


@pytest.mark.parametrize("case", _GIVEN_UP)
def test_what_cannot_be_followed_is_refused_by_name_or_loaded_from_whole_tensors(case: str) -> None:
    loader, words, why = _GIVEN_UP[case]
    engine, metas = _Engine(loader, w=(6, 4)), _metas(t=(6, 4))
    held = engine.part.w
    address = held.data_ptr()
    with pytest.raises(PlanMismatch, match=words):
        record_layout(engine, metas, worker=0)
    recorded = record(engine, metas, worker=0, reloader=_Reloader())
    (entry,) = recorded.reloaded
    assert (entry.module, [param.name for param in entry.params]) == ("part", ["ws_whole/t"])
    assert re.search(why or words, entry.why)
    assert {copy.dst_param for copy in recorded.layout.copies} == {"ws_whole/t"}
    assert engine.part.w is held
    assert held.data_ptr() == address
    assert (held == _POISON).all(), "the recorder wrote into the engine"


def _through_temporary(m: Any, n: str, t: torch.Tensor) -> None:
    if n == "t":
        m.held = torch.empty(6, 4)
        m.held[1:3].copy_(t[1:3])
    else:
        m.w.data.copy_(m.held * 2)


@pytest.mark.parametrize(
    ("loader", "why", "sources"),
    [
        (lambda m, n, t: m.w.data.add_(t), "combines t", "tu"),
        (lambda m, n, t: m.w.data.copy_(t), "24 elements of part.w are written more than once", "tu"),
        (_through_temporary, "its loader computes with what it loads", "t"),
    ],
)
def test_a_module_of_several_tensors_is_loaded_from_those_that_it_needs(loader: Loader, why: str, sources: str) -> None:
    metas = _metas(t=(6, 4), u=(6, 4))
    (entry,) = record(_Engine(loader, w=(6, 4)), metas, worker=0, reloader=_Reloader()).reloaded
    assert {param.name for param in entry.params} == {f"ws_whole/{name}" for name in sources}
    assert why in entry.why


_NEVER = "of 24 elements 0 come .* 24 are never written"
_REFUSED: dict[str, tuple[Loader, str, str]] = {
    "a number of it": (lambda m, n, t: m.w.data.fill_(t[0, 0].item()), "_local_scalar_dense.* computes with t",
                       "_local_scalar_dense.* needs the data of t"),
    "other source": (lambda m, n, t: m.w.data.copy_(torch.zeros(6, 4)), "into part.w that is not part of the checkp",
                     _NEVER),
    "random": (lambda m, n, t: m.w.data.normal_(), "aten.normal_.default changes part.w while t .* is loaded", _NEVER),
    "out argument": (lambda m, n, t: torch.mul(m.w.data, 2, out=m.w.data), "aten.mul.out changes part.w", _NEVER),
    "nothing": (lambda m, n, t: None, f"part.w .* {_NEVER}", ""),
    "half": (
        lambda m, n, t: m.w.data[:2].copy_(t[:2]),
        r"part.w \(6, 4\): of 24 elements 8 come .* 0 are constant padding, 16 are never written, 0 ",
        "",
    ),
    "into the checkpoint": (lambda m, n, t: t.copy_(m.w.data), "writes into the checkpoint tensor t; loaders may", ""),
    "changes the checkpoint": (lambda m, n, t: t.mul_(2), "aten.mul_.Tensor computes with t", "into the checkpoint"),
    "wrong shape": (lambda m, n, t: m.w.data[:5].copy_(t), r"t: \(6, 4\) does not fit \(5, 4\) of part.w", ""),
    "beyond its rows": (
        lambda m, n, t: m.w.data.copy_(t.narrow(0, 3, 6)),
        r"the loader of _Engine refused t \(6, 4\): RuntimeError: .*; the learner's parameter does not fit, or",
        "",
    ),
    "unknown name": (lambda m, n, t: m.get_parameter(n), "AttributeError", ""),
    "rebinding data": (lambda m, n, t: setattr(m.w, "data", t), "the loader moves part.w to other memory", ""),
}  # fmt: skip
"""As `_GIVEN_UP`, but refused with a reloader too."""


@pytest.mark.parametrize("case", _REFUSED)
def test_drift_between_learner_and_engine_is_refused_also_with_a_reloader(case: str) -> None:
    loader, words, with_reloader = _REFUSED[case]
    for reloader, expected in ((None, words), (_Reloader(), with_reloader or words)):
        engine = _Engine(loader, w=(6, 4))
        address = engine.part.w.data_ptr()
        with pytest.raises(PlanMismatch, match=expected):
            record(engine, _metas(t=(6, 4)), worker=0, reloader=reloader)
        assert engine.part.w.data_ptr() == address
        assert (engine.part.w == _POISON).all(), "the recorder wrote into the engine"


def test_parameter_of_another_dtype_than_the_wire_goes_through_its_loader() -> None:
    engine = _Engine(lambda m, n, t: m.w.data.copy_(t), w=(6, 4))
    wider = (ParamMeta(name="t", shape=(6, 4), dtype="bfloat16"),)
    recorded = record(engine, wider, worker=0, reloader=_Reloader())
    assert recorded.layout.params[0].dtype == "float32", "as the engine has it"
    assert recorded.reloaded == (), "the planner sends it in float32"
    engine.part.w.data = engine.part.w.data.bfloat16()
    recorded = record(engine, _metas(t=(6, 4)), worker=0, reloader=_Reloader())
    assert [entry.why for entry in recorded.reloaded] == ["part.w is bfloat16, t is sent as float32"]


def test_permutation_of_single_elements_is_refused() -> None:
    """70,000 boxes of one element each: describing them would be slower than loading."""
    engine = _Engine(lambda m, n, t: m.w.data.copy_(t[1:3, ::2].t()), w=(70000, 2))
    with pytest.raises(PlanMismatch, match=r"t is rearranged on its way into part\.w"):
        record_layout(engine, _metas(t=(4, 140000)), worker=0)


def test_engine_that_cannot_be_written_by_bytes_is_refused() -> None:
    engine = _Engine(lambda m, n, t: None, w=(2, 3), x=(4,))
    engine.part.w.data = torch.zeros(3, 2).t()
    with pytest.raises(PlanMismatch, match=r"part.w has shape \(2, 3\) and strides \(1, 2\)"):
        record_layout(engine, (), worker=0)
    engine = _Engine(lambda m, n, t: None, x=(4,))
    engine.part.y = torch.nn.Parameter(engine.part.x.data[2:])
    with pytest.raises(PlanMismatch, match=r"part\.x and part\.y share 8 bytes"):
        record_layout(engine, (), worker=0)
    with pytest.raises(PlanMismatch, match=r"w .* has no memory"):
        record_layout(_Engine(lambda m, n, t: None, w=(2,)).to("meta"), (), worker=0)
    with pytest.raises(PlanMismatch, match="Linear has no load_weights"):
        record_layout(torch.nn.Linear(2, 2), (), worker=0)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_chain_of_views_is_recorded_element_for_element(data: st.DataObject) -> None:
    """Random slices, splits, merges and permutations of the source, copied into a row of a flat parameter."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    steps = data.draw(
        st.lists(st.sampled_from(["slice", "step", "permute", "flatten", "unflatten", "drop"]), max_size=4)
    )
    picks = data.draw(st.lists(st.integers(0, 10**6), min_size=24, max_size=24))

    def view(tensor: torch.Tensor) -> torch.Tensor:
        draws = iter(picks)
        for step in steps:
            dim = next(draws) % max(1, tensor.ndim)
            if tensor.ndim == 0:
                break
            n = tensor.shape[dim]
            if step == "slice":
                start = next(draws) % n
                tensor = tensor.narrow(dim, start, 1 + next(draws) % (n - start))
            elif step == "step":
                tensor = tensor[(slice(None),) * dim + (slice(next(draws) % n, None, 2),)]
            elif step == "permute":
                tensor = tensor.transpose(dim, next(draws) % tensor.ndim)
            elif step == "flatten" and tensor.is_contiguous():
                tensor = tensor.flatten()
            elif step == "unflatten" and n % 2 == 0:
                tensor = tensor.unflatten(dim, (2, n // 2))
            elif step == "drop":
                tensor = tensor.select(dim, next(draws) % n)
        return tensor

    value = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
    assert value.stride() == row_major_strides(shape) or 1 in shape
    want = view(value)
    engine = _Engine(lambda m, n, t: m.w.data.view(view(t).shape).copy_(view(t)), w=(want.numel(),))
    layout = record_layout(engine, _metas(t=shape), worker=0)
    assert torch.equal(_replay(layout, {"t": value})["part.w"], want.reshape(-1))
