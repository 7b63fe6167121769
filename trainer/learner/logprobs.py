"""Log-probabilities of chosen tokens, and entropy, without ever holding the logits of all tokens.

Logits exist for `chunk_tokens` tokens at a time and are recomputed in the backward: one more product with the output
matrix (about 2% of a 7B step) in place of `tokens x vocabulary` floats (10 GB at 16k tokens).

Shape legend: `L` loss tokens, `C` tokens of a chunk, `E` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def selected_logprobs(
    hidden_LE: Tensor,
    weight_VE: Tensor,
    target_L: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_has_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[target], and the entropy of that distribution in nats.

    Args:
        hidden_LE: last hidden states at the positions that predict; compute dtype.
        weight_VE: output matrix; compute dtype.
        target_L: int64, 0 <= target < V.
        temperature: > 0; the behavior log-probs are after temperature, so ours must be too.
        chunk_tokens: C, >= 1.
        entropy_has_grad: for an entropy bonus. Its gradient shares the backward's recomputed softmax: one more pass
            over a chunk, no further product and no memory that grows with L.

    Returns:
        (log-probs float32[L], entropy float32[L]); float64 with float64 inputs. The entropy carries a gradient only
        with `entropy_has_grad`.
    """
    args = hidden_LE, weight_VE, target_L, temperature, chunk_tokens, entropy_has_grad
    return _SelectedLogprobs.apply(*args)  # pyright: ignore[reportReturnType]


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_LE: Tensor,
        weight_VE: Tensor,
        target_L: Tensor,
        temperature: float,
        chunk_tokens: int,
        entropy_has_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_LE.shape[0]
        # Three tensors, not views of one: FSDP2 hooks the outputs, and warns about views.
        logprobs_L, entropy_L, lse_L = (hidden_LE.new_empty(num_tokens, dtype=_wide(hidden_LE)) for _ in range(3))
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV = _logits(hidden_LE[chunk], weight_VE, temperature)
            lse_C = torch.logsumexp(logits_CV, dim=-1)
            logprobs_L[chunk] = logits_CV.gather(1, target_L[chunk, None]).squeeze(1) - lse_C
            probs_CV = torch.exp(logits_CV - lse_C[:, None])
            # H = -sum p log p = lse - sum p logit
            entropy_L[chunk] = lse_C - (probs_CV.mul_(logits_CV)).sum(-1)
            lse_L[chunk] = lse_C
        ctx.temperature, ctx.chunk_tokens, ctx.entropy_has_grad = temperature, chunk_tokens, entropy_has_grad
        if entropy_has_grad:
            ctx.save_for_backward(hidden_LE, weight_VE, target_L, lse_L, entropy_L)
        else:
            ctx.save_for_backward(hidden_LE, weight_VE, target_L, lse_L)
            ctx.mark_non_differentiable(entropy_L)
        return logprobs_L, entropy_L

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_LE, weight_VE, target_L, lse_L, *entropy = ctx.saved_tensors
        grad_L = grads[0] / ctx.temperature
        grad_hidden_LE = torch.zeros_like(hidden_LE)
        grad_weight_VE = None
        if ctx.needs_input_grad[1]:  # not below adapters
            # float32: a sum over chunks in bfloat16 would lose the late ones.
            grad_weight_VE = torch.zeros_like(weight_VE, dtype=_wide(weight_VE))
        for start in range(0, hidden_LE.shape[0], ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            grad_logits_CV = _logits(hidden_LE[chunk], weight_VE, ctx.temperature).sub_(lse_L[chunk, None])
            # d logprob / d logit = onehot(target) - softmax, all scaled by grad / temperature
            scale_C1 = grad_L[chunk, None]
            if ctx.entropy_has_grad:
                # d entropy / d logit = -softmax (log softmax + entropy)
                entropy_scale_C1 = (grads[1][chunk] / ctx.temperature)[:, None]
                factor_CV = (grad_logits_CV + entropy[0][chunk, None]).mul_(entropy_scale_C1).add_(scale_C1)
                grad_logits_CV.exp_().mul_(factor_CV.neg_())
            else:
                grad_logits_CV.exp_().mul_(-scale_C1)
            grad_logits_CV.scatter_add_(1, target_L[chunk, None], scale_C1)
            grad_logits_CV = grad_logits_CV.to(weight_VE.dtype)  # products in the compute dtype, as in the forward
            grad_hidden_LE[chunk] = grad_logits_CV @ weight_VE
            if grad_weight_VE is not None:
                grad_weight_VE += grad_logits_CV.T @ hidden_LE[chunk]
        if grad_weight_VE is not None:
            grad_weight_VE = grad_weight_VE.to(weight_VE.dtype)
        return grad_hidden_LE, grad_weight_VE, None, None, None, None


def _logits(hidden_CE: Tensor, weight_VE: Tensor, temperature: float) -> Tensor:
    """float32[C, V]: softmax in bfloat16 would be off by percents."""
    logits_CV = (hidden_CE @ weight_VE.T).to(_wide(hidden_CE))
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _wide(values: Tensor) -> torch.dtype:
    """float32, or float64 where the inputs are (numerical checks of the gradient)."""
    return torch.promote_types(values.dtype, torch.float32)
