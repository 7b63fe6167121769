"""Attention over packed sequences: which kernel computes it, and where the sequences of a row begin and end.

Sequences are packed end to end in one row of `T` tokens; no token may see another sequence. Three ways to compute it:
`VarlenLayout` hands the boundaries to torch's variable-length kernel, which knows plain scores only; `FlexLayout`
compiles a kernel for boundaries, soft-capping and sinks; `PaddedLayout` works on every device: it gathers sequences of
similar length into dense blocks, so that hundreds of short sequences cost a handful of kernel calls.

Sequences may share their first tokens, which the row then holds once. Their keys and values are repeated for every
sequence, and the gradients of those are summed.

Shape legend: `T` tokens of the packed row, `B` blocks of it, `K` keys, `N` sequences (in a block: of the block), `L`
padded length of a block, `H` heads, `D` head size.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.errors import TESTED, ModelError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

ATTENTION_NAME = "tandem_packed"
"""Name of our function in transformers' attention interface."""

FLEX_BLOCK = 128
"""Tokens of a block of the row that a kernel of FlexAttention computes, or leaves out, at once."""
SHORTEST_BLOCK = 16
BLOCK_GROWTH = 1.25
"""A block holds lengths in (L / 1.25, L], or all up to 16: padding costs little, kernel calls cost much."""


class Scores(NamedTuple):
    """How products of queries and keys become weights, in this order."""

    scale: float
    """Of the products."""
    softcap: float | None = None
    """x -> softcap * tanh(x / softcap)"""
    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None means all before it."""
    sinks_H: Tensor | None = None
    """One more score in every softmax, of which nothing is read (Xiao et al. 2023, arXiv:2309.17453)."""

    @property
    def is_plain(self) -> bool:
        """Whether every kernel can compute them."""
        return self.softcap is None and self.sinks_H is None


class PackedLayout(Protocol):
    """Where the sequences of a packed row begin and end, as one kernel needs it. Not a tuple, which torch.compile would
    look into: it would compile again for every number of blocks."""

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, how: Scores) -> Tensor:
        """Causal attention inside each sequence; keys may have fewer heads (GQA). [T, H, D] in the dtype of
        `q_THD`."""
        ...


class LayoutFn(Protocol):
    """Makes the layout of a micro-batch, for one kernel."""

    @property
    def name(self) -> str: ...

    @property
    def refused(self) -> tuple[str, ...]:
        """Kernels that were tried before, each with the reason against it."""
        ...

    @property
    def shares_prefix(self) -> bool:
        """Whether a prompt that several sequences share costs its attention once."""
        ...

    def __call__(self, cu_seqlens: np.ndarray, device: torch.device, rows: np.ndarray | None = None) -> PackedLayout:
        """
        Args:
            cu_seqlens: int32[N+1], of whole sequences, every one at least one token long.
            rows: int64[cu_seqlens[-1]], the token of the packed row that each token of a sequence is; a sequence has
                shared ones first and at least one of its own. None: every token is in the row.
        """
        ...


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys of sequences that share their first tokens: for every sequence those of the shared tokens, then its own."""

    cu_seqlens: Tensor
    """int32[N+1]"""
    max_seqlen: int
    row_K: Tensor
    """int64[K]: token of the row that has the key."""
    own_T: Tensor
    """int64[T]: the place of every token's key in its own sequence ..."""
    again: Tensor
    """int64[K - T]: ... and the places of those that another sequence sees as well."""
    repeated: Tensor
    """int64: tokens of the row that several sequences see."""
    slot: Tensor
    """int64[K - T]: of each place in `again`, which of `repeated` it has."""

    @staticmethod
    def of(cu_seqlens: np.ndarray, rows: np.ndarray, device: torch.device) -> SharedKeys:
        """As `LayoutFn`."""
        own, again = own_places(rows)
        repeated, slot = np.unique(rows[again], return_inverse=True)
        tensors = (to_device(array, device) for array in (rows, own, again, repeated, slot))
        longest = int(np.diff(cu_seqlens).max())
        return SharedKeys(to_device(cu_seqlens.astype(np.int32), device), longest, *tensors)

    def gather(self, x_THD: Tensor) -> Tensor:
        """[K, H, D]"""
        places = self.row_K, self.own_T, self.again, self.repeated, self.slot
        return _GatherShared.apply(x_THD, *places)  # pyright: ignore[reportReturnType]


