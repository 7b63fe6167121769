"""Bytes on one device of an engine, and how many tokens its KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.sizes import GIB, Part

if TYPE_CHECKING:
    from trainer.planning.sizes import Device, ModelShape

MAX_WORKSPACE_BYTES = 2 * GIB
WORKSPACE_SHARE = 1 / 16
SHADOW_HEADROOM = 0.9
"""`commit=auto` stages only if the shadow takes at most this share of what is free (weight_sync/landing.py)."""


UNCOUNTED = (
    "quantization",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "cpu_offload_gb",
)
"""Engine arguments that change what weights and cache take; what they do is not for us to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What the configuration says about one engine."""

    tensor_parallel_size: int
    dtype_bytes: int
    memory_share: float
    """rollout.gpu_memory_utilization; it has no meaning where `kv_bytes` is given."""
    kv_bytes: int | None
    """Size of the cache where it is set directly (on a CPU); None where it takes what is left."""
    max_model_len: int
    num_seats: int
    """Answers that it generates at once at most."""
    commit: str
    uncounted: tuple[str, ...]
    """Engine arguments that change what is counted here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One device of an engine."""

    parts: tuple[Part, ...]
    is_staged: bool
    shadow_fits: bool
    kv_bytes: int
    """Room for the cache; negative if not even the weights fit."""
    kv_tokens: int
    most_kv_tokens: int
    """If the workspace is half as large as assumed."""
    longest_tokens: int
    """Of one sequence, for which there must be room."""
    num_seats: int
    uncounted: tuple[str, ...]
    """See `EnginePlan`."""

    @property
    def wanted_tokens(self) -> int:
        """For a sequence of full length on every seat."""
        return self.num_seats * self.longest_tokens

    @property
    def may_not_fit(self) -> bool:
        """Whether there is room for the longest sequence only if the workspace is smaller than assumed."""
        return self.kv_tokens < self.longest_tokens <= self.most_kv_tokens


def workspace_bytes(device: Device) -> int:
    """Assumed for what an engine measures at its start and keeps free: activations of a prefill and captured graphs."""
    return min(MAX_WORKSPACE_BYTES, int(WORKSPACE_SHARE * device.total_bytes))


def engine_memory(shape: ModelShape, plan: EnginePlan, device: Device) -> EngineMemory:
    """The engine takes its share of the device; the shadow of a staged commit must fit into the rest."""
    tp = plan.tensor_parallel_size
    weights = -(-shape.num_params * plan.dtype_bytes // tp)
    shadow = -(-shape.num_trained_params * plan.dtype_bytes // tp)
    if plan.kv_bytes is None:
        own_bytes = int(plan.memory_share * device.total_bytes)
        workspace = workspace_bytes(device)
        kv_bytes = own_bytes - weights - workspace
        free = device.total_bytes - own_bytes
    else:
        workspace, kv_bytes = 0, plan.kv_bytes
        free = device.total_bytes - weights - kv_bytes
    fits = shadow <= (SHADOW_HEADROOM * free if plan.commit == "auto" else free)
    is_staged = plan.commit == "staged" or (plan.commit == "auto" and fits)
    per_token = shape.kv_bytes_per_token(tensor_parallel_size=tp, dtype_bytes=plan.dtype_bytes)
    parts = [
        Part(name="weights", nbytes=weights, remedy="rollout.tensor_parallel_size: more devices per engine"),
        Part(name="workspace (assumed)", nbytes=workspace, remedy="rollout.engine_args", is_exact=False),
        Part(name="KV cache", nbytes=max(0, kv_bytes), remedy="rollout.gpu_memory_utilization"),
    ]
    if is_staged:
        remedy = "weight_sync.commit=inplace, or a lower rollout.gpu_memory_utilization"
        parts.append(Part(name="shadow of a staged commit", nbytes=shadow, remedy=remedy))
    return EngineMemory(
        parts=tuple(parts),
        is_staged=is_staged,
        shadow_fits=fits,
        kv_bytes=kv_bytes,
        kv_tokens=max(0, kv_bytes) // per_token,
        most_kv_tokens=max(0, kv_bytes + workspace // 2) // per_token,
        longest_tokens=plan.max_model_len,
        num_seats=plan.num_seats,
        uncounted=plan.uncounted,
    )
