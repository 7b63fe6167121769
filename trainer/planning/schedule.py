"""What moves and waits in a run: bytes per version, slots, work per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trainer.planning.sizes import ModelShape

LINK_BYTES_PER_S = (25e9, 200e9)
"""Two links that a pull may go over: a 200 Gbit/s network card per device, and a link between devices of one host."""
TAIL_EFFICIENCY, FULL_EFFICIENCY = 0.2, 0.45
"""Arithmetic efficiency of decoding over that of training, if engines have few answers each, as in a long tail, and if
they are kept full. The asynchronous runs on H200s in docs/benchmarks.md had 0.20 to 0.26 by the generation-bound time
as it was, and 0.27 to 0.55 by that at the full rate. The test of this module has all of them."""


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
    """Arithmetic of one step per device, in floating point operations."""

    learner_flops: float
    engine_flops: float

    @property
    def generation_over_learning(self) -> tuple[float, float]:
        """Time of generation over that of learning: with engines that are kept full, and with few answers in them."""
        ratio = self.engine_flops / self.learner_flops
        return ratio / FULL_EFFICIENCY, ratio / TAIL_EFFICIENCY

    @property
    def bottleneck(self) -> Literal["learning", "generation", "either"]:
        """The side that takes longer wherever between the two efficiencies decoding is."""
        least, most = self.generation_over_learning
        if most < 1:
            return "learning"
        return "generation" if least > 1 else "either"


def step_work(
    shape: ModelShape, devices: tuple[int, int], *, prompt_tokens: float, response_tokens: float, passes: float
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
