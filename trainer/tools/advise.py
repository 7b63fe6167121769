"""`python -m trainer advise RUN_DIR`: which side of a run waits for the other, and what to change.

Exit codes: 0 there is a diagnosis, 1 too few steps for one, 2 the directory holds no run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from trainer.config.seats import GRAPH_SIZES
from trainer.tools.run_records import InvalidRunDir, TooFewSteps, read_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainer.config.schema import RunConfig
    from trainer.tools.run_records import RunFacts


EXIT_DIAGNOSED, EXIT_TOO_EARLY, EXIT_NOT_A_RUN = 0, 1, 2
MATTERS = 0.05
"""Smaller shares of the time and smaller gains are ignored."""
SURE_STEPS = 20
RARER = "are evaluations and saves needed so often?"

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
    "long_tail": "The learner waits for the longest responses; the engines would be fast enough.",
    "colocated": "Learner and engines alternate.",
    "balanced": "Neither side waits: the run is balanced.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Waits as shares of the time. They overlap, so they need not add up."""

    learner_waits_for_data: float
    """Without its waits for evaluations."""
    learner_waits_for_evaluation: float
    learner_waits_for_sync: float
    engines_idle: float
    producer_waits_for_slots: float
    old_groups_hold_up: float
    """Part of the wait for data in which enough groups were ready, but older ones came first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSplit:
    """A division of the devices, with its expected time of a step."""

    num_ranks: int
    num_replicas: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Times are of a step, in seconds."""

    num_steps: int
    num_lost_steps: int
    """Left out because an engine was lost."""
    step_s: float
    shares: Shares
    learning_s: float
    """If only learning counted."""
    other_s: float
    """In which the learner neither computes nor waits for data or sync; it may wait for evaluations."""
    generation_s: float
    """If only generation counted."""
    generation_full_s: float | None
    """The same at the full rate of the engines; None without a trace that shows it."""
    verdict: Verdict
    splits: tuple[DeviceSplit, ...]
    """Of all devices of the run, best first."""
    limits: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def has_notable_rest(self) -> bool:
        return self.other_s >= MATTERS * self.step_s

    @property
    def floor_s(self) -> float:
        """The larger of both sides, the learner's with its other time: no schedule of these devices is faster."""
        return max(self.learning_s + self.other_s, _at_best(self.generation_s, self.generation_full_s))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One change; without `keys`, none is worth it."""

    why: str
    keys: dict[str, int | str] = field(default_factory=dict)
    step_s: float | None = None
    """Expected time of a step; None if unknown."""

    @property
    def arguments(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.keys.items())

    @property
    def caveats(self) -> list[str]:
        """What is unknown of another division of devices."""
        if not {"learner.num_ranks", "rollout.num_replicas"} & self.keys.keys():
            return []
        command = f"python -m trainer --dry-run {self.arguments}"
        return [
            f"Whether that fits into memory: check it with `{command}` and all other options of this run.",
            "What communication between another number of ranks, and with another number of engines, costs.",
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer advise", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="directory of a run that has ended or is in progress")
    parser.add_argument("--json", action="store_true", help="print values for programs instead of words")
    args = parser.parse_args(argv)
    try:
        facts = read_run(args.run_dir)
    except InvalidRunDir as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_A_RUN
    except TooFewSteps as early:
        sys.stderr.write(f"{early}\n")
        sys.stdout.write(_so_far(early, as_json=args.json))
        return EXIT_TOO_EARLY
    found = diagnose(facts)
    advice = recommend(found, facts)
    sys.stdout.write(as_json(found, advice) if args.json else format_report(found, advice, facts))
    return EXIT_DIAGNOSED


def _so_far(early: TooFewSteps, *, as_json: bool) -> str:
    facts, num = early.facts, len(early.facts.lines)
    step_s = fmean(line.step_s for line in facts.lines) if num else 0.0
    shares = shares_of(facts) if num else None
    if as_json:
        values = {"verdict": None, "num_steps": num, "num_steps_missing": early.num_missing, "step_s": step_s}
        return _json({**values, "shares": None if shares is None else asdict(shares)})
    if shares is None:
        return ""
    head = f"So far {num} step{'' if num == 1 else 's'}, the first ones included, {_s(step_s)} each."
    return "\n".join([f"{head} Share of that time in which", *_waits(shares)]) + "\n"


def diagnose(facts: RunFacts) -> Diagnosis:
    """Who waits for whom, by how much, and what each division of the devices would give."""
    lines, trace, is_colocated = facts.lines, facts.trace, facts.cfg.mode.shares_devices
    step_s, shares = fmean(line.step_s for line in lines), shares_of(facts)
    computes_s, packs_s = fmean(line.learner_s for line in lines), fmean(line.pack_s for line in lines)
    sync_s, data_s = fmean(line.sync_wait_s for line in lines), fmean(line.data_wait_s for line in lines)
    other_s = max(0.0, step_s - computes_s - data_s - sync_s)
    # Of a colocated run, neither the wait for sync nor moving in and out is learning; packing is.
    scaled_s, fixed_s = (computes_s + packs_s, 0.0) if is_colocated else (computes_s, sync_s + other_s)
    learning_s = scaled_s if is_colocated else computes_s + sync_s
    # Engines that serve an evaluation are not idle either.
    generation_s = step_s * max(0.0, 1 - shares.engines_idle - shares.learner_waits_for_evaluation)
    full_s = None if trace is None else trace.generation_full_s
    if facts.cfg.mode.max_staleness > 0 or is_colocated:  # they overlap, or would on separate devices
        counted_s = _at_best(generation_s, full_s)
    else:  # engines that serve an evaluation while the learner waits are busy; that is its other time already
        counted_s = min(generation_s, data_s)
    verdict = _verdict(
        shares,
        facts.cfg,
        has_slack=full_s is not None and full_s <= (1 - 2 * MATTERS) * (computes_s + sync_s),
        has_tails=full_s is not None and max(learning_s + other_s, full_s) <= (1 - 2 * MATTERS) * step_s,
    )
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
        splits=() if not counted_s else splits_of(facts, scaled_s, counted_s, fixed_s=fixed_s),
        limits=tuple(_limits(shares, facts, verdict)),
        unknown=tuple(_unknown(facts, shares)),
    )


def splits_of(facts: RunFacts, learning_s: float, generation_s: float, *, fixed_s: float) -> tuple[DeviceSplit, ...]:
    """Every division of all devices that keeps replicas and context groups whole, fastest first; of equal ones, that
    nearest to today's. More ranks shorten `learning_s` and not `fixed_s`, which the learner also needs."""
    cfg, found = facts.cfg, list[DeviceSplit]()
    tp, overlaps = cfg.rollout.tensor_parallel_size, cfg.mode.max_staleness > 0 or cfg.mode.shares_devices
    for devices in range(tp, facts.num_devices, tp):
        ranks, replicas = facts.num_devices - devices, devices // tp * cfg.rollout.engines_per_device
        if ranks % cfg.learner.rank_multiple:
            continue
        learning = learning_s * cfg.learner.num_ranks / ranks + fixed_s
        generation = generation_s * cfg.rollout.num_replicas / replicas
        step_s = max(learning, generation) if overlaps else learning + generation
        found.append(DeviceSplit(num_ranks=ranks, num_replicas=replicas, step_s=step_s))
    return tuple(sorted(found, key=lambda s: (round(s.step_s, 9), abs(s.num_ranks - cfg.learner.num_ranks))))


