"""The figures of a benchmark's runs.

    learning-bound time     seconds that the learner computes for a step
    generation-bound time   seconds that the engines would need for the tokens of a step, at the rate that they had in
                            the same run while they were busy, so with at least one group each
    (full)                  the same at the rate while at least half a step's groups were running

`ratio`, step over the larger of learning and generation, shows engines that were empty while the learner had nothing to
do. It is near 1 for engines that are never empty, even if the learner waits for a last response, and below 1 where the
steps trained more tokens than were generated meanwhile. `strict_ratio`, with (full), also counts tails that other
responses could have filled: it is 1 only if the learner never waits, or if the engines always have much to do. Neither
proves that no schedule of the same devices is faster.

Steady steps count: not the first ones, nor the last S, in which the engines have no prompt left.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainer.learner.flops import TRAINED, ModelFlops
from trainer.tools.bench_workload import NUM_PROMPTS, attention_tokens
from trainer.tools.run_records import full_rate, idle_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.tools.bench_workload import Case, Workload
    from trainer.tools.run_records import Record, Span


HANDOVER = ("devices/sleep_s", "devices/onload_s", "devices/offload_s")
TIMELINE_STEPS = 4
"""Of the picture, at most."""
PER_STEP: Mapping[str, str] = {
    "step_s": "perf/step_s",
    "learner_step_s": "learner/step_s",
    "trained_tokens": "learner/num_tokens",
    "loss_tokens": "learner/num_loss_tokens",
    "learner_waits_for_data_s": "time/wait_for_batch_s",
    "learner_waits_for_sync_s": "time/wait_for_sync_s",
    "engines_idle_s": "time/engines_idle_s",
    "producer_waits_for_slots_s": "time/backpressure_s",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "length_bias_ks": "length_bias/ks",
    "sync_pause_s": "sync/pause_s",
}
"""Name in FILE.json to the metric that it is; docs/metrics.md describes each."""


class TooShort(Exception):
    """The run has not enough steps for figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """How long a run is, and which of its steps count."""

    work: Workload
    case: Case
    warmup: int
    """First steps, which do not count."""
    num_steps: int
    """Steps that count, if the run gets so far."""
    peak_tflops: float | None
    """Of one device in the compute dtype."""

    @property
    def last_counted(self) -> int:
        """Number of the last step that counts, from 1."""
        return self.warmup + self.num_steps

    @property
    def total_steps(self) -> int:
        return self.last_counted + self.case.max_staleness

    def counts(self, step: int) -> bool:
        """Whether `step`, from 1, is steady. A run that was cut off earlier had prompts left until then."""
        return self.warmup < step <= self.last_counted


def strict_ratio(step_s: float, *, generation_full_s: float | None, learning_s: float) -> float | None:
    """Of plain values, since results of older versions have the values and not the ratio."""
    return None if generation_full_s is None else step_s / max(generation_full_s, learning_s)


def figures_of(records: Sequence[Record], spans: Sequence[Span], plan: BenchPlan) -> dict[str, Any]:
    """Of the steady steps, per step unless noted; times in seconds, some with mean, min and max.

        steps                     first and last step that count, from 1
        tokens_per_step           trained, with the prompt counted once per response
        generation_full_s         None if half a step's groups never ran at once
        engines                   see `engine_rate`
        devices_change_hands_s    shared devices: engines fall asleep, the learner's memory comes and goes; otherwise 0
        model_tflop               model operations of the learner, 10^12 (`step_flops`), of the workload's shape, with
                                  shared prompts as often as they are computed
        mfu                       of the learner while it computes; None if the peak of a device is not given, or with a
                                  model of the case's own
        failed_attempts, discarded_tokens    of the whole run
        bound_s, ratio, strict_ratio         see the module

    Raises:
        TooShort: no steady step is left, or none whose groups have all ended.
    """
    steady = [record for record in records if plan.counts(record["step"])]
    if not steady:
        raise TooShort(f"{len(records)} steps ended and the first {plan.warmup} do not count; allow more time")
    num_tokens, step_s = _mean(steady, "learner/num_tokens"), _range(steady, "perf/step_s")
    learning_s, generated = _mean(steady, "learner/step_s"), _mean(steady, "learner/num_loss_tokens")
    engines = engine_rate(records, spans, plan)
    generation_s, full = generated / engines["tokens_per_s"], engines["full_tokens_per_s"]
    full_s, bound_s = None if full is None else generated / full, max(generation_s, learning_s)
    flops = step_flops(
        plan.work,
        num_tokens=num_tokens,
        num_loss_tokens=generated,
        num_shared_tokens=fmean(one["learner/num_tokens"] * one.get("learner/shared_tokens_frac", 0) for one in steady),
        attention_tokens=attention_tokens(plan.work, steady[-1]["step"] * plan.work.groups_per_step),
    )
    peak = None if plan.case.has_own_model else plan.peak_tflops
    return {
        "steps": (steady[0]["step"], steady[-1]["step"]),
        "num_devices": plan.case.num_devices,
        "step_s": step_s,
        "tokens_per_step": num_tokens,
        "tokens_per_s_per_device": num_tokens / step_s["mean"] / plan.case.num_devices,
        "generation_s": generation_s,
        "generation_full_s": full_s,
        "learning_s": learning_s,
        "engines": engines,
        "learner_waits_for_data_s": _mean(steady, "time/wait_for_batch_s"),
        "learner_waits_for_sync_s": _mean(steady, "time/wait_for_sync_s"),
        "engines_idle_s": _mean(steady, "time/engines_idle_s"),
        "devices_change_hands_s": sum(_mean(steady, name) for name in HANDOVER if name in steady[0]),
        "sync_pause_s": _range(steady, "sync/pause_s"),
        "sync_end_to_end_s": _range(steady, "sync/end_to_end_s"),
        "sync_pull_s": _range(steady, "sync/pull_s"),
        "staleness_mean": _mean(steady, "staleness/mean"),
        "staleness_max": max(record["staleness/max"] for record in steady),
        "model_tflop": flops / 1e12,
        "mfu": None if peak is None else flops / learning_s / plan.case.num_ranks / (peak * 1e12),
        "failed_attempts": records[-1]["buffer/failed"],
        "discarded_tokens": records[-1]["discarded_tokens"],
        "bound_s": bound_s,
        "ratio": step_s["mean"] / bound_s,
        "strict_ratio": strict_ratio(step_s["mean"], generation_full_s=full_s, learning_s=learning_s),
    }


