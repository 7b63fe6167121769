"""One entry per optimizer step of a run, so that what is said about single steps can be checked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.bench.figures import Measure

ENTRIES: Mapping[str, str] = {
    "step_s": "perf/step_s",
    "learner_step_s": "learner/step_s",
    "trained_tokens": "learner/num_tokens",
    "loss_tokens": "learner/num_loss_tokens",
    "learner_waits_for_data_s": "wait/learner_for_data_s",
    "learner_waits_for_sync_s": "wait/learner_for_sync_s",
    "engines_idle_s": "wait/engines_idle_s",
    "producer_waits_for_slots_s": "wait/producer_for_slots_s",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "length_bias_ks": "length_bias/ks",
    "sync_pause_s": "sync/pause_s",
}
"""Name here to the metric that it is; docs/metrics.md says what each means."""


def per_step(records: Sequence[Mapping[str, Any]], how: Measure) -> list[dict[str, Any]]:
    """Every step that was recorded, warm-up and the last S included. What a record does not have is None.

    `trained_tokens` count the prompt once per answer; `generated_tokens` are those of the groups that came back from
    the engines since the step before, whichever step trains them.
    """
    return [_entry(record, is_counted=how.counts(record["step"])) for record in records]


def _entry(record: Mapping[str, Any], *, is_counted: bool) -> dict[str, Any]:
    return {
        "step": record["step"],
        "is_counted": is_counted,
        **{name: record.get(metric) for name, metric in ENTRIES.items()},
        "generated_tokens": _generated_tokens(record),
    }


def _generated_tokens(record: Mapping[str, Any]) -> int | None:
    rate, step_s = record.get("perf/rollout_tokens_per_s"), record.get("perf/step_s")
    return None if rate is None or step_s is None else round(rate * step_s)
