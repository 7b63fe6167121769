"""The metrics of a step: what the driver measures and counts between two steps."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.buffer.buffer_stats import BufferStats
    from rollout.types import Group, Trajectory
    from trainer.data.batch import TrainBatch
    from trainer.driver.checkpointing import Evaluation
    from trainer.learner.step_stats import StepResult
    from weight_sync.types import SyncReport


WINDOW_COHORTS = 16
"""The latest complete cohorts that are compared together."""


def ks_distance(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> float:
    """Kolmogorov-Smirnov distance between two samples of lengths, in [0, 1]; 0 if either is empty."""
    a, b = np.sort(np.asarray(a, np.int64)), np.sort(np.asarray(b, np.int64))
    if not a.size or not b.size:
        return 0.0
    points = np.union1d(a, b)
    cdf_a, cdf_b = (np.searchsorted(side, points, side="right") / side.size for side in (a, b))
    return float(np.max(np.abs(cdf_a - cdf_b)))


class EarlyLengths:
    """Lengths of what was trained first of each cohort, and of the whole cohort."""

    def __init__(self) -> None:
        self._open: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)  # start version -> step -> lengths
        self._complete: deque[dict[int, list[int]]] = deque(maxlen=WINDOW_COHORTS)

    def trained(self, groups: Sequence[Group], *, step: int, max_staleness: int) -> None:
        """`step` trained these groups; cohorts that no later step can train are complete."""
        for group in groups:
            lengths = self._open[group.start_version].setdefault(step, [])
            lengths += [t.num_generated_tokens for t in group.trajectories]
        for version in sorted(v for v in self._open if v + max_staleness <= step):
            self._complete.append(self._open.pop(version))

    def record(self) -> dict[str, float]:
        """Metrics over the latest complete cohorts; nothing before the first."""
        early = [n for cohort in self._complete for n in cohort[min(cohort)]]
        everything = [n for cohort in self._complete for lengths in cohort.values() for n in lengths]
        if not everything or sum(everything) == 0:
            return {}
        ratio = (sum(early) / len(early)) / (sum(everything) / len(everything))
        return {"length_bias/early_ks": ks_distance(early, everything), "length_bias/early_length_ratio": ratio}


LENGTH_WINDOW_GROUPS = 256
"""Length bias compares the latest generated and trained groups: at least so many, of whole steps, since both sides
order the groups of a step differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWait:
    """Of the learner, for the groups of a step, in seconds."""

    whole_s: float
    beside_evaluation_s: float
    """Part of it, while an evaluation ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What the learner did between two steps, in seconds."""

    waited_for_data: DataWait
    waited_for_sync_s: float
    """Until the new weights were packed and it could go on."""


