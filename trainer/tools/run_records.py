"""Reads run directories: configuration, metrics, trace, starts, evaluations and samples."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import yaml
from msgspec import structs

from trainer.config.plain import read_stored
from trainer.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.errors import Problem

_T = TypeVar("_T")
_GIVE = "give the run directory that the run printed at its start"
Record = dict[str, Any]
"""Of metrics.jsonl, evaluations.jsonl or environment.jsonl."""
MIN_STEPS = 3
"""Fewer steady steps show nothing."""
CLOCKS_AGREE_S = 0.1
"""Between the time of a process and that of its steps. Two processes that start equally fast may be a second apart."""

RENAMED: Mapping[str, str] = {
    "buffer/forced_wait_s": "buffer/oldest_wait_s",
    "wait/engines_idle_s": "time/engines_idle_s",
    "wait/learner_for_data_s": "time/wait_for_batch_s",
    "wait/learner_for_evaluation_s": "time/wait_for_eval_s",
    "wait/learner_for_sync_s": "time/wait_for_sync_s",
    "wait/producer_for_slots_s": "time/backpressure_s",
}
"""Earlier name of a metric that is read here -> its name now, for records of earlier runs."""


class InvalidRunDir(Exception):
    """The directory holds no run that can be read; the message names what is missing."""


class TooFewSteps(Exception):
    """The run has too few steady steps for a diagnosis."""

    def __init__(self, message: str, facts: RunFacts, *, num_missing: int) -> None:
        super().__init__(message)
        self.facts = facts
        """With all steps since the start."""
        self.num_missing = num_missing


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a step that decide who waits for whom. None: this run did not record it."""

    step: int
    step_s: float = msgspec.field(name="perf/step_s")
    learner_s: float = msgspec.field(name="learner/step_s")
    data_wait_s: float = msgspec.field(name="time/wait_for_batch_s")
    """Without `evaluation_wait_s`."""
    evaluation_wait_s: float = msgspec.field(name="time/wait_for_eval_s", default=0.0)
    """The part of the wait for groups caused by an evaluation, which has one of the engines."""
    sync_wait_s: float = msgspec.field(name="time/wait_for_sync_s")
    pack_s: float = msgspec.field(name="sync/pack_s", default=0.0)
    engines_idle_s: float = msgspec.field(name="time/engines_idle_s")
    slot_wait_s: float = msgspec.field(name="time/backpressure_s")
    oldest_wait_s: float = msgspec.field(name="buffer/oldest_wait_s", default=0.0)
    """Total since the start of the process, not of this step."""
    time_s: float | None = None
    """Its end, since the start of the process."""
    num_slots: float | None = msgspec.field(name="buffer/num_slots", default=None)
    engines_lost: float = msgspec.field(name="fleet/engines_lost", default=0)
    """Engines that were away at some time of this step."""
    failed_frac: float = msgspec.field(name="response/failed_frac", default=0.0)
    stall_s: float = msgspec.field(name="checkpoint/stall_s", default=0.0)
    optimizer_s: float = msgspec.field(name="learner/optimizer_s", default=0.0)
    time_imbalance: float = msgspec.field(name="learner/time_imbalance", default=1.0)
    num_micro_batches: float = msgspec.field(name="learner/num_micro_batches", default=1)
    num_tokens: float = msgspec.field(name="learner/num_tokens", default=0)
    num_loss_tokens: float = msgspec.field(name="learner/num_loss_tokens", default=0)