def _at_best(generation_s: float, full_s: float | None) -> float:
    return generation_s if full_s is None else min(generation_s, full_s)


def shares_of(facts: RunFacts) -> Shares:
    """Of at least one line."""
    lines, total_s = facts.lines, sum(line.step_s for line in facts.lines)
    # Groups of the next step are waited for while the learner is busy with this one, which costs nothing.
    forced_s = sum(
        min(max(0.0, b.oldest_wait_s - a.oldest_wait_s), b.data_wait_s)
        for a, b in itertools.pairwise(lines)
        if b.step == a.step + 1
    )

    def share(seconds: float) -> float:
        return min(max(seconds / total_s, 0.0), 1.0) if total_s > 0 else 0.0

    return Shares(
        learner_waits_for_data=share(sum(line.data_wait_s for line in lines)),
        learner_waits_for_evaluation=share(sum(line.evaluation_wait_s for line in lines)),
        learner_waits_for_sync=share(sum(line.sync_wait_s for line in lines)),
        engines_idle=share(sum(line.engines_idle_s for line in lines)),
        producer_waits_for_slots=share(sum(line.slot_wait_s for line in lines)),
        old_groups_hold_up=share(forced_s),
    )


def _verdict(shares: Shares, cfg: RunConfig, *, has_slack: bool, has_tails: bool) -> Verdict:
    """
    Args:
        has_slack: at their full rate the engines would need clearly less than the learner.
        has_tails: with that rate, and the learner never waiting, a step would be clearly shorter.
    """
    if cfg.mode.shares_devices:
        return "colocated"
    data, sync, idle = shares.learner_waits_for_data, shares.learner_waits_for_sync, shares.engines_idle
    evaluation = shares.learner_waits_for_evaluation
    if evaluation >= MATTERS and evaluation >= max(data, sync, idle):
        return "evaluation_waits"
    if sync >= 2 * MATTERS and sync >= max(data, idle if data >= MATTERS else 0.0):
        return "sync_waits"
    if data >= MATTERS and idle >= MATTERS and (cfg.mode.max_staleness == 0 or min(data, idle) >= 2 * MATTERS):
        return "overlap_limited"
    if max(data, idle) < MATTERS:
        return "training_bound" if has_slack else "balanced"
    if data > idle:
        return "long_tail" if has_tails else "generation_bound"
    return "training_bound"


