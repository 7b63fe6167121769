"""The lines that an optimizer step and an evaluation leave behind. Pure bookkeeping."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.batcher import BuiltBatch, batch_stats
from trainer.pipeline.length_bias import EarlyLengths, ks_distance

if TYPE_CHECKING:
    from rollout.buffer.stats import BufferStats
    from rollout.types import Group
    from trainer.data.batch import TrainBatch
    from trainer.learner.result import StepResult
    from trainer.pipeline.state import Evaluation
    from weight_sync.types import SyncReport

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
            [
                sum(s.num_tokens for turn in turns for s in turn.segments)
                for t in group.trajectories
                for turns in t.sequences
            ]
        )

    def step_record(
        self, groups: Sequence[Group], built: BuiltBatch, result: StepResult, times: StepTimes, *, max_staleness: int
    ) -> dict[str, object]:
        """Metrics of one step, without what only the driver's state and the buffer know."""
        now = self._clock()
        step_s = max(now - self._last_at, 1e-9)
        self._last_at = now
        generated, self._generated_tokens = self._generated_tokens, 0
        self._trained_lengths.append(_trained_lengths(built))
        self._keep_whole_steps(len(groups))
        step = built.batch.step
        self._early.trained(groups, step=step, max_staleness=max_staleness)
        learner_s = max(result.seconds["step"], 1e-9)
        return {
            **batch_stats(groups, step),
            **token_ages(built.batch, max_staleness=max_staleness),
            **{f"learner/{name}": metric.mean for name, metric in result.metrics.items()},
            **{f"learner/{phase}_s": seconds for phase, seconds in result.seconds.items()},
            "learner/num_samples": built.batch.num_samples,
            "learner/num_sequences": built.num_sequences,
            "learner/num_micro_batches": len(built.batch.micro_batches[0]),
            "learner/imbalance": 1 / built.packing_frac,
            "perf/step_s": step_s,
            "perf/rollout_tokens_per_s": generated / step_s,
            "perf/train_tokens_per_s": built.batch.num_tokens / learner_s,
            "perf/tokens_per_s": built.batch.num_tokens / step_s,
            "perf/learner_busy_frac": min(learner_s / step_s, 1.0),
            **_utilisation(result),
            "wait/learner_for_data_s": times.waited_for_data.whole_s,
            "wait/learner_for_evaluation_s": times.waited_for_data.beside_evaluation_s,
            "wait/learner_for_sync_s": times.waited_for_sync_s,
            **{f"response/untrained/{reason}": number for reason, number in built.excluded.items()},
            "discarded/excluded_tokens": _num_judged_tokens(groups) - built.batch.num_loss_tokens,
            "length_bias/ks": ks_distance(_flat(self._generated_lengths), _flat(self._trained_lengths)),
            **self._early.record(),
        }

    def _keep_whole_steps(self, groups_per_step: int) -> None:
        num_steps = -(-LENGTH_WINDOW_GROUPS // groups_per_step)
        while len(self._trained_lengths) > num_steps:
            self._trained_lengths.popleft()
        while len(self._generated_lengths) > num_steps * groups_per_step:
            self._generated_lengths.popleft()


def _trained_lengths(built: BuiltBatch) -> list[int]:
    """Tokens that carry loss, of every token sequence that has some."""
    batches = [batch for rank in built.batch.micro_batches for batch in rank]
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
