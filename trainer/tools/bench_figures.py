"""The figures of a benchmark's runs.

    learning-bound time     seconds that the learner computes for a step
    generation-bound time   seconds that the engines would need for the tokens of a step, at the rate that they had in
                            the same run while they were busy, so with at least one group each
    (full)                  the same at the rate while at least half a step's groups were running

Step over the larger of learning and generation, `ratio`, shows engines that were empty while the learner had nothing to
do either. It cannot show a learner that waits for a last answer: engines that are never empty need a whole step for a
step's tokens, so it is near 1 whatever the schedule; below 1 where the steps that count trained more tokens than were
generated meanwhile. With (full), `strict_ratio` counts tails that other answers could have filled as lost: it is 1 only
if the learner never waits, or if the engines always have much to do.

Neither proves that no schedule of the same devices is faster. Engines may be faster still with more groups at once than
(full) is the mean of. On shared devices each side has all of them in turn, so the larger one is out of reach there.

Steady steps alone count: not the first ones, and not the last S. A run admits no prompt that no step is left for, so
its engines run dry while its last S steps are trained.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
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


class TooShort(Exception):
    """The run has not enough steps for figures; the message says how many it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinMeanMax:
    """Mean and range of a few values."""

    mean: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MinMeanMax:
        return cls(mean=sum(values) / len(values), min=min(values), max=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRate:
    """What all engines together did during the steps that count."""

    tokens_per_s: float
    """While they were busy, awake: of engines that never are empty, the mean over all the time, tails included."""
    full_tokens_per_s: float | None
    """While at least half a step's groups were running."""
    busy_frac: float
    groups_running: float
    """Mean over the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of steady steps, per step where nothing else is said. Times in seconds. The module says what both ratios show."""

    steps: tuple[int, int]
    """First and last step that count, from 1."""
    num_devices: int
    step_s: MinMeanMax
    tokens_per_step: float
    """Trained, with the prompt counted once per answer."""
    tokens_per_s_per_device: float
    generation_s: float
    generation_full_s: float | None
    """At the rate that the engines had while at least half a step's groups were running, so without the long tails
    that few answers make; None if that never was."""
    learning_s: float
    engines: EngineRate
    learner_waits_for_data_s: float
    learner_waits_for_sync_s: float
    engines_idle_s: float
    devices_change_hands_s: float
    """Shared devices: engines fall asleep, the learner's memory comes and goes. 0 where nothing is shared."""
    sync_pause_s: MinMeanMax
    sync_end_to_end_s: MinMeanMax
    sync_pull_s: MinMeanMax
    staleness_mean: float
    staleness_max: float
    model_tflop: float
    """Model operations of the learner, 10^12; see `step_flops`. Of the workload's shape, also with another model."""
    mfu: float | None
    """Of the learner while it computes; None if nobody said what a device can do, or with a model of the case's own."""
    failed_attempts: int
    """Of the whole run, as the next one."""
    discarded_tokens: int

    @property
    def bound_s(self) -> float:
        """The larger of learning and generation, the latter at the rate of engines that have at least one group."""
        return max(self.generation_s, self.learning_s)

    @property
    def ratio(self) -> float:
        """Step time over `bound_s`: near 1 wherever engines are never empty, also if the learner waits."""
        return self.step_s.mean / self.bound_s

    @property
    def strict_ratio(self) -> float | None:
        """Step time over the larger of learning and generation at the full rate; None if that rate never was."""
        full_s = self.generation_full_s
        return strict_ratio(self.step_s.mean, generation_full_s=full_s, learning_s=self.learning_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """How long a run is, and how to look at it.

    Example:
        BenchPlan(work=work, case=case, warmup=4, num_steps=8, peak_tflops=None).total_steps  # 14 with S = 2
    """

    work: Workload
    case: Case
    warmup: int
    """Steps at the beginning that do not count."""
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
        """That the run is to make: the last S do not count either."""
        return self.last_counted + self.case.max_staleness

    def counts(self, step: int) -> bool:
        """Whether `step`, from 1, is a steady one. Says nothing of how far the run got: one that was cut off before its
        last S steps had prompts left until then."""
        return self.warmup < step <= self.last_counted


def strict_ratio(step_s: float, *, generation_full_s: float | None, learning_s: float) -> float | None:
    """Of plain values, since results of older versions have the values and not the ratio."""
    return None if generation_full_s is None else step_s / max(generation_full_s, learning_s)


def figures_as_values(figures: Figures) -> dict[str, Any]:
    """With what follows from them."""
    ratios = {"bound_s": figures.bound_s, "ratio": figures.ratio, "strict_ratio": figures.strict_ratio}
    return {**asdict(figures), **ratios}


def figures_of(records: Sequence[Record], spans: Sequence[Span], plan: BenchPlan) -> Figures:
    """
    Raises:
        TooShort: no steady step is left, or none whose groups have all ended.
    """
    steady = [record for record in records if plan.counts(record["step"])]
    if not steady:
        raise TooShort(f"{len(records)} steps ended and the first {plan.warmup} do not count; allow more time")
    tokens = [record["learner/num_tokens"] for record in steady]
    step_s = [record["perf/step_s"] for record in steady]
    synced = [record for record in steady if "sync/pull_s" in record]
    learning_s = _mean(steady, "learner/step_s")
    engines = engine_rate(records, spans, plan)
    generated, full = _mean(steady, "learner/num_loss_tokens"), engines.full_tokens_per_s
    flops = step_flops(
        plan.work,
        num_tokens=sum(tokens) / len(tokens),
        num_loss_tokens=generated,
        attention_tokens=attention_tokens(plan.work, steady[-1]["step"] * plan.work.groups_per_step),
    )
    peak = None if plan.case.has_own_model else plan.peak_tflops
    return Figures(
        steps=(steady[0]["step"], steady[-1]["step"]),
        num_devices=plan.case.num_devices,
        step_s=MinMeanMax.of(step_s),
        tokens_per_step=sum(tokens) / len(tokens),
        tokens_per_s_per_device=sum(tokens) / sum(step_s) / plan.case.num_devices,
        generation_s=generated / engines.tokens_per_s,
        generation_full_s=None if full is None else generated / full,
        learning_s=learning_s,
        engines=engines,
        learner_waits_for_data_s=_mean(steady, "time/wait_for_batch_s"),
        learner_waits_for_sync_s=_mean(steady, "time/wait_for_sync_s"),
        engines_idle_s=_mean(steady, "time/engines_idle_s"),
        devices_change_hands_s=sum(_mean(steady, name) for name in HANDOVER if name in steady[0]),
        sync_pause_s=MinMeanMax.of([record["sync/pause_s"] for record in synced]),
        sync_end_to_end_s=MinMeanMax.of([record["sync/end_to_end_s"] for record in synced]),
        sync_pull_s=MinMeanMax.of([record["sync/pull_s"] for record in synced]),
        staleness_mean=_mean(steady, "staleness/mean"),
        staleness_max=max(record["staleness/max"] for record in steady),
        model_tflop=flops / 1e12,
        mfu=None if peak is None else flops / learning_s / plan.case.num_ranks / (peak * 1e12),
        failed_attempts=records[-1]["buffer/failed"],
        discarded_tokens=records[-1]["discarded_tokens"],
    )


def engine_rate(records: Sequence[Record], spans: Sequence[Span], plan: BenchPlan) -> EngineRate:
    """From the trace: the tokens of a group are spread evenly over its time with the engines, and an engine is busy
    while it has a group. On shared devices the learner's turns are cut out.

    A group that never ended leaves no trace, so the last S steps are left out: whatever was running before them has
    been trained in them. Of a run that made all its steps, these are the S that do not count anyway.

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
    group_s = sum(end - begin for begin, end in clipped)
    tokens = sum(rate * (end - begin) for rate, (begin, end) in zip(rates, clipped, strict=True))
    return EngineRate(
        tokens_per_s=tokens / busy_s,
        full_tokens_per_s=full_rate(clipped, rates, max_groups=plan.work.groups_per_step),
        busy_frac=busy_s / seconds,
        groups_running=group_s / seconds,
    )


def _learners_turns(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """On shared devices: from the moment that engines are told to sleep until they have woken. Else none."""
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


def step_flops(work: Workload, *, num_tokens: float, num_loss_tokens: float, attention_tokens: float) -> float:
    """Operations of forward and backward that the model asks for; see `ModelFlops`.

    Args:
        attention_tokens: sum of length^2 over sum of length, of the sequences trained.
    """
    shape = work.architecture()
    in_blocks = sum(
        size[0] * size[1] for name, size in shape.shapes() if len(size) == 2 and name.startswith("model.layers.")
    )
    if shape.num_experts:
        raise ValueError(f"{shape.name} has experts; only those that a token visits would count")
    flops = ModelFlops(
        per_token=TRAINED * in_blocks,
        per_loss_token=TRAINED * shape.vocab * shape.hidden,
        per_squared_length=6.0 * shape.layers * shape.heads * shape.head_dim,
    )
    squared_lengths = attention_tokens * num_tokens
    return flops.of(num_tokens=num_tokens, num_loss_tokens=num_loss_tokens, squared_lengths=squared_lengths)


def start_up(
    records: Sequence[Record], spans: Sequence[Span], output: Sequence[str], *, started_at: float
) -> dict[str, float]:
    """Seconds from the start of the process to its first training step, and where they went.

    `output` are the lines that the run wrote to the screen; the phases are called as there.
    """
    first = min((span.begin_s for span in spans if span.track == "learner" and span.name == "step 0"), default=None)
    generated = min((span.begin_s for span in spans if span.track == "groups"), default=None)
    if first is None or generated is None or not records:
        return {}
    phases: dict[str, float] = {}
    for line in output:
        name, dots, rest = line.strip().partition(" ... ")
        seconds, unit, end = rest.partition(" s")
        if dots and unit and not end and name not in phases and seconds.replace(".", "", 1).isdigit():
            phases[name] = float(seconds)
        if line.startswith("step "):
            break
    told = {f"phase: {name}": seconds for name, seconds in phases.items()}
    return {
        "to_first_prompt_s": generated - started_at,
        "to_first_step_s": first - started_at,
        **told,
        "checks and imports": max(0.0, generated - started_at - sum(phases.values())),
        "first rollout": first - generated,
    }


def timeline_of(records: Sequence[Record], spans: Sequence[Span], plan: BenchPlan) -> Mapping[str, Any]:
    """A steady stretch for a picture: seconds from its beginning.

    `learner` and `paused` are [begin, end] of steps and of pauses of engines, `syncs` of weight syncs; `running` are
    [time, groups with the engines] at every change.
    """
    window = _window(records[: plan.warmup + TIMELINE_STEPS + plan.case.max_staleness], spans, plan)
    if window is None:
        return {}
    begin_s, end_s = window

    def within(track: str, prefix: str) -> list[list[float]]:
        found = [s for s in spans if s.track.startswith(track) and s.name.startswith(prefix)]
        return sorted(
            [max(s.begin_s, begin_s) - begin_s, min(s.end_s, end_s) - begin_s]
            for s in found
            if s.begin_s < end_s and s.end_s > begin_s
        )

    changes: dict[float, int] = {}
    for begin, end in within("groups", "group "):
        changes[begin] = changes.get(begin, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    running, number = [], 0
    for at in sorted(changes):
        number += changes[at]
        running.append([at, number])
    return {
        "seconds": end_s - begin_s,
        "learner": within("learner", "step "),
        "syncs": within("sync", "sync v"),
        "paused": within("engine", "paused for"),
        "running": running,
    }


def _group_tokens(span: Span, work: Workload) -> int:
    """Of all answers. Group number n has prompt number n, since prompts are not shuffled."""
    return sum(work.lengths_of(int(span.name.removeprefix("group ")) % NUM_PROMPTS))


def _mean(records: Sequence[Record], name: str) -> float:
    return sum(record[name] for record in records) / len(records)


ENTRIES: Mapping[str, str] = {
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
"""Name here to the metric that it is; docs/metrics.md says what each means."""


def per_step(records: Sequence[Mapping[str, Any]], plan: BenchPlan) -> list[dict[str, Any]]:
    """Every step that was recorded, warm-up and the last S included. What a record does not have is None.

    `trained_tokens` count the prompt once per answer; `generated_tokens` are those of the groups that came back from
    the engines since the step before, whichever step trains them.
    """
    return [
        {
            "step": record["step"],
            "is_counted": plan.counts(record["step"]),
            **{name: record.get(metric) for name, metric in ENTRIES.items()},
            "generated_tokens": _generated_tokens(record),
        }
        for record in records
    ]


def _generated_tokens(record: Mapping[str, Any]) -> int | None:
    rate, step_s = record.get("perf/rollout_tokens_per_s"), record.get("perf/step_s")
    return None if rate is None or step_s is None else round(rate * step_s)