def _limits(shares: Shares, facts: RunFacts, verdict: Verdict) -> list[str]:
    """Failures, and what S and the size of a step prevent."""
    cfg, staleness, found = facts.cfg, facts.cfg.mode.max_staleness, list[str]()
    if failed := fmean(line.failed_frac for line in facts.lines):
        found.append(
            f"{failed:.1%} of the responses failed and have no reward: their reward function or agent raised or timed "
            "out. Mean rewards exclude them; log.txt and summary.json (first_failure) name the first error."
        )
    if cfg.mode.shares_devices:
        found.append("Learner and engines alternate on the same devices, by definition.")
    elif staleness == 0:
        found.append("S = 0: generation and learning alternate, by definition.")
    elif shares.old_groups_hold_up >= MATTERS:
        found.append(
            f"S = {staleness} limits: {shares.old_groups_hold_up:.0%} of the time the learner waited for old groups "
            "although enough others were ready."
        )
    elif verdict == "overlap_limited" and not facts.has_closed_slots:
        found.append(f"S = {staleness} limits: both sides wait, so they do not overlap enough.")
    elif verdict == "long_tail" and not facts.has_closed_slots:
        found.append(f"S = {staleness} limits: the longest responses take more steps than it gives them.")
    if shares.learner_waits_for_evaluation >= MATTERS:
        second = ", or a second engine" if cfg.rollout.num_replicas == 1 else ""
        found.append(
            f"Evaluations limit: {shares.learner_waits_for_evaluation:.0%} of the time the learner waited for them; "
            f"rarer ones (trainer.eval_every), smaller ones (task.eval_size, task.eval_sets){second} would help."
        )
    num_sequences = facts.max_groups * cfg.rollout.group_size
    seats = GRAPH_SIZES[-1] if cfg.rollout.max_num_seqs == "auto" else cfg.rollout.max_num_seqs
    capacity = cfg.rollout.num_replicas * seats
    if num_sequences < capacity and verdict in ("generation_bound", "overlap_limited"):
        found.append(
            f"trainer.groups_per_step = {cfg.trainer.groups_per_step} may limit: at most (S + 1) x groups_per_step x "
            f"group_size = {num_sequences} responses can be in flight, the engines take {capacity} at once."
        )
    return [*found, *_learner_limits(facts)]


