"""What is known of a run: its sizes, and one line of plain numbers per optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The keys of a configuration that decide who waits for whom."""

    num_ranks: int
    num_replicas: int
    tensor_parallel_size: int
    max_staleness: int
    groups_per_step: int
    group_size: int
    max_num_seqs: int
    sync_slots: int
    device_name: str
    takes_turns: bool = False
    """Learner and engines compute on the same devices, one after the other (mode=colocated)."""
    fixes_staleness: bool = False
    """The mode has one S (sync, one_step_off): another one needs mode=async beside it."""
    has_ended: bool = False
    """It trained all the steps it was to make, so its last ones while engines ran out of prompts."""
    resumed_from_step: int = 0
    """Where the latest process of the run began. What was before it is another run to a judge of waits."""
    is_device_assumed: bool = False
    """No file says on what it ran, so it is taken for an accelerator."""
    eval_every: int = 0
    """Steps between evaluations beside training; 0 without any, and if they stop training (trainer.eval_blocking)."""
    eval_at_start: bool = False
    """Each process begins with one beside training."""

    @property
    def shares_cores(self) -> bool:
        """Learner and engines compute on the same cores, so that none has devices of its own to give away."""
        return self.device_name == "cpu"

    @property
    def most_groups(self) -> int:
        """(S + 1) x B: groups that may ever be under way at once."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def num_devices(self) -> int:
        if self.takes_turns:
            return self.num_ranks
        return self.num_ranks + self.num_replicas * self.tensor_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One optimizer step, seconds. What this run did not record is None."""

    step: int
    step_s: float
    """Since the end of the step before."""
    learner_s: float
    data_wait_s: float
    """Without `evaluation_wait_s`."""
    sync_wait_s: float
    pack_s: float
    engines_idle_s: float | None
    slot_wait_s: float | None
    forced_wait_s: float
    """Total since the start of the process, not of this step."""
    evaluation_wait_s: float = 0.0
    """What the learner waited for groups because an engine had an evaluation instead."""
    time_s: float | None = None
    """Its end, since the start of the process."""
    num_slots: float | None = None
    """Groups that could be under way at its end."""
    num_skipped: int = 0
    """Engines that the last sync left out: lost, or with an evaluation."""
    num_rescued: float | None = None
    """Requests that went on elsewhere when their engine was lost; like the next two in all so far. None if no worker
    told of itself, and less than before if one of them did not."""
    attempt_tokens: float | None = None
    """Of groups that came to nothing; told like the requests."""
    num_failed: float = 0.0
    """Attempts at a group that failed."""
    failed_frac: float = 0.0
    """Share of the step's responses that have no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One that ran beside training, with an engine of its own."""

    version: int
    """That it evaluated; the run had made as many steps when it began."""
    last_step: int | None = None
    """Steps that the run had made when it ended; None if nobody has written that it has."""

    def may_pass_by(self, step: int) -> bool:
        """Whether the line of this step may tell of a sync that left its engine out. A sync ends up to two steps after
        the one that made its version."""
        return self.version < step and (self.last_step is None or step <= self.last_step + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTime:
    """Where the learner's time of a step goes, seconds. Packing is a part of the wait for sync."""

    computes_s: float
    waits_for_data_s: float
    waits_for_sync_s: float
    packs_s: float
    other_s: float
    """All that is left, the wait for evaluations included."""

    @classmethod
    def of(cls, lines: Sequence[StepLine]) -> LearnerTime:
        num = len(lines)
        return cls(
            computes_s=sum(line.learner_s for line in lines) / num,
            waits_for_data_s=sum(line.data_wait_s for line in lines) / num,
            waits_for_sync_s=sum(line.sync_wait_s for line in lines) / num,
            packs_s=sum(line.pack_s for line in lines) / num,
            other_s=max(0.0, sum(b.step_s - b.learner_s - b.data_wait_s - b.sync_wait_s for b in lines) / num),
        )

    @property
    def busy_s(self) -> float:
        """Computing, and waiting for sync."""
        return self.computes_s + self.waits_for_sync_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """What the trace says about the steps that count."""

    engines_idle_s: float
    """Time that an engine had no group, mean over all engines."""
    evaluation_s: float
    """Time during which an evaluation ran beside them."""
    generation_full_s: float | None = None
    """Of a step, if the engines were always as quick as while they have at least half its groups; None if they never
    have."""
