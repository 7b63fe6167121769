"""Log-probabilities of chosen tokens, and entropy, without ever holding the logits of all tokens.

Both passes hold the logits of about `LOGITS_BYTES`; a compiled forward twice as many, since it has nothing beside
them. The forward takes a chunk of tokens at a time, with the whole vocabulary. The backward computes the logits again
(one more product with the output matrix), for all tokens and a slice of the vocabulary at a time: rows of the matrix's
gradient are then one product each, and what is summed over slices, in float32, is as large as the hidden states and not
as the matrix.

Shape legend: `L` loss tokens, `C` tokens of a chunk, `E` hidden size, `V` vocabulary, `S` tokens of a vocabulary slice.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainer.learner.flops import logits_chunk

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE_MULTIPLE = 128
"""Tokens: full tiles for a device's matrix products."""


class Head(NamedTuple):
    """How logits are computed."""

    temperature: float = 1.0
    """> 0; the behavior log-probs are after temperature, so ours must be too."""
    chunk_tokens: int | None = None
    """C, >= 1; None for chunks of `LOGITS_BYTES`. A slice of the backward has as many logits."""
    entropy_has_grad: bool = False
    """For an entropy bonus. Its gradient shares the backward's softmax: no further product."""
    float32: bool = True
    """Products of half-precision operands leave the sum in float32. Otherwise they are rounded to the compute dtype
    before the softmax (a logit between 16 and 32 to 1/8), as an engine does that computes its logits in it."""
    compiled: bool = False
    """Fuse what follows a product into two kernels (torch.compile)."""
    softcap: float | None = None
    """x -> softcap * tanh(x / softcap) of every logit, before temperature."""