def _learner_limits(facts: RunFacts) -> Iterator[str]:
    """Time of the learner that another configuration would save."""
    cfg, lines, learner = facts.cfg, facts.lines, facts.cfg.learner
    computes_s, step_s = sum(line.learner_s for line in lines), sum(line.step_s for line in lines)
    if (stalls := sum(line.stall_s for line in lines) / step_s) >= MATTERS:
        keeps_up = "the disk does not keep up: set a larger checkpoint.every_steps"
        do = keeps_up if cfg.checkpoint.asynchronous else "set checkpoint.asynchronous=true"
        yield f"Checkpoints limit: {stalls:.0%} of the time the learner waited for them; {do}."
    if (imbalance := fmean(line.time_imbalance for line in lines)) >= 1 + 2 * MATTERS:
        yield (
            f"A rank limits: the slowest of the learner computes {imbalance:.2f} times as long as the mean "
            "(learner/time_imbalance). If learner/imbalance is near 1, its device or host is slow."
        )
    if (moves := sum(line.optimizer_s for line in lines) / computes_s) >= 2 * MATTERS and learner.optimizer == "muon":
        yield f"The optimizer takes {moves:.0%} of the learner's time; learner.optimizer=adamw takes less."
    tokens, loss_tokens = (sum(getattr(line, name) for line in lines) for name in ("num_tokens", "num_loss_tokens"))
    size = cfg.rollout.group_size
    # Of an agent, what tools said is no prompt.
    again = 0.0 if cfg.task.agent or not tokens else (1 - loss_tokens / tokens) * (size - 1) / size
    if learner.share_prefix is False and again >= MATTERS:
        yield f"About {again:.0%} of the trained tokens are a prompt once more; learner.share_prefix=auto saves them."
    given, num_passes = learner.max_tokens_per_micro_batch, fmean(line.num_micro_batches for line in lines)
    if given != "auto" and num_passes >= 4 and not facts.shares_cores:
        yield (
            f"A step has {num_passes:.0f} micro-batches per rank of up to {given} tokens; "
            "learner.max_tokens_per_micro_batch=auto makes them as large as the device allows."
        )


def _unknown(facts: RunFacts, shares: Shares) -> list[str]:
    lines, trace, found = facts.lines, facts.trace, list[str]()
    if len(lines) < SURE_STEPS:
        found.append(f"Only {len(lines)} steady steps: the shares may still change.")
    if trace is not None and trace.generation_full_s is not None:
        found.append("With another number of replicas each has another share of the requests, and another full rate.")
        found.append(
            "For the full rate a group is with engines until its rewards are there: tools and judges count as theirs."
        )
    elif shares.engines_idle >= 2 * MATTERS:
        found.append("Engines that often wait run with few requests; with more to do their rate may be higher.")
    if shares.learner_waits_for_evaluation >= MATTERS and facts.cfg.rollout.num_replicas == 1:
        found.append("Groups that begin only when an evaluation has ended are waited for as data.")
    if trace is not None and trace.evaluation_s >= MATTERS * sum(line.step_s for line in lines):
        found.append("Evaluations ran during a good part of these steps; engines may have counted them as work.")
    if facts.device_name == "auto":
        found.append("What it ran on is unknown (no environment.jsonl, device.name=auto): an accelerator is assumed.")
    if facts.shares_cores:
        found.append("Learner and engines share this machine's cores, so the shares predict no split of devices.")
    return found


def recommend(found: Diagnosis, facts: RunFacts) -> Recommendation:
    """The one change that is worth most."""
    match found.verdict:
        case "sync_waits":
            return _about_sync(found, facts)
        case "evaluation_waits":
            return _about_evaluations(found, facts.cfg)
        case "overlap_limited" | "long_tail":
            return _about_staleness(found, facts)
        case "generation_bound" | "training_bound":
            return _about_devices(found, facts)
        case "colocated":
            return _about_separate_devices(found, facts)
        case "balanced":
            leave = RARER if found.has_notable_rest else "leave it unchanged"
            return Recommendation(f"neither side waits for the other; {leave}")
        case _:
            raise ValueError(f"unknown verdict {found.verdict!r}")


def _about_staleness(found: Diagnosis, facts: RunFacts) -> Recommendation:
    """S + 1 steps are as long as the longest responses and their training take; the new S makes as many steps of the
    floor's time last as long."""
    if facts.has_closed_slots and found.shares.old_groups_hold_up < MATTERS:
        return Recommendation("not all slots are open yet: a run opens more when its learner has to wait; ask later")
    is_tail = found.verdict == "long_tail"
    side = "the longest responses are late" if is_tail else "both sides wait for each other"
    if facts.shares_cores:  # what overlaps there takes the cores from the other
        return Recommendation(f"{side}, and both share the cores of this machine")
    mode = facts.cfg.mode
    num_steps = (mode.max_staleness + 1) * found.step_s / found.floor_s
    keys: dict[str, int | str] = {"mode": "async"} if mode.name in ("sync", "one_step_off") else {}
    keys["mode.max_staleness"] = max(mode.max_staleness + 1, math.ceil(num_steps - 1 - MATTERS))
    return Recommendation(f"{side}: let generation run further ahead", keys, found.floor_s)