class _GatherShared(torch.autograd.Function):
    """`x[row_K]`. Gradients of a token that several sequences see are summed in float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, row_K: Tensor, own_T: Tensor, again: Tensor, repeated: Tensor, slot: Tensor
    ) -> Tensor:
        ctx.save_for_backward(own_T, again, repeated, slot)
        return x.index_select(0, row_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own_T, again, repeated, slot = ctx.saved_tensors
        grad = grads[0].index_select(0, own_T)
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.index_select(0, repeated).to(wide)
        total.index_add_(0, slot, grads[0].index_select(0, again).to(wide))
        return grad.index_copy_(0, repeated, total.to(grad.dtype)), None, None, None, None, None


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """For `torch.nn.attention.varlen` (half precision on devices that have the kernel).

    The kernel's backward need not repeat to the last bit, so two equal steps may differ by rounding.
    """

    cu_seqlens: Tensor
    """int32[N+1]"""
    max_seqlen: int
    shared: SharedKeys | None = None
    """None if keys are where queries are."""
    repeats_kv: bool = False
    """The kernel wants as many heads of keys and values as of queries."""
    asks_for_gqa: bool = False
    """It must be told that there are fewer. Can go when torch 2.12 is the oldest we support: then it must always."""

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, how: Scores) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        kwargs: dict[str, Any] = {}
        if q_THD.shape[1] != k_THD.shape[1]:
            if self.repeats_kv:
                repeats = q_THD.shape[1] // k_THD.shape[1]
                k_THD, v_THD = (x.repeat_interleave(repeats, dim=1) for x in (k_THD, v_THD))
            elif self.asks_for_gqa:
                kwargs["enable_gqa"] = True
        # (-1, 0): everything to the left, nothing to the right. The kernel's left side does not count the token itself.
        kwargs["window_size"] = (-1 if how.window is None else how.window - 1, 0)
        # Of fewer queries than keys, the kernel takes the last query to see the last key.
        bounds = (self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)
        if (shared := self.shared) is not None:
            k_THD, v_THD = (shared.gather(x) for x in (k_THD, v_THD))
            bounds = (self.cu_seqlens, shared.cu_seqlens, self.max_seqlen, shared.max_seqlen)
        out = varlen_attn(q_THD, k_THD, v_THD, *bounds, scale=how.scale, **kwargs)
        assert isinstance(out, Tensor)  # a tuple only with return_aux
        return out


@dataclass(frozen=True, slots=True)
class Block:
    """`num_seqs` sequences padded to `length`. Padding is after the real tokens, so causality alone hides it."""

    num_seqs: int
    length: int
    token_index: Tensor
    """int64[N*L]: packed token at each place; padding repeats a token of the same sequence."""
    place_index: Tensor
    """int64[real tokens]: places of the block that are not padding ..."""
    packed_index: Tensor
    """int64[real tokens]: ... and the packed token each of them holds."""
    is_shared: bool = False
    """Whether some of these are in several sequences."""

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, how: Scores) -> Tensor:
        """[N*L, H, D]: output at every place of the block."""
        q_NHLD, k_NHLD, v_NHLD = (
            _Gather.apply(x, self.token_index, self.place_index, self.packed_index, self.is_shared)
            .view(self.num_seqs, self.length, *x.shape[1:])  # pyright: ignore[reportOptionalMemberAccess]
            .transpose(1, 2)
            for x in (q_THD, k_THD, v_THD)
        )
        mask = None
        if not how.is_plain or (how.window is not None and how.window < self.length):
            distance = torch.arange(self.length, device=q_THD.device)
            distance = distance[:, None] - distance[None, :]
            mask = (distance >= 0) & (distance < (self.length if how.window is None else how.window))
        if mask is not None and not how.is_plain:
            out_NHLD = _plain_attention(q_NHLD, k_NHLD, v_NHLD, mask, how)
        else:
            has_groups = q_NHLD.shape[1] != k_NHLD.shape[1]
            out_NHLD = scaled_dot_product_attention(
                q_NHLD, k_NHLD, v_NHLD, attn_mask=mask, is_causal=mask is None, scale=how.scale, enable_gqa=has_groups
            )
        return out_NHLD.transpose(1, 2).reshape(self.num_seqs * self.length, *q_THD.shape[1:])


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """For scaled-dot-product attention, any device and dtype."""

    blocks: tuple[Block, ...]
    restore_index: Tensor
    """int64[T]: place of packed token t in the concatenation of all blocks."""

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, how: Scores) -> Tensor:
        return _attend_blocks(self, q_THD, k_THD, v_THD, how)  # pyright: ignore[reportCallIssue]


@torch.compiler.disable  # the number and shapes of blocks differ in every micro-batch
def _attend_blocks(layout: PaddedLayout, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, how: Scores) -> Tensor:
    outputs = [block.attend(q_THD, k_THD, v_THD, how) for block in layout.blocks]
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Gather.apply(flat, layout.restore_index, None, layout.restore_index, False)  # pyright: ignore[reportReturnType]


def _plain_attention(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, mask_LL: Tensor, how: Scores) -> Tensor:
    """Scores in float32, which are in memory: of a block's sequences only."""
    wide, repeats = torch.promote_types(q_NHLD.dtype, torch.float32), q_NHLD.shape[1] // k_NHLD.shape[1]
    k_NHLD, v_NHLD = (x.repeat_interleave(repeats, dim=1) for x in (k_NHLD, v_NHLD))
    scores_NHLL = (q_NHLD @ k_NHLD.transpose(2, 3)).to(wide) * how.scale
    if how.softcap is not None:
        scores_NHLL = how.softcap * torch.tanh(scores_NHLL / how.softcap)
    scores_NHLL = scores_NHLL.masked_fill(~mask_LL, -math.inf)
    total_NHL1 = scores_NHLL.logsumexp(-1, keepdim=True)
    if how.sinks_H is not None:
        total_NHL1 = torch.logaddexp(total_NHL1, how.sinks_H.to(wide)[:, None, None])
    return (scores_NHLL - total_NHL1).exp().to(v_NHLD.dtype) @ v_NHLD


