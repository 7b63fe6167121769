"""Greedy baselines in the loops: filtered by, counted, checked for their age, and never trained."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.types import Group
from tests.fakes.scripted_run import Script, ScriptedRun, prompt_set, trajectory
from tests.unit.trainer.driver.test_loops import lines, recorded
from trainer.driver.loops import StalenessBroken, check_ages
from trainer.driver.step_metrics import StepRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.types import RolloutRequest

PROMPT = prompt_set(1).prompts[0]
REMAX: dict[str, Any] = {"advantage": "remax", "loss": "ppo_clip"}
WRONG_EVERY_THIRD = Script(reward_of=lambda group_id, sample: float(group_id % 3 > 0))
"""All samples of a group are worth the same; the greedy answer is worth 1."""


def with_baselines(run: ScriptedRun) -> ScriptedRun:
    run_group = run.world.run_group

    async def more(item: RolloutRequest) -> Group:
        group = await run_group(item)
        greedy = trajectory(item.prompt, 2, [(run.world.live, 7)], reward=1.0)
        return replace(group, baseline=greedy)

    run.world.run_group = more  # type: ignore[method-assign]
    return run


def test_a_run_reports_its_baselines_and_trains_none(
    scripted: Callable[..., ScriptedRun], play: Callable[..., Any]
) -> None:
    run = with_baselines(scripted(WRONG_EVERY_THIRD, algorithm=REMAX, mode={"max_staleness": 2}))
    play(run)
    written = lines(run)
    assert len(written) == 6
    assert {line["reward/greedy_mean"] for line in written} == {1.0}
    assert {line["learner/num_samples"] for line in written} == {3 * 2}
    assert {line["discarded_tokens"] for line in written} == {0}
    assert all(line["baseline"]["num_generated_tokens"] == 7 for line in recorded(run))
    assert {line["response/tokens_max"] for line in written} <= {2.0, 3.0}


def test_dynamic_sampling_drops_groups_that_are_worth_what_the_greedy_answer_is(
    scripted: Callable[..., ScriptedRun], play: Callable[..., Any]
) -> None:
    keys = REMAX | {"filter_zero_variance": True, "max_refills_per_step": 16}
    run = with_baselines(scripted(WRONG_EVERY_THIRD, algorithm=keys))
    play(run)
    reasons = {line["group_id"] % 3: line["reason"] for line in recorded(run)}
    assert reasons == {0: "", 1: "zero_variance", 2: "zero_variance"}
    assert {line["reward/zero_variance_frac"] for line in lines(run)} == {0.0}


def test_a_baseline_that_is_too_old_breaks_the_promise_too() -> None:
    fresh = Group(
        group_id=4,
        prompt=PROMPT,
        trajectories=[trajectory(PROMPT, 0, [(5, 2)], reward=1.0)],
        start_version=5,
        baseline=trajectory(PROMPT, 1, [(5, 2)], reward=1.0),
    )
    check_ages([fresh], step=6, max_staleness=1)
    assert fresh.baseline is not None
    old = replace(fresh, baseline=trajectory(PROMPT, 1, [(4, 1), (5, 1)], reward=1.0))
    with pytest.raises(StalenessBroken, match=r"version 4 \(group 4\)"):
        check_ages([old], step=6, max_staleness=1)


def test_tokens_of_a_baseline_count_as_generated_but_not_in_the_lengths() -> None:
    recorder = StepRecorder(clock=lambda: 0.0)
    answers = [trajectory(PROMPT, i, [(0, 2)], reward=1.0) for i in range(2)]
    greedy = trajectory(PROMPT, 2, [(0, 7)], reward=1.0)
    group = Group(group_id=0, prompt=PROMPT, trajectories=answers, start_version=0, baseline=greedy)
    assert group.num_generated_tokens == 11
    recorder.count_generated(group)
    assert recorder._generated_tokens == 11
    assert list(recorder._generated_lengths) == [[2, 2]]
