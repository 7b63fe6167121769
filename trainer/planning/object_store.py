"""What is in Ray's object store at most: groups on their way to the driver, one batch, the answers of an evaluation.

A group is one object that stays until the group is trained, unless it is so small that it travels within the worker's
answer (docs/rollout.md, "How groups travel"). Each learner rank fetches its micro-batches from there, and an evaluation
brings all its answers in one object per replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.group_server import MOST_BYTES
from trainer.config.loss_keys import SELECTING_LOSSES
from trainer.planning.sizes import GIB, Part, total

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig
    from trainer.planning.sizes import Workload

TURN_BYTES = 4 + 1 + 4
"""Per token of prompt and answer in `rollout.types.Turn`: token_ids, is_generated, logprobs."""
TEXT_BYTES = 4
"""Per token of the answer in `Trajectory.text`; assumed, as for English."""
MICRO_BATCH_BYTES = 4 + 1 + 4 + 4 + 4 + 4
"""Per token in `trainer.data.batch.MicroBatch`: token_ids, loss_mask, behaviour_logprobs, versions, advantages,
loss_weights."""
SELECTED_BYTES, REWARDS_BYTES = 1, 4
"""Further ones there, where a loss selects tokens, and where the learner finishes advantages."""
SPILL_SHARE = 0.8
"""From this share of the store on, Ray writes objects to disk (its object_spilling_threshold)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """With every answer at its longest, so a run has less there."""

    parts: tuple[Part, ...]
    group_bytes: int
    """Of one group."""
    total_bytes: int | None
    """Its size; None if the cluster is not ours."""

    @property
    def carries_groups(self) -> bool:
        """Whether a group goes through the store, and not to the driver itself."""
        return self.group_bytes > MOST_BYTES

    @property
    def may_spill(self) -> bool:
        return self.total_bytes is not None and total(self.parts) > SPILL_SHARE * self.total_bytes


def object_store(cfg: RunConfig, workload: Workload, *, num_slots: int, group_size: int) -> ObjectStore:
    """
    Args:
        num_slots: groups in flight.
        group_size: answers that are generated for a prompt, a greedy baseline included.
    """
    answer = cfg.task.agent_max_sequences * answer_bytes(workload, response_tokens=cfg.rollout.max_response_tokens)
    num_asked = workload.num_evaluated
    parts = [_part("micro-batches of one step", _batch_bytes(cfg, workload))]
    if group_size * answer > MOST_BYTES:
        parts.append(_part(f"{num_slots:,} groups in flight", num_slots * group_size * answer))
    if num_asked * answer > MOST_BYTES:
        parts.append(_part(f"{num_asked:,} answers of an evaluation", num_asked * answer))
    return ObjectStore(
        parts=tuple(parts),
        group_bytes=group_size * answer,
        total_bytes=int(cfg.ray.object_store_gib * GIB) if cfg.ray.address == "local" else None,
    )


def answer_bytes(workload: Workload, *, response_tokens: int) -> int:
    """Of one trajectory, without what does not grow with its length."""
    return int(TURN_BYTES * workload.prompt_tokens) + (TURN_BYTES + TEXT_BYTES) * response_tokens


def _part(name: str, nbytes: int) -> Part:
    return Part(name=name, nbytes=nbytes, remedy="ray.object_store_gib: more", is_exact=False)


def _batch_bytes(cfg: RunConfig, workload: Workload) -> int:
    """All samples of a step; a greedy baseline is not trained."""
    selected = SELECTED_BYTES * (cfg.algorithm.loss in SELECTING_LOSSES)
    per_token = MICRO_BATCH_BYTES + selected + REWARDS_BYTES * cfg.algorithm.finishes_on_ranks
    sequences = cfg.trainer.groups_per_step * cfg.rollout.group_size * cfg.task.agent_max_sequences
    return int(sequences * (workload.prompt_tokens + cfg.rollout.max_response_tokens) * per_token)
