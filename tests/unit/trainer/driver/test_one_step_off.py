"""`mode=one_step_off` in a run: the next step is generated while one is trained, and never more than that."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import Script, ScriptedRun
from trainer.config.compose import load_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.types import Group
    from trainer.driver import loops

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., loops.Parts]

NUM_STEPS, GROUPS_PER_STEP = 10, 3


def one_step_off(scripted: Make, play: Play, script: Script) -> tuple[ScriptedRun, list[list[Group]]]:
    """A run with what the group of that name sets, and the groups of each step."""
    mode = asdict(load_config(["mode=one_step_off"]).mode)
    trainer = {"total_steps": NUM_STEPS, "groups_per_step": GROUPS_PER_STEP}
    run = scripted(script, mode=mode, trainer=trainer)
    assert run.cfg.mode.name == "one_step_off"
    steps: list[list[Group]] = []

    def watch(parts: loops.Parts) -> None:
        take = parts.buffer.take

        async def watching(step: int) -> list[Group]:
            groups = await take(step)
            steps.append(groups)
            return groups

        parts.buffer.take = watching  # type: ignore[method-assign]

    play(run, meddle=watch)
    return run, steps


def times(run: ScriptedRun, what: str) -> dict[int, float]:
    """Number of the step or group -> when that happened."""
    return {number: time for time, name, number in run.world.events if name == what}


@pytest.mark.parametrize(
    "script",
    [
        Script(),
        Script(train_s=10.0, generate_s=(2.0, 4.0)),
        Script(train_s=1.0, generate_s=(15.0, 15.0)),
        Script(train_s=0.2, pull_s=4.0),
        Script(generate_s=(0.1, 30.0), seed=3),
    ],
    ids=["even", "learner is slow", "engines are slow", "sync is slow", "long tail"],
)
def test_every_group_is_trained_within_one_step_whatever_is_slow(scripted: Make, play: Play, script: Script) -> None:
    run, steps = one_step_off(scripted, play, script)
    ages = [step - group.start_version for step, groups in enumerate(steps) for group in groups]
    assert len(ages) == NUM_STEPS * GROUPS_PER_STEP
    assert (min(ages), max(ages)) == (0, 1), "at the start both steps are made by the first version; never more"
    lines: list[dict[str, Any]] = [json.loads(line) for line in run.telemetry.run_dir.metrics.read_text().splitlines()]
    assert max(line["staleness/max"] for line in lines) == 1
    assert {line["buffer/num_slots"] for line in lines} == {2 * GROUPS_PER_STEP}, "one step ahead, and none more"
    assert run.world.numbers("trained") == list(range(NUM_STEPS))


def test_the_next_step_is_generated_while_one_is_trained(scripted: Make, play: Play) -> None:
    """Engines need at most 4 s, and a version 0.7 s to get to them; the learner needs 10 s."""
    run, steps = one_step_off(scripted, play, Script(train_s=10.0, generate_s=(2.0, 4.0)))
    begun, ended = times(run, "generate"), times(run, "generated")
    train, trained = times(run, "train"), times(run, "trained")
    for step in range(1, NUM_STEPS - 1):
        for group in steps[step + 1]:
            assert group.start_version == step, "by the version that the step before has made"
            assert train[step] < begun[group.group_id] < ended[group.group_id] < trained[step]


def test_generation_is_never_two_steps_ahead(scripted: Make, play: Play) -> None:
    run, steps = one_step_off(scripted, play, Script(train_s=10.0, generate_s=(2.0, 4.0)))
    begun, trained = times(run, "generate"), times(run, "trained")
    for step in range(NUM_STEPS - 2):
        assert all(begun[group.group_id] > trained[step] for group in steps[step + 2])
