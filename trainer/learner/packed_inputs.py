"""The tensors of one micro-batch, and attention over packed sequences.

Sequences are packed end to end in one row of `T` tokens; no token may see another sequence. Two ways to compute it:
`VarlenLayout` hands the boundaries to torch's variable-length kernel; `PaddedLayout` works on every device: it gathers
sequences of similar length into dense blocks, so that hundreds of short sequences cost a handful of kernel calls.

Where sequences share their prompt (`MicroBatch.prefix_lens`), the row holds it once and is shorter than the batch:
every matrix product, norm and head sees it once. Attention alone gets the keys and values of the prompt for each
sequence again, and their gradients are summed.

Shape legend: `T` tokens of the packed row, `K` keys, `N` sequences (in a block: of the block), `L` padded length of a
block, `H` heads, `D` head size.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.algorithms.losses import LossInputs
from trainer.errors import TESTED, ModelError, one_line

if TYPE_CHECKING:
    from trainer.data.batch import MicroBatch


log = logging.getLogger(__name__)

ATTENTION_NAME = "tandem_packed"
"""Name of our function in transformers' attention interface."""

SHORTEST_BLOCK = 16
BLOCK_GROWTH = 1.25
"""A block holds lengths in (L / 1.25, L], or all up to 16: padding costs little, kernel calls cost much."""


class PackedLayout(Protocol):
    """Where the sequences of a packed row begin and end, as one kernel needs it. Not a tuple, which torch.compile would
    look into: it would compile again for every number of blocks."""

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scale: float, window: int | None) -> Tensor:
        """Causal attention inside each sequence; keys may have fewer heads (GQA). [T, H, D] in the dtype of `q_THD`.

        A token sees itself and the `window - 1` tokens before it; None means all before it.
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
        own, again = _own_places(rows)
        repeated, slot = np.unique(rows[again], return_inverse=True)
        tensors = (to_device(array, device) for array in (rows, own, again, repeated, slot))
        longest = int(np.diff(cu_seqlens).max())
        return SharedKeys(to_device(cu_seqlens.astype(np.int32), device), longest, *tensors)

    def gather(self, x_THD: Tensor) -> Tensor:
        """[K, H, D]"""
        places = self.row_K, self.own_T, self.again, self.repeated, self.slot
        return _GatherShared.apply(x_THD, *places)  # pyright: ignore[reportReturnType]


def _own_places(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of `rows` (tokens of the row, ascending in their first occurrences) that come first, and all others."""
    is_first = np.zeros(len(rows), np.bool_)
    is_first[np.unique(rows, return_index=True)[1]] = True
    return np.flatnonzero(is_first), np.flatnonzero(~is_first)


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

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scale: float, window: int | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        kwargs: dict[str, Any] = {}
        if q_THD.shape[1] != k_THD.shape[1]:
            if "enable_gqa" in inspect.signature(varlen_attn).parameters:
                kwargs["enable_gqa"] = True
            else:  # torch 2.11's kernel has no such argument; can go when 2.12 is the oldest we support.
                repeats = q_THD.shape[1] // k_THD.shape[1]
                k_THD, v_THD = (x.repeat_interleave(repeats, dim=1) for x in (k_THD, v_THD))
        # (-1, 0): everything to the left, nothing to the right. The kernel's left side does not count the token itself.
        kwargs["window_size"] = (-1 if window is None else window - 1, 0)
        # Of fewer queries than keys, the kernel takes the last query to see the last key.
        bounds = (self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)
        if (shared := self.shared) is not None:
            k_THD, v_THD = (shared.gather(x) for x in (k_THD, v_THD))
            bounds = (self.cu_seqlens, shared.cu_seqlens, self.max_seqlen, shared.max_seqlen)
        out = varlen_attn(q_THD, k_THD, v_THD, *bounds, scale=scale, **kwargs)
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

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scale: float, window: int | None) -> Tensor:
        """[N*L, H, D]: output at every place of the block."""
        q_NHLD, k_NHLD, v_NHLD = (
            _Gather.apply(x, self.token_index, self.place_index, self.packed_index, self.is_shared)
            .view(self.num_seqs, self.length, *x.shape[1:])  # pyright: ignore[reportOptionalMemberAccess]
            .transpose(1, 2)
            for x in (q_THD, k_THD, v_THD)
        )
        mask = None
        if window is not None and window < self.length:
            distance = torch.arange(self.length, device=q_THD.device)
            distance = distance[:, None] - distance[None, :]
            mask = (distance >= 0) & (distance < window)
        out_NHLD = scaled_dot_product_attention(
            q_NHLD,
            k_NHLD,
            v_NHLD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q_NHLD.shape[1] != k_NHLD.shape[1],
        )
        return out_NHLD.transpose(1, 2).reshape(self.num_seqs * self.length, *q_THD.shape[1:])


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """For scaled-dot-product attention, any device and dtype."""

    blocks: tuple[Block, ...]
    restore_index: Tensor
    """int64[T]: place of packed token t in the concatenation of all blocks."""

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scale: float, window: int | None) -> Tensor:
        return _attend_blocks(self, q_THD, k_THD, v_THD, scale=scale, window=window)  # pyright: ignore[reportCallIssue]