def engine_rate(records: Sequence[Record], spans: Sequence[Span], plan: BenchPlan) -> dict[str, Any]:
    """What all engines together did during the steps that count, by the trace.

        tokens_per_s         while they had a group, tails included
        full_tokens_per_s    while at least half a step's groups were running; None if they never were
        busy_frac, groups_running    means over the time

    A group's tokens are spread evenly over its time with the engines. On shared devices the learner's turns are cut
    out. A group that never ended leaves no trace, so the last S steps are left out: they train what ran before them.

    Raises:
        TooShort: nothing is left.
    """
    window = _window(records, spans, plan)
    if window is None:
        needed = plan.warmup + plan.case.max_staleness + 1
        raise TooShort(f"{len(records)} steps ended (in metrics and trace); the rate of the engines needs {needed}")
    seconds, turns = window[1] - window[0], _learners_turns(spans)
    begin_s, end_s = (_without(turns, at_s) for at_s in window)
    cut = [(s, _without(turns, s.begin_s), _without(turns, s.end_s)) for s in spans if s.track == "groups"]
    groups = [one for one in cut if one[1] < end_s and one[2] > max(one[1], begin_s)]
    rates = [_group_tokens(span, plan.work) / (end - begin) for span, begin, end in groups]
    clipped = [(max(begin, begin_s), min(end, end_s)) for _, begin, end in groups]
    busy_s = (end_s - begin_s) - idle_seconds(clipped, (begin_s, end_s), num_replicas=plan.case.num_replicas)
    if busy_s <= 0:
        raise TooShort("the trace shows no group with the engines during the steps that count")
    tokens = sum(rate * (end - begin) for rate, (begin, end) in zip(rates, clipped, strict=True))
    return {
        "tokens_per_s": tokens / busy_s,
        "full_tokens_per_s": full_rate(clipped, rates, max_groups=plan.work.groups_per_step),
        "busy_frac": busy_s / seconds,
        "groups_running": sum(end - begin for begin, end in clipped) / seconds,
    }


