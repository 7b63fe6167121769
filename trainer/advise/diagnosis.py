"""Who waits for whom in a run, and what would change it. Pure functions over records.

The model, on purpose simple:

- *learning-bound time* of a step: what the learner computes, and what it waits for weight sync. It shrinks with the
  learner's devices, but for that wait.
- *other time*: what is left of a step without these and the wait for data, such as evaluations and saves that the
  learner waits for. It comes on top of learning, and no number of devices shortens it.
- *generation-bound time* of a step: what is left of it without the time in which engines had nothing to do or made the
  learner wait for an evaluation, so with the tail, in which few answers are left. *At the full rate* it is what
  engines would need if they always had as much to do as while at least half the groups of a step were with them. Both
  shrink with the number of replicas.
- A step takes the larger of both sides, if S lets the two overlap; then tails overlap with other answers, and the full
  rate counts, if it is known. With S = 0 it takes their sum, of generation what the learner waits for.
- Every answer has S + 1 steps from its admission to the end of the step that trains it: (S + 1) x step >= longest
  answer + learning.
- Of a run whose sides take turns on the same devices, the model says what devices of their own would give, where tails
  overlap. Its longest answer is taken to last longer in proportion where fewer replicas share the work: S is rather
  too large than too small, which costs nothing, since slots are opened only when they are missed.

It does not know: communication between more ranks, memory that would no longer suffice, engines that run faster when
they have more to do at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.advise.facts import LearnerTime
from trainer.advise.findings import MATTERS, Findings, Shares, Split, at_best
from trainer.advise.recommendation import caveats, recommend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.advise.facts import Setup, StepLine, TraceFacts
    from trainer.advise.findings import Verdict
    from trainer.advise.recommendation import Recommendation

SURE_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a run shows, and what to do about it."""

    findings: Findings
    recommendation: Recommendation


def diagnose(lines: Sequence[StepLine], setup: Setup, *, trace: TraceFacts | None, num_lost: int = 0) -> Diagnosis:
    """Args:
    lines: of steady steps.
    trace: what the trace says about the same steps; None without one.
    num_lost: steps left out because an engine was lost.
    """
    total_s = sum(line.step_s for line in lines)
    shares = _shares(lines, total_s, trace)
    step_s, learner = total_s / len(lines), LearnerTime.of(lines)
    # Of a run that takes turns, neither its wait for sync nor moving in and out is learning; packing is.
    turns = setup.takes_turns
    scaled_s = learner.computes_s + (learner.packs_s if turns else 0.0)
    learning_s, other_s = scaled_s + (0.0 if turns else learner.waits_for_sync_s), learner.other_s
    generation_s = _generation_s(shares, step_s)
    full_s = None if trace is None else trace.generation_full_s
    fixed_s = 0.0 if turns else learner.waits_for_sync_s + other_s
    overlaps = setup.max_staleness > 0 or turns  # or would, on devices of their own
    if overlaps:
        counted_s = at_best(generation_s, full_s)
    else:  # engines that answer an evaluation while the learner stands still are busy; that is its other time already
        counted_s = 0.0 if generation_s is None else min(generation_s, learner.waits_for_data_s)
    verdict = _verdict(
        shares,
        setup,
        has_slack=full_s is not None and full_s <= (1 - 2 * MATTERS) * learner.busy_s,
        has_tails=full_s is not None and max(learning_s + other_s, full_s) <= (1 - 2 * MATTERS) * step_s,
    )
    open_slots = lines[-1].num_slots
    has_room = open_slots is not None and open_slots < setup.most_groups
    found = Findings(
        num_steps=len(lines),
        num_lost_steps=num_lost,
        step_s=step_s,
        shares=shares,
        learning_s=learning_s,
        other_s=other_s,
        generation_s=generation_s,
        generation_full_s=full_s,
        verdict=verdict,
        splits=() if not counted_s else splits_of(setup, scaled_s, counted_s, fixed_s=fixed_s),
        limits=(*_failures(lines), *_limits(shares, setup, verdict, has_room=has_room)),
        unknown=tuple(_unknown(lines, setup, shares, trace)),
    )
    advice = recommend(found, setup, pack_s=learner.packs_s, has_room=has_room)
    return Diagnosis(findings=replace(found, unknown=(*found.unknown, *caveats(advice))), recommendation=advice)