@torch.compiler.disable  # the number and shapes of blocks differ in every micro-batch
def _attend_blocks(
    layout: PaddedLayout, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scale: float, window: int | None
) -> Tensor:
    outputs = [block.attend(q_THD, k_THD, v_THD, scale=scale, window=window) for block in layout.blocks]
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Gather.apply(flat, layout.restore_index, None, layout.restore_index, False)  # pyright: ignore[reportReturnType]


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
    (its own mask, soft-capping, attention sinks, a position bias, values of another size than keys), or is called
    without a layout."""
    kind, layout = type(module).__name__, kwargs.get("packed")
    if layout is None:
        raise ModelError(f"{kind} was not given packed=<layout>, or its model does not hand it on; use {TESTED}")
    asked = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
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
    out_THD = layout.attend(q_THD, k_THD, v_THD, scale=scale, window=kwargs.get("sliding_window"))
    return out_THD.unsqueeze(0), None


@functools.cache
def best_layout(device: torch.device, dtype: torch.dtype, *, head_dim: int) -> LayoutFn:
    """The packed layout for a model of this compute dtype: `varlen_layout` where its kernel works, else
    `padded_layout`, with one warning per process that says why; without one on CPU, where that is normal. Raises
    torch.OutOfMemoryError if the kernel could not be tried."""
    if device.type == "cpu":
        return padded_layout
    reason = why_no_varlen_kernel(device, dtype, head_dim=head_dim)
    if reason is None:
        return varlen_layout
    log.warning(
        "attention is computed in padded blocks, which costs time and memory: torch's variable-length kernel does not "
        "work on %s for %s and heads of size %d: %s",
        device, dtype, head_dim, reason,
    )  # fmt: skip
    return padded_layout


def why_no_varlen_kernel(device: torch.device, dtype: torch.dtype, *, head_dim: int) -> str | None:
    """Why torch's variable-length kernel does not work here; None if it does: it is run forward and backward once."""
    if dtype not in (torch.float16, torch.bfloat16):
        return "it computes in half precision only"
    try:
        q_THD = torch.ones(2, 2, head_dim, device=device, dtype=dtype, requires_grad=True)
        kv_THD = torch.ones(2, 1, head_dim, device=device, dtype=dtype)
        cu_seqlens = torch.tensor([0, 1, 2], device=device, dtype=torch.int32)
        out = VarlenLayout(cu_seqlens, 1).attend(q_THD, kv_THD, kv_THD, scale=1.0, window=None)
        out.sum().backward()
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except (ImportError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        return one_line(error)
    return None if torch.isfinite(out).all() else "its result is not finite"


def varlen_layout(cu_seqlens: np.ndarray, device: torch.device, rows: np.ndarray | None = None) -> VarlenLayout:
    """As `LayoutFn`."""
    if rows is None:
        return VarlenLayout(to_device(cu_seqlens.astype(np.int32), device), max_seqlen=int(np.diff(cu_seqlens).max()))
    own = np.searchsorted(_own_places(rows)[0], cu_seqlens)
    queries = to_device(own.astype(np.int32), device)
    return VarlenLayout(queries, int(np.diff(own).max()), SharedKeys.of(cu_seqlens, rows, device))


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
    return PaddedLayout(tuple(blocks), restore_index=to_device(restore[_own_places(rows)[0]], device))


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


class LayoutFn(Protocol):
    """Makes the layout of a micro-batch."""

    def __call__(self, cu_seqlens: np.ndarray, device: torch.device, rows: np.ndarray | None = None) -> PackedLayout:
        """
        Args:
            cu_seqlens: int32[N+1], of whole sequences, every one at least one token long.
            rows: int64[cu_seqlens[-1]], the token of the packed row that each token of a sequence is; a sequence has
                shared ones first and at least one of its own. None: every token is in the row.
        """
        ...


class PackedInputs(NamedTuple):
    """What one forward needs. The logits of token t come from position t - 1, so `predict_pos_L` is one less than the
    positions of the loss tokens."""

    token_ids_1T: Tensor
    """int64"""
    position_ids_1T: Tensor
    """int64, restarts at 0 in every sequence; after a shared prefix, behind it."""
    layout: PackedLayout
    predict_pos_L: Tensor
    """int64: packed position whose hidden state predicts the loss token."""
    target_L: Tensor
    """int64: the loss token itself."""

    @staticmethod
    def of(batch: MicroBatch, *, device: torch.device, layout: LayoutFn) -> PackedInputs:
        """Raises ValueError if a first token of a sequence carries loss: nothing predicts it."""
        cu_seqlens = batch.cu_seqlens
        lengths = np.diff(cu_seqlens)
        if len(lengths) == 0 or lengths.min() < 1 or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(batch.token_ids):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the {len(batch.token_ids)} tokens, got {cu_seqlens.tolist()[:20]}"
            )
        if batch.loss_mask[cu_seqlens[:-1]].any():
            raise ValueError("loss_mask is True on the first token of a sequence, which nothing predicts; mask it out")
        loss_positions = np.flatnonzero(batch.loss_mask)
        token_ids, predict_pos = batch.token_ids, loss_positions - 1
        positions = np.arange(len(token_ids)) - np.repeat(cu_seqlens[:-1].astype(np.int64), lengths)
        rows = None if batch.prefix_lens is None else packed_rows(cu_seqlens, batch.prefix_lens)
        if rows is not None:
            own, _ = _own_places(rows)
            token_ids, positions, predict_pos = token_ids[own], positions[own], rows[predict_pos]
        return PackedInputs(
            token_ids_1T=to_device(token_ids.astype(np.int64), device).unsqueeze(0),
            position_ids_1T=to_device(positions, device).unsqueeze(0),
            layout=layout(cu_seqlens, device, rows),
            predict_pos_L=to_device(predict_pos, device),
            target_L=to_device(batch.token_ids[loss_positions].astype(np.int64), device),
        )


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


