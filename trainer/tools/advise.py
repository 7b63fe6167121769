"""`python -m trainer.advise RUN_DIR`: which side of a run waits for the other, and what to change.

Usage: python -m trainer.advise RUN_DIR [--json]

Exit codes: 0 there is a diagnosis, 1 too few steps to say anything, 2 the directory holds no run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainer.tools.run_records import InvalidRunDir, TooFewSteps, read_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainer.tools.run_records import RunFacts, Setup, StepLine


EXIT_DIAGNOSED, EXIT_TOO_EARLY, EXIT_NOT_A_RUN = 0, 1, 2
MATTERS = 0.05
"""A share of the time, or a gain, that is smaller is not worth a word of advice."""
SURE_STEPS = 20
RARER = "are evaluations and saves needed so often?"
"""Said where the other time of a step is what could be shortened."""

Verdict = Literal[
    "generation_bound", "training_bound", "sync_waits", "evaluation_waits", "overlap_limited", "long_tail", "balanced",
    "colocated",
]  # fmt: skip
VERDICTS: dict[Verdict, str] = {
    "generation_bound": "The learner waits: generation is the slower side.",
    "training_bound": "The engines wait: learning is the slower side.",
    "sync_waits": "The learner waits for weight sync.",
    "evaluation_waits": "The learner waits for evaluations.",
    "overlap_limited": "Both sides wait for each other.",
    "long_tail": "The learner waits for the longest answers; the engines would be fast enough.",
    "colocated": "Learner and engines take turns.",
    "balanced": "Neither side waits: the run is balanced.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Waits as shares of the steady time. They overlap, so they need not add up. None: not recorded."""

    learner_waits_for_data: float
    """Without its waits for evaluations."""
    learner_waits_for_evaluation: float
    learner_waits_for_sync: float
    engines_idle: float | None
    producer_waits_for_slots: float | None
    old_groups_hold_up: float
    """Part of the wait for data in which enough groups were ready, but older ones had to come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSplit:
    """A division of the devices, and the time of a step that the model gives it."""

    num_ranks: int
    num_replicas: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a run shows. Times are of a step, in seconds."""

    num_steps: int
    num_lost_steps: int
    """Left out because an engine was lost."""
    step_s: float
    shares: Shares
    learning_s: float
    """If only learning counted."""
    other_s: float
    """In which the learner neither computes nor waits for data or sync; it may wait for evaluations."""
    generation_s: float | None
    """If only generation counted; None if engines' idle times are unknown."""
    generation_full_s: float | None
    """The same at the full rate of the engines; None without a trace that shows it."""
    verdict: Verdict
    splits: tuple[DeviceSplit, ...]
    """Best first; of as many devices as the run has."""
    limits: tuple[str, ...]
    unknown: tuple[str, ...]
    """What could not be known, in words."""

    @property
    def has_notable_rest(self) -> bool:
        """Whether the other time is worth a word."""
        return self.other_s >= MATTERS * self.step_s

    @property
    def floor_s(self) -> float:
        """The larger of both sides, the learner's with its other time: by this model no schedule of these devices is
        faster."""
        return max(self.learning_s + self.other_s, _at_best(self.generation_s, self.generation_full_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One thing to change. `keys` is empty if nothing is worth it."""

    keys: dict[str, int | str]
    why: str
    step_s: float | None
    """Time of a step that the model expects; None where it has no say."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.advise", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="directory of a run that has ended or is under way")
    parser.add_argument("--json", action="store_true", help="print values for programs instead of words")
    args = parser.parse_args(argv)
    try:
        facts = read_run(args.run_dir)
    except (InvalidRunDir, TooFewSteps) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_A_RUN if isinstance(error, InvalidRunDir) else EXIT_TOO_EARLY
    found = diagnose(facts)
    advice = recommend(found, facts)
    sys.stdout.write(as_json(found, advice) if args.json else format_report(found, advice, facts.setup))
    return EXIT_DIAGNOSED


def diagnose(facts: RunFacts) -> Diagnosis:
    """Who waits for whom, by how much, and what each division of the devices would give."""
    lines, setup, trace = facts.lines, facts.setup, facts.trace
    step_s = _mean(line.step_s for line in lines)
    shares = _shares(facts, step_s)
    computes_s, packs_s = _mean(line.learner_s for line in lines), _mean(line.pack_s for line in lines)
    sync_s, data_s = _mean(line.sync_wait_s for line in lines), _mean(line.data_wait_s for line in lines)
    other_s = max(0.0, step_s - computes_s - data_s - sync_s)
    # Of a colocated run, neither the wait for sync nor moving in and out is learning; packing is.
    turns = setup.is_colocated
    scaled_s = computes_s + (packs_s if turns else 0.0)
    learning_s = scaled_s + (0.0 if turns else sync_s)
    generation_s = _generation_s(shares, step_s)
    full_s = None if trace is None else trace.generation_full_s
    if setup.max_staleness > 0 or turns:  # they overlap, or would on separate devices
        counted_s = _at_best(generation_s, full_s)
    else:  # engines that answer an evaluation while the learner stands still are busy; that is its other time already
        counted_s = 0.0 if generation_s is None else min(generation_s, data_s)
    verdict = _verdict(
        shares,
        setup,
        has_slack=full_s is not None and full_s <= (1 - 2 * MATTERS) * (computes_s + sync_s),
        has_tails=full_s is not None and max(learning_s + other_s, full_s) <= (1 - 2 * MATTERS) * step_s,
    )
    fixed_s = 0.0 if turns else sync_s + other_s
    return Diagnosis(
        num_steps=len(lines),
        num_lost_steps=facts.num_lost_steps,
        step_s=step_s,
        shares=shares,
        learning_s=learning_s,
        other_s=other_s,
        generation_s=generation_s,
        generation_full_s=full_s,
        verdict=verdict,
        splits=() if not counted_s else splits_of(setup, scaled_s, counted_s, fixed_s=fixed_s),
        limits=(*_failures(lines), *_limits(shares, setup, verdict, has_closed_slots=facts.has_closed_slots)),
        unknown=tuple(_unknown(facts, shares)),
    )


def splits_of(setup: Setup, learning_s: float, generation_s: float, *, fixed_s: float) -> tuple[DeviceSplit, ...]:
    """Every way to give all devices away, fastest first; of equal ones, that nearest to today's.

    Args:
        learning_s: of a step, what more ranks shorten; they do not shorten `fixed_s`, which the learner also needs.
    """
    found: list[DeviceSplit] = []
    for replicas in range(1, setup.num_devices // setup.tensor_parallel_size + 1):
        ranks = setup.num_devices - replicas * setup.tensor_parallel_size
        if ranks >= 1:
            learning = learning_s * setup.num_ranks / ranks + fixed_s
            generation = generation_s * setup.num_replicas / replicas
            overlap = setup.max_staleness > 0 or setup.is_colocated
            step_s = max(learning, generation) if overlap else learning + generation
            found.append(DeviceSplit(num_ranks=ranks, num_replicas=replicas, step_s=step_s))
    return tuple(sorted(found, key=lambda s: (round(s.step_s, 9), abs(s.num_ranks - setup.num_ranks))))


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _at_best(generation_s: float | None, full_s: float | None) -> float:
    return min([time_s for time_s in (generation_s, full_s) if time_s is not None], default=0.0)


def _shares(facts: RunFacts, step_s: float) -> Shares:
    lines, num = facts.lines, len(facts.lines)
    idle = [line.engines_idle_s for line in lines if line.engines_idle_s is not None]
    slots = [line.slot_wait_s for line in lines if line.slot_wait_s is not None]
    # Groups of the next step are waited for while the learner is busy with this one, which costs nothing.
    forced_s = sum(
        min(max(0.0, b.oldest_wait_s - a.oldest_wait_s), b.data_wait_s)
        for a, b in itertools.pairwise(lines)
        if b.step == a.step + 1
    )
    idle_s: float | None = None
    if len(idle) == num:
        idle_s = sum(idle)
    elif facts.trace is not None:
        idle_s = facts.trace.engines_idle_s

    def share(seconds: float) -> float:
        return min(max(seconds / num / step_s, 0.0), 1.0) if step_s > 0 else 0.0

    return Shares(
        learner_waits_for_data=share(sum(line.data_wait_s for line in lines)),
        learner_waits_for_evaluation=share(sum(line.evaluation_wait_s for line in lines)),
        learner_waits_for_sync=share(sum(line.sync_wait_s for line in lines)),
        engines_idle=None if idle_s is None else share(idle_s),
        producer_waits_for_slots=share(sum(slots)) if len(slots) == num else None,
        old_groups_hold_up=share(forced_s),
    )


def _generation_s(shares: Shares, step_s: float) -> float | None:
    if shares.engines_idle is None:
        return None
    # Engines that answer an evaluation are not idle either.
    return step_s * max(0.0, 1 - shares.engines_idle - shares.learner_waits_for_evaluation)


def _verdict(shares: Shares, setup: Setup, *, has_slack: bool, has_tails: bool) -> Verdict:
    """
    Args:
        has_slack: at their full rate the engines would need clearly less than the learner.
        has_tails: with that rate, and the learner never waiting, a step would be clearly shorter.
    """
    if setup.is_colocated:
        return "colocated"
    idle = 0.0 if shares.engines_idle is None else shares.engines_idle
    data, sync, evaluation = (
        shares.learner_waits_for_data, shares.learner_waits_for_sync, shares.learner_waits_for_evaluation
    )  # fmt: skip
    if evaluation >= MATTERS and evaluation >= max(data, sync, idle):
        return "evaluation_waits"
    if sync >= 2 * MATTERS and sync >= max(data, idle if data >= MATTERS else 0.0):
        return "sync_waits"
    if data >= MATTERS and idle >= MATTERS and (setup.max_staleness == 0 or min(data, idle) >= 2 * MATTERS):
        return "overlap_limited"
    if max(data, idle) < MATTERS:
        return "training_bound" if has_slack else "balanced"
    if data > idle:
        return "long_tail" if has_tails else "generation_bound"
    return "training_bound"


def _failures(lines: Sequence[StepLine]) -> list[str]:
    frac = _mean(line.failed_frac for line in lines)
    if not frac:
        return []
    text = (
        f"{frac:.1%} of the responses failed and have no reward: their reward function or agent raised or timed out. "
    )
    return [f"{text}Mean rewards are over the others; log.txt and summary.json (first_failure) name the first error."]


def _limits(shares: Shares, setup: Setup, verdict: Verdict, *, has_closed_slots: bool) -> list[str]:
    """What S and the size of a step prevent, in words."""
    found: list[str] = []
    if setup.is_colocated:
        found.append("Learner and engines take turns on the same devices, by definition.")
    elif setup.max_staleness == 0:
        found.append("S = 0: generation and learning take turns, by definition.")
    elif shares.old_groups_hold_up >= MATTERS:
        found.append(
            f"S = {setup.max_staleness} limits: {shares.old_groups_hold_up:.0%} of the time the learner waited for old "
            "groups although enough others were ready."
        )
    elif verdict == "overlap_limited" and not has_closed_slots:
        found.append(f"S = {setup.max_staleness} limits: both sides wait, so they do not overlap enough.")
    elif verdict == "long_tail" and not has_closed_slots:
        found.append(f"S = {setup.max_staleness} limits: the longest answers take more steps than it gives them.")
    if shares.learner_waits_for_evaluation >= MATTERS:
        second = ", or a second engine" if setup.num_replicas == 1 else ""
        found.append(
            f"Evaluations limit: {shares.learner_waits_for_evaluation:.0%} of the time the learner waited for them; "
            f"rarer ones (trainer.eval_every), smaller ones (task.eval_size, task.eval_sets){second} would help."
        )
    num_sequences = setup.max_groups * setup.group_size
    capacity = setup.num_replicas * setup.max_num_seqs
    if num_sequences < capacity and verdict in ("generation_bound", "overlap_limited"):
        found.append(
            f"trainer.groups_per_step = {setup.groups_per_step} may limit: (S + 1) x groups_per_step x group_size = "
            f"{num_sequences} answers can be in flight at most, the engines take {capacity} at once."
        )
    return found


def _unknown(facts: RunFacts, shares: Shares) -> list[str]:
    lines, setup, trace = facts.lines, facts.setup, facts.trace
    found: list[str] = []
    if len(lines) < SURE_STEPS:
        found.append(f"Only {len(lines)} steady steps: the shares may still change.")
    if shares.engines_idle is None:
        found.append("Neither metrics nor a trace tell when engines were idle: the generation-bound time is unknown.")
    elif trace is not None and trace.generation_full_s is not None:
        found.append("With another number of replicas each has another share of the requests, and another full rate.")
        found.append(
            "To the full rate a group is with engines until its rewards are there: tools and judges count as theirs."
        )
    elif shares.engines_idle >= 2 * MATTERS:
        found.append("Engines that often wait run with few requests; with more to do their rate may be higher.")
    if shares.learner_waits_for_evaluation >= MATTERS and setup.num_replicas == 1:
        found.append("Groups that begin only when an evaluation has ended are waited for as data.")
    if trace is not None and trace.evaluation_s >= MATTERS * sum(line.step_s for line in lines):
        found.append("Evaluations ran beside a good part of these steps; engines may have counted them as work.")
    if setup.is_device_assumed:
        found.append("Nothing says on what it ran (no environment.jsonl, device.name=auto): an accelerator is assumed.")
    if setup.shares_cores:
        found.append("Learner and engines share this machine's cores: no split of devices can be judged from it.")
    return found


def recommend(found: Diagnosis, facts: RunFacts) -> Recommendation:
    """The one change that is worth most."""
    setup, verdict = facts.setup, found.verdict
    match verdict:
        case "sync_waits":
            return _about_sync(found, setup, pack_s=_mean(line.pack_s for line in facts.lines))
        case "evaluation_waits":
            return _about_evaluations(found, setup)
        case "overlap_limited" | "long_tail":
            return _about_staleness(found, facts)
        case "generation_bound" | "training_bound":
            return _about_devices(found, setup)
        case "colocated":
            return _about_separate_devices(found, setup)
        case "balanced":
            leave = RARER if found.has_notable_rest else "leave it as it is"
            return _nothing(f"neither side waits for the other; {leave}")
        case _:
            raise ValueError(f"unknown verdict {verdict!r}")


def _nothing(why: str) -> Recommendation:
    return Recommendation(keys={}, why=why, step_s=None)


def _about_staleness(found: Diagnosis, facts: RunFacts) -> Recommendation:
    """Today S + 1 steps are as long as the longest answers and their training take; with how many would they be, if
    each took no longer than the floor?"""
    setup = facts.setup
    if facts.has_closed_slots and found.shares.old_groups_hold_up < MATTERS:
        return _nothing("not all slots are open yet: a run opens more when its learner has to wait; ask later")
    overlap_limited = found.verdict == "overlap_limited"
    side = "both sides wait for each other" if overlap_limited else "the longest answers are missed"
    if setup.shares_cores:  # what overlaps there takes the cores from the other
        return _nothing(f"{side}, and both share the cores of this machine")
    num_steps = (setup.max_staleness + 1) * found.step_s / found.floor_s
    keys: dict[str, int | str] = {"mode": "async"} if setup.fixes_staleness else {}
    keys["mode.max_staleness"] = max(setup.max_staleness + 1, math.ceil(num_steps - 1 - MATTERS))
    return Recommendation(keys=keys, why=f"{side}: let generation run further ahead", step_s=found.floor_s)


def _about_sync(found: Diagnosis, setup: Setup, *, pack_s: float) -> Recommendation:
    waits_s = found.step_s * found.shares.learner_waits_for_sync
    if pack_s < 0.5 * waits_s and setup.sync_slots < 4:
        why = "the learner waits for a free slot, not for packing: engines still read an old version"
        more = setup.sync_slots + 1
        return Recommendation(keys={"weight_sync.num_slots": more}, why=why, step_s=found.step_s - waits_s + pack_s)
    why = "every step pays for one packing of the weights: larger steps pay less often (the step then does more work)"
    return Recommendation(keys={"trainer.groups_per_step": 2 * setup.groups_per_step}, why=why, step_s=None)


def _about_evaluations(found: Diagnosis, setup: Setup) -> Recommendation:
    instead = "smaller ones (task.eval_size, task.eval_sets) shorten it, too"
    if setup.num_replicas == 1:
        instead = f"{instead}, and with a second engine (rollout.num_replicas=2) syncs go on meanwhile"
    why = f"the learner waits for evaluations: half as many halve that; {instead}"
    waits_s = found.step_s * found.shares.learner_waits_for_evaluation
    keys: dict[str, int | str] = {"trainer.eval_every": 2 * setup.eval_every} if setup.eval_every else {}
    return Recommendation(keys=keys, why=why, step_s=found.step_s - waits_s / 2 if keys else None)


def _about_separate_devices(found: Diagnosis, setup: Setup) -> Recommendation:
    """Whether separate devices would be better than taking turns, with generation far enough ahead for the longest
    answers."""
    if setup.shares_cores or not found.splits:
        return _nothing("learner and engines take turns, and nothing tells what devices of their own would give")
    best = found.splits[0]
    if best.step_s >= (1 - MATTERS) * found.step_s:
        return _nothing(
            f"taking turns on {setup.num_devices} devices is about as fast as any division of them, and on-policy"
        )
    # The longest answers take up to S + 1 turns of the engines.
    turns_s = (setup.max_staleness + 1) * found.step_s * found.shares.learner_waits_for_data
    longest_s = turns_s * setup.num_replicas / best.num_replicas
    learning_s = found.learning_s * setup.num_ranks / best.num_ranks
    staleness = max(1, math.ceil((longest_s + learning_s) / best.step_s - 1 - MATTERS))
    why = f"on devices of their own both sides work at once; answers are then up to S = {staleness} steps old"
    return Recommendation(
        keys={"mode": "async", "mode.max_staleness": staleness, **_keys_of(best)}, why=why, step_s=best.step_s
    )


def _about_devices(found: Diagnosis, setup: Setup) -> Recommendation:
    learner_waits = found.verdict == "generation_bound"
    side = "the learner waits for data" if learner_waits else "the engines have nothing to do"
    if not learner_waits and (found.shares.engines_idle or 0.0) < MATTERS:
        side = "learning sets the pace (engines wait for slots)"
    if setup.shares_cores:
        return _nothing(f"{side}, and both share the cores of this machine")
    if found.splits:
        best = found.splits[0]
        today = next(split for split in found.splits if split.num_ranks == setup.num_ranks)
        if best.step_s < (1 - MATTERS) * today.step_s:
            why = f"{side}: divide the devices otherwise"
            return Recommendation(keys=_keys_of(best), why=why, step_s=best.step_s)
    if not learner_waits and found.other_s >= found.learning_s:
        return _nothing(f"{side}, but learning is the smaller part of it; {RARER}")
    more, key, count = (
        ("replicas", "rollout.num_replicas", setup.num_replicas)
        if learner_waits
        else ("learner devices", "learner.num_ranks", setup.num_ranks)
    )
    why = f"{side}, and no other division of {setup.num_devices} devices is much better: add {more}"
    return Recommendation(keys={key: count + 1}, why=why, step_s=None)


def _keys_of(split: DeviceSplit) -> dict[str, int | str]:
    return {"learner.num_ranks": split.num_ranks, "rollout.num_replicas": split.num_replicas}


def as_arguments(advice: Recommendation) -> str:
    """Its keys as arguments of a command."""
    return " ".join(f"{key}={value}" for key, value in advice.keys.items())


def _caveats(advice: Recommendation) -> list[str]:
    """What is not known of another division of devices, in words."""
    if not {"learner.num_ranks", "rollout.num_replicas"} & advice.keys.keys():
        return []
    command = f"python -m trainer --dry-run {as_arguments(advice)}"
    return [
        f"Whether that fits into memory: `{command}`, with all else that this run was given, tells.",
        "What communication between another number of ranks, and with another number of engines, costs.",
    ]


def as_json(found: Diagnosis, advice: Recommendation) -> str:
    """The report for programs."""
    unknown = [*found.unknown, *_caveats(advice)]
    values = {**asdict(found), "unknown": unknown, "floor_s": found.floor_s, "recommendation": asdict(advice)}
    return json.dumps(values, indent=2) + "\n"


def format_report(found: Diagnosis, advice: Recommendation, setup: Setup) -> str:
    """The report for people."""
    shares, generation = found.shares, "unknown" if found.generation_s is None else _s(found.generation_s)
    if found.generation_full_s is not None:
        generation += f" (at the full rate of the engines: {_s(found.generation_full_s)})"
    lines = [VERDICTS[found.verdict], ""]
    if num := found.num_lost_steps:
        lines.append(f"{num} step{'' if num == 1 else 's'} with a lost engine {'is' if num == 1 else 'are'} left out.")
    lines += [
        f"Steady steps: {found.num_steps}, {_s(found.step_s)} each. Share of that time in which",
        f"  the learner waited for data      {_share(shares.learner_waits_for_data)}",
    ]
    if shares.learner_waits_for_evaluation >= MATTERS:
        lines.append(f"  ... and for evaluations          {_share(shares.learner_waits_for_evaluation)}")
    lines += [
        f"  the learner waited for sync      {_share(shares.learner_waits_for_sync)}",
        f"  engines had nothing to do        {_share(shares.engines_idle)}",
        f"  no slot was free (back-pressure) {_share(shares.producer_waits_for_slots)}",
        "",
        f"Time of a step if only learning counted: {_s(found.learning_s)}; if only generation counted: {generation}.",
    ]
    if found.has_notable_rest:
        hands = "devices that change hands, " if setup.is_colocated else ""
        part = f"{_s(found.other_s)} of a step ({found.other_s / found.step_s:.0%})"
        lines.append(
            f"The rest, {part}, is neither: {hands}evaluations and saves that the learner waits for, and so on."
        )
    if found.generation_s is not None and not setup.is_colocated:
        best = "" if found.generation_full_s is None else " at the full rate"
        times = found.step_s / max(found.floor_s, 1e-9)
        learning = "learning with that rest" if found.has_notable_rest else "learning"
        lines.append(f"The steps took {times:.2f} times the larger of {learning} and generation{best}.")
    lines += [*found.limits, *_split_text(found, setup), ""]
    if advice.keys:
        gain = "" if advice.step_s is None else f" Expected: {_s(advice.step_s)} a step, now {_s(found.step_s)}."
        lines += [f"Advice: {as_arguments(advice)}", f"  Why: {advice.why}.{gain}"]
    else:
        lines.append(f"Advice: {advice.why}.")
    if unknown := [*found.unknown, *_caveats(advice)]:
        lines += ["", "What this cannot know:", *(f"  - {text}" for text in unknown)]
    return "\n".join(lines) + "\n"


def _split_text(found: Diagnosis, setup: Setup) -> list[str]:
    if not found.splits or setup.shares_cores or setup.is_colocated:
        return []
    best = found.splits[0]
    today = next((s for s in found.splits if s.num_ranks == setup.num_ranks), best)
    here = f"{setup.num_ranks} for the learner, {setup.num_replicas} x {setup.tensor_parallel_size} for engines"
    if best.num_ranks == today.num_ranks:
        return [f"Of {setup.num_devices} devices, the split of this run ({here}) is the best of {len(found.splits)}."]
    there = f"{best.num_ranks} for the learner, {best.num_replicas} x {setup.tensor_parallel_size} for engines"
    gain = f"{_s(best.step_s)} a step instead of {_s(today.step_s)}, {today.step_s / best.step_s:.2f} times as fast"
    return [f"This run's split: {here}. Best of {setup.num_devices} devices by the model: {there}: {gain}."]


def _share(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:6.1%}"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
