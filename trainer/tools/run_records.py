"""Reads run directories: configuration, metrics, trace, starts and evaluations of a run. The only reader of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from trainer.config.plain import read_stored
from trainer.telemetry.metrics import current_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


Record = dict[str, Any]
"""A line of metrics.jsonl, evaluations.jsonl or environment.jsonl."""
MIN_STEPS = 3
"""Fewer steady steps say nothing."""
CLOCKS_AGREE_S = 0.1
"""The time of a process and that between two of its steps are taken this close to each other. Two processes that need
about as long to start may be a second apart."""


class InvalidRunDir(Exception):
    """The directory holds no run that can be read; the message says what is missing."""


class TooFewSteps(Exception):
    """The run has not enough steady steps to say anything."""


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
    is_colocated: bool = False
    """Learner and engines compute on the same devices, one after the other (mode=colocated)."""
    fixes_staleness: bool = False
    """The mode has one S (sync, one_step_off): another one needs mode=async too."""
    has_ended: bool = False
    """It trained all its steps, so its last ones while engines ran out of prompts."""
    resumed_from_step: int = 0
    """Where the latest process of the run began. Earlier steps belong to another run as far as waits are concerned."""
    is_device_assumed: bool = False
    """No file says on what it ran, so it is taken for an accelerator."""
    eval_every: int = 0
    """Steps between evaluations beside training; 0 without any, and if they stop training (trainer.eval_blocking)."""
    eval_at_start: bool = False
    """Each process begins with one beside training."""

    @property
    def shares_cores(self) -> bool:
        """Learner and engines compute on the same cores: neither has devices to give away."""
        return self.device_name == "cpu"

    @property
    def max_groups(self) -> int:
        """(S + 1) x B: groups in flight at most."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def num_devices(self) -> int:
        if self.is_colocated:
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
    oldest_wait_s: float
    """Total since the start of the process, not of this step."""
    evaluation_wait_s: float = 0.0
    """What the learner waited for groups because an engine had an evaluation instead."""
    time_s: float | None = None
    """Its end, since the start of the process."""
    num_slots: float | None = None
    """Groups that could be in flight at its end."""
    num_skipped: int = 0
    """Engines that the last sync left out: lost, or with an evaluation."""
    num_rescued: float | None = None
    """Requests that moved to another engine when theirs was lost; like `attempt_tokens` a total so far. None if no
    worker reported, and less than before if one of them did not."""
    attempt_tokens: float | None = None
    """Of groups that came to nothing; reported like the requests."""
    num_failed: float = 0.0
    """Attempts at a group that failed."""
    failed_frac: float = 0.0
    """Share of the step's responses that have no reward."""


class Span(NamedTuple):
    """A stretch of time on a row of the trace, Unix seconds."""

    track: str
    name: str
    begin_s: float
    end_s: float
    tokens: int | None = None
    """Generated, of a group; None where nobody counted them."""
    process: int = 1
    """Of the run, counted from 1."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The steady steps of the latest process of a run."""

    setup: Setup
    lines: Sequence[StepLine]
    num_lost_steps: int = 0
    """Left out only because an engine was lost."""
    trace: TraceFacts | None = None
    """None without a trace that shows these steps."""

    @property
    def has_closed_slots(self) -> bool:
        """Whether the run has not yet opened all slots that S allows."""
        num_slots = self.lines[-1].num_slots
        return num_slots is not None and num_slots < self.setup.max_groups


def read_run(run_dir: Path) -> RunFacts:
    """
    Raises:
        InvalidRunDir: there is no configuration or there are no metrics, or they cannot be read.
        TooFewSteps: nearly no step is steady.
    """
    setup = read_setup(run_dir)
    lines = read_lines(run_dir, setup)
    setup = _as_started(setup, _latest_start(read_records(run_dir / "environment.jsonl"), lines))
    lines = [line for line in lines if line.step > setup.resumed_from_step]
    setup = replace(setup, has_ended=_has_ended(run_dir, lines))
    lost = _steps_with_lost_engine(lines, _evaluations(run_dir, setup), max_staleness=setup.max_staleness)
    try:
        kept, num_lost = steady(lines, max_staleness=setup.max_staleness, has_ended=setup.has_ended, lost=lost)
    except TooFewSteps as error:
        resumed = f"; the {setup.resumed_from_step} steps before the last resume are left out"
        raise TooFewSteps(f"{error}{resumed if setup.resumed_from_step else ''}") from error
    return RunFacts(setup=setup, lines=kept, num_lost_steps=num_lost, trace=read_trace(run_dir, kept, setup))


def read_records(path: Path) -> list[Record]:
    """Every line that is a JSON object. One that is being written or was torn by a crash is skipped; no file, no
    records."""
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [record for text in texts if (record := _json_object(text)) is not None]