def loss_inputs(batch: MicroBatch, logprobs_L: Tensor) -> LossInputs:
    """The batch's loss tokens and their log-probs under the policy being trained, on the device of those."""
    mask, device = batch.loss_mask, logprobs_L.device
    num_sequences = len(batch.cu_seqlens) - 1
    sequence_T = np.repeat(np.arange(num_sequences), np.diff(batch.cu_seqlens))
    selected = batch.cov_selected
    return LossInputs(
        logprobs_L=logprobs_L,
        old_logprobs_L=to_device(batch.behavior_logprobs[mask], device),
        advantages_L=to_device(batch.advantages[mask], device),
        sequence_L=to_device(sequence_T[mask], device),
        num_sequences=num_sequences,
        selected_L=None if selected is None else to_device(selected[mask], device),
    )


def token_ages(batch: MicroBatch, *, version: int, device: torch.device) -> Tensor:
    """The version that is trained minus the one that sampled the token: int64[L], >= 0. Raises ValueError if a token is
    younger than the weights that are trained on it."""
    age_L = version - batch.versions[batch.loss_mask].astype(np.int64)
    if age_L.size and age_L.min() < 0:
        raise ValueError(
            f"a token was sampled by version {version - int(age_L.min())}, but version {version} is trained; "
            "engines can only have versions that the learner has made"
        )
    return to_device(age_L, device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to `device`. The array is made writable first (Ray hands out read-only ones, about which torch warns)."""
    owned = torch.from_numpy(np.ascontiguousarray(array if array.flags.writeable else array.copy()))
    # Page-locked: the host would wait for the device to reach a copy from other memory.
    return owned if device.type == "cpu" else owned.pin_memory().to(device, non_blocking=True)


def scatter_to_tokens(values_L: Tensor, batch: MicroBatch) -> np.ndarray:
    """Values of the loss tokens at their places on the host: float32[T], 0 outside `loss_mask`."""
    out_T = np.zeros(len(batch.token_ids), np.float32)
    out_T[batch.loss_mask] = values_L.detach().cpu().numpy()
    return out_T