class StepRecorder:
    """Turns what the loops know into metric lines."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_at = clock()
        self._generated_tokens = 0
        self._generated_lengths: deque[Sequence[int]] = deque()
        """Of token sequences, by group."""
        self._trained_lengths: deque[Sequence[int]] = deque()
        """Of token sequences, by step."""
        self._early = EarlyLengths()

    def count_generated(self, group: Group) -> None:
        """A group came back from the engines, whatever becomes of it."""
        self._generated_tokens += group.num_generated_tokens
        self._generated_lengths.append(
            [int(t.loss_mask[sequence].sum()) for t in group.trajectories for sequence in t.sequences()]
        )

    def step_record(
        self, groups: Sequence[Group], built: TrainBatch, result: StepResult, times: StepTimes, *, max_staleness: int
    ) -> dict[str, object]:
        """Metrics of one step, without what only the driver's state and the buffer know."""
        now = self._clock()
        step_s = max(now - self._last_at, 1e-9)
        self._last_at = now
        generated, self._generated_tokens = self._generated_tokens, 0
        self._trained_lengths.append(_trained_lengths(built))
        self._keep_whole_steps(len(groups))
        step = built.step
        self._early.trained(groups, step=step, max_staleness=max_staleness)
        learner_s = max(result.seconds["step"], 1e-9)
        return {
            **batch_stats(groups, step),
            **token_ages(built, max_staleness=max_staleness),
            **{f"learner/{name}": metric.mean for name, metric in result.metrics.items()},
            **{f"learner/{phase}_s": seconds for phase, seconds in result.seconds.items()},
            "learner/num_samples": built.num_samples,
            "learner/num_sequences": built.num_sequences,
            "learner/num_micro_batches": len(built.micro_batches[0]),
            "learner/imbalance": 1 / built.packing_efficiency,
            "perf/step_s": step_s,
            "perf/rollout_tokens_per_s": generated / step_s,
            "perf/train_tokens_per_s": built.num_tokens / learner_s,
            "perf/tokens_per_s": built.num_tokens / step_s,
            "perf/learner_busy_frac": min(learner_s / step_s, 1.0),
            **_utilisation(result),
            "wait/learner_for_data_s": times.waited_for_data.whole_s,
            "wait/learner_for_evaluation_s": times.waited_for_data.beside_evaluation_s,
            "wait/learner_for_sync_s": times.waited_for_sync_s,
            **{f"response/untrained/{reason}": number for reason, number in built.excluded.items()},
            "discarded/excluded_tokens": _num_judged_tokens(groups) - built.num_loss_tokens,
            "length_bias/ks": ks_distance(_flat(self._generated_lengths), _flat(self._trained_lengths)),
            **self._early.record(),
        }

    def _keep_whole_steps(self, groups_per_step: int) -> None:
        num_steps = -(-LENGTH_WINDOW_GROUPS // groups_per_step)
        while len(self._trained_lengths) > num_steps:
            self._trained_lengths.popleft()
        while len(self._generated_lengths) > num_steps * groups_per_step:
            self._generated_lengths.popleft()


def _trained_lengths(built: TrainBatch) -> list[int]:
    """Tokens that carry loss, of every token sequence that has some."""
    batches = [batch for rank in built.micro_batches for batch in rank]
    lengths = [np.add.reduceat(batch.loss_mask, batch.cu_seqlens[:-1], dtype=np.int64) for batch in batches]
    return [length for of_batch in lengths for length in of_batch.tolist() if length]


def _utilisation(result: StepResult) -> dict[str, float]:
    """Model-flops utilisation: operations of the policy's forward and backward, over what all learner devices could do
    in the seconds that the slowest rank computed the step, optimizer, reference and critic included. Time in which the
    learner waits is not in it. Nothing where either side is not known."""
    if result.model_flops is None or result.peak_flops is None:
        return {}
    return {"perf/mfu": result.model_flops / max(result.seconds["step"], 1e-9) / result.peak_flops}


def token_ages(batch: TrainBatch, *, max_staleness: int) -> dict[str, object]:
    """How old the tokens that carry loss are, in policy versions: the step minus the version that sampled them. Mean,
    largest, median, 90th percentile, and the fractions at every age from 0 to S (each age that occurs beyond it would
    be a bug, and is shown). Without such tokens a mean and a largest of 0, and nothing else."""
    versions = [micro.versions[micro.loss_mask] for rank in batch.micro_batches for micro in rank]
    ages = batch.step - np.concatenate([np.empty(0, np.int32), *versions])
    if len(ages) == 0:
        return {"staleness/mean": 0.0, "staleness/max": 0.0}
    tokens, total = np.bincount(ages, minlength=max_staleness + 1), len(ages)
    cumulated = np.cumsum(tokens)
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        **{f"staleness/age_frac/{age}": count / total for age, count in enumerate(tokens.tolist())},
        "staleness/p50": int(np.searchsorted(cumulated, 0.5 * total)),
        "staleness/p90": int(np.searchsorted(cumulated, 0.9 * total)),
    }


def sync_record(report: SyncReport, *, version_lag: int) -> dict[str, object]:
    """Metrics of the last sync that ended."""
    return {
        "sync/pack_s": report.pack_s,
        "sync/seal_s": report.seal_s,
        "sync/lease_s": report.lease_s,
        "sync/pull_s": report.pull_s,
        "sync/pull_gb_per_s": report.pull_bytes_per_s / 1e9,
        **{f"sync/pull_s/learner_{rank}": seconds for rank, seconds in report.pull_by_source.items()},
        "sync/attest_s": report.attest_s,
        "sync/drain_s": report.drain_s,
        "sync/pause_s": report.pause_s,
        "sync/commit_s": report.commit_s,
        "sync/resume_s": report.resume_s,
        "sync/end_to_end_s": report.end_to_end_s,
        "sync/bytes": report.nbytes,
        "sync/num_runs": report.num_runs,
        "sync/num_retries": report.num_retries,
        "sync/num_stalls": report.num_stalls,
        "sync/replicas_live": report.replicas_live,
        "sync/replicas_skipped": report.replicas_skipped,
        "sync/version_lag": version_lag,
        **{f"sync/counter/{name}": count for name, count in report.counters.items()},
    }


def evaluation_line(evaluation: Evaluation, *, step: int, time_s: float) -> dict[str, object]:
    """A line of evaluations.jsonl: an evaluation that ended after `step` optimizer steps, `time_s` into the run."""
    return {
        "version": evaluation.version,
        "step": step,
        "time_s": time_s,
        **evaluation_numbers(evaluation),
        "seconds": evaluation.time_s,
    }


