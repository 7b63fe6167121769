"""Reads the files of a run directory, whether the run has ended or not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from trainer.advise.facts import Setup, StepLine, TraceFacts
from trainer.config.convert import to_run_config
from trainer.telemetry.environment import latest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


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


def read_setup(run_dir: Path) -> Setup:
    """Raises NotARun if there is no configuration, or none that can be read."""
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
    ran_on = latest(run_dir / "environment.jsonl")
    device, resumed = str(ran_on.get("device", cfg.device.name)), ran_on.get("resumed_from_step")
    return Setup(
        num_ranks=cfg.learner.num_ranks,
        num_replicas=cfg.rollout.num_replicas,
        tensor_parallel_size=cfg.rollout.tensor_parallel_size,
        max_staleness=cfg.mode.max_staleness,
        groups_per_step=cfg.trainer.groups_per_step,
        group_size=cfg.rollout.group_size,
        max_num_seqs=cfg.rollout.max_num_seqs,
        sync_slots=cfg.weight_sync.num_slots,
        device_name=device,
        takes_turns=cfg.mode.shares_devices,
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


def read_lines(run_dir: Path) -> list[StepLine]:
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
            lines.append(_line(json.loads(text)))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):
                break
            raise NotARun(f"{path}, line {number}, is not a line of metrics: {error!r}") from error
    return lines


def _line(record: Mapping[str, Any]) -> StepLine:
    def maybe(name: str) -> float | None:
        return None if record.get(name) is None else float(record[name])

    forced_s = maybe("buffer/forced_wait_s")
    return StepLine(
        step=int(record["step"]),
        step_s=float(record["perf/step_s"]),
        learner_s=float(record["learner/step_s"]),
        data_wait_s=float(record["wait/learner_for_data_s"]),
        sync_wait_s=float(record["wait/learner_for_sync_s"]),
        pack_s=float(record["sync/pack_s"]),
        engines_idle_s=maybe("wait/engines_idle_s"),
        slot_wait_s=maybe("wait/producer_for_slots_s"),
        forced_wait_s=0.0 if forced_s is None else forced_s,
        num_slots=maybe("buffer/num_slots"),
    )


def read_trace(run_dir: Path, steps: Sequence[StepLine], setup: Setup) -> TraceFacts | None:
    """What the trace says about `steps`; None if there is none, or it does not show them."""
    path = run_dir / "trace.json"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        spans = list(spans_of(file))
    # Metrics count steps that are done, the trace names them from 0.
    shown = {f"step {line.step - 1}" for line in steps}
    learner = [span for span in spans if span.track == "learner" and span.name in shown]
    if len(learner) < len(shown):
        return None
    end_s = max(span.end_s for span in learner)
    begin_s = end_s - sum(line.step_s for line in steps)
    window = (begin_s, end_s)
    groups = [span for span in spans if span.track == "groups"]
    evaluations = _within(window, [span for span in spans if span.track == "evaluation"])
    return TraceFacts(
        engines_idle_s=idle_seconds(_within(window, groups), window, num_replicas=setup.num_replicas),
        evaluation_s=(end_s - begin_s) - idle_seconds(evaluations, window, num_replicas=1),
        generation_full_s=_generation_full_s(groups, steps, setup, begin_s=begin_s),
    )


def _within(window: tuple[float, float], spans: Sequence[Span]) -> list[tuple[float, float]]:
    """(begin, end) of what lies in it."""
    clipped = [(max(span.begin_s, window[0]), min(span.end_s, window[1])) for span in spans]
    return [(begin, end) for begin, end in clipped if begin < end]


def _generation_full_s(
    groups: Sequence[Span], steps: Sequence[StepLine], setup: Setup, *, begin_s: float
) -> float | None:
    """Time of the engines for what they generated per step, filtered groups included, at their full rate. None if they
    never show it, or nobody counted tokens.

    A group that has not ended leaves no trace. What runs while a step ends is trained at most S + 1 steps later.
    """
    sure = steps if setup.has_ended else steps[: max(0, len(steps) - setup.max_staleness - 1)]
    window = begin_s, begin_s + sum(line.step_s for line in sure)
    within = [span for span in groups if span.begin_s < window[1] and span.end_s > max(span.begin_s, window[0])]
    if not sure or not within or any(span.tokens is None for span in within):
        return None
    rates = [(span.tokens or 0) / (span.end_s - span.begin_s) for span in within]
    clipped = _within(window, within)
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
    tracks: dict[int, str] = {}
    begun: dict[tuple[int, int], tuple[str, float, int | None]] = {}
    for line in lines:
        text = line.strip().rstrip(",")
        try:
            event = json.loads(text) if text.startswith("{") else None
        except ValueError:
            event = None
        if event is None:
            continue
        match event["ph"]:
            case "M":
                tracks[event["tid"]] = event["args"]["name"]
            case "X":
                yield Span(
                    track=tracks.get(event["tid"], ""),
                    name=event["name"],
                    begin_s=event["ts"] / 1e6,
                    end_s=(event["ts"] + event["dur"]) / 1e6,
                )
            case "b":
                tokens = event.get("args", {}).get("tokens")
                begun[event["tid"], event["id"]] = (event["name"], event["ts"] / 1e6, tokens)
            case "e":
                name, begin_s, tokens = begun.pop((event["tid"], event["id"]), ("", None, None))
                if begin_s is not None:
                    track, end_s = tracks.get(event["tid"], ""), event["ts"] / 1e6
                    yield Span(track=track, name=name, begin_s=begin_s, end_s=end_s, tokens=tokens)
            case _:
                continue


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
