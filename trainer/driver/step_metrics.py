"""What the driver measures and counts between two steps, as metrics."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.buffer.buffer_stats import BufferStats
    from rollout.types import Group, Trajectory
    from trainer.data.batch import TrainBatch
    from trainer.learner.step_stats import StepResult
    from weight_sync.messages import SyncReport


COHORT_WINDOW = 16
"""Complete cohorts that are compared together."""
LENGTH_WINDOW_GROUPS = 256
"""Length bias compares at least this many of the latest groups, rounded up to whole steps: groups of one step are
generated and trained in different orders."""
SYNC_FIELDS = (
    "pack_s", "seal_s", "pin_s", "pull_s", "attest_s", "drain_s", "pause_s", "commit_s", "resume_s", "end_to_end_s",
    "skipped_bytes", "num_runs", "num_retries", "num_stalls", "replicas_live", "replicas_skipped",
)  # fmt: skip
"""Fields of a SyncReport that are metrics of the same name."""
LOST = ("filtered_tokens", "failed_tokens", "unused_tokens", "retried_s", "dropped_s")
"""Kinds of lost work that the queue counts."""


class StepMetrics:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.queue = QueueTimer(clock=clock)
        self.lengths = LengthBiasMonitor()
        self._clock = clock
        self._last_at = clock()
        self._generated_tokens = 0

    def count_generated(self, group: Group) -> None:
        """Counts a group from the engines, whether it is trained or not."""
        self._generated_tokens += group.num_generated_tokens
        self.lengths.generated(group)

    def step_record(
        self,
        groups: Sequence[Group],
        batch: TrainBatch,
        result: StepResult,
        *,
        version: int,
        max_staleness: int,
        wait_for_batch_s: float,
        wait_for_eval_s: float,
        wait_for_sync_s: float,
    ) -> dict[str, object]:
        """Metrics of one step, without those of `batch_record`, the queue, the buffer and the run state.

        Args:
            version: of the policy before the step.
            wait_for_batch_s: how long the learner had no batch.
            wait_for_eval_s: part of it, while an evaluation ran.
            wait_for_sync_s: how long packing the new weights took.
        """
        now = self._clock()
        step_s = max(now - self._last_at, 1e-9)
        self._last_at = now
        generated, self._generated_tokens = self._generated_tokens, 0
        self.lengths.trained(groups, batch, version=version, max_staleness=max_staleness)
        learner_s = max(result.seconds["step"], 1e-9)
        return {
            **{name if "/" in name else f"learner/{name}": metric.mean for name, metric in result.metrics.items()},
            **{f"learner/{phase}_s": seconds for phase, seconds in result.seconds.items()},
            **({} if result.time_imbalance is None else {"learner/time_imbalance": result.time_imbalance}),
            "perf/step_s": step_s,
            "perf/rollout_tokens_per_s": generated / step_s,
            "perf/train_tokens_per_s": batch.num_tokens / learner_s,
            "perf/tokens_per_s": batch.num_tokens / step_s,
            "perf/learner_busy_frac": min(learner_s / step_s, 1.0),
            **model_flops_utilization(result),
            "time/wait_for_batch_s": wait_for_batch_s,
            "time/wait_for_eval_s": wait_for_eval_s,
            "time/wait_for_sync_s": wait_for_sync_s,
            **self.lengths.record(),
        }


def batch_record(groups: Sequence[Group], batch: TrainBatch, *, version: int, max_staleness: int) -> dict[str, object]:
    """What is known of a step before `version` is trained on these groups."""
    num_scored = sum(t.num_generated_tokens for g in groups for t in g.trajectories if t.status != "failed")
    shared = batch.num_shared_tokens
    return {
        **batch_stats(groups, version),
        **token_ages(batch, version=version, max_staleness=max_staleness),
        "learner/num_samples": batch.num_samples,
        "learner/num_sequences": batch.num_sequences,
        "learner/num_micro_batches": len(batch.micro_batches[0]),
        "learner/imbalance": 1 / batch.balance_frac,
        **({"learner/shared_tokens_frac": shared / batch.num_tokens} if shared else {}),
        **{f"response/excluded/{reason}": number for reason, number in batch.excluded.items()},
        "discarded/masked_tokens": num_scored - batch.num_loss_tokens,
    }


def model_flops_utilization(result: StepResult) -> dict[str, float]:
    """MFU: operations of the policy's forward and backward over the peak of all learner devices, in the time in which
    the slowest rank computed the step (with optimizer, reference and critic, without waits). Empty if unknown."""
    if result.model_flops is None or result.peak_flops is None:
        return {}
    return {"perf/mfu": result.model_flops / max(result.seconds["step"], 1e-9) / result.peak_flops}


def batch_stats(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Metrics of the groups of one step, before anything is excluded from training; undefined ones are absent.

    Rewards are raw (before overlong shaping), outcome and turns together. Greedy baselines count in
    `reward/greedy_mean` alone. Staleness is `version`, which the step trains, minus a group's start version.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    if not trajectories:
        return {}
    lengths = [t.num_generated_tokens for t in trajectories]
    group_ages = [version - g.start_version for g in groups]
    stats = {
        "response/tokens_mean": _mean(lengths),
        "response/tokens_max": float(max(lengths)),
        "response/truncated_frac": _mean([t.status == "truncated" for t in trajectories]),
        "staleness/group_mean": _mean(group_ages),
        "staleness/group_max": float(max(group_ages)),
        "reward/zero_variance_frac": _mean([g.has_equal_rewards for g in groups]),
        **_agent_stats(trajectories),
    }
    if scored := [t for t in trajectories if t.status != "failed"]:
        rewards = [t.total_reward for t in scored]
        stats |= {"reward/mean": _mean(rewards), "reward/std": float(np.std(np.array(rewards, np.float64)))}
        for name in sorted({name for t in scored for name in t.reward_parts}):
            stats[f"reward/part/{name}"] = _mean([t.reward_parts[name] for t in scored if name in t.reward_parts])
        if any(of_turns := [sum(t.turn_rewards.tolist()) for t in scored]):  # an environment rewarded some
            stats["reward/turns_mean"] = _mean(of_turns)
    if baselines := [g.baseline.total_reward for g in groups if g.baseline is not None]:
        stats["reward/greedy_mean"] = _mean(baselines)
    return stats


def _agent_stats(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns and tool calls, without failed responses. Empty if all are single-turn and no agent counts calls."""
    turns = [t.num_generated_turns for t in trajectories if t.num_generated_turns]
    used = [t.tool_use for t in trajectories if t.tool_use is not None]
    stats: dict[str, float] = {}
    if turns and (used or max(turns) > 1):
        stats["agent/turns_mean"] = _mean(turns)
    if used:
        stats["agent/tool_calls_mean"] = _mean([one.num_calls for one in used])
        stats["agent/tool_errors"] = float(sum(one.num_errors for one in used))
    return stats


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(np.array(values, np.float64)))