def splits_of(setup: Setup, learning_s: float, generation_s: float, *, fixed_s: float) -> tuple[Split, ...]:
    """Every way to give all devices away, fastest first; of equal ones, that nearest to today's.

    Args:
        learning_s: of a step, what more ranks shorten; they do not shorten `fixed_s`, which the learner needs besides.
    """
    found: list[Split] = []
    for replicas in range(1, setup.num_devices // setup.tensor_parallel_size + 1):
        ranks = setup.num_devices - replicas * setup.tensor_parallel_size
        if ranks >= 1:
            learning = learning_s * setup.num_ranks / ranks + fixed_s
            generation = generation_s * setup.num_replicas / replicas
            overlap = setup.max_staleness > 0 or setup.takes_turns
            together = max(learning, generation) if overlap else learning + generation
            found.append(Split(num_ranks=ranks, num_replicas=replicas, step_s=together))
    return tuple(sorted(found, key=lambda s: (round(s.step_s, 9), abs(s.num_ranks - setup.num_ranks))))


def _shares(lines: Sequence[StepLine], total_s: float, trace: TraceFacts | None) -> Shares:
    idle = [line.engines_idle_s for line in lines if line.engines_idle_s is not None]
    slots = [line.slot_wait_s for line in lines if line.slot_wait_s is not None]
    # Groups of the next step are waited for while the learner is busy with this one, which costs nothing.
    forced_s = sum(
        min(max(0.0, b.forced_wait_s - a.forced_wait_s), b.data_wait_s)
        for a, b in itertools.pairwise(lines)
        if b.step == a.step + 1
    )
    idle_s: float | None = None
    if len(idle) == len(lines):
        idle_s = sum(idle)
    elif trace is not None:
        idle_s = trace.engines_idle_s

    def share(seconds: float) -> float:
        return min(max(seconds / total_s, 0.0), 1.0) if total_s > 0 else 0.0

    return Shares(
        learner_waits_for_data=share(sum(line.data_wait_s for line in lines)),
        learner_waits_for_evaluation=share(sum(line.evaluation_wait_s for line in lines)),
        learner_waits_for_sync=share(sum(line.sync_wait_s for line in lines)),
        engines_idle=None if idle_s is None else share(idle_s),
        producer_waits_for_slots=share(sum(slots)) if len(slots) == len(lines) else None,
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
    if setup.takes_turns:
        return "take_turns"
    idle = 0.0 if shares.engines_idle is None else shares.engines_idle
    data, sync, evaluation = (
        shares.learner_waits_for_data, shares.learner_waits_for_sync, shares.learner_waits_for_evaluation
    )  # fmt: skip
    if evaluation >= MATTERS and evaluation >= max(data, sync, idle):
        return "evaluation_waits"
    if sync >= 2 * MATTERS and sync >= max(data, idle if data >= MATTERS else 0.0):
        return "sync_waits"
    if data >= MATTERS and idle >= MATTERS and (setup.max_staleness == 0 or min(data, idle) >= 2 * MATTERS):
        return "both_wait"
    if max(data, idle) < MATTERS:
        return "engines_wait" if has_slack else "balanced"
    if data > idle:
        return "tail_waits" if has_tails else "learner_waits"
    return "engines_wait"


def _failures(lines: Sequence[StepLine]) -> list[str]:
    frac = sum(line.failed_frac for line in lines) / len(lines)
    if not frac:
        return []
    text = (
        f"{frac:.1%} of the responses failed and have no reward: their reward function or agent raised or timed out. "
    )
    return [f"{text}Mean rewards are over the others; log.txt and summary.json (first_failure) name the first error."]


def _limits(shares: Shares, setup: Setup, verdict: Verdict, *, has_room: bool) -> list[str]:
    """What S and the size of a step stand in the way of, in words. `has_room`: not all slots that S allows are open."""
    found: list[str] = []
    if setup.takes_turns:
        found.append("Learner and engines take turns on the same devices, by definition.")
    elif setup.max_staleness == 0:
        found.append("S = 0: generation and learning take turns, by definition.")
    elif shares.old_groups_hold_up >= MATTERS:
        found.append(
            f"S = {setup.max_staleness} limits: {shares.old_groups_hold_up:.0%} of the time the learner waited for old "
            "groups although enough others were ready."
        )
    elif verdict == "both_wait" and not has_room:
        found.append(f"S = {setup.max_staleness} limits: both sides wait, so they do not overlap enough.")
    elif verdict == "tail_waits" and not has_room:
        found.append(f"S = {setup.max_staleness} limits: the longest answers take more steps than it gives them.")
    if shares.learner_waits_for_evaluation >= MATTERS:
        second = ", or a second engine" if setup.num_replicas == 1 else ""
        found.append(
            f"Evaluations limit: {shares.learner_waits_for_evaluation:.0%} of the time the learner waited for them; "
            f"rarer ones (trainer.eval_every), smaller ones (task.eval_size, task.eval_sets){second} would help."
        )
    num_sequences = setup.most_groups * setup.group_size
    room = setup.num_replicas * setup.max_num_seqs
    if num_sequences < room and verdict in ("learner_waits", "both_wait"):
        found.append(
            f"trainer.groups_per_step = {setup.groups_per_step} may limit: (S + 1) x groups_per_step x group_size = "
            f"{num_sequences} answers can be in flight at most, the engines take {room} at once."
        )
    return found


def _unknown(lines: Sequence[StepLine], setup: Setup, shares: Shares, trace: TraceFacts | None) -> list[str]:
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