def _learners_turns(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """On shared devices: from when engines are sent to sleep until they have woken. Otherwise none."""
    wakes = sorted(s.end_s for s in spans if s.track.startswith("engine ") and s.name.startswith("paused for"))
    begins = [s.begin_s for s in spans if s.track == "devices" and s.name == "sleep"]
    return [(begin, next((end for end in wakes if end > begin), math.inf)) for begin in begins]


def _without(turns: Sequence[tuple[float, float]], at_s: float) -> float:
    """The same moment, with `turns` cut out of the time before it."""
    return at_s - sum(min(at_s, end) - begin for begin, end in turns if begin < at_s)


def _window(records: Sequence[Record], spans: Sequence[Span], plan: BenchPlan) -> tuple[float, float] | None:
    """From the end of the last step that does not count to that of the last one whose groups have all ended."""
    first, last = plan.warmup, min(len(records) - plan.case.max_staleness, plan.last_counted) - 1
    ends = {span.name: span.end_s for span in spans if span.track == "learner"}
    begin_s, end_s = ends.get(f"step {first - 1}"), ends.get(f"step {last}")
    return None if last < first or begin_s is None or end_s is None else (begin_s, end_s)


def step_flops(
    work: Workload,
    *,
    num_tokens: float,
    num_loss_tokens: float,
    attention_tokens: float,
    num_shared_tokens: float = 0,
) -> float:
    """Operations of forward and backward that the model asks for; see `ModelFlops`.

    Args:
        attention_tokens: sum of length^2 over sum of length, of the sequences trained.
        num_shared_tokens: those of `num_tokens` that belong to prompts computed with another response.
    """
    shape = work.architecture()
    if shape.num_experts:
        raise ValueError(f"{shape.name} has experts; only those that a token visits would count")
    in_blocks = sum(math.prod(s) for name, s in shape.shapes() if len(s) == 2 and name.startswith("model.layers."))
    flops = ModelFlops(
        per_token=TRAINED * in_blocks,
        per_loss_token=TRAINED * shape.vocab * shape.hidden,
        per_squared_length=6.0 * shape.layers * shape.heads * shape.head_dim,
    )
    squared_lengths = attention_tokens * num_tokens - work.prompt_tokens * num_shared_tokens
    num_tokens -= num_shared_tokens
    return flops.of(num_tokens=num_tokens, num_loss_tokens=num_loss_tokens, squared_lengths=squared_lengths)


def start_up(
    records: Sequence[Record], spans: Sequence[Span], output: Sequence[str], *, started_at: float
) -> dict[str, float]:
    """Seconds from the start of the process to its first training step, and where they went; phases as in the console
    lines `output`."""
    first = min((span.begin_s for span in spans if span.track == "learner" and span.name == "step 0"), default=None)
    generated = min((span.begin_s for span in spans if span.track == "groups"), default=None)
    if first is None or generated is None or not records:
        return {}
    phases: dict[str, float] = {}
    for line in output:
        if line.startswith("step "):
            break
        if phase := re.fullmatch(r"(.+?) \.\.\. (\d+\.?\d*) s", line.strip()):
            phases.setdefault(f"phase: {phase[1]}", float(phase[2]))
    return {
        "to_first_prompt_s": generated - started_at,
        "to_first_step_s": first - started_at,
        **phases,
        "checks and imports": max(0.0, generated - started_at - sum(phases.values())),
        "first rollout": first - generated,
    }


def timeline_of(records: Sequence[Record], spans: Sequence[Span], plan: BenchPlan) -> dict[str, Any]:
    """A steady stretch for a picture, in seconds from its beginning: [begin, end] of steps, pauses of engines and
    syncs; [time, groups with the engines] at every change."""
    window = _window(records[: plan.warmup + TIMELINE_STEPS + plan.case.max_staleness], spans, plan)
    if window is None:
        return {}
    begin_s, end_s = window

    def within(track: str, prefix: str) -> list[list[float]]:
        return sorted(
            [max(s.begin_s, begin_s) - begin_s, min(s.end_s, end_s) - begin_s]
            for s in spans
            if s.track.startswith(track) and s.name.startswith(prefix) and s.begin_s < end_s and s.end_s > begin_s
        )

    groups = within("groups", "group ")
    changes = Counter(begin for begin, _ in groups)
    changes.subtract(end for _, end in groups)
    times = sorted(changes)
    return {
        "seconds": end_s - begin_s,
        "learner": within("learner", "step "),
        "syncs": within("sync", "sync v"),
        "paused": within("engine", "paused for"),
        "running": [[at, number] for at, number in zip(times, accumulate(changes[at] for at in times), strict=True)],
    }


def per_step(records: Sequence[Record], plan: BenchPlan) -> list[dict[str, Any]]:
    """Every recorded step; what a record lacks is None. `trained_tokens` count the prompt once per response;
    `generated_tokens` are of the groups that ended since the step before, whichever step trains them."""
    steps: list[dict[str, Any]] = []
    for record in records:
        rate, step_s = record.get("perf/rollout_tokens_per_s"), record.get("perf/step_s")
        steps.append({
            "step": record["step"],
            "is_counted": plan.counts(record["step"]),
            **{name: record.get(metric) for name, metric in PER_STEP.items()},
            "generated_tokens": None if rate is None or step_s is None else round(rate * step_s),
        })  # fmt: skip
    return steps


def _group_tokens(span: Span, work: Workload) -> int:
    """Group n has prompt n, since prompts are not shuffled."""
    return sum(work.lengths_of(int(span.name.removeprefix("group ")) % NUM_PROMPTS))


def _mean(records: Sequence[Record], name: str) -> float:
    return fmean(record[name] for record in records)


def _range(records: Sequence[Record], name: str) -> dict[str, float]:
    """Of the records that have it: a step that left the policy unchanged has no sync."""
    values = [record[name] for record in records if name in record]
    if not values:
        raise TooShort(f"no step that counts has {name}")
    return {"mean": fmean(values), "min": min(values), "max": max(values)}
