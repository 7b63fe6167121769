"""The line of metrics.jsonl that one optimizer step leaves behind. Pure bookkeeping."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.batcher import BuiltBatch, batch_stats

if TYPE_CHECKING:
    from rollout.buffer.stats import BufferStats
    from rollout.types import Group
    from trainer.learner.result import StepResult
    from weight_sync.types import SyncReport

LENGTH_WINDOW_GROUPS = 256
"""Length bias compares so many of the latest generated and trained groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What the learner did between two steps, in seconds."""

    waited_for_data_s: float
    waited_for_sync_s: float
    """Until the new weights were packed and it could go on."""


class StepRecorder:
    """Turns what the loops know into metric lines."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_at = clock()
        self._generated_tokens = 0
        self._generated_lengths: deque[Sequence[int]] = deque(maxlen=LENGTH_WINDOW_GROUPS)
        self._trained_lengths: deque[Sequence[int]] = deque(maxlen=LENGTH_WINDOW_GROUPS)

    def count_generated(self, group: Group) -> None:
        """A group came back from the engines, whatever becomes of it."""
        self._generated_tokens += group.num_generated_tokens
        self._generated_lengths.append([t.num_generated_tokens for t in group.trajectories])

    def step_record(
        self, groups: Sequence[Group], built: BuiltBatch, result: StepResult, times: StepTimes
    ) -> dict[str, object]:
        """Metrics of one step, without what only the driver's state and the buffer know."""
        now = self._clock()
        step_s = max(now - self._last_at, 1e-9)
        self._last_at = now
        generated, self._generated_tokens = self._generated_tokens, 0
        self._trained_lengths.extend([t.num_generated_tokens for t in g.trajectories] for g in groups)
        learner_s = max(result.seconds["step"], 1e-9)
        return {
            **batch_stats(groups, built.batch.step),
            **{f"learner/{name}": metric.mean for name, metric in result.metrics.items()},
            **{f"learner/{phase}_s": seconds for phase, seconds in result.seconds.items()},
            "learner/num_samples": built.batch.num_samples,
            "learner/num_micro_batches": len(built.batch.micro_batches[0]),
            "learner/imbalance": 1 / built.packing_frac,
            "perf/step_s": step_s,
            "perf/rollout_tokens_per_s": generated / step_s,
            "perf/train_tokens_per_s": built.batch.num_tokens / learner_s,
            "perf/tokens_per_s": built.batch.num_tokens / step_s,
            "wait/learner_for_data_s": times.waited_for_data_s,
            "wait/learner_for_sync_s": times.waited_for_sync_s,
            "length_bias/ks": _ks_distance(self._generated_lengths, self._trained_lengths),
        }


def sync_record(report: SyncReport, *, version_lag: int) -> dict[str, object]:
    """Metrics of the last sync that ended."""
    return {
        "sync/pack_s": report.pack_s,
        "sync/seal_s": report.seal_s,
        "sync/pull_s": report.pull_s,
        "sync/pull_gb_per_s": report.pull_bytes_per_s / 1e9,
        **{f"sync/pull_s/learner_{rank}": seconds for rank, seconds in report.pull_by_source.items()},
        "sync/attest_s": report.attest_s,
        "sync/drain_s": report.drain_s,
        "sync/pause_s": report.pause_s,
        "sync/commit_s": report.commit_s,
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


def buffer_record(stats: BufferStats) -> dict[str, object]:
    """Metrics of the work buffer; counts by reason become one metric each."""
    record: dict[str, object] = {"discarded_tokens": stats.discarded_tokens}
    for name, value in asdict(stats).items():
        if isinstance(value, Mapping):
            record |= {f"buffer/{name}/{reason}": count for reason, count in value.items()}
        else:
            record[f"buffer/{name}"] = value
    return record


def _ks_distance(generated: Sequence[Sequence[int]], trained: Sequence[Sequence[int]]) -> float:
    """Kolmogorov-Smirnov distance between two samples of lengths, in [0, 1]; 0 if either is empty."""
    a, b = (np.sort(np.array([n for group in side for n in group], np.int64)) for side in (generated, trained))
    if not a.size or not b.size:
        return 0.0
    points = np.union1d(a, b)
    cdf_a, cdf_b = (np.searchsorted(side, points, side="right") / side.size for side in (a, b))
    return float(np.max(np.abs(cdf_a - cdf_b)))
