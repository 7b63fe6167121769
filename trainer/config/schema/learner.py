"""`learner`: FSDP2 training of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    num_ranks: int = key(2, "Learner processes, one per device (FSDP2 shards over all of them).", ge=1)
    lr: float = key(1e-6, "Peak learning rate (AdamW).", gt=0)
    lr_schedule: Literal["constant", "cosine", "linear"] = key("constant", "Schedule after the warm-up.")
    min_lr_frac: float = key(
        0.0, "Learning rate at the end of a cosine or linear schedule, as a share of `lr`.", ge=0, le=1
    )
    warmup_steps: int = key(0, "Steps of linear warm-up.", ge=0)
    weight_decay: float = key(0.01, "AdamW weight decay (not on norms and biases).", ge=0)
    beta1: float = key(0.9, "AdamW beta1.", ge=0, lt=1)
    beta2: float = key(0.999, "AdamW beta2.", ge=0, lt=1)
    eps: float = key(1e-8, "AdamW epsilon.", gt=0)
    max_grad_norm: float = key(1.0, "Gradient norm is clipped to this.", gt=0)
    max_skipped_steps: int = key(
        3,
        "Steps in a row whose gradient is not finite, and that are skipped: weights and moments stay as they were. One "
        "more ends the run, after a save.",
        ge=0,
    )
    max_tokens_per_micro_batch: int = key(16384, "Packed tokens per micro-batch and rank.", ge=1)
    logprob_chunk_tokens: int = key(1024, "Tokens whose logits exist at once.", ge=1)
    activation_checkpointing: bool = key(False, "Recompute each block in the backward.")
    compile: bool = key(
        False,
        "torch.compile each block: 1.1 to 1.4 times as fast on an H200, for up to a minute of the start on a new host. "
        "On a CPU, where it takes minutes, only the command line or a YAML file of your own turns it on.",
    )
    cpu_offload: bool = key(False, "Keep parameters and optimizer state in host memory (FSDP2 CPU offload).")
    reference_cpu_offload: bool = key(
        False, "Keep the reference (`algorithm.kl.coef` > 0) in host memory between its forward passes."
    )
    port: int = key(
        0,
        "Port where learner ranks meet (on rank 0's node); 0 takes a free one; fix it where a firewall needs to know.",
        ge=0,
        le=65535,
    )
    timeout_s: float = key(1800.0, "Deadline of one learner call (step, checkpoint) and of its collectives.", gt=0)