def _about_sync(found: Diagnosis, facts: RunFacts) -> Recommendation:
    waits_s, pack_s = found.step_s * found.shares.learner_waits_for_sync, fmean(line.pack_s for line in facts.lines)
    num_slots, groups = facts.cfg.weight_sync.num_slots, facts.cfg.trainer.groups_per_step
    if pack_s < 0.5 * waits_s and num_slots < 4:
        why = "the learner waits for a free slot, not for packing: engines still read an old version"
        return Recommendation(why, {"weight_sync.num_slots": num_slots + 1}, found.step_s - waits_s + pack_s)
    why = "every step pays for one packing of the weights: larger steps pay less often (the step then does more work)"
    return Recommendation(why, {"trainer.groups_per_step": 2 * groups})


def _about_evaluations(found: Diagnosis, cfg: RunConfig) -> Recommendation:
    instead = "smaller ones (task.eval_size, task.eval_sets) shorten it, too"
    if cfg.rollout.num_replicas == 1:
        instead = f"{instead}, and with a second engine (rollout.num_replicas=2) syncs continue meanwhile"
    why = f"the learner waits for evaluations: half as many halve that; {instead}"
    if not cfg.trainer.eval_every:
        return Recommendation(why)
    waits_s = found.step_s * found.shares.learner_waits_for_evaluation
    return Recommendation(why, {"trainer.eval_every": 2 * cfg.trainer.eval_every}, found.step_s - waits_s / 2)


def _about_separate_devices(found: Diagnosis, facts: RunFacts) -> Recommendation:
    """Separate devices instead of shared ones, with generation far enough ahead for the longest responses."""
    cfg = facts.cfg
    if facts.shares_cores or not found.splits:
        return Recommendation("learner and engines alternate; what separate devices would give is unknown")
    best = found.splits[0]
    if best.step_s >= (1 - MATTERS) * found.step_s:
        return Recommendation(
            f"sharing {facts.num_devices} devices is about as fast as any division of them, and it is on-policy"
        )
    # The longest responses take up to S + 1 turns of the engines.
    turns_s = (cfg.mode.max_staleness + 1) * found.step_s * found.shares.learner_waits_for_data
    longest_s = turns_s * cfg.rollout.num_replicas / best.num_replicas
    learning_s = found.learning_s * cfg.learner.num_ranks / best.num_ranks
    staleness = max(1, math.ceil((longest_s + learning_s) / best.step_s - 1 - MATTERS))
    why = f"on separate devices both sides work at once; responses are then up to S = {staleness} steps old"
    return Recommendation(why, {"mode": "async", "mode.max_staleness": staleness, **_keys_of(best)}, best.step_s)


def _about_devices(found: Diagnosis, facts: RunFacts) -> Recommendation:
    num_ranks, num_replicas = facts.cfg.learner.num_ranks, facts.cfg.rollout.num_replicas
    learner_waits = found.verdict == "generation_bound"
    side = "the learner waits for data" if learner_waits else "the engines have nothing to do"
    if not learner_waits and found.shares.engines_idle < MATTERS:
        side = "learning sets the pace (engines wait for slots)"
    if facts.shares_cores:
        return Recommendation(f"{side}, and both share the cores of this machine")
    if found.splits:
        best, today = found.splits[0], next(split for split in found.splits if split.num_ranks == num_ranks)
        if best.step_s < (1 - MATTERS) * today.step_s:
            return Recommendation(f"{side}: divide the devices differently", _keys_of(best), best.step_s)
    if not learner_waits and found.other_s >= found.learning_s:
        return Recommendation(f"{side}, but learning is the smaller part of it; {RARER}")
    why = f"{side}, and no other division of {facts.num_devices} devices is much better: add "
    if learner_waits:
        more = num_replicas + facts.cfg.rollout.engines_per_device
        return Recommendation(f"{why}replicas", {"rollout.num_replicas": more})
    return Recommendation(f"{why}learner devices", {"learner.num_ranks": num_ranks + facts.cfg.learner.rank_multiple})


