"""Whole runs in virtual time around scripted workers, learner and weight sync; and what they leave behind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollout.errors import RewardError
from tests.fakes.scripted_run import Script, held_out
from tests.golden import seams
from tests.golden.clocks import virtual_clocks
from tests.golden.net import Part

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LONG_TAIL, SLOW_SYNC, SLOW_LEARNER = (
    {"generate_s": (0.1, 30.0), "seed": 3},
    {"train_s": 0.2, "pull_s": 4.0},
    {"train_s": 10.0},
)

CASES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "sync, long tail": {"mode": "sync", "script": LONG_TAIL},
    "async, S=0": {"config": {"mode.max_staleness": 0}},
    "async, S=1": {},
    "async, S=2, slow sync": {"config": {"mode.max_staleness": 2, "trainer.total_steps": 10}, "script": SLOW_SYNC},
    "async, S=3, long tail": {"config": {"mode.max_staleness": 3, "trainer.total_steps": 10}, "script": LONG_TAIL},
    "one step off": {"mode": "one_step_off", "script": SLOW_LEARNER},
    "evaluation sets": {"sets": True, "config": {"trainer.eval_samples": 2, "trainer.eval_every": 1}},
    "blocking evaluation": {"config": {"trainer.eval_blocking": True}, "script": {"evaluate_s": 5.0}},
    "accuracy reached": {
        "config": {"trainer.stop_at_accuracy": 0.35, "trainer.total_steps": 50, "checkpoint.export_hf": True},
    },
    "failing rewards": {"no_reward": 4},
    "filtered groups": {"equal": 3, "config": {"algorithm.dynamic_sampling": True}},
    "dropped and retried groups": {"fails": {3: 1, 5: 2, 8: 9, 11: 1}},
    "no retries": {"fails": {2: 1, 4: 1}, "config": {"rollout.max_retries": 0}},
    "no progress": {"fails": dict.fromkeys(range(100), 9)},
    "no progress by filters": {"equal": 1, "config": {"algorithm.dynamic_sampling": True}},
    "a group is too old": {"mode": "sync", "too_old": (4,)},
    "a group hangs": {"hangs": (4,), "config": {"trainer.stall_timeout_s": 60.0}},
    "checkpoints": {"config": {"checkpoint.every_steps": 2, "checkpoint.keep_last": 1, "checkpoint.save_at_end": True}},
    "interrupt": {"interrupts": (3.0,), "script": SLOW_LEARNER},
    "interrupt twice": {"interrupts": (25.0, 28.0), "script": SLOW_LEARNER},
    "learner failure": {"learner_fails_at": 3, "config": {"checkpoint.every_steps": 2}},
    "sync failure": {"sync_fails_at": 2},
    "workers lost": {"watch_fails_s": 27.0, "script": SLOW_LEARNER},
    "resume": {
        "learner_fails_at": 5,
        "config": {"mode.max_staleness": 2, "trainer.total_steps": 8, "checkpoint.every_steps": 3},
        "script": {"generate_s": (0.1, 9.0)},
        "then": {"script": {"seed": 9}},
    },
    "resume after an interrupt": {
        "interrupts": (12.0,),
        "config": {"trainer.total_steps": 5},
        "script": SLOW_LEARNER,
        "then": {"script": SLOW_LEARNER},
    },
}  # fmt: skip


def cases() -> Mapping[str, Any]:
    return CASES


def play(given: Mapping[str, Any], folder: Path) -> Any:
    runs = [given] + (
        [{**given, "learner_fails_at": None, "interrupts": (), **given["then"]}] if "then" in given else []
    )
    with virtual_clocks():
        records = [seams.scripted_run(_described(one), folder / "run") for one in runs]
    return records[0] if len(records) == 1 else {**records[0], "then": records[1]}


def _described(given: Mapping[str, Any]) -> seams.Run:
    sections: dict[str, dict[str, Any]] = {}
    for path, value in given.get("config", {}).items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    hard = [replace(one, name="hard", num_samples=3) for one in held_out(seams.small_config(), 2)]
    return seams.Run(
        mode=given.get("mode", "async"),
        sections=sections,
        script=_script(given),
        sets=tuple(hard) if given.get("sets") else (),
        interrupts=given.get("interrupts", ()),
        watch_fails_s=given.get("watch_fails_s", math.inf),
        too_old=given.get("too_old", ()),
    )


def _script(given: Mapping[str, Any]) -> Script:
    fails, no_reward, equal = given.get("fails", {}), given.get("no_reward", 0), given.get("equal", 0)
    learner_at, sync_at, hangs = given.get("learner_fails_at"), given.get("sync_fails_at"), given.get("hangs", ())

    def reward_of(group_id: int, sample: int) -> float:
        if no_reward and (group_id + sample) % no_reward == 0:
            return math.nan
        return 1.0 if equal and group_id % equal == 0 else float(sample % 2)

    return Script(
        reward_of=reward_of,
        fails=lambda item: (
            RewardError(f"attempt {item.attempt}") if item.attempt < fails.get(item.group_id, 0) else None
        ),
        hangs=lambda item: item.group_id in hangs,
        learner_error=lambda step: OSError("power cut") if step == learner_at else None,
        sync_error=lambda version: OSError("no engine took it") if version == sync_at else None,
        **given.get("script", {}),
    )


RUNS = Part(name="runs", cases=cases, play=play)
