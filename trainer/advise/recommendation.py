"""One thing to change in a run, by what it shows. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.advise.findings import MATTERS

if TYPE_CHECKING:
    from trainer.advise.facts import Setup
    from trainer.advise.findings import Findings, Split

RARER = "are evaluations and saves needed so often?"
"""Said where the other time of a step is what could be shortened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One thing to change. `keys` is empty if nothing is worth it."""

    keys: dict[str, int | str]
    why: str
    step_s: float | None
    """Time of a step that the model expects; None where it has no say."""


def recommend(found: Findings, setup: Setup, *, pack_s: float, has_room: bool) -> Recommendation:
    match found.verdict:
        case "sync_waits":
            return _about_sync(found, setup, pack_s=pack_s)
        case "evaluation_waits":
            return _about_evaluations(found, setup)
        case "both_wait" | "tail_waits" if has_room and found.shares.old_groups_hold_up < MATTERS:
            why = "not all slots are open yet: a run opens more when its learner has to wait; ask later"
            return Recommendation(keys={}, why=why, step_s=None)
        case "both_wait" | "tail_waits":
            side = (
                "both sides wait for each other" if found.verdict == "both_wait" else "the longest answers are missed"
            )
            if setup.shares_cores:  # what overlaps there takes the cores from the other
                return Recommendation(keys={}, why=f"{side}, and both share the cores of this machine", step_s=None)
            why = f"{side}: let generation run further ahead"
            keys: dict[str, int | str] = {"mode": "async"} if setup.fixes_staleness else {}
            keys["mode.max_staleness"] = _needed_staleness(found, setup)
            return Recommendation(keys=keys, why=why, step_s=found.floor_s)
        case "learner_waits" | "engines_wait":
            return _about_devices(found, setup)
        case "take_turns":
            return _about_turns(found, setup)
        case "balanced":
            leave = RARER if found.has_notable_rest else "leave it as it is"
            return Recommendation(keys={}, why=f"neither side waits for the other; {leave}", step_s=None)
        case _:
            raise ValueError(f"unknown verdict {found.verdict!r}")


def caveats(advice: Recommendation) -> list[str]:
    """What is not known of another division of devices, in words."""
    if not {"learner.num_ranks", "rollout.num_replicas"} & advice.keys.keys():
        return []
    command = f"python -m trainer --dry-run {as_arguments(advice)}"
    return [
        f"Whether that fits into memory: `{command}`, with all else that this run was given, tells.",
        "What communication between another number of ranks, and with another number of engines, costs.",
    ]


def as_arguments(advice: Recommendation) -> str:
    """Its keys as arguments of a command."""
    return " ".join(f"{key}={value}" for key, value in advice.keys.items())


def _needed_staleness(found: Findings, setup: Setup) -> int:
    """Today S + 1 steps are as long as the longest answers and their training take; with how many would they be, if
    each took no longer than the floor?"""
    num_steps = (setup.max_staleness + 1) * found.step_s / found.floor_s
    return max(setup.max_staleness + 1, math.ceil(num_steps - 1 - MATTERS))


def _about_sync(found: Findings, setup: Setup, *, pack_s: float) -> Recommendation:
    waits_s = found.step_s * found.shares.learner_waits_for_sync
    if pack_s < 0.5 * waits_s and setup.sync_slots < 4:
        why = "the learner waits for a free slot, not for packing: engines still read an old version"
        more = setup.sync_slots + 1
        return Recommendation(keys={"weight_sync.num_slots": more}, why=why, step_s=found.step_s - waits_s + pack_s)
    why = "every step pays for one packing of the weights: larger steps pay less often (the step then does more work)"
    return Recommendation(keys={"trainer.groups_per_step": 2 * setup.groups_per_step}, why=why, step_s=None)


def _about_evaluations(found: Findings, setup: Setup) -> Recommendation:
    instead = "smaller ones (task.eval_size, task.eval_sets) shorten it, too"
    if setup.num_replicas == 1:
        instead = f"{instead}, and with a second engine (rollout.num_replicas=2) syncs go on meanwhile"
    why = f"the learner waits for evaluations: half as many halve that; {instead}"
    waits_s = found.step_s * found.shares.learner_waits_for_evaluation
    keys: dict[str, int | str] = {"trainer.eval_every": 2 * setup.eval_every} if setup.eval_every else {}
    return Recommendation(keys=keys, why=why, step_s=found.step_s - waits_s / 2 if keys else None)


def _about_turns(found: Findings, setup: Setup) -> Recommendation:
    """Whether devices of their own would be better, with generation far enough ahead for the longest answers."""
    if setup.shares_cores or not found.splits:
        why = "learner and engines take turns, and nothing tells what devices of their own would give"
        return Recommendation(keys={}, why=why, step_s=None)
    best = found.splits[0]
    if best.step_s >= (1 - MATTERS) * found.step_s:
        why = f"taking turns on {setup.num_devices} devices is about as fast as any division of them, and on-policy"
        return Recommendation(keys={}, why=why, step_s=None)
    # The longest answers take up to S + 1 turns of the engines.
    turns_s = (setup.max_staleness + 1) * found.step_s * found.shares.learner_waits_for_data
    longest_s = turns_s * setup.num_replicas / best.num_replicas
    learning_s = found.learning_s * setup.num_ranks / best.num_ranks
    staleness = max(1, math.ceil((longest_s + learning_s) / best.step_s - 1 - MATTERS))
    why = f"on devices of their own both sides work at once; answers are then up to S = {staleness} steps old"
    return Recommendation(
        keys={"mode": "async", "mode.max_staleness": staleness, **_keys_of(best)}, why=why, step_s=best.step_s
    )


def _keys_of(split: Split) -> dict[str, int | str]:
    return {"learner.num_ranks": split.num_ranks, "rollout.num_replicas": split.num_replicas}


def _about_devices(found: Findings, setup: Setup) -> Recommendation:
    learner_waits = found.verdict == "learner_waits"
    side = "the learner waits for data" if learner_waits else "the engines have nothing to do"
    if not learner_waits and (found.shares.engines_idle or 0.0) < MATTERS:
        side = "learning sets the pace (engines wait for slots)"
    if setup.shares_cores:
        return Recommendation(keys={}, why=f"{side}, and both share the cores of this machine", step_s=None)
    if found.splits:
        best = found.splits[0]
        today = next(split for split in found.splits if split.num_ranks == setup.num_ranks)
        if best.step_s < (1 - MATTERS) * today.step_s:
            why = f"{side}: divide the devices otherwise"
            return Recommendation(keys=_keys_of(best), why=why, step_s=best.step_s)
    if not learner_waits and found.other_s >= found.learning_s:
        return Recommendation(keys={}, why=f"{side}, but learning is the smaller part of it; {RARER}", step_s=None)
    more, key, count = (
        ("replicas", "rollout.num_replicas", setup.num_replicas)
        if learner_waits
        else ("learner devices", "learner.num_ranks", setup.num_ranks)
    )
    why = f"{side}, and no other division of {setup.num_devices} devices is much better: add {more}"
    return Recommendation(keys={key: count + 1}, why=why, step_s=None)