def _json_object(text: str) -> Record | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return current_names(value) if isinstance(value, dict) else None


def read_setup(run_dir: Path) -> Setup:
    """What the configuration says. Raises InvalidRunDir if there is none, or none that can be read."""
    if not run_dir.is_dir():
        raise InvalidRunDir(f"{run_dir} is not a directory; give the run directory that the run printed at its start")
    path = run_dir / "config.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRunDir(f"{path} cannot be read ({_first_line(error)}); is {run_dir} a run directory?") from error
    if not isinstance(data, dict):
        raise InvalidRunDir(f"{path} holds no configuration; is {run_dir} a run directory?")
    # Keys that this version does not know are ignored: the run was allowed to have them.
    cfg, _ = read_stored(data)
    evaluates_beside = bool(cfg.task.eval_path) and not cfg.trainer.eval_blocking
    return Setup(
        num_ranks=cfg.learner.num_ranks,
        num_replicas=cfg.rollout.num_replicas,
        tensor_parallel_size=cfg.rollout.tensor_parallel_size,
        max_staleness=cfg.mode.max_staleness,
        groups_per_step=cfg.trainer.groups_per_step,
        group_size=cfg.rollout.group_size,
        max_num_seqs=cfg.rollout.max_num_seqs,
        sync_slots=cfg.weight_sync.num_slots,
        device_name=cfg.device.name,
        is_colocated=cfg.mode.shares_devices,
        fixes_staleness=cfg.mode.name in ("sync", "one_step_off"),
        is_device_assumed=cfg.device.name == "auto",
        eval_every=cfg.trainer.eval_every if evaluates_beside else 0,
        eval_at_start=cfg.trainer.eval_at_start and evaluates_beside,
    )


def read_lines(run_dir: Path, setup: Setup) -> list[StepLine]:
    """One entry per step. A last line that is half written is left out.

    Raises:
        InvalidRunDir: there are no metrics, or a line in the middle is damaged.
    """
    path = run_dir / "metrics.jsonl"
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InvalidRunDir(f"{path} cannot be read ({_first_line(error)}); has a step ended yet?") from error
    lines: list[StepLine] = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(_step_line(current_names(json.loads(text)), setup))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):
                break
            raise InvalidRunDir(f"{path}, line {number}, is not a line of metrics: {error!r}") from error
    return lines


def _step_line(record: Record, setup: Setup) -> StepLine:
    def maybe(name: str) -> float | None:
        return None if record.get(name) is None else float(record[name])

    def total(name: str) -> float:
        number = maybe(name)
        return 0.0 if number is None else number

    # An evaluation has one of the engines, so it causes only that part of a wait beside it.
    evaluation_wait_s = total("time/wait_for_eval_s") / setup.num_replicas
    return StepLine(
        step=int(record["step"]),
        step_s=float(record["perf/step_s"]),
        learner_s=float(record["learner/step_s"]),
        data_wait_s=max(0.0, float(record["time/wait_for_batch_s"]) - evaluation_wait_s),
        evaluation_wait_s=evaluation_wait_s,
        sync_wait_s=float(record["time/wait_for_sync_s"]),
        pack_s=total("sync/pack_s"),  # absent where a step left the policy as it was
        engines_idle_s=maybe("time/engines_idle_s"),
        slot_wait_s=maybe("time/backpressure_s"),
        time_s=maybe("time_s"),
        oldest_wait_s=total("buffer/oldest_wait_s"),
        num_slots=maybe("buffer/num_slots"),
        num_skipped=int(total("sync/replicas_skipped")),
        num_rescued=maybe("engine/migrated_requests"),
        attempt_tokens=maybe("discarded/failed_attempt_tokens"),
        num_failed=total("buffer/failed"),
        failed_frac=total("response/failed_frac"),
    )


# Which process of the run made the steps


def _as_started(setup: Setup, start: Mapping[str, Any]) -> Setup:
    """With what a line of environment.jsonl says; it may be empty."""
    device, resumed = str(start.get("device", setup.device_name)), start.get("resumed_from_step")
    return replace(
        setup,
        device_name=device,
        is_device_assumed=device == "auto",
        resumed_from_step=resumed if isinstance(resumed, int) else 0,
    )


