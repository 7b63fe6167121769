"""The state machines of weight sync, in virtual time: the slots of a learner, and the membership of replicas."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.golden import sync_seams
from tests.golden.net import Part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

NUM_EACH = 8
PACK: list[tuple[str, float]] = [("pack", 0), ("packed", 0)]
SCRIPTS = {
    "versions in order": ["sync 1", "step 1", "step 2", "sync 2", "publish 3", "publish 4", "sync 3", "sync 4"],
    "a version that is gone": ["publish 1", "begin sync 1", "publish 2", "publish 3", "end sync", "sync 3"],
    "a pull fails once": ["step 1", "fault r0 pull fails", "step 2", "step 3"],
    "a pull fails twice": ["step 1", "fault r0 pull fails", "fault r0 pull fails", "step 2", "step 3"],
    "a commit fails once": ["step 1", "fault r0 commit fails", "step 2"],
    "a commit fails twice": ["step 1", "fault r0 commit fails", "fault r0 commit fails", "step 2", "step 3", "join r0"],
    "a mixture, then whole": ["step 1", "fault r0 commit dirty", "step 2"],
    "a mixture that stays": ["step 1", "fault r0 commit dirty", "fault r0 commit dirty", "step 2", "step 3", "join r0"],
    "a commit hangs": ["step 1", "fault r0 commit hangs", "step 2", "step 3"],
    "an engine dies while it pulls": ["step 1", "fault r0 pull dies", "step 2", "step 3", "leave r0", "step 4"],
    "an engine dies in a commit": ["step 1", "fault r0 commit dies", "step 2", "join r0", "step 3"],
    "all engines die": ["step 1", "fault r0 pull dies", "fault r1 commit dies", "step 2", "step 3", "join r0",
                        "step 4"],
    "a newcomer": ["step 1", "join r2", "step 2", "leave r1", "leave r0", "step 3", "leave r2"],
    "a newcomer before the first version": ["join r2", "step 1"],
    "a newcomer is refused": ["step 1", "join r2 refused", "step 2"],
    "a successor": ["step 1", "join r0", "step 2", "join r0 refused", "step 3"],
    "a newcomer waits for a sync": ["step 1", "fault r0 pull is slow", "publish 2", "begin sync 2", "join r2",
                                    "end sync"],
    "one is held": ["step 1", "hold r0", "step 2", "step 3", "let go r0", "step 4"],
    "all are held": ["step 1", "hold r0", "hold r1", "publish 2", "begin sync 2", "wait 5", "let go r0", "end sync",
                     "let go r1"],
    "one is held and lost afterwards": ["step 1", "hold r0", "step 2", "fault r0 pull dies", "let go r0", "step 3"],
    "one is held and replaced": ["step 1", "hold r0", "step 2", "join r0", "step 3", "let go r0", "step 4"],
    "hold during a sync": ["step 1", "fault r1 pull is slow", "publish 2", "begin sync 2", "wait 1", "hold r0",
                           "end sync", "let go r0"],
    "one is frozen": ["step 1", "freeze r0", "publish 2", "begin sync 2", "wait 30", "let go r0", "end sync"],
    "nobody of that name": ["hold r7", "freeze r7", "leave r7"],
}  # fmt: skip


def cases() -> Mapping[str, Any]:
    slow = [*PACK, ("hold", 0), ("wait", 6.0), *PACK, *PACK, ("let go", 2), ("hold", 0)]
    renewed = [
        *PACK,
        ("hold", 0),
        ("wait", 3.0),
        ("hold", 0),
        ("wait", 3.0),
        *PACK,
        ("let go", 0),
        *PACK,
        ("let go", 1),
    ]
    slots: dict[str, Any] = {
        f"{num_slots} slots, {name}": ("slots", (num_slots, events))
        for num_slots in (1, 2)
        for name, events in {"a reader that is too slow": slow, "a reader that asks for more time": renewed}.items()
    }
    slots |= {
        f"{num_slots} slots, {seed}": ("slots", (num_slots, slot_events(random.Random(seed))))
        for num_slots in (1, 2, 3)
        for seed in range(NUM_EACH)
    }
    named = {f"members: {name}": ("members", script) for name, script in SCRIPTS.items()}
    chance = {f"members {seed}": ("members", membership_events(random.Random(seed))) for seed in range(2 * NUM_EACH)}
    return {**slots, **named, **chance}


def slot_events(rng: random.Random) -> list[tuple[str, float]]:
    """What parties do to the slots, in an order that can happen; with seconds, or versions back from the newest."""
    events = [*PACK]
    for _ in range(30):
        kind = rng.choice(["pack", "pack", "hold", "hold", "let go", "let go", "wait"])
        match kind:
            case "pack":
                events.append(("pack", 0))
                events += [("hold", rng.randint(0, 2))] * (rng.random() < 0.2)
                events.append(("packed" if rng.random() < 0.85 else "failed", 0))
            case "wait":
                events.append(("wait", rng.choice([1.0, 3.0, 6.0])))
            case _:
                events.append((kind, rng.randint(0, 1 + (kind == "let go"))))
    return events


def membership_events(rng: random.Random) -> list[str]:
    names, version, script = ["r0", "r1"], 1, ["step 1"]
    held = set[str]()
    for _ in range(12):
        name = rng.choice(names)
        match rng.choice(["step", "step", "fault", "fault", "join", "leave", "hold", "newcomer"]):
            case "step" if len(held) < len(names):
                version += 1
                script.append(f"step {version}")
            case "fault":
                phase = rng.choice(["pull", "commit"])
                hows = {"pull": ["fails", "dies", "is slow"], "commit": ["fails", "dirty", "dies", "hangs"]}
                script += [f"fault {name} {phase} {rng.choice(hows[phase])}"] * rng.randint(1, 2)
            case "join" if name not in held:
                script.append(f"join {name}" + " refused" * (rng.random() < 0.2))
            case "leave" if name not in held and len(names) > 1:
                names.remove(name)
                script.append(f"leave {name}")
            case "newcomer" if len(names) < 4:
                names.append(f"r{version}{len(names)}x{len(script)}")
                script.append(f"join {names[-1]}")
            case "hold":
                script.append(f"let go {name}" if name in held else f"hold {name}")
                held ^= {name}
            case _:
                script.append("wait 1")
    return [*script, *(f"let go {name}" for name in sorted(held)), f"step {version + 1}"]


def play(given: tuple[str, Any], folder: Path) -> Any:
    kind, script = given
    if kind == "members":
        return sync_seams.membership(script, folder)
    num_slots, events = script
    return _slots(num_slots, events)


def _slots(num_slots: int, events: Sequence[tuple[str, float]]) -> list[Any]:
    slots, newest, is_packing, trace = sync_seams.Slots(num_slots), 0, False, []
    for kind, number in events:
        version = newest - int(number)
        match kind:
            case "pack":
                outcome = slots.pack(newest + 1)
                is_packing = outcome == "packs"
                newest += is_packing
                version = newest
            case "packed" | "failed":
                outcome = slots.packed(is_good=kind == "packed") if is_packing else "nothing"
                is_packing = False
            case "hold":
                outcome = slots.hold(version, 5.0)
            case "let go":
                outcome = slots.let_go(version)
            case _:
                slots.now += number
                outcome = ""
        trace.append([f"{kind} {number if kind == 'wait' else version}", outcome, slots.states()])
    return trace


SYNC_STATES = Part(name="sync_states", cases=cases, play=play, tolerance=0.1)