def token_ages(batch: TrainBatch, *, version: int, max_staleness: int) -> dict[str, object]:
    """Ages of the tokens that carry loss: `version`, which the step trains, minus the version that sampled them.

    An age above `max_staleness` would be a bug, and is shown. Without such tokens only mean and max, both 0.
    """
    versions = [micro.versions[micro.loss_mask] for rank in batch.micro_batches for micro in rank]
    ages = version - np.concatenate([np.empty(0, np.int32), *versions])
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


class LengthBiasMonitor:
    """Compares lengths: trained with generated over the latest steps, and in each cohort (the groups that began at one
    version) those trained first with all."""

    def __init__(self) -> None:
        self._generated: deque[Sequence[int]] = deque()
        """Lengths of token sequences, by group."""
        self._trained: deque[Sequence[int]] = deque()
        """Lengths of token sequences, by step."""
        self._open: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        """Start version -> step -> lengths, while later steps may still train some."""
        self._complete: deque[dict[int, list[int]]] = deque(maxlen=COHORT_WINDOW)

    def generated(self, group: Group) -> None:
        self._generated.append(
            [int(t.loss_mask[sequence].sum()) for t in group.trajectories for sequence in t.sequences()]
        )

    def trained(self, groups: Sequence[Group], batch: TrainBatch, *, version: int, max_staleness: int) -> None:
        """A step trained `groups` on `version`, which completes the cohorts that no later version may train."""
        micro_batches = [micro for rank in batch.micro_batches for micro in rank]
        counts = [np.add.reduceat(micro.loss_mask, micro.cu_seqlens[:-1], dtype=np.int64) for micro in micro_batches]
        self._trained.append([length for count in counts for length in count.tolist() if length])
        num_steps = -(-LENGTH_WINDOW_GROUPS // len(groups))
        while len(self._trained) > num_steps:
            self._trained.popleft()
        while len(self._generated) > num_steps * len(groups):
            self._generated.popleft()
        for group in groups:
            lengths = self._open[group.start_version].setdefault(batch.step, [])
            lengths += [t.num_generated_tokens for t in group.trajectories]
        for start in sorted(start for start in self._open if start + max_staleness <= version):
            self._complete.append(self._open.pop(start))

    def record(self) -> dict[str, float]:
        """Those of cohorts only once one is complete."""
        flat = itertools.chain.from_iterable
        record = {"length_bias/ks": ks_distance([*flat(self._generated)], [*flat(self._trained)])}
        early = [n for cohort in self._complete for n in cohort[min(cohort)]]
        everything = [n for cohort in self._complete for lengths in cohort.values() for n in lengths]
        if sum(everything):
            ratio = (sum(early) / len(early)) / (sum(everything) / len(everything))
            record["length_bias/early_ks"] = ks_distance(early, everything)
            record["length_bias/early_length_ratio"] = ratio
        return record


def ks_distance(a: Sequence[int], b: Sequence[int]) -> float:
    """Kolmogorov-Smirnov distance of two samples, in [0, 1]; 0 if either is empty."""
    if not a or not b:
        return 0.0
    points = np.union1d(a, b)
    cdf_a, cdf_b = (np.searchsorted(np.sort(side), points, side="right") / len(side) for side in (a, b))
    return float(np.max(np.abs(cdf_a - cdf_b)))


class QueueTimer:
    """Follows every group from its admission to its step."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[int, dict[str, float]] = {}
        """Group -> event -> time; of its last attempt."""
        self._num_running = 0
        self._changed_at = clock()
        self._seconds_with: defaultdict[int, float] = defaultdict(float)
        """Number of groups with the engines -> seconds."""
        self._lost: defaultdict[str, float] = defaultdict(float)
        self._backpressure_s = 0.0

    def admitted(self, group_id: int) -> None:
        self._times[group_id] = {"admitted": self._clock()}

    def claimed(self, group_id: int) -> None:
        """A rollout worker has it, where its requests may still wait for room at an engine."""
        self._count_running(1)
        self._times[group_id]["claimed"] = self._clock()

    def finished(self, group: Group) -> None:
        """It waits for its step. Counts its tokens that are never trained: those of responses without a reward, and
        what agent loops gave up."""
        self._count_running(-1)
        self._times[group.group_id]["finished"] = self._clock()
        for one in group.generated:
            if one.status == "failed":
                self._lost["failed_tokens"] += one.num_generated_tokens + one.num_lost_tokens
            else:
                self._lost["unused_tokens"] += one.num_lost_tokens

    def filtered(self, group: Group) -> None:
        """Another group replaces it; its tokens are lost."""
        self._count_running(-1)
        del self._times[group.group_id]
        self._lost["filtered_tokens"] += group.num_generated_tokens

    def failed(self, group_id: int, outcome: Literal["retried", "dropped"]) -> None:
        """An attempt raised. Its tokens stayed where it failed, so its time is counted instead."""
        self._count_running(-1)
        now = self._clock()
        self._lost[f"{outcome}_s"] += now - self._times.pop(group_id)["claimed"]
        if outcome == "retried":
            self._times[group_id] = {"admitted": now}

    def taken(self, groups: Sequence[Group]) -> None:
        """They are trained next. One that was never admitted is for the age check to find."""
        for group in groups:
            if group.group_id in self._times:
                self._times[group.group_id]["taken"] = self._clock()

    def step_record(
        self, groups: Sequence[Group], *, num_replicas: int, backpressure_s: float, engines_idle_frac: float | None
    ) -> dict[str, float]:
        """Metrics since the last record; forgets `groups`, which this step trained.

        Args:
            backpressure_s: total wait for free slots so far.
            engines_idle_frac: as measured by the engines; None estimates it: `n` groups keep `n` engines busy.
        """
        self._count_running(0)
        seconds, self._seconds_with = self._seconds_with, defaultdict(float)
        elapsed_s = max(sum(seconds.values()), 1e-9)
        idle_frac = engines_idle_frac
        if idle_frac is None:
            idle_frac = sum(s * max(0, num_replicas - n) / num_replicas for n, s in seconds.items()) / elapsed_s
        times = [self._times.pop(group.group_id) for group in groups if group.group_id in self._times]
        lost, self._lost = self._lost, defaultdict(float)
        waited_s, self._backpressure_s = backpressure_s - self._backpressure_s, backpressure_s
        return {
            "time/engines_idle_s": idle_frac * elapsed_s,
            "time/backpressure_s": waited_s,
            "perf/engines_busy_frac": 1 - idle_frac,
            "perf/groups_running": sum(s * n for n, s in seconds.items()) / elapsed_s,
            **{f"discarded/{kind}": lost[kind] for kind in LOST},
            **_queue_waits(times, groups),
        }

    def _count_running(self, change: int) -> None:
        now = self._clock()
        self._seconds_with[self._num_running] += now - self._changed_at
        self._changed_at = now
        self._num_running += change


def _queue_waits(times: Sequence[Mapping[str, float]], groups: Sequence[Group]) -> dict[str, float]:
    """Mean and maximum of each wait: over groups, that for an engine over responses."""
    waits = {
        "pending_s": [at["claimed"] - at["admitted"] for at in times],
        "rollout_s": [at["finished"] - at["claimed"] for at in times],
        "ready_s": [at["taken"] - at["finished"] for at in times],
        "engine_slot_s": [
            t.timings["engine_wait_s"] for group in groups for t in group.trajectories if "engine_wait_s" in t.timings
        ],
    }
    means = {f"queue/{name}": sum(values) / len(values) for name, values in waits.items() if values}
    return means | {f"queue/{name}_max": max(values) for name, values in waits.items() if values}


def sync_record(report: SyncReport) -> dict[str, object]:
    return {
        **{f"sync/{name}": getattr(report, name) for name in SYNC_FIELDS},
        "sync/bytes": report.nbytes,
        "sync/pull_gb_per_s": report.pull_bytes_per_s / 1e9,
        **{f"sync/pull_s/learner_{rank}": seconds for rank, seconds in report.pull_by_source.items()},
        **{f"sync/counter/{name}": count for name, count in report.counters.items()},
    }


def buffer_record(stats: BufferStats) -> dict[str, object]:
    """Counts by reason become one metric each."""
    record: dict[str, object] = {"discarded_tokens": stats.discarded_tokens}
    for name, value in asdict(stats).items():
        if isinstance(value, Mapping):
            record |= {f"buffer/{name}/{reason}": count for reason, count in value.items()}
        else:
            record[f"buffer/{name}"] = value
    return record
