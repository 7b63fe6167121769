"""Model operations of a step, and what a device can do: the two numbers behind MFU (Chowdhery et al. 2022, PaLM).

Imports without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from trainer.data.batch import MicroBatch

TRAINED, FROZEN = 6, 4
"""Operations per weight and token: two in the forward, two for the input's gradient, two for the weight's."""

EXPERTS_PER_TOKEN = "num_experts_per_tok"
PEAK_TFLOPS = (
    (r"\bB200\b", 2250.0),
    (r"\bH[12]00 NVL\b", 835.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\b(H100|H200|H800)\b", 989.0),
    (r"\bH20\b", 148.0),
    (r"\b(A100|A800)\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bMI3(00|25)X\b", 1307.0),
)
"""Dense bfloat16, from the vendors' data sheets; the first pattern found in a device's name counts."""
LOGITS_BYTES = 256 << 20
"""Of the float32 logits that exist at one time: enough for full products, and with what is computed from them below
1 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Operations of forward and backward that a model asks for. What is recomputed or padded does not count."""

    per_token: float
    """In the blocks' matrices: 6 per weight, 4 where it is frozen."""
    per_loss_token: float
    """In the output matrix: logits exist of these tokens only."""
    per_squared_length: float
    """In attention: 6 x layers x heads x head size, since a causal one looks at half of all pairs."""

    def of(self, *, num_tokens: float, num_loss_tokens: float, squared_lengths: float) -> float:
        """Operations of sequences whose squared lengths add up to `squared_lengths`."""
        return (
            self.per_token * num_tokens
            + self.per_loss_token * num_loss_tokens
            + self.per_squared_length * squared_lengths
        )

    def of_sequence(self, num_tokens: int, num_loss_tokens: int) -> float:
        return self.of(num_tokens=num_tokens, num_loss_tokens=num_loss_tokens, squared_lengths=float(num_tokens) ** 2)

    def of_batches(self, batches: Iterable[MicroBatch]) -> float:
        """Of packed micro-batches; those without a loss token do not count, and a shared prefix counts once."""
        trained = [batch for batch in batches if batch.loss_mask.any()]
        lengths_N = np.concatenate([np.zeros(0), *(np.diff(batch.cu_seqlens) for batch in trained)])
        shared = [batch.prefix_lens for batch in trained if batch.prefix_lens is not None]
        shared_N = np.concatenate([np.zeros(0), *shared])
        return self.of(
            num_tokens=float(lengths_N.sum() - shared_N.sum()),
            num_loss_tokens=sum(int(np.count_nonzero(batch.loss_mask)) for batch in trained),
            squared_lengths=float((lengths_N**2).sum() - (shared_N**2).sum()),
        )


def model_flops(hf: PreTrainedModel) -> ModelFlops | None:
    """Of a causal LM with its adapters, sharded or not. Attention counts as if it reached back to the beginning: with
    sliding windows it is less.

    None where that cannot be known from the shapes: experts that are not fused, or attention whose heads have other
    sizes than `head_dim`.
    """
    text, blocks = hf.config.get_text_config(), list(cast("nn.ModuleList", hf.base_model.layers))
    params = [param for block in blocks for param in block.parameters()]
    is_mixture = getattr(text, EXPERTS_PER_TOKEN, None) is not None
    has_experts = any(param.ndim == 3 for param in params)
    if is_mixture != has_experts or any(param.ndim > 3 for param in params):
        return None
    if getattr(text, "v_head_dim", None) is not None:
        return None
    head = cast("nn.Linear", hf.get_output_embeddings()).weight
    return ModelFlops(
        per_token=float(sum(_each(param) * visited_params(param, text) for param in params)),
        per_loss_token=_each(head) * head.numel(),
        per_squared_length=6.0 * len(blocks) * int(text.num_attention_heads) * head_dim(hf.config),
    )


def visited_params(param: nn.Parameter, text: PreTrainedConfig) -> int:
    """Of a block's parameter, the numbers that one token is multiplied with: a matrix, or of fused experts
    [experts, out, in] those that it visits; without `num_experts_per_tok` all of them."""
    if param.ndim < 2:
        return 0
    visited = getattr(text, EXPERTS_PER_TOKEN, None) if param.ndim == 3 else None
    return param.numel() if visited is None else param.numel() // param.shape[0] * visited


def _each(param: Tensor) -> int:
    return TRAINED if param.requires_grad else FROZEN


def head_dim(config: PreTrainedConfig) -> int:
    """Size of an attention head; of a composite model, of its language model."""
    text = config.get_text_config()
    given = getattr(text, "head_dim", None)
    return int(text.hidden_size) // int(text.num_attention_heads) if given is None else int(given)


def logits_chunk(vocab_size: int, given: int | None) -> int:
    """Tokens whose logits exist at the same time; `given` is `learner.logprob_chunk_size`."""
    return max(1, LOGITS_BYTES // (4 * vocab_size)) if given is None else given


def peak_flops(device_name: str, *, compute_dtype: str, given_tflops: float | None) -> float | None:
    """Operations per second of one device: `given_tflops` x 10^12, else that of a known device in bfloat16, else None.

    A part of a device (MIG) is not known: it would be compared with the whole.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    if compute_dtype != "bfloat16" or re.search(r"\bMIG\b", device_name):
        return None
    return next((tflops * 1e12 for pattern, tflops in PEAK_TFLOPS if re.search(pattern, device_name)), None)