def _latest_start(starts: Sequence[Record], lines: Sequence[StepLine]) -> Record:
    """The newest start that made a step and that the steps after its checkpoint do not refute; empty without any.

    A process cuts the steps after its checkpoint once nothing can refuse it any more. If they are there although they
    continue the line before, by the clock of its process, an earlier process made them.
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


def _has_ended(run_dir: Path, lines: Sequence[StepLine]) -> bool:
    """Whether `lines` end with the last step that the run was to make, before which its engines ran out of prompts.

    Without a readable summary the run counts as running; so it does with that of a process before a resume.
    """
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return summary["exit_reason"] == "completed" and summary["steps"] == max(line.step for line in lines)
    except (OSError, ValueError, KeyError, TypeError):
        return False


# Which steps are steady


def steady(
    lines: Sequence[StepLine], *, max_staleness: int, has_ended: bool = False, lost: Collection[int] = ()
) -> tuple[list[StepLine], int]:
    """(steady steps, how many more there would be if no engine had been lost).

    Without the first S + 2 steps: until then slots fill up for the first time, kernels compile and caches warm up.
    Without the last S of a run that `has_ended`: no prompt is left for its engines. Without the steps `lost`, in which
    an engine was away. Without those until the last time that slots were opened, if enough steps have come after it.

    Raises:
        TooFewSteps: nearly nothing is left.
    """
    num_last = max_staleness if has_ended else 0
    inner = sorted(lines, key=lambda line: line.step)[max_staleness + 2 : len(lines) - num_last]
    opened = next((i for i in range(len(inner) - 1, 0, -1) if inner[i].num_slots != inner[i - 1].num_slots), 0)
    num_lost = 0
    for considered in (inner[opened:], inner):
        kept = [line for line in considered if line.step not in lost]
        num_lost = len(considered) - len(kept)
        if len(kept) >= MIN_STEPS:
            return kept, num_lost
    last, do = (f", the last {num_last} empty it", "give a longer run") if num_last else ("", "let the run go on")
    away = f", {num_lost} of the others had a lost engine" if num_lost else ""
    raise TooFewSteps(
        f"{len(lines)} steps since the start were recorded; the first {max_staleness + 2} fill the pipeline{last}"
        f"{away}, and at least {MIN_STEPS} more are needed; {do}{' with all its engines' if away else ''}"
    )


def _steps_with_lost_engine(
    lines: Sequence[StepLine], evaluations: Sequence[tuple[int, int | None]], *, max_staleness: int
) -> set[int]:
    """Steps in which an engine was away. An engine that an evaluation had is not lost.

    - A line reports the sync before it, so an engine that this left out may have been lost in the step before, too.
    - One whose requests moved to another engine, even if it was back before the next sync.
    - The only one: its groups begin anew, so tokens are lost although no group failed. (Workers report what they lost
      a moment after a failure, hence the lines around it.) At most S steps have their groups then; the next one waits
      until the engine is back.

    Args:
        evaluations: see `_evaluations`.
    """
    lines = sorted(lines, key=lambda line: line.step)
    found: set[int] = set()
    for line in lines:
        # A sync ends up to two steps after the one that made its version.
        may_have_evaluation = any(
            version < line.step and (last_step is None or line.step <= last_step + 2)
            for version, last_step in evaluations
        )
        if line.num_skipped > int(may_have_evaluation):
            found |= {line.step - 1, line.step}
    found |= {lines[i].step for i in _rises(line.num_rescued for line in lines)}
    reported = [line for line in lines if line.attempt_tokens is not None]
    for i in _rises(line.attempt_tokens for line in reported):
        if 2 <= i < len(reported) - 1 and reported[i + 1].num_failed == reported[i - 2].num_failed:
            found |= set(range(reported[i].step, reported[i].step + max_staleness + 2))
    return found & {line.step for line in lines}


def _rises(totals: Iterable[float | None]) -> list[int]:
    """Where a total is above all before it. One below them only lacks what some worker did not report this time."""
    found, highest = list[int](), 0.0
    for i, total in enumerate(totals):
        if total is not None and total > highest:
            found.append(i)
            highest = total
    return found


def _evaluations(run_dir: Path, setup: Setup) -> list[tuple[int, int | None]]:
    """(version, steps made when it ended) of evaluations beside training of the latest process; the steps are None of
    one that may still run."""
    every, first = setup.eval_every, setup.resumed_from_step
    if not (every or setup.eval_at_start):
        return []
    ended = list[tuple[int, int | None]]()
    for record in read_records(run_dir / "evaluations.jsonl"):
        try:
            ended.append((int(record["version"]), int(record["step"])))
        except (ValueError, KeyError, TypeError):
            continue
    # A resume cuts off later versions than its own, so earlier ones are of processes before it. One of its own version
    # may be of either, and is taken for its own.
    ended = [one for one in ended if one[0] >= first]
    if not ended and setup.eval_at_start:
        return [(first, None)]
    if not every:
        return ended
    newest, last_step = max(((version, step or 0) for version, step in ended), default=(first, first))
    return [*ended, (max((newest // every + 1) * every, last_step), None)]


# The trace


def read_spans(path: Path) -> list[Span]:
    """All spans of a trace file, of every process of the run; none without a file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return list(spans_of(file))