class _Gather(torch.autograd.Function):
    """`x[index]`, whose backward writes each row once, several times faster than the scatter-add of autograd: row
    `sources[i]` of the gradient (row i if that is None) goes to row `targets[i]` of x, and all other rows get 0. If
    targets occur several times (`adds`), it is a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, sources: Tensor | None, targets: Tensor, adds: bool) -> Tensor:
        ctx.save_for_backward(sources, targets)
        ctx.num_rows, ctx.adds = x.shape[0], adds
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (sources, targets), grad = ctx.saved_tensors, grads[0]
        rows, zeros = grad if sources is None else grad.index_select(0, sources), grad.new_zeros
        write = Tensor.index_add_ if ctx.adds else Tensor.index_copy_
        return write(zeros(ctx.num_rows, *grad.shape[1:]), 0, targets, rows), None, None, None, None


def register_packed_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. Idempotent; called where a model is built, not at import."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface: [1, H, T, D] in, [1, T, H, D] out. The layout is the keyword
    `packed` of the call of the model. Raises ModelError if the model asks for something this function does not compute
    (its own mask, a position bias, values of another size than keys), or is called without a layout."""
    kind, layout = type(module).__name__, kwargs.get("packed")
    if layout is None:
        raise ModelError(f"{kind} was not given packed=<layout>, or its model does not hand it on; use {TESTED}")
    asked = [name for name in ("position_bias",) if kwargs.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    if value.shape[-1] != query.shape[-1]:
        asked.append(f"values of size {value.shape[-1]} and keys of size {query.shape[-1]}")
    if asked:
        raise ModelError(
            f"{kind} uses attention with {', '.join(asked)}, which the packed attention does not compute; use {TESTED}"
        )
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    how = Scores(scale, kwargs.get("softcap"), kwargs.get("sliding_window"), kwargs.get("s_aux"))
    out_THD = layout.attend(q_THD, k_THD, v_THD, how)
    return out_THD.unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """A `LayoutFn` for torch's variable-length attention."""

    name: str
    flash_impl: str | None = None
    """Of `torch.nn.attention.activate_flash_attention_impl`, for the whole process; None for torch's own kernel."""
    repeats_kv: bool = False
    refused: tuple[str, ...] = ()
    shares_prefix: bool = True

    def __call__(self, cu_seqlens: np.ndarray, device: torch.device, rows: np.ndarray | None = None) -> VarlenLayout:
        own = cu_seqlens if rows is None else np.searchsorted(own_places(rows)[0], cu_seqlens)
        shared = None if rows is None else SharedKeys.of(cu_seqlens, rows, device)
        queries = to_device(own.astype(np.int32), device)
        return VarlenLayout(queries, int(np.diff(own).max()), shared, self.repeats_kv, _asks_for_gqa())


def _asks_for_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


class FlexLayout:
    """For torch's FlexAttention (He et al. 2024, arXiv:2412.05496). What a token sees follows from arrays over the row,
    where every token of a shared prefix is once; blocks of the row that see nothing of each other are left out."""

    def __init__(self, cu_seqlens: np.ndarray, device: torch.device, rows: np.ndarray | None) -> None:
        """As `LayoutFn`."""
        starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens)
        rows = np.arange(cu_seqlens[-1]) if rows is None else rows
        own, _ = own_places(rows)
        owner_T = np.repeat(np.arange(len(lengths)), lengths)[own]
        position_T = own - starts[owner_T]
        prefix_N = position_T[np.unique(owner_T, return_index=True)[1]]  # where a sequence's own tokens begin
        first_N = owner_T[rows[starts]]
        arrays = np.stack([owner_T, position_T, first_N[owner_T], prefix_N[owner_T]])
        padding = -len(own) % FLEX_BLOCK
        self._arrays_4B = np.pad(arrays, ((0, 0), (0, padding)), mode="edge").reshape(4, -1, FLEX_BLOCK)
        self._num_tokens, self._device = len(own), device
        self._row_T = to_device(self._arrays_4B.reshape(4, -1).astype(np.int32), device)
        self._masks: dict[int, Any] = {}

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, how: Scores) -> Tensor:
        return _attend_flex(self, q_THD, k_THD, v_THD, how)  # pyright: ignore[reportCallIssue]

    def mask(self, window: int | None) -> Any:
        """A BlockMask, made once."""
        from torch.nn.attention.flex_attention import BlockMask

        reach = self._num_tokens if window is None else window
        if reach not in self._masks:
            owner, position, first, prefix = self._row_T.unbind()
            too_far = position - reach

            def is_seen(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                is_shared = (owner[k] == first[q]) & (position[k] < prefix[q])
                is_near = (position[k] <= position[q]) & (position[k] > too_far[q])
                return ((owner[k] == owner[q]) | is_shared) & is_near

            found_QK = self.seen_blocks(reach)
            counts, order = found_QK.sum(1), np.argsort(~found_QK, axis=1, kind="stable")
            blocks = (to_device(one.astype(np.int32), self._device)[None, None] for one in (counts, order))
            sizes = (self._num_tokens, self._num_tokens)
            self._masks[reach] = BlockMask.from_kv_blocks(
                *blocks, BLOCK_SIZE=FLEX_BLOCK, mask_mod=is_seen, seq_lengths=sizes
            )
        return self._masks[reach]

    def seen_blocks(self, reach: int) -> np.ndarray:
        """bool[Q, K]: whether a token of block q may see one of block k, at most `reach - 1` tokens before it."""
        (owner_lo, position_lo, first_lo, _), (owner_hi, position_hi, first_hi, prefix_hi) = (
            function(self._arrays_4B, axis=2) for function in (np.min, np.max)
        )
        is_own = (owner_lo <= owner_hi[:, None]) & (owner_hi >= owner_lo[:, None])
        of_first = (owner_lo <= first_hi[:, None]) & (owner_hi >= first_lo[:, None])
        is_near = position_lo[:, None] - position_hi < reach
        return np.tril((is_own | (of_first & (position_lo < prefix_hi[:, None]))) & is_near)


@torch.compiler.disable  # the mask differs in every micro-batch; the kernel is compiled by itself
def _attend_flex(layout: FlexLayout, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, how: Scores) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    # By head, since torch compiles numbers as constants, and a second one badly.
    wide, cap = torch.promote_types(q_THD.dtype, torch.float32), 1.0 if how.softcap is None else how.softcap
    scale_H, cap_H = (q_THD.new_full((q_THD.shape[1],), value, dtype=wide) for value in (how.scale / cap, cap))

    def scaled(score: Tensor, _batch: Tensor, head: Tensor, *_: Tensor) -> Tensor:
        return score * scale_H[head]

    def capped(score: Tensor, _batch: Tensor, head: Tensor, *_: Tensor) -> Tensor:
        return cap_H[head] * torch.tanh(score * scale_H[head])

    parts_1HTD = [x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_THD, v_THD)]
    for part in parts_1HTD:
        torch._dynamo.mark_static(part, [0, 1, 3])  # or a second model would make heads and their size dynamic, too
    out_1HTD, aux = _flex_attention(q_THD.device.type != "cpu")(
        *parts_1HTD,
        score_mod=scaled if how.softcap is None else capped,
        block_mask=layout.mask(how.window),
        scale=1.0,
        enable_gqa=q_THD.shape[1] != k_THD.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out_THD = out_1HTD.squeeze(0).transpose(0, 1)
    if how.sinks_H is None:
        return out_THD
    shares_TH1 = torch.sigmoid(aux.lse.squeeze(0).T - how.sinks_H.float()).unsqueeze(-1)
    return (out_THD * shares_TH1).to(out_THD.dtype)


@functools.cache
def _flex_attention(compiled: bool) -> Any:
    """On a CPU torch compiles no backward of it."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


@dataclass(frozen=True, slots=True)
class OtherKernel:
    """Any other `LayoutFn`."""

    name: str
    make: Callable[[np.ndarray, torch.device, np.ndarray | None], PackedLayout]
    refused: tuple[str, ...] = ()
    shares_prefix: bool = True

    def __call__(self, cu_seqlens: np.ndarray, device: torch.device, rows: np.ndarray | None = None) -> PackedLayout:
        return self.make(cu_seqlens, device, rows)


FLEX = OtherKernel("FlexAttention", FlexLayout)
KERNELS: tuple[VarlenKernel | OtherKernel, ...] = (
    VarlenKernel("FlashAttention 3", "FA3"),
    VarlenKernel("FlashAttention 4", "FA4"),
    VarlenKernel("torch's variable-length kernel"),
    VarlenKernel("torch's variable-length kernel, keys and values repeated for every query head", repeats_kv=True),
    FLEX,
)
"""In the order they are tried; only the last knows scores that are not plain. That of vLLM is none of them, since it
has no backward, nor is the package flash_attn, which has the kernel that torch has."""
KERNEL_TOLERANCE = 0.02
"""Of a result and a gradient in half precision, relative to their norms."""


@functools.cache
def best_layout(device: torch.device, dtype: torch.dtype, *, head_dim: int, is_plain: bool = True) -> LayoutFn:
    """The first of `KERNELS` that works for a model of this compute dtype, whose scores are plain or not, else padded
    blocks, with one warning per process; without one on CPU, where that is normal. Raises torch.OutOfMemoryError if a
    kernel could not be tried."""
    if device.type == "cpu":
        return OtherKernel("padded blocks", padded_layout, shares_prefix=False)
    refused: list[str] = []
    for kernel in KERNELS if is_plain else KERNELS[-1:]:
        reason = why_not(kernel, device, dtype, head_dim=head_dim)
        if reason is None:
            return replace(kernel, refused=tuple(refused))
        refused.append(f"{kernel.name} ({reason})")
    padded = OtherKernel("padded blocks", padded_layout, tuple(refused), shares_prefix=False)
    log.warning(
        "attention of %s, which costs time and memory, for %s and heads of size %d on %s",
        attention_name(padded), dtype, head_dim, device,
    )  # fmt: skip
    return padded


def attention_name(layout: LayoutFn) -> str:
    """What computes the attention, and why what would be faster does not."""
    return "; not ".join([layout.name, *layout.refused])


def why_not(
    kernel: VarlenKernel | OtherKernel, device: torch.device, dtype: torch.dtype, *, head_dim: int
) -> str | None:
    """Why a kernel does not work here; None if it does: it stays active then. It computes two short sequences that
    share a prompt, with grouped heads, forward and backward, and must give what plain operations do."""
    flash_impl = None
    if isinstance(kernel, VarlenKernel):
        flash_impl = kernel.flash_impl
        if dtype not in (torch.float16, torch.bfloat16):
            return "half precision only"
    try:
        if flash_impl is not None:
            _activate(flash_impl)
        with torch._dynamo.config.patch(suppress_errors=False):  # or what is not compiled would count as working
            worst = _largest_error(kernel, device, dtype, head_dim)
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = one_line(error)
    else:
        if worst <= KERNEL_TOLERANCE:
            return None
        reason = f"its result is off by {worst:.2g} of its norm"
    if flash_impl is not None:
        _activate(None)
    return reason


def _activate(impl: str | None) -> None:
    """A flash-attention implementation for all of the process; None for torch's own. Raises ImportError if it, or a
    torch that can use it, is not installed."""
    from torch.nn import attention

    if not hasattr(attention, "activate_flash_attention_impl"):
        if impl is not None:
            raise ImportError("this torch takes no other implementation")
    elif impl is not None:
        attention.activate_flash_attention_impl(impl)
    elif attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def _largest_error(
    kernel: VarlenKernel | OtherKernel, device: torch.device, dtype: torch.dtype, head_dim: int
) -> float:
    """Of output and gradients, relative to their norms; infinite if one is not finite."""
    cu_seqlens = np.array([0, 5, 11])
    rows = packed_rows(cu_seqlens, np.array([0, 3]))
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[Tensor, ...]] = []
    drawn = [torch.randn(8, heads, head_dim, generator=generator) for heads in (4, 2, 2, 4)]
    how = Scores(head_dim**-0.5)
    if isinstance(kernel, OtherKernel):
        how = how._replace(softcap=1.0, window=4, sinks_H=torch.tensor([-1.0, 0.0, 0.5, 1.0], device=device))
    for layout, kind in ((kernel, dtype), (padded_layout, torch.float32)):
        *inputs, grad = (x.to(device=device, dtype=dtype).to(kind) for x in drawn)
        q, k, v = (x.requires_grad_() for x in inputs)
        out = layout(cu_seqlens, device, rows).attend(q, k, v, how)
        found.append((out.detach(), *torch.autograd.grad(out, (q, k, v), grad)))
    errors = [((got.float() - exact).norm() / exact.norm()).item() for got, exact in zip(*found, strict=True)]
    return max(math.inf if math.isnan(error) else error for error in errors)


def padded_layout(cu_seqlens: np.ndarray, device: torch.device, rows: np.ndarray | None = None) -> PaddedLayout:
    """As `LayoutFn`. Queries of shared tokens are computed for every sequence, and those of the first are used."""
    is_shared = rows is not None
    rows = np.arange(cu_seqlens[-1]) if rows is None else rows
    starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
    order = np.argsort(lengths, kind="stable")
    restore, blocks, offset = np.empty(int(cu_seqlens[-1]), np.int64), [], 0
    for members in _split_by_length(order, lengths):
        length = int(lengths[members].max())
        position = np.arange(length)[None, :]
        is_real = position < lengths[members][:, None]
        tokens = starts[members][:, None] + np.minimum(position, lengths[members][:, None] - 1)
        places, packed = np.flatnonzero(is_real), tokens[is_real]
        restore[packed] = offset + places
        offset += is_real.size
        indices = (to_device(index, device) for index in (rows[tokens.reshape(-1)], places, rows[packed]))
        blocks.append(Block(len(members), length, *indices, is_shared=is_shared))
    return PaddedLayout(tuple(blocks), restore_index=to_device(restore[own_places(rows)[0]], device))


def _split_by_length(order: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Cut sequences, ascending in length, wherever a length outgrows the block that began with the shortest one."""
    sorted_lengths, cuts = lengths[order], []
    limit = max(SHORTEST_BLOCK, sorted_lengths[0] * BLOCK_GROWTH)
    while True:
        cut = int(np.searchsorted(sorted_lengths, limit, side="right"))
        if cut == len(order):
            return np.split(order, cuts)
        cuts.append(cut)
        limit = sorted_lengths[cut] * BLOCK_GROWTH


def packed_rows(cu_seqlens: np.ndarray, prefix_lens: np.ndarray) -> np.ndarray:
    """The token of the packed row that each token of the batch is: int64[T of the batch]. Raises ValueError unless
    every shared prefix is shorter than its sequence, and no longer than that of the sequence which has it."""
    starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens)
    number = np.arange(len(lengths))
    first = np.maximum.accumulate(np.where(prefix_lens == 0, number, 0))
    if prefix_lens[0] != 0 or (prefix_lens >= lengths).any() or (prefix_lens > lengths[first]).any():
        raise ValueError(f"prefix_lens {prefix_lens.tolist()[:20]} do not fit lengths {lengths.tolist()[:20]}")
    sequence = np.repeat(number, lengths)
    position = np.arange(cu_seqlens[-1]) - starts[sequence]
    is_own = position >= prefix_lens[sequence]
    rows = np.cumsum(is_own) - 1
    rows[~is_own] = rows[starts[first[sequence[~is_own]]] + position[~is_own]]
    return rows


def own_places(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of `rows` (tokens of the row, ascending in their first occurrences) that come first, and all others."""
    is_first = np.zeros(len(rows), np.bool_)
    is_first[np.unique(rows, return_index=True)[1]] = True
    return np.flatnonzero(is_first), np.flatnonzero(~is_first)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to `device`. The array is made writable first (Ray hands out read-only ones, about which torch warns)."""
    owned = torch.from_numpy(np.ascontiguousarray(array if array.flags.writeable else array.copy()))
    # Page-locked: the host would wait for the device to reach a copy from other memory.
    return owned if device.type == "cpu" else owned.pin_memory().to(device, non_blocking=True)
