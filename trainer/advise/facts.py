"""What is known of a run: its sizes, and one line of plain numbers per optimizer step."""

from __future__ import annotations

from dataclasses import dataclass


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
    has_ended: bool = False
    """It trained all the steps it was to make, so its last ones while engines ran out of prompts."""
    resumed_from_step: int = 0
    """Where the latest process of the run began. What was before it is another run to a judge of waits."""
    is_device_assumed: bool = False
    """No file says on what it ran, so it is taken for an accelerator."""

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
    sync_wait_s: float
    pack_s: float
    engines_idle_s: float | None
    slot_wait_s: float | None
    forced_wait_s: float
    """Total since the start of the process, not of this step."""
    num_slots: float | None = None
    """Groups that could be under way at its end."""


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