def _keys_of(split: DeviceSplit) -> dict[str, int | str]:
    return {"learner.num_ranks": split.num_ranks, "rollout.num_replicas": split.num_replicas}


def as_json(found: Diagnosis, advice: Recommendation) -> str:
    unknown = [*found.unknown, *advice.caveats]
    return _json({**asdict(found), "unknown": unknown, "floor_s": found.floor_s, "recommendation": asdict(advice)})


def _json(values: dict[str, object]) -> str:
    return json.dumps(values, indent=2) + "\n"


def format_report(found: Diagnosis, advice: Recommendation, facts: RunFacts) -> str:
    """The report for people."""
    is_colocated = facts.cfg.mode.shares_devices
    generation = _s(found.generation_s)
    if found.generation_full_s is not None:
        generation += f" (at the full rate of the engines: {_s(found.generation_full_s)})"
    lines = [VERDICTS[found.verdict], ""]
    if num := found.num_lost_steps:
        lines.append(f"{num} step{'' if num == 1 else 's'} with a lost engine {'is' if num == 1 else 'are'} left out.")
    lines += [
        f"Steady steps: {found.num_steps}, {_s(found.step_s)} each. Share of that time in which",
        *_waits(found.shares),
        "",
        f"Time of a step if only learning counted: {_s(found.learning_s)}; if only generation counted: {generation}.",
    ]
    if found.has_notable_rest:
        hands = "switching of devices, " if is_colocated else ""
        part = f"{_s(found.other_s)} of a step ({found.other_s / found.step_s:.0%})"
        lines.append(
            f"The rest, {part}, is neither: {hands}evaluations and saves that the learner waits for, and so on."
        )
    if not is_colocated:
        best = "" if found.generation_full_s is None else " at the full rate"
        times = found.step_s / max(found.floor_s, 1e-9)
        learning = "learning with that rest" if found.has_notable_rest else "learning"
        lines.append(f"The steps took {times:.2f} times the larger of {learning} and generation{best}.")
    lines += [*found.limits, *_split_text(found, facts), ""]
    if advice.keys:
        gain = "" if advice.step_s is None else f" Expected: {_s(advice.step_s)} a step, now {_s(found.step_s)}."
        lines += [f"Advice: {advice.arguments}", f"  Why: {advice.why}.{gain}"]
    else:
        lines.append(f"Advice: {advice.why}.")
    if unknown := [*found.unknown, *advice.caveats]:
        lines += ["", "What this cannot know:", *(f"  - {text}" for text in unknown)]
    return "\n".join(lines) + "\n"


def _waits(shares: Shares) -> list[str]:
    rows = {"the learner waited for data": shares.learner_waits_for_data}
    if shares.learner_waits_for_evaluation >= MATTERS:
        rows["... and for evaluations"] = shares.learner_waits_for_evaluation
    rows |= {
        "the learner waited for sync": shares.learner_waits_for_sync,
        "engines had nothing to do": shares.engines_idle,
        "no slot was free (backpressure)": shares.producer_waits_for_slots,
    }
    return [f"  {what:<32} {share:6.1%}" for what, share in rows.items()]


def _split_text(found: Diagnosis, facts: RunFacts) -> list[str]:
    if not found.splits or facts.shares_cores or facts.cfg.mode.shares_devices:
        return []
    num_ranks, tp, best = facts.cfg.learner.num_ranks, facts.cfg.rollout.tensor_parallel_size, found.splits[0]

    def split(ranks: int, replicas: int) -> str:
        per_device = facts.cfg.rollout.engines_per_device
        engines = f"{replicas} x {tp}" if per_device == 1 else f"{replicas} / {per_device}"
        return f"{ranks} for the learner, {engines} for engines"

    here = split(num_ranks, facts.cfg.rollout.num_replicas)
    if best.num_ranks == num_ranks:
        return [f"Of {facts.num_devices} devices, the split of this run ({here}) is the best of {len(found.splits)}."]
    today = next(split for split in found.splits if split.num_ranks == num_ranks)
    there = split(best.num_ranks, best.num_replicas)
    gain = f"{_s(best.step_s)} a step instead of {_s(today.step_s)}, {today.step_s / best.step_s:.2f} times as fast"
    return [f"This run's split: {here}. Best of {facts.num_devices} devices by the model: {there}: {gain}."]


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
