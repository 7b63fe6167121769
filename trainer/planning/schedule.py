"""What moves and waits in a run: bytes per version, slots, work per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weight_sync.routes import Party, plan_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.planning.sizes import ModelShape
    from weight_sync.routes import RelayMode

LINK_BYTES_PER_S = (25e9, 200e9)
"""Two links that a pull may go over: a 200 Gbit/s network card per device, and a link between devices of one host."""
TAIL_EFFICIENCY, FULL_EFFICIENCY = 0.2, 0.45
"""Arithmetic efficiency of decoding over that of training, if engines have few answers each, as in a long tail, and if
they are kept full. The asynchronous runs on H200s in docs/benchmarks.md had 0.20 to 0.26 by the generation-bound time
as it was, and 0.27 to 0.55 by that at the full rate. The test of this module has all of them."""
TRAINED, FROZEN = 3, 2
"""Forward passes' worth of forward and backward: the gradients of the input and of the weights are one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTraffic:
    """Of one policy version."""

    version_bytes: int
    """All published parameters, once."""
    device_bytes: int
    """That one engine device reads."""
    rank_bytes: int
    """That the busiest learner rank serves, on all nodes."""
    relays: bool
    """Whether engines hand versions on to each other."""

    def floor_s(self, link_bytes_per_s: float) -> float:
        """No pull is faster than the busier of the two ends of its link."""
        return max(self.device_bytes, self.rank_bytes) / link_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Parties:
    """Who publishes a version, and who reads it."""

    ranks: Sequence[str]
    """Node of every learner rank."""
    replicas: Sequence[str]
    """Node of every engine; it is on one, with all its devices."""
    tensor_parallel_size: int
    relay: RelayMode
    """"off" also where engines have nothing to hand on."""


def sync_traffic(shape: ModelShape, parties: Parties, *, dtype_bytes: int) -> SyncTraffic:
    """Every replica needs every published byte once, spread over its devices, by the routes of weight sync."""
    version, tp = shape.num_trained_params * dtype_bytes, parties.tensor_parallel_size
    everyone = range(len(parties.ranks))
    routes = plan_routes(
        dict(enumerate(parties.ranks)),
        [
            Party(name=f"{replica}/{worker}", worker=worker, node=node)
            for replica, node in enumerate(parties.replicas)
            for worker in range(tp)
        ],
        dict.fromkeys(range(tp), everyone),
        relay=parties.relay,
    )
    most_readers = max(sum(route[rank] is None for route in routes.values()) for rank in everyone)
    return SyncTraffic(
        version_bytes=version,
        device_bytes=-(-version // tp),
        rank_bytes=-(-version * most_readers // (tp * len(parties.ranks))),
        relays=any(via is not None for route in routes.values() for via in route.values()),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one side does in a step."""

    num_devices: int
    params: float
    """That every token meets, each as often as a pass needs it: see `params_met`."""
    tokens: float

    @property
    def flops(self) -> float:
        """2 operations per parameter and token in a forward pass (Kaplan et al. 2020, section 2.1), attention left
        out. Of one device."""
        return 2 * self.params * self.tokens / self.num_devices


def step_work(learner: Side, engines: Side) -> StepWork:
    """
    Args:
        learner: its tokens are prompts and answers.
        engines: theirs are all answers, those that are not trained included.
    """
    return StepWork(learner_flops=learner.flops, engine_flops=engines.flops)


def params_met(shape: ModelShape, *, recomputes: bool) -> float:
    """Parameters that a token of the learner meets in forward and backward, counted once per forward pass' worth.

    Args:
        recomputes: the backward repeats the forward (activation checkpointing).
    """
    if shape.num_adapter_params:
        return (FROZEN + recomputes) * shape.num_active_params + (TRAINED + recomputes) * shape.num_adapter_params
    return (TRAINED + recomputes) * shape.num_active_params
