"""Reads the files of a run directory, whether the run has ended or not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from trainer.advise.facts import Setup, StepLine, TraceFacts
from trainer.config.convert import to_run_config

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
    tokens: float = 0.0
    """Generated, of a group; 0 where nobody counted them."""


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
        has_ended=_has_ended(run_dir),
    )


def _has_ended(run_dir: Path) -> bool:
    """Without a summary that can be read, a run is taken to be under way."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return summary["exit_reason"] in ("completed", "accuracy_reached")
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


def read_trace(
    run_dir: Path, steps: Sequence[StepLine], *, num_replicas: int, groups_per_step: int
) -> TraceFacts | None:
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
    within = [(s, max(s.begin_s, begin_s), min(s.end_s, end_s)) for s in spans]
    counted = [(s, a, b) for s, a, b in within if s.track == "groups" and a < b]
    groups = [(a, b) for _, a, b in counted]
    evaluations = [(a, b) for s, a, b in within if s.track == "evaluation" and a < b]
    window = (begin_s, end_s)
    return TraceFacts(
        engines_idle_s=idle_seconds(groups, window, num_replicas=num_replicas),
        evaluation_s=(end_s - begin_s) - idle_seconds(evaluations, window, num_replicas=1),
        full_groups_per_s=_full_groups_per_s(counted, groups_per_step),
    )


def _full_groups_per_s(groups: Sequence[tuple[Span, float, float]], groups_per_step: int) -> float | None:
    """Of (span, begin and end within the time that counts). In groups of mean size: of all groups, the short ones run
    first, so that their number would say too much. None if a group has no tokens."""
    tokens = [span.tokens for span, _, _ in groups]
    if not tokens or not all(tokens):
        return None
    rates = [span.tokens / (span.end_s - span.begin_s) for span, _, _ in groups]
    rate = full_rate([(begin, end) for _, begin, end in groups], rates, most_groups=groups_per_step)
    return None if rate is None else rate * len(tokens) / sum(tokens)


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
    begun: dict[tuple[int, int], tuple[str, float, float]] = {}
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
                tokens = float(event.get("args", {}).get("tokens", 0))
                begun[event["tid"], event["id"]] = (event["name"], event["ts"] / 1e6, tokens)
            case "e":
                name, begin_s, tokens = begun.pop((event["tid"], event["id"]), ("", None, 0.0))
                if begin_s is not None:
                    track, end_s = tracks.get(event["tid"], ""), event["ts"] / 1e6
                    yield Span(track=track, name=name, begin_s=begin_s, end_s=end_s, tokens=tokens)
            case _:
                continue


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