def evaluation_numbers(evaluation: Evaluation) -> dict[str, object]:
    """What a line of evaluations.jsonl says of a set."""
    return {
        "accuracy": evaluation.accuracy,
        "pass_at": {str(k): value for k, value in evaluation.pass_at.items()},
        "num_prompts": evaluation.num_prompts,
        "num_samples": evaluation.num_samples,
        "tokens_mean": evaluation.tokens_mean,
        "truncated_frac": evaluation.truncated_frac,
    }


def failed_evaluation_line(reason: str, *, version: int, step: int, time_s: float, seconds: float) -> dict[str, object]:
    """As `evaluation_line`, of one that gave no number."""
    return {"version": version, "step": step, "time_s": time_s, "failed": reason, "seconds": seconds}


def buffer_record(stats: BufferStats) -> dict[str, object]:
    """Metrics of the work buffer; counts by reason become one metric each."""
    record: dict[str, object] = {"discarded_tokens": stats.discarded_tokens}
    for name, value in asdict(stats).items():
        if isinstance(value, Mapping):
            record |= {f"buffer/{name}/{reason}": count for reason, count in value.items()}
        else:
            record[f"buffer/{name}"] = value
    return record


def _num_judged_tokens(groups: Sequence[Group]) -> int:
    return sum(t.num_generated_tokens for g in groups for t in g.trajectories if t.status != "failed")


def _flat(sides: Iterable[Sequence[int]]) -> list[int]:
    return [length for group in sides for length in group]


@dataclass(slots=True, kw_only=True)
class Passage:
    """When one group came where, by the clock of the flow. Of a group that was retried: its last attempt."""

    admitted_at: float
    claimed_at: float
    finished_at: float
    taken_at: float