def selected_logprobs(hidden_LE: Tensor, weight_VE: Tensor, target_L: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[target], and the entropy of that distribution in nats.

    Args:
        hidden_LE: last hidden states at the positions that predict; compute dtype.
        weight_VE: output matrix; compute dtype.
        target_L: int64, 0 <= target < V.

    Returns:
        (log-probs float32[L], entropy float32[L]); float64 with float64 inputs. The entropy carries a gradient only
        with `head.entropy_has_grad`.
    """
    return _SelectedLogprobs.apply(hidden_LE, weight_VE, target_L, head)  # pyright: ignore[reportReturnType]


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_LE: Tensor, weight_VE: Tensor, target_L: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        num_tokens = len(hidden_LE)
        ctx.head, ctx.chunk_tokens = head, logits_chunk(len(weight_VE), head.chunk_tokens)
        # Three tensors, not views of one: FSDP2 hooks the outputs, and warns about views.
        logprobs_L, entropy_L, lse_L = (hidden_LE.new_empty(num_tokens, dtype=_wide(hidden_LE)) for _ in range(3))
        # With a small hidden size the host takes longer to start the kernels of a chunk than the device to run them.
        chunk_tokens = ctx.chunk_tokens * (2 if head.compiled and head.chunk_tokens is None else 1)
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV = _logits(hidden_LE[chunk], weight_VE, head)
            statistics = _fused(_statistics, logits_CV, head)
            logprobs_L[chunk], entropy_L[chunk], lse_L[chunk] = statistics(logits_CV, target_L[chunk])
            del logits_CV  # before the next ones exist
        if head.entropy_has_grad:
            ctx.save_for_backward(hidden_LE, weight_VE, target_L, lse_L, entropy_L)
        else:
            ctx.save_for_backward(hidden_LE, weight_VE, target_L, lse_L)
            ctx.mark_non_differentiable(entropy_L)
        return logprobs_L, entropy_L

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_LE, weight_VE, target_L, lse_L, *entropy = ctx.saved_tensors
        head, vocab = ctx.head, len(weight_VE)
        scales = [grad / head.temperature for grad in grads[: 1 + len(entropy)]]
        grad_hidden_LE = torch.zeros_like(hidden_LE, dtype=_wide(hidden_LE))
        grad_weight_VE = torch.empty_like(weight_VE) if ctx.needs_input_grad[1] else None  # not below adapters
        width = max(1, ctx.chunk_tokens * vocab // max(1, len(hidden_LE)))
        width = min(vocab, -(-width // SLICE_MULTIPLE) * SLICE_MULTIPLE)
        for start in range(0, vocab, width):
            rows_SE = weight_VE[start : start + width]
            logits_LS = _logits(hidden_LE, rows_SE, head)
            grad_logits = _fused(_grad_logits, logits_LS, head)
            slope_LS = None if head.softcap is None else 1 - (logits_LS * (head.temperature / head.softcap)).square_()
            grad_LS = grad_logits(logits_LS, target_L - start, lse_L, rows_SE.dtype, *scales, *entropy)
            del logits_LS  # may be the same memory
            if slope_LS is not None:
                grad_LS = (grad_LS * slope_LS).to(grad_LS.dtype)
            _add_product(grad_hidden_LE, grad_LS, rows_SE)
            if grad_weight_VE is not None:
                torch.mm(grad_LS.T, hidden_LE, out=grad_weight_VE[start : start + width])
            del grad_LS
        return grad_hidden_LE.to(hidden_LE.dtype), grad_weight_VE, None, None


def _statistics(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, and log-sum-exp of every row. May overwrite the logits."""
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    shifted_CV = _minus(logits_CV, largest_C1)
    chosen_C = shifted_CV.gather(1, target_C[:, None]).squeeze(1)
    exp_CV = shifted_CV.exp()
    sum_C = exp_CV.sum(-1)
    log_C = sum_C.log()
    # H = -sum p log p = log sum exp(x) - sum p x
    entropy_C = log_C - exp_CV.mul_(shifted_CV).sum(-1) / sum_C
    return chosen_C - log_C, entropy_C, largest_C1.squeeze(1) + log_C


def _grad_logits(
    logits_LS: Tensor,
    target_L: Tensor,
    lse_L: Tensor,
    dtype: torch.dtype,
    scale_L: Tensor,
    entropy_scale_L: Tensor | None = None,
    entropy_L: Tensor | None = None,
) -> Tensor:
    """Gradient of the logits of a slice, in `dtype`. `target_L` counts from the slice's first token, and most are
    outside of it. May overwrite the logits.

    d logprob / d logit = onehot(target) - softmax, d entropy / d logit = -softmax (log softmax + entropy).
    """
    logprob_LS = _minus(logits_LS, lse_L[:, None])
    if entropy_scale_L is None or entropy_L is None:
        grad_LS = _exp(logprob_LS).mul_(-scale_L[:, None])
    else:
        factor_LS = (logprob_LS + entropy_L[:, None]).mul_(-entropy_scale_L[:, None]).sub_(scale_L[:, None])
        grad_LS = factor_LS.mul_(_exp(logprob_LS))
    # The target's entry is summed before it is rounded: its parts cancel where the probability is near 1.
    column_L1 = target_L.clamp(0, logits_LS.shape[1] - 1)[:, None]
    onehot_L1 = torch.where(column_L1 == target_L[:, None], scale_L[:, None], 0.0)
    target_grad_L1 = grad_LS.gather(1, column_L1) + onehot_L1
    return grad_LS.to(dtype).scatter_(1, column_L1, target_grad_L1.to(dtype))


def _minus(x: Tensor, y: Tensor) -> Tensor:
    """In place, unless it is compiled: then a difference is never in memory, and one in place would be."""
    return x - y if torch.compiler.is_compiling() else x.sub_(y)


def _exp(x: Tensor) -> Tensor:
    return x.exp() if torch.compiler.is_compiling() else x.exp_()


def _fused(function: Callable[..., Any], logits: Tensor, head: Head) -> Callable[..., Any]:
    """`function` compiled; not for a single row, which torch would compile once more, in the middle of a run."""
    return _compiled(function) if head.compiled and min(logits.shape) > 1 else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Dynamic: chunks and slices differ in every micro-batch.
    return torch.compile(function, dynamic=True)


def _logits(hidden_CE: Tensor, weight_SE: Tensor, head: Head) -> Tensor:
    """float32[C, S]: a softmax in bfloat16 would be off by percents."""
    wide = _wide(hidden_CE)
    if not head.float32 or hidden_CE.dtype == wide:
        logits_CS = (hidden_CE @ weight_SE.T).to(wide)
    elif sums_in_float32(hidden_CE.device, hidden_CE.dtype):
        logits_CS = torch.mm(hidden_CE, weight_SE.T, out_dtype=wide)
    else:
        logits_CS = hidden_CE.to(wide) @ weight_SE.to(wide).T
    if head.softcap is not None:
        logits_CS = logits_CS.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits_CS if head.temperature == 1.0 else logits_CS.div_(head.temperature)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif sums_in_float32(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


@functools.cache
def sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device has a product of half-precision matrices that leaves its sum in float32: CUDA and ROCm do, and
    it costs what the rounded one does."""
    one = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(one.float(), one, torch.mm(one, one, out_dtype=torch.float32).to(dtype), out_dtype=torch.float32)
    except torch.OutOfMemoryError:  # says nothing about the product
        raise
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def _wide(values: Tensor) -> torch.dtype:
    """float32, or float64 where the inputs are (numerical checks of the gradient)."""
    return torch.promote_types(values.dtype, torch.float32)
