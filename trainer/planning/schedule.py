"""What moves and waits in a run: bytes per version, slots, work per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.planning.sizes import ModelShape

LINK_BYTES_PER_S = (25e9, 200e9)
"""Two links that a pull may go over: a 200 Gbit/s network card per device, and a link between devices of one host."""
DECODING_EFFICIENCY = 0.1
"""Assumed arithmetic efficiency of decoding over that of training: decoding reads all weights for every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTraffic:
    """Of one policy version."""

    version_bytes: int
    """All published parameters, once."""
    device_bytes: int
    """That one engine device reads."""
    rank_bytes: int
    """That one learner rank serves, if engines do not hand versions on to each other."""

    def floor_s(self, link_bytes_per_s: float) -> float:
        """No pull is faster than the busier of the two ends of its link."""
        return max(self.device_bytes, self.rank_bytes) / link_bytes_per_s


def sync_traffic(
    shape: ModelShape, *, dtype_bytes: int, num_ranks: int, num_replicas: int, tensor_parallel_size: int
) -> SyncTraffic:
    """Every replica needs every published byte once, spread over its devices."""
    version = shape.num_trained_params * dtype_bytes
    return SyncTraffic(
        version_bytes=version,
        device_bytes=-(-version // tensor_parallel_size),
        rank_bytes=-(-version * num_replicas // num_ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Arithmetic of one step per device, in floating point operations, with answers of full length."""

    learner_flops: float
    engine_flops: float

    @property
    def generation_over_learning(self) -> float:
        """Time of generation over that of learning, if decoding reaches `DECODING_EFFICIENCY` of the learner's."""
        return self.engine_flops / DECODING_EFFICIENCY / self.learner_flops


def step_work(
    shape: ModelShape, devices: tuple[int, int], *, prompt_tokens: float, response_tokens: int, passes: float
) -> StepWork:
    """2 operations per parameter and token in a forward pass (Kaplan et al. 2020, section 2.1), attention left out.

    Args:
        devices: (of the learner, of all engines).
        prompt_tokens: of all answers of a step together, like `response_tokens`.
        passes: forward passes' worth that the learner spends on a token: 3 for forward and backward, 1 for each
            further forward.
    """
    return StepWork(
        learner_flops=2 * passes * shape.num_params * (prompt_tokens + response_tokens) / devices[0],
        engine_flops=2 * shape.num_params * response_tokens / devices[1],
    )