class Span(NamedTuple):
    """A stretch of time on a row of the trace, Unix seconds."""

    track: str
    name: str
    begin_s: float
    end_s: float
    tokens: int | None = None
    """Generated, of a group; None where they were not counted."""
    process: int = 1
    """Of the run, counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """Of the steady steps."""

    evaluation_s: float
    """Time during which an evaluation ran concurrently."""
    generation_full_s: float | None = None
    """Per step, at the rate that engines have with at least half its groups; None if they never had so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The steady steps of the latest process of a run."""

    cfg: RunConfig
    lines: Sequence[StepLine]
    device_name: str
    """"auto" where no file names it."""
    has_ended: bool = False
    """It trained all its steps: engines ran out of prompts during the last ones."""
    num_lost_steps: int = 0
    """Left out only because an engine was lost."""
    trace: TraceFacts | None = None
    """None without a trace of these steps."""

    @property
    def shares_cores(self) -> bool:
        """Neither learner nor engines have devices to give away."""
        return self.device_name == "cpu"

    @property
    def num_devices(self) -> int:
        if self.cfg.mode.shares_devices:
            return self.cfg.learner.num_ranks
        return self.cfg.learner.num_ranks + self.cfg.rollout.num_devices

    @property
    def max_groups(self) -> int:
        """(S + 1) x B: groups in flight at most."""
        return (self.cfg.mode.max_staleness + 1) * self.cfg.trainer.groups_per_step

    @property
    def has_closed_slots(self) -> bool:
        num_slots = self.lines[-1].num_slots
        return num_slots is not None and num_slots < self.max_groups


def read_run(run_dir: Path) -> RunFacts:
    """
    Raises:
        InvalidRunDir: there is no configuration or there are no metrics, or they cannot be read.
        TooFewSteps: nearly no step is steady.
    """
    cfg = read_config(run_dir)
    lines = read_steps(run_dir, num_replicas=cfg.rollout.num_replicas)
    start = _latest_start(read_records(run_dir / "environment.jsonl"), lines)
    resumed = start.get("resumed_from_step")
    first = resumed if isinstance(resumed, int) else 0
    lines = [line for line in lines if line.step > first]
    device, has_ended = str(start.get("device", cfg.device.name)), _has_ended(run_dir, lines)
    facts = RunFacts(cfg=cfg, lines=lines, device_name=device, has_ended=has_ended)
    kept, num_lost = steady(lines, max_staleness=cfg.mode.max_staleness, has_ended=has_ended)
    if len(kept) < MIN_STEPS:
        raise _too_few(facts, num_kept=len(kept), num_lost=num_lost, resumed_from_step=first)
    return replace(facts, lines=kept, num_lost_steps=num_lost, trace=read_trace(run_dir, replace(facts, lines=kept)))


# Files


def read_config(run_dir: Path) -> RunConfig:
    """Ignores keys that this version does not know: the run was allowed to have them. Raises InvalidRunDir."""
    if not run_dir.is_dir():
        raise InvalidRunDir(f"{run_dir} is not a directory; {_GIVE}")
    try:
        return read_config_file(run_dir / "config.yaml")[0]
    except InvalidRunDir as error:
        raise InvalidRunDir(f"{error}; is {run_dir} a run directory?") from error


def read_config_file(path: Path) -> tuple[RunConfig, list[Problem]]:
    """The configuration of a run, perhaps of an earlier version, and its problems. Raises InvalidRunDir."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRunDir(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise InvalidRunDir(f"{path} holds no configuration")
    return read_stored(data)


def read_lines(
    path: Path, decode: Callable[[bytes], _T], *, damaged: Callable[[int, Exception], object]
) -> Iterator[_T]:
    """Every line, decoded, but a last one without an end, which is being written or was torn by a crash. `damaged` gets
    the number and the error of any other that cannot be decoded. Raises OSError if there is no file."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                try:
                    yield decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    damaged(number, error)


def read_records(path: Path) -> list[Record]:
    """Every line that is a JSON object; none without a file."""
    try:
        return list(read_lines(path, _record, damaged=lambda *_: None))
    except OSError:
        return []


def read_steps(run_dir: Path, *, num_replicas: int) -> list[StepLine]:
    """In order. Raises InvalidRunDir if there are no metrics, or a line is damaged."""
    path = run_dir / "metrics.jsonl"

    def damaged(number: int, error: Exception) -> None:
        raise InvalidRunDir(f"{path}, line {number}, is not a line of metrics: {error}")

    def decode(line: bytes) -> StepLine:
        known = {name: value for name, value in _record(line).items() if value is not None}
        step = msgspec.convert(known, StepLine)
        evaluation_s = step.evaluation_wait_s / num_replicas
        return structs.replace(
            step, evaluation_wait_s=evaluation_s, data_wait_s=max(0.0, step.data_wait_s - evaluation_s)
        )

    try:
        return sorted(read_lines(path, decode, damaged=damaged), key=lambda line: line.step)
    except OSError as error:
        raise InvalidRunDir(f"{path} cannot be read ({one_line(error)}); has a step ended yet?") from error


def sample_files(run_dir: Path, folder: str) -> list[Path]:
    """Files of `trajectories` or `evaluations`, oldest first. Raises InvalidRunDir if the directory holds no run."""
    if not run_dir.is_dir():
        raise InvalidRunDir(f"{run_dir} is not a directory; {_GIVE}")
    if not (run_dir / "config.yaml").is_file() and not (run_dir / folder).is_dir():
        raise InvalidRunDir(f"{run_dir} holds no run: it has no config.yaml and no {folder}/; {_GIVE}")

    def numbers(path: Path) -> list[str]:  # groups_00003.jsonl; version_20.jsonl, version_20.2.jsonl
        return path.stem.removeprefix("groups_").removeprefix("version_").split(".")

    ours = [path for path in (run_dir / folder).glob("*_*.jsonl") if all(map(str.isdecimal, numbers(path)))]
    return sorted(ours, key=lambda path: [int(number) for number in numbers(path)])


def _record(line: bytes) -> Record:
    """With the names that its metrics have now."""
    return {RENAMED.get(name, name): value for name, value in msgspec.json.decode(line, type=dict).items()}


def _has_ended(run_dir: Path, lines: Sequence[StepLine]) -> bool:
    """Whether `lines` end with the last step of the run. Without a readable summary, or with that of a process before a
    resume, the run counts as running."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return summary["exit_reason"] == "completed" and summary["steps"] == max(line.step for line in lines)
    except (OSError, ValueError, KeyError, TypeError):
        return False


