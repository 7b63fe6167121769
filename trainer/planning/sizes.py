"""The numbers that an estimate is made of. Plain values: no torch, no configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A causal language model, as far as memory depends on it. Counts are of parameters; tied ones count once."""

    num_params: int
    num_block_params: int
    """Of the largest decoder block."""
    num_root_params: int
    """Outside the blocks: embedding, final norm, output matrix."""
    num_head_params: int
    """Of an output matrix that is not tied to the embedding."""
    num_visited_params: int
    """In the matrices of all blocks, per token: of a mixture of experts, those of the experts that one token visits."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Per token: of a mixture of experts, the experts that one token visits together."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    latent_size: int = 0
    """Numbers in the cache per token and block, in the place of keys and values: of multi-head latent attention."""
    num_adapter_params: int = 0
    """Of LoRA, beside `num_params`; 0 if all weights are trained."""

    @property
    def num_trained_params(self) -> int:
        return self.num_adapter_params if self.num_adapter_params else self.num_params

    @property
    def num_frozen_params(self) -> int:
        return self.num_params if self.num_adapter_params else 0

    @property
    def num_active_params(self) -> int:
        """That a token is multiplied with in a forward pass, without adapters. The embedding is looked up."""
        return self.num_visited_params + self.vocab_size * self.hidden_size

    def with_value_head(self) -> ModelShape:
        """As a critic has it: one value in the place of the logits, and all of it trained."""
        num_value_params = self.hidden_size + 1
        return replace(
            self,
            num_params=self.num_params - self.num_head_params + num_value_params,
            num_root_params=self.num_root_params - self.num_head_params + num_value_params,
            num_head_params=num_value_params,
            vocab_size=1,
            num_adapter_params=0,
        )

    def kv_bytes_per_token(self, *, tensor_parallel_size: int, dtype_bytes: int) -> int:
        """Keys and values of one token on one device; at least one head stays whole, and every device has all of a
        latent."""
        if self.latent_size:
            return self.num_layers * self.latent_size * dtype_bytes
        heads = max(1, -(-self.num_kv_heads // tensor_parallel_size))
        return 2 * self.num_layers * heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one device offers."""

    name: str
    total_bytes: int
    is_shared: bool
    """All ranks and engines of this host share it: a CPU's main memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is known of prompts and answers before a run."""

    prompt_tokens: float
    """Mean of the training prompts."""
    response_tokens: float | None = None
    """Mean of the answers; None if nobody said."""
    num_evaluated: int = 0
    """Answers of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing that takes memory on a device."""

    name: str
    nbytes: int
    remedy: str
    """The key that makes it smaller, with what to do."""
    is_exact: bool = True
    """Follows from shapes. An estimate may be off by half."""
    is_state: bool = False
    """Is there between two steps, too, and moves to the host where devices are shared."""

    @property
    def least_bytes(self) -> int:
        return self.nbytes if self.is_exact else self.nbytes // 2


def total(parts: tuple[Part, ...]) -> int:
    return sum(part.nbytes for part in parts)


def least(parts: tuple[Part, ...]) -> int:
    """What is needed even if every estimate is twice too large."""
    return sum(part.least_bytes for part in parts)