def spans_of(lines: Iterable[str]) -> Iterator[Span]:
    """The spans of a trace file, which has one event per line. Lines that a crash has torn are skipped."""
    tracks: dict[tuple[int, int], str] = {}
    begun: dict[tuple[int, int, int], tuple[str, float, int | None]] = {}
    for line in lines:
        event = _json_object(line.strip().rstrip(","))
        if event is None:
            continue
        row = event["pid"], event["tid"]  # each process of a run numbers its tracks anew
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


def read_trace(run_dir: Path, steps: Sequence[StepLine], setup: Setup) -> TraceFacts | None:
    """What the trace says about `steps`; None if there is none, or it does not show them."""
    spans = read_spans(run_dir / "trace.json")
    shown = {_name(line) for line in steps}
    ends_s = {span.name: span.end_s for span in spans if span.track == "learner" and span.name in shown}
    if not spans or len(ends_s) < len(shown):
        return None
    groups = [span for span in spans if span.track == "groups"]
    evaluations = [span for span in spans if span.track == "evaluation"]
    windows = _windows(steps, ends_s)

    def idle_s(spans: Sequence[Span], num_replicas: int) -> float:
        return sum(idle_seconds(_within(window, spans), window, num_replicas=num_replicas) for window in windows)

    return TraceFacts(
        engines_idle_s=idle_s(groups, setup.num_replicas),
        evaluation_s=sum(end - begin for begin, end in windows) - idle_s(evaluations, 1),
        generation_full_s=_generation_full_s(groups, steps, setup, ends_s=ends_s),
    )


def _name(line: StepLine) -> str:
    """In the trace. Metrics count steps that are done, the trace names them from 0."""
    return f"step {line.step - 1}"


def _windows(steps: Sequence[StepLine], ends_s: Mapping[str, float]) -> list[tuple[float, float]]:
    """(begin, end) of every stretch of steps that follow each other."""
    found: list[tuple[float, float]] = []
    for before, line in zip((None, *steps), steps, strict=False):
        begin_s = ends_s[_name(line)] - line.step_s
        if before is not None and before.step + 1 == line.step:
            begin_s = found.pop()[0]
        found.append((begin_s, ends_s[_name(line)]))
    return found


def _within(window: tuple[float, float], spans: Sequence[Span]) -> list[tuple[float, float]]:
    """(begin, end) of the parts inside it."""
    clipped = [(max(span.begin_s, window[0]), min(span.end_s, window[1])) for span in spans]
    return [(begin, end) for begin, end in clipped if begin < end]


def _generation_full_s(
    groups: Sequence[Span], steps: Sequence[StepLine], setup: Setup, *, ends_s: Mapping[str, float]
) -> float | None:
    """Time of the engines for what they generated per step, filtered groups included, at their full rate. None if they
    never show it, or nobody counted tokens.

    A group that has not ended leaves no trace. What runs while a step ends is trained at most S + 1 steps later.
    """
    sure = steps if setup.has_ended else steps[: max(0, len(steps) - setup.max_staleness - 1)]
    windows = _windows(sure, ends_s)
    within = [(span, part) for span in groups for window in windows for part in _within(window, [span])]
    if not within or any(span.tokens is None for span, _ in within):
        return None
    rates = [(span.tokens or 0) / (span.end_s - span.begin_s) for span, _ in within]
    clipped = [part for _, part in within]
    rate = full_rate(clipped, rates, max_groups=setup.groups_per_step)
    tokens = sum(rate * (end - begin) for rate, (begin, end) in zip(rates, clipped, strict=True))
    return tokens / rate / len(sure) if rate else None


def idle_seconds(spans: Sequence[tuple[float, float]], window: tuple[float, float], *, num_replicas: int) -> float:
    """Seconds of `window` in which a replica had none of the `spans` (begin, end), mean over replicas; each span keeps
    one replica busy."""
    begin, end = window
    changes = sorted([(a, 1) for a, _ in spans] + [(b, -1) for _, b in spans] + [(end, 0)])
    idle_s, at, running = 0.0, begin, 0
    for time_s, change in changes:
        idle_s += (time_s - at) * max(0, num_replicas - running) / num_replicas
        at, running = time_s, running + change
    return idle_s


def full_rate(spans: Sequence[tuple[float, float]], rates: Sequence[float], *, max_groups: int) -> float | None:
    """Mean sum of `rates` while at least half of `max_groups` of the `spans` run; None if they never do."""
    changes = [(begin, 1, rate) for (begin, _), rate in zip(spans, rates, strict=True)]
    changes += [(end, -1, -rate) for (_, end), rate in zip(spans, rates, strict=True)]
    seconds = done = rate = at = 0.0
    running = 0
    for time_s, number, more in sorted(changes):
        if 2 * running >= max_groups:
            seconds, done = seconds + time_s - at, done + rate * (time_s - at)
        at, running, rate = time_s, running + number, rate + more
    return done / seconds if seconds > 0 else None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
