"""A diagnosis in words, and as plain values for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from trainer.advise.findings import MATTERS
from trainer.advise.recommendation import as_arguments

if TYPE_CHECKING:
    from trainer.advise.diagnosis import Diagnosis
    from trainer.advise.facts import Setup
    from trainer.advise.findings import Findings, Verdict

VERDICTS: dict[Verdict, str] = {
    "learner_waits": "The learner waits: generation is the slower side.",
    "engines_wait": "The engines wait: learning is the slower side.",
    "sync_waits": "The learner waits for weight sync.",
    "evaluation_waits": "The learner waits for evaluations.",
    "both_wait": "Both sides wait for each other.",
    "tail_waits": "The learner waits for the longest answers; the engines would be fast enough.",
    "take_turns": "Learner and engines take turns.",
    "balanced": "Neither side waits: the run is balanced.",
}


def in_words(diagnosis: Diagnosis, setup: Setup) -> str:
    """What a person reads."""
    found = diagnosis.findings
    shares, generation = found.shares, "unknown" if found.generation_s is None else _s(found.generation_s)
    if found.generation_full_s is not None:
        generation += f" (at the full rate of the engines: {_s(found.generation_full_s)})"
    lines = [
        VERDICTS[found.verdict],
        "",
        *_left_out(found),
        f"Steady steps: {found.num_steps}, {_s(found.step_s)} each. Share of that time in which",
        f"  the learner waited for data      {_share(shares.learner_waits_for_data)}",
        *_for_evaluations(shares.learner_waits_for_evaluation),
        f"  the learner waited for sync      {_share(shares.learner_waits_for_sync)}",
        f"  engines had nothing to do        {_share(shares.engines_idle)}",
        f"  no slot was free (back-pressure) {_share(shares.producer_waits_for_slots)}",
        "",
        f"Time of a step if only learning counted: {_s(found.learning_s)}; if only generation counted: {generation}.",
        *_rest(found, setup),
    ]
    if found.generation_s is not None and not setup.takes_turns:
        best = "" if found.generation_full_s is None else " at the full rate"
        times = found.step_s / max(found.floor_s, 1e-9)
        learning = "learning with that rest" if found.has_notable_rest else "learning"
        lines.append(f"The steps took {times:.2f} times the larger of {learning} and generation{best}.")
    lines += [*found.limits, *_split_text(found, setup), "", *_advice(diagnosis)]
    if found.unknown:
        lines += ["", "What this cannot know:", *(f"  - {text}" for text in found.unknown)]
    return "\n".join(lines) + "\n"


def as_values(diagnosis: Diagnosis) -> dict[str, object]:
    """The same as JSON values."""
    found, advice = diagnosis.findings, diagnosis.recommendation
    return {**asdict(found), "floor_s": found.floor_s, "recommendation": asdict(advice)}


def _left_out(found: Findings) -> list[str]:
    num = found.num_lost_steps
    if not num:
        return []
    return [f"{num} step{'' if num == 1 else 's'} with a lost engine {'is' if num == 1 else 'are'} left out."]


def _for_evaluations(share: float) -> list[str]:
    return [f"  ... and for evaluations          {_share(share)}"] if share >= MATTERS else []


def _rest(found: Findings, setup: Setup) -> list[str]:
    if not found.has_notable_rest:
        return []
    hands = "devices that change hands, " if setup.takes_turns else ""
    part = f"{_s(found.other_s)} of a step ({found.other_s / found.step_s:.0%})"
    return [f"The rest, {part}, is neither: {hands}evaluations and saves that the learner waits for, and so on."]


def _split_text(found: Findings, setup: Setup) -> list[str]:
    if not found.splits or setup.shares_cores or setup.takes_turns:
        return []
    best = found.splits[0]
    today = next((s for s in found.splits if s.num_ranks == setup.num_ranks), best)
    here = f"{setup.num_ranks} for the learner, {setup.num_replicas} x {setup.tensor_parallel_size} for engines"
    if best.num_ranks == today.num_ranks:
        return [f"Of {setup.num_devices} devices, the split of this run ({here}) is the best of {len(found.splits)}."]
    there = f"{best.num_ranks} for the learner, {best.num_replicas} x {setup.tensor_parallel_size} for engines"
    gain = f"{_s(best.step_s)} a step instead of {_s(today.step_s)}, {today.step_s / best.step_s:.2f} times as fast"
    return [f"This run's split: {here}. Best of {setup.num_devices} devices by the model: {there}: {gain}."]


def _advice(diagnosis: Diagnosis) -> list[str]:
    advice = diagnosis.recommendation
    if not advice.keys:
        return [f"Advice: {advice.why}."]
    gain = (
        "" if advice.step_s is None else f" Expected: {_s(advice.step_s)} a step, now {_s(diagnosis.findings.step_s)}."
    )
    return [f"Advice: {as_arguments(advice)}", f"  Why: {advice.why}.{gain}"]


def _share(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:6.1%}"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