# Which steps count


def _latest_start(starts: Sequence[Record], lines: Sequence[StepLine]) -> Record:
    """The newest start that made a step and that the steps after its checkpoint do not refute; empty without any.

    A process cuts the steps after its checkpoint once nothing can refuse it any more. Steps that continue the line
    before, by the clock of its process, are of an earlier process.
    """
    by_step = {line.step: line for line in lines}

    def is_refuted(start: Record) -> bool:
        step = start.get("resumed_from_step")
        if not isinstance(step, int):
            return False
        if max(by_step, default=0) <= step:
            return True  # it has made no step
        before, line = by_step.get(step), by_step.get(step + 1)
        if before is None or line is None or before.time_s is None or line.time_s is None:
            return False
        return abs(line.time_s - before.time_s - line.step_s) < CLOCKS_AGREE_S

    return next((start for start in reversed(starts) if not is_refuted(start)), {})


def steady(lines: Sequence[StepLine], *, max_staleness: int, has_ended: bool = False) -> tuple[list[StepLine], int]:
    """(steady steps, how many more there would be if no engine had been lost).

    Left out are the first S + 2 steps, in which slots fill up, kernels compile and caches warm up; the last S of a run
    that `has_ended`, whose engines have no prompt left; steps in which an engine was away; and those until the last
    time that slots were opened, if enough steps came after it.
    """
    inner = lines[max_staleness + 2 : len(lines) - (max_staleness if has_ended else 0)]
    opened = next((i for i in range(len(inner) - 1, 0, -1) if inner[i].num_slots != inner[i - 1].num_slots), 0)
    kept = [line for line in inner[opened:] if not line.engines_lost]
    if len(kept) >= MIN_STEPS:
        return kept, len(inner) - opened - len(kept)
    kept = [line for line in inner if not line.engines_lost]
    return kept, len(inner) - len(kept)


def _too_few(facts: RunFacts, *, num_kept: int, num_lost: int, resumed_from_step: int) -> TooFewSteps:
    staleness, num = facts.cfg.mode.max_staleness, len(facts.lines)
    num_first, num_last = staleness + 2, staleness if facts.has_ended else 0
    num_missing = MIN_STEPS - num_kept + max(0, num_first + num_last - num)
    last, do = (f", the last {num_last} empty it", "give a longer run") if num_last else ("", "let the run continue")
    away = f", {num_lost} of the others had a lost engine" if num_lost else ""
    resumed = f"; the {resumed_from_step} steps before the last resume are left out" if resumed_from_step else ""
    more = "1 more step is" if num_missing == 1 else f"{num_missing} more steps are"
    return TooFewSteps(
        f"{num} steps since the start were recorded; the first {num_first} fill the pipeline{last}{away}; {more} "
        f"needed for a diagnosis: {do}{' with all its engines' if away else ''}{resumed}",
        facts,
        num_missing=num_missing,
    )


# The trace