class GroupFlow:
    """Follows every group from its admission to its step. One event loop, no threads."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passages: dict[int, Passage] = {}
        self._num_running = 0
        self._changed_at = clock()
        self._seconds_with: defaultdict[int, float] = defaultdict(float)  # by number of groups with the engines
        self._lost: defaultdict[str, float] = defaultdict(float)
        self._slot_wait_s = 0.0

    def admitted(self, group_id: int) -> None:
        now = self._clock()
        self._passages[group_id] = Passage(admitted_at=now, claimed_at=now, finished_at=now, taken_at=now)

    def claimed(self, group_id: int) -> None:
        """A rollout worker has it from now on. Its requests may wait there, for room at an engine."""
        self._count(1)
        self._passages[group_id].claimed_at = self._clock()

    def finished(self, group: Group) -> None:
        """It waits for its step. Nothing will be learned from answers without a reward, nor from what agent loops gave
        up of the others: both are counted here."""
        self._count(-1)
        self._passages[group.group_id].finished_at = self._clock()
        for trajectory in group.generated:
            if trajectory.status == "failed":
                self._lost["failed_tokens"] += trajectory.num_generated_tokens + trajectory.num_lost_tokens
            else:
                self._lost["given_up_tokens"] += trajectory.num_lost_tokens

    def filtered(self, group: Group) -> None:
        """It is replaced by another; all that was generated for it is lost."""
        self._count(-1)
        del self._passages[group.group_id]
        self._lost["filtered_tokens"] += group.num_generated_tokens

    def failed(self, group_id: int, outcome: Literal["retried", "dropped"]) -> None:
        """An attempt raised. Its tokens stayed where it failed, so the time that it took is counted instead."""
        self._count(-1)
        passage, now = self._passages[group_id], self._clock()
        self._lost[f"{outcome}_s"] += now - passage.claimed_at
        if outcome == "dropped":
            del self._passages[group_id]
        else:
            passage.admitted_at = now

    def taken(self, groups: Sequence[Group]) -> None:
        """They are trained next. A group that was never admitted here is for the age check to find, not for this."""
        for passage in self._of(groups):
            passage.taken_at = self._clock()

    def step_record(
        self,
        groups: Sequence[Group],
        *,
        num_replicas: int,
        slot_wait_s: float,
        engines_idle_frac: float | None,
    ) -> dict[str, float]:
        """Metrics since the last line; the `groups` of this step are forgotten.

        Args:
            slot_wait_s: total wait of the producer for free slots so far.
            engines_idle_frac: see `EngineIdleMeter`; else `n` groups are taken to keep `n` engines busy.
        """
        self._count(0)
        seconds, self._seconds_with = self._seconds_with, defaultdict(float)
        elapsed_s = max(sum(seconds.values()), 1e-9)
        idle_frac = engines_idle_frac
        if idle_frac is None:
            idle_frac = sum(s * max(0, num_replicas - n) / num_replicas for n, s in seconds.items()) / elapsed_s
        passages = self._of(groups)
        for group in groups:
            self._passages.pop(group.group_id, None)
        lost, self._lost = self._lost, defaultdict(float)
        waited_s, self._slot_wait_s = slot_wait_s - self._slot_wait_s, slot_wait_s
        return {
            "wait/engines_idle_s": idle_frac * elapsed_s,
            "wait/producer_for_slots_s": waited_s,
            "perf/engines_busy_frac": 1 - idle_frac,
            "perf/groups_running": sum(s * n for n, s in seconds.items()) / elapsed_s,
            "discarded/filtered_tokens": lost["filtered_tokens"],
            "discarded/failed_tokens": lost["failed_tokens"],
            "discarded/given_up_tokens": lost["given_up_tokens"],
            "discarded/retried_s": lost["retried_s"],
            "discarded/dropped_s": lost["dropped_s"],
            **_queue_times(passages, groups),
        }

    def _of(self, groups: Sequence[Group]) -> list[Passage]:
        return [self._passages[group.group_id] for group in groups if group.group_id in self._passages]

    def _count(self, change: int) -> None:
        now = self._clock()
        self._seconds_with[self._num_running] += now - self._changed_at
        self._changed_at = now
        self._num_running += change


def _queue_times(passages: Sequence[Passage], groups: Sequence[Group]) -> dict[str, float]:
    """Mean and maximum of each wait, in seconds: over groups, and of the wait for an engine over answers."""
    waits = {
        "admitted_to_claimed_s": [p.claimed_at - p.admitted_at for p in passages],
        "claimed_to_finished_s": [p.finished_at - p.claimed_at for p in passages],
        "finished_to_taken_s": [p.taken_at - p.finished_at for p in passages],
        "for_engine_s": [
            t.timings["engine_wait_s"] for group in groups for t in group.trajectories if "engine_wait_s" in t.timings
        ],
    }
    means = {f"queue/{name}": sum(times) / len(times) for name, times in waits.items() if times}
    return means | {f"queue/{name}_max": max(times) for name, times in waits.items() if times}


log = logging.getLogger(__name__)


def batch_stats(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Metrics of the groups of one step, before anything is left out of training.

    Rewards are the raw ones (before overlong shaping) of the trajectories that have one, outcome and turns together.
    Greedy baselines count in `reward/greedy_mean` alone. The staleness of a group is `step` minus its start version,
    in policy versions. Keys whose value would be undefined (no judged trajectory) are absent.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    if not trajectories:
        return {}
    judged = [t for t in trajectories if t.status != "failed"]
    lengths = np.array([t.num_generated_tokens for t in trajectories], np.float64)
    group_ages = np.array([step - g.start_version for g in groups], np.float64)
    stats = {
        "response/tokens_mean": float(lengths.mean()),
        "response/tokens_max": float(lengths.max()),
        "response/truncated_frac": sum(t.status == "truncated" for t in trajectories) / len(trajectories),
        "staleness/group_mean": float(group_ages.mean()),
        "staleness/group_max": float(group_ages.max()),
        "reward/zero_variance_frac": sum(g.has_equal_rewards for g in groups) / len(groups),
    }
    stats |= _agent_stats(trajectories)
    if judged:
        rewards = np.array([t.total_reward for t in judged], np.float64)
        stats |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        for name in sorted({name for t in judged for name in t.reward_parts}):
            parts = [t.reward_parts[name] for t in judged if name in t.reward_parts]
            stats[f"reward/part/{name}"] = float(np.mean(parts))
        stats |= _turn_rewards(judged)
    if baselines := [g.baseline.total_reward for g in groups if g.baseline is not None]:
        stats["reward/greedy_mean"] = float(np.mean(baselines))
    return stats


def _turn_rewards(judged: Sequence[Trajectory]) -> dict[str, float]:
    """Absent where no environment rewarded a turn."""
    rewards = [sum(t.turn_rewards.tolist()) for t in judged]
    return {"reward/turns_mean": float(np.mean(rewards))} if any(rewards) else {}


def _agent_stats(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns and calls of tools. Absent where every answer is one turn and nobody counts calls. An answer whose agent
    failed has neither, and does not count."""
    turns = [t.num_generated_turns for t in trajectories if t.num_generated_turns]
    used = [t.tool_use for t in trajectories if t.tool_use is not None]
    stats: dict[str, float] = {}
    if turns and (used or max(turns) > 1):
        stats["agent/turns_mean"] = float(np.mean(turns))
    if used:
        stats["agent/tool_calls_mean"] = float(np.mean([one.num_calls for one in used]))
        stats["agent/tool_errors"] = float(sum(one.num_errors for one in used))
    return stats
