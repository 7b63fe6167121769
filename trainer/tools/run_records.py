"""Reads run directories: metrics, trace, environment, evaluations."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

from trainer.config.convert import to_run_config

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


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
    fixes_staleness: bool = False
    """The mode has one S (sync, one_step_off): another one needs mode=async beside it."""
    has_ended: bool = False
    """It trained all the steps it was to make, so its last ones while engines ran out of prompts."""
    resumed_from_step: int = 0
    """Where the latest process of the run began. What was before it is another run to a judge of waits."""
    is_device_assumed: bool = False
    """No file says on what it ran, so it is taken for an accelerator."""
    eval_every: int = 0
    """Steps between evaluations beside training; 0 without any, and if they stop training (trainer.eval_blocking)."""
    eval_at_start: bool = False
    """Each process begins with one beside training."""

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
    """Without `evaluation_wait_s`."""
    sync_wait_s: float
    pack_s: float
    engines_idle_s: float | None
    slot_wait_s: float | None
    forced_wait_s: float
    """Total since the start of the process, not of this step."""
    evaluation_wait_s: float = 0.0
    """What the learner waited for groups because an engine had an evaluation instead."""
    time_s: float | None = None
    """Its end, since the start of the process."""
    num_slots: float | None = None
    """Groups that could be under way at its end."""
    num_skipped: int = 0
    """Engines that the last sync left out: lost, or with an evaluation."""
    num_rescued: float | None = None
    """Requests that went on elsewhere when their engine was lost; like the next two in all so far. None if no worker
    told of itself, and less than before if one of them did not."""
    attempt_tokens: float | None = None
    """Of groups that came to nothing; told like the requests."""
    num_failed: float = 0.0
    """Attempts at a group that failed."""
    failed_frac: float = 0.0
    """Share of the step's responses that have no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One that ran beside training, with an engine of its own."""

    version: int
    """That it evaluated; the run had made as many steps when it began."""
    last_step: int | None = None
    """Steps that the run had made when it ended; None if nobody has written that it has."""

    def may_pass_by(self, step: int) -> bool:
        """Whether the line of this step may tell of a sync that left its engine out. A sync ends up to two steps after
        the one that made its version."""
        return self.version < step and (self.last_step is None or step <= self.last_step + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTime:
    """Where the learner's time of a step goes, seconds. Packing is a part of the wait for sync."""

    computes_s: float
    waits_for_data_s: float
    waits_for_sync_s: float
    packs_s: float
    other_s: float
    """All that is left, the wait for evaluations included."""

    @classmethod
    def of(cls, lines: Sequence[StepLine]) -> LearnerTime:
        num = len(lines)
        return cls(
            computes_s=sum(line.learner_s for line in lines) / num,
            waits_for_data_s=sum(line.data_wait_s for line in lines) / num,
            waits_for_sync_s=sum(line.sync_wait_s for line in lines) / num,
            packs_s=sum(line.pack_s for line in lines) / num,
            other_s=max(0.0, sum(b.step_s - b.learner_s - b.data_wait_s - b.sync_wait_s for b in lines) / num),
        )

    @property
    def busy_s(self) -> float:
        """Computing, and waiting for sync."""
        return self.computes_s + self.waits_for_sync_s


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


CLOCKS_AGREE_S = 0.1
"""The time of a process and that between two of its steps are taken this close to each other. Two processes that need
about as long to start may be a second apart."""


def read_starts(path: Path) -> list[Mapping[str, Any]]:
    """The lines of `environment.jsonl`, oldest first; none if it cannot be read. Torn lines are passed over."""
    found: list[Mapping[str, Any]] = []
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def latest_start(starts: Sequence[Mapping[str, Any]], lines: Sequence[StepLine]) -> Mapping[str, Any]:
    """The newest start that made a step and is not refuted by those behind its checkpoint; empty without any.

    A process cuts what is behind its checkpoint when nothing can refuse it any more. What stands there although it goes
    on from the line before, by the clock of its process, is the work of an earlier one.
    """
    by_step = {line.step: line for line in lines}

    def is_refuted(start: Mapping[str, Any]) -> bool:
        step = start.get("resumed_from_step")
        if not isinstance(step, int):
            return False
        if max(by_step, default=0) <= step:
            return True  # it has made no step
        if step not in by_step or step + 1 not in by_step:
            return False
        return _goes_on(by_step[step], by_step[step + 1])

    return next((start for start in reversed(starts) if not is_refuted(start)), {})


def _goes_on(before: StepLine, line: StepLine) -> bool:
    """Whether both are steps of one process."""
    if before.time_s is None or line.time_s is None:
        return False
    return abs(line.time_s - before.time_s - line.step_s) < CLOCKS_AGREE_S


MIN_STEPS = 3
"""Fewer steady steps say nothing."""


class TooFewSteps(Exception):
    """The run has not enough steady steps to say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Steps that tell who waits for whom."""

    lines: list[StepLine]
    num_lost: int
    """Steps that would be among them if they had had all engines."""


def steady(
    lines: Sequence[StepLine], *, max_staleness: int, has_ended: bool = False, lost: Collection[int] = ()
) -> Steady:
    """Without the first S + 2 steps: until then slots fill up for the first time, kernels compile and caches warm up.
    Without the last S of a run that `has_ended`: no prompt is left for its engines. Without the steps `lost`, in which
    an engine was away. Without those until the last time that slots were opened, if enough steps have come after it.

    Raises:
        TooFewSteps: nearly nothing is left.
    """
    num_last = max_staleness if has_ended else 0
    inner = sorted(lines, key=lambda line: line.step)[max_staleness + 2 : len(lines) - num_last]
    since = next((i for i in range(len(inner) - 1, 0, -1) if inner[i].num_slots != inner[i - 1].num_slots), 0)
    found = _without(lost, inner[since:])
    if len(found.lines) < MIN_STEPS:
        found = _without(lost, inner)
    if len(found.lines) < MIN_STEPS:
        last, do = (f", the last {num_last} empty it", "give a longer run") if num_last else ("", "let the run go on")
        away = f", {found.num_lost} of the others had a lost engine" if found.num_lost else ""
        raise TooFewSteps(
            f"{len(lines)} steps since the start were recorded; the first {max_staleness + 2} fill the pipeline{last}"
            f"{away}, and at least {MIN_STEPS} more are needed; {do}{' with all its engines' if away else ''}"
        )
    return found


def _without(lost: Collection[int], lines: Sequence[StepLine]) -> Steady:
    left = [line for line in lines if line.step not in lost]
    return Steady(lines=left, num_lost=len(lines) - len(left))


def steps_with_lost_engine(
    lines: Sequence[StepLine], evaluations: Sequence[Evaluation], *, max_staleness: int
) -> frozenset[int]:
    """Steps in which an engine was away. An engine that an evaluation had is not lost.

    - A line tells of the sync before it, so an engine that this left out may have been lost in the step before, too.
    - One whose requests went on elsewhere, even if it was back before the next sync.
    - The only one: its groups begin anew, so tokens are lost although no group failed. (Workers tell what they lost a
      moment after a failure, hence the lines beside it.) No more than S steps have their groups then; the next one
      waits until the engine is back.
    """
    lines = sorted(lines, key=lambda line: line.step)
    found: set[int] = set()
    for line in lines:
        num_with_evaluation = int(any(evaluation.may_pass_by(line.step) for evaluation in evaluations))
        if line.num_skipped > num_with_evaluation:
            found |= {line.step - 1, line.step}
    found |= {lines[i].step for i in _rises(line.num_rescued for line in lines)}
    told = [line for line in lines if line.attempt_tokens is not None]
    for i in _rises(line.attempt_tokens for line in told):
        if 2 <= i < len(told) - 1 and told[i + 1].num_failed == told[i - 2].num_failed:
            found |= set(range(told[i].step, told[i].step + max_staleness + 2))
    return frozenset(found & {line.step for line in lines})


def _rises(totals: Iterable[float | None]) -> list[int]:
    """Where a total is above all before it. One below them only lacks what some worker did not tell this time."""
    found, highest = list[int](), 0.0
    for i, total in enumerate(totals):
        if total is not None and total > highest:
            found.append(i)
            highest = total
    return found


def evaluation_under_way(ended: Sequence[Evaluation], setup: Setup) -> Evaluation | None:
    """One beside training that may be under way, or ended with the run; nobody has written of it. `ended` are those of
    the latest process."""
    every, first = setup.eval_every, setup.resumed_from_step
    if not ended and setup.eval_at_start:
        return Evaluation(version=first)
    if not every:
        return None
    newest, last_step = max(((one.version, one.last_step or 0) for one in ended), default=(first, first))
    return Evaluation(version=max((newest // every + 1) * every, last_step))


class NotARun(Exception):
    """The directory holds no run that can be read; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time on a row of the trace, Unix seconds."""

    track: str
    name: str
    begin_s: float
    end_s: float
    tokens: int | None = None
    """Generated, of a group; None where nobody counted them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A run, and what of it counts."""

    setup: Setup
    lines: list[StepLine]
    num_lost_steps: int
    """Left out only because an engine was lost."""


def read_counted(run_dir: Path) -> Counted:
    """The steps of the latest process of a run that tell who waits for whom.

    Raises:
        NotARun: as `read_setup` and `read_lines`.
        TooFewSteps: nearly none counts.
    """
    setup = read_setup(run_dir)
    every = read_lines(run_dir, setup)
    setup = _as_started(setup, latest_start(read_starts(run_dir / "environment.jsonl"), every))
    every = [line for line in every if line.step > setup.resumed_from_step]
    setup = replace(setup, has_ended=has_ended(run_dir, every))
    lost = steps_with_lost_engine(every, read_evaluations(run_dir, setup), max_staleness=setup.max_staleness)
    try:
        counted = steady(every, max_staleness=setup.max_staleness, has_ended=setup.has_ended, lost=lost)
    except TooFewSteps as error:
        resumed = f"; the {setup.resumed_from_step} steps before the last resume are left out"
        raise TooFewSteps(f"{error}{resumed if setup.resumed_from_step else ''}") from error
    return Counted(setup=setup, lines=counted.lines, num_lost_steps=counted.num_lost)


def read_setup(run_dir: Path) -> Setup:
    """What the configuration says. Raises NotARun if there is none, or none that can be read."""
    if not run_dir.is_dir():
        raise NotARun(f"{run_dir} is not a directory; give the run directory that the run printed at its start")
    path = run_dir / "config.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise NotARun(f"{path} cannot be read ({_first_line(error)}); is {run_dir} a run directory?") from error
    if not isinstance(data, dict):
        raise NotARun(f"{path} holds no configuration; is {run_dir} a run directory?")
    # Keys that this version does not know (any more) are passed over: the run was allowed to have them.
    cfg, _ = to_run_config(data)
    is_beside = bool(cfg.task.eval_path) and not cfg.trainer.eval_blocking
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
        takes_turns=cfg.mode.shares_devices,
        fixes_staleness=cfg.mode.name in ("sync", "one_step_off"),
        is_device_assumed=cfg.device.name == "auto",
        eval_every=cfg.trainer.eval_every if is_beside else 0,
        eval_at_start=cfg.trainer.eval_at_start and is_beside,
    )


def _as_started(setup: Setup, start: Mapping[str, Any]) -> Setup:
    """With what a line of environment.jsonl says; it may be empty."""
    device, resumed = str(start.get("device", setup.device_name)), start.get("resumed_from_step")
    return replace(
        setup,
        device_name=device,
        is_device_assumed=device == "auto",
        resumed_from_step=resumed if isinstance(resumed, int) else 0,
    )


def has_ended(run_dir: Path, lines: Sequence[StepLine]) -> bool:
    """Whether `lines` end with the last step that the run was to make, before which its engines ran out of prompts.

    Without a summary that can be read, a run is taken to be under way; also with that of a process before a resume.
    """
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return summary["exit_reason"] == "completed" and summary["steps"] == max(line.step for line in lines)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_lines(run_dir: Path, setup: Setup) -> list[StepLine]:
    """One entry per step. A last line that is half written is left out.

    Raises:
        NotARun: there are no metrics, or a line in the middle is damaged.
    """
    path = run_dir / "metrics.jsonl"
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise NotARun(f"{path} cannot be read ({_first_line(error)}); has a step ended yet?") from error
    lines: list[StepLine] = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(_line(json.loads(text), setup))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):
                break
            raise NotARun(f"{path}, line {number}, is not a line of metrics: {error!r}") from error
    return lines


def read_evaluations(run_dir: Path, setup: Setup) -> list[Evaluation]:
    """Those beside training of the latest process, with one that may be under way."""
    if not (setup.eval_every or setup.eval_at_start):
        return []
    path, ended = run_dir / "evaluations.jsonl", list[Evaluation]()
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(text)
            ended.append(Evaluation(version=int(record["version"]), last_step=int(record["step"])))
        except (ValueError, KeyError, TypeError):
            continue  # half written
    # A resume cuts off later versions than its own, so earlier ones are of processes before it. One of its own version
    # may be of either, and is taken for its own.
    ended = [one for one in ended if one.version >= setup.resumed_from_step]
    under_way = evaluation_under_way(ended, setup)
    return ended if under_way is None else [*ended, under_way]


def _line(record: Mapping[str, Any], setup: Setup) -> StepLine:
    def maybe(name: str) -> float | None:
        return None if record.get(name) is None else float(record[name])

    def total(name: str) -> float:
        number = maybe(name)
        return 0.0 if number is None else number

    # An evaluation has one of the engines, so of a wait beside it only as large a part is its doing.
    evaluation_wait_s = total("wait/learner_for_evaluation_s") / setup.num_replicas
    return StepLine(
        step=int(record["step"]),
        step_s=float(record["perf/step_s"]),
        learner_s=float(record["learner/step_s"]),
        data_wait_s=max(0.0, float(record["wait/learner_for_data_s"]) - evaluation_wait_s),
        evaluation_wait_s=evaluation_wait_s,
        sync_wait_s=float(record["wait/learner_for_sync_s"]),
        pack_s=float(record["sync/pack_s"]),
        engines_idle_s=maybe("wait/engines_idle_s"),
        slot_wait_s=maybe("wait/producer_for_slots_s"),
        time_s=maybe("time_s"),
        forced_wait_s=total("buffer/forced_wait_s"),
        num_slots=maybe("buffer/num_slots"),
        num_skipped=int(total("sync/replicas_skipped")),
        num_rescued=maybe("engine/rescued_requests"),
        attempt_tokens=maybe("discarded/attempt_tokens"),
        num_failed=total("buffer/failed"),
        failed_frac=total("response/failed_frac"),
    )


def read_trace(run_dir: Path, steps: Sequence[StepLine], setup: Setup) -> TraceFacts | None:
    """What the trace says about `steps`; None if there is none, or it does not show them."""
    path = run_dir / "trace.json"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        spans = list(spans_of(file))
    shown = {_name(line) for line in steps}
    learner = [span for span in spans if span.track == "learner" and span.name in shown]
    if len(learner) < len(shown):
        return None
    ends_s = {span.name: span.end_s for span in learner}
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


def _windows(steps: Sequence[StepLine], ends_s: Mapping[str, float]) -> list[tuple[float, float]]:
    """(begin, end) of every stretch of steps that follow each other."""
    found: list[tuple[float, float]] = []
    for before, line in zip((None, *steps), steps, strict=False):
        begin_s = ends_s[_name(line)] - line.step_s
        if before is not None and before.step + 1 == line.step:
            begin_s = found.pop()[0]
        found.append((begin_s, ends_s[_name(line)]))
    return found


def _name(line: StepLine) -> str:
    """In the trace. Metrics count steps that are done, the trace names them from 0."""
    return f"step {line.step - 1}"


def _within(window: tuple[float, float], spans: Sequence[Span]) -> list[tuple[float, float]]:
    """(begin, end) of what lies in it."""
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
    rate = full_rate(clipped, rates, most_groups=setup.groups_per_step)
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


def full_rate(spans: Sequence[tuple[float, float]], rates: Sequence[float], *, most_groups: int) -> float | None:
    """Mean sum of `rates` while at least half of `most_groups` of the `spans` are under way; None if they never are."""
    changes = [(begin, 1, rate) for (begin, _), rate in zip(spans, rates, strict=True)]
    changes += [(end, -1, -rate) for (_, end), rate in zip(spans, rates, strict=True)]
    seconds = done = rate = at = 0.0
    running = 0
    for time_s, number, more in sorted(changes):
        if 2 * running >= most_groups:
            seconds, done = seconds + time_s - at, done + rate * (time_s - at)
        at, running, rate = time_s, running + number, rate + more
    return done / seconds if seconds > 0 else None


def spans_of(lines: Iterator[str] | Sequence[str]) -> Iterator[Span]:
    """The spans of a trace file, which has one event per line. Lines that a crash has torn are passed over."""
    tracks: dict[tuple[int, int], str] = {}
    begun: dict[tuple[int, int, int], tuple[str, float, int | None]] = {}
    for line in lines:
        text = line.strip().rstrip(",")
        try:
            event = json.loads(text) if text.startswith("{") else None
        except ValueError:
            event = None
        if event is None:
            continue
        row = event["pid"], event["tid"]  # each process of a run numbers its tracks anew
        match event["ph"]:
            case "M" if event["name"] == "thread_name":
                tracks[row] = event["args"]["name"]
            case "X":
                yield Span(
                    track=tracks.get(row, ""),
                    name=event["name"],
                    begin_s=event["ts"] / 1e6,
                    end_s=(event["ts"] + event["dur"]) / 1e6,
                )
            case "b":
                tokens = event.get("args", {}).get("tokens")
                begun[*row, event["id"]] = (event["name"], event["ts"] / 1e6, tokens)
            case "e":
                name, begin_s, tokens = begun.pop((*row, event["id"]), ("", None, None))
                if begin_s is not None:
                    track, end_s = tracks.get(row, ""), event["ts"] / 1e6
                    yield Span(track=track, name=name, begin_s=begin_s, end_s=end_s, tokens=tokens)
            case _:
                continue


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