def read_spans(path: Path) -> list[Span]:
    """Of every process of the run; none without a file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return list(spans_of(file))


def spans_of(lines: Iterable[bytes]) -> Iterator[Span]:
    """The spans of events, one per line. Lines that a crash has torn are skipped."""
    tracks: dict[tuple[int, int], str] = {}
    begun: dict[tuple[int, int, int], tuple[str, float, int | None]] = {}
    for line in lines:
        try:
            event = msgspec.json.decode(line.strip().rstrip(b","), type=dict)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        row = event["pid"], event["tid"]  # each process of a run numbers its tracks again
        match event["ph"]:
            case "M" if event["name"] == "thread_name":
                tracks[row] = event["args"]["name"]
            case "X":
                begin_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                yield Span(tracks.get(row, ""), event["name"], begin_s, end_s, process=row[0])
            case "b":
                begun[*row, event["id"]] = event["name"], event["ts"] / 1e6, event.get("args", {}).get("tokens")
            case "e" if (begin := begun.pop((*row, event["id"]), None)) is not None:
                name, begin_s, tokens = begin
                yield Span(tracks.get(row, ""), name, begin_s, event["ts"] / 1e6, tokens, row[0])
            case _:
                continue


def read_trace(run_dir: Path, facts: RunFacts) -> TraceFacts | None:
    """None without a trace that shows the steps."""
    spans = read_spans(run_dir / "trace.json")
    ends_s = {span.name: span.end_s for span in spans if span.track == "learner"}
    names = [f"step {line.step - 1}" for line in facts.lines]  # metrics count steps that are done, the trace from 0
    if any(name not in ends_s for name in names):
        return None
    steps = [
        (line.step, ends_s[name] - line.step_s, ends_s[name]) for line, name in zip(facts.lines, names, strict=True)
    ]
    groups, evaluations = ([span for span in spans if span.track == track] for track in ("groups", "evaluation"))
    windows = _windows(steps)
    return TraceFacts(
        evaluation_s=sum(w[1] - w[0] - idle_seconds(_within(w, evaluations), w, num_replicas=1) for w in windows),
        generation_full_s=_generation_full_s(groups, facts, steps),
    )


def _windows(steps: Sequence[tuple[int, float, float]]) -> list[tuple[float, float]]:
    """(begin, end) of every stretch of `steps` (number, begin, end) that follow each other."""
    found: list[tuple[float, float]] = []
    for before, (step, begin_s, end_s) in zip((None, *steps), steps, strict=False):
        is_next = before is not None and before[0] + 1 == step
        found.append((found.pop()[0] if is_next else begin_s, end_s))
    return found


def _within(window: tuple[float, float], spans: Sequence[Span]) -> list[tuple[float, float]]:
    """(begin, end) of the parts inside it."""
    clipped = [(max(span.begin_s, window[0]), min(span.end_s, window[1])) for span in spans]
    return [(begin, end) for begin, end in clipped if begin < end]


def _generation_full_s(
    groups: Sequence[Span], facts: RunFacts, steps: Sequence[tuple[int, float, float]]
) -> float | None:
    """Time of the engines for what they generated per step, filtered groups included, at their full rate. None if they
    never reached it, or tokens were not counted. A group that has not ended leaves no trace; it is trained at most
    S + 1 steps later."""
    cfg = facts.cfg
    sure = steps if facts.has_ended else steps[: max(0, len(steps) - cfg.mode.max_staleness - 1)]
    within = [(span, part) for span in groups for window in _windows(sure) for part in _within(window, [span])]
    if not within or any(span.tokens is None for span, _ in within):
        return None
    rates = [(span.tokens or 0) / (span.end_s - span.begin_s) for span, _ in within]
    clipped = [part for _, part in within]
    rate = full_rate(clipped, rates, max_groups=cfg.trainer.groups_per_step)
    tokens = sum(rate * (end - begin) for rate, (begin, end) in zip(rates, clipped, strict=True))
    return tokens / rate / len(sure) if rate else None


def _stretches(spans: Sequence[tuple[float, float]], rates: Sequence[float]) -> Iterator[tuple[float, int, float]]:
    """(seconds, spans that run, sum of their rates) from each begin or end of a span (begin, end) to the next."""
    begins = [(begin, 1, rate) for (begin, _), rate in zip(spans, rates, strict=True)]
    ends = [(end, -1, -rate) for (_, end), rate in zip(spans, rates, strict=True)]
    running, total = 0, 0.0
    for (at, number, rate), (until, *_) in itertools.pairwise(sorted(begins + ends)):
        running, total = running + number, total + rate
        yield until - at, running, total


def idle_seconds(spans: Sequence[tuple[float, float]], window: tuple[float, float], *, num_replicas: int) -> float:
    """Seconds of `window` in which a replica had none of the `spans` inside it, mean over replicas. A span keeps one
    replica busy."""
    busy_s = sum(seconds * min(running, num_replicas) for seconds, running, _ in _stretches(spans, [0.0] * len(spans)))
    return window[1] - window[0] - busy_s / num_replicas


def full_rate(spans: Sequence[tuple[float, float]], rates: Sequence[float], *, max_groups: int) -> float | None:
    """Mean sum of `rates` while at least half of `max_groups` of the `spans` run; None if they never do."""
    full = [(seconds, rate) for seconds, running, rate in _stretches(spans, rates) if 2 * running >= max_groups]
    full_s = sum(seconds for seconds, _ in full)
    return sum(seconds * rate for seconds, rate in full) / full_s if full_s > 0 else None
