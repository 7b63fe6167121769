"""The loops around the real buffer, prompt source, batcher and telemetry; workers, learner and sync scripted."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.errors import NoProgress
from rollout.types import Group
from tests.fakes.metric_names import check_complete, check_known
from tests.fakes.scripted_run import (
    Script,
    ScriptedRun,
    World,
    all_evaluations,
    lines,
    prompt_set,
    recorded,
    trajectory,
    watch_batches,
)
from tests.unit.trainer.data.conftest import make_group
from trainer.config.compose import load_config
from trainer.driver.checkpointing import find_resume_point
from trainer.driver.loops import StalenessViolation, StallTimeout, check_staleness
from trainer.driver.state import FailedResponses
from trainer.errors import first_cause
from trainer.telemetry import trajectories

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.types import RolloutRequest

    Make = Callable[..., ScriptedRun]


PROMPT = prompt_set(1).prompts[0]
SLOW_SYNC = Script(train_s=0.2, pull_s=4.0)
"""Several versions are trained while one is on its way."""
NUM_STEPS = 12


@pytest.mark.parametrize("mode", [0, 1, 4, "one_step_off"])
@pytest.mark.parametrize(
    "script",
    [
        Script(),
        SLOW_SYNC,
        Script(generate_s=(0.1, 30.0), seed=3),
        Script(train_s=10.0, generate_s=(2.0, 4.0)),
        Script(train_s=1.0, generate_s=(15.0, 15.0)),
    ],
    ids=["even", "sync is slow", "long tail", "learner is slow", "engines are slow"],
)
def test_a_run_trains_every_step_and_no_group_is_too_old_whatever_is_slow(
    scripted: Make, mode: int | str, script: Script
) -> None:
    preset = asdict(load_config(["mode=one_step_off"]).mode) if mode == "one_step_off" else {"max_staleness": mode}
    run = scripted(script, mode=preset, trainer={"total_steps": NUM_STEPS})
    seen, bound = watch_batches(run), run.cfg.mode.max_staleness
    run.play()
    assert run.world.numbers("trained") == list(range(NUM_STEPS))
    assert run.state.step == run.world.live == run.state.live_version == NUM_STEPS
    ages = [step - group.start_version for step, groups in enumerate(seen) for group in groups]
    assert len(ages) == NUM_STEPS * 3
    assert 0 <= min(ages) <= max(ages) <= bound
    written = lines(run)
    assert [line["step"] for line in written] == [line["version"] for line in written] == list(range(1, NUM_STEPS + 1))
    for line in written:
        check_known(line)
        check_complete(line)
        assert line["discarded_tokens"] == 0
        assert line["staleness/max"] <= line["staleness/group_max"] <= bound
    assert any(line["perf/rollout_tokens_per_s"] > 0 for line in written)
    assert run.buffer.stats().trained == NUM_STEPS * 3
    if script is SLOW_SYNC or mode == "one_step_off":
        assert max(ages) == bound, "it does reach the bound"
    if mode == "one_step_off":
        assert {line["buffer/num_slots"] for line in written} == {2 * 3}, "one step ahead, and none more"


@pytest.mark.parametrize(
    ("asked", "learner_shares", "is_shared"),
    [("auto", True, True), ("auto", False, False), (False, True, False), (True, False, True)],
)
def test_prompts_are_shared_where_the_learner_gains_by_it_or_the_user_says(
    asked: Any, learner_shares: bool, is_shared: bool, scripted: Make
) -> None:
    run = scripted(learner={"share_prefix": asked}, trainer={"total_steps": 2})
    run.world.shares_prefix = learner_shares
    run.play()
    assert [("learner/shared_tokens_frac" in line) for line in lines(run)] == 2 * [is_shared]


@pytest.mark.parametrize(
    ("script", "slots", "last_ages"),
    [
        (Script(train_s=10.0, generate_s=(0.1, 2.0)), {6}, {1}),
        (Script(train_s=10.0, generate_s=(15.0, 15.0)), {6, 9}, {2}),
        (Script(train_s=1.0, generate_s=(4.0, 20.0)), {6, 9, 12, 15}, {4}),
    ],
    ids=["engines are faster", "responses take longer than a step", "the learner is faster"],
)
def test_generation_gets_a_longer_lead_while_the_learner_has_to_wait_and_no_longer(
    scripted: Make, script: Script, slots: set[int], last_ages: set[int]
) -> None:
    """With S = 4 and 3 groups per step."""
    run = scripted(script, mode={"max_staleness": 4}, trainer={"total_steps": 20}).play()
    written = lines(run)
    assert {line["buffer/num_slots"] for line in written} == slots
    assert {line["staleness/group_max"] for line in written[-8:-4]} == last_ages


def test_a_token_or_a_baseline_that_is_too_old_is_caught_even_in_a_young_group() -> None:
    young = trajectory(PROMPT, 0, [(4, 4)], reward=0.0)
    old = trajectory(PROMPT, 0, [(2, 1), (4, 3)], reward=0.0)
    group = Group(group_id=7, prompt_id="p", trajectories=[young], start_version=4)
    for one in (replace(group, trajectories=[old]), replace(group, baseline=old)):
        check_staleness([one], version=4, max_staleness=2)
        with pytest.raises(StalenessViolation, match=r"version 2 \(group 7\)"):
            check_staleness([one], version=4, max_staleness=1)


@pytest.mark.parametrize(
    ("keys", "saved", "kept"),
    [
        ({"every_steps": 2, "keep_last": 2, "save_at_end": True, "export_hf": True}, [2, 4, 6], [4, 6]),
        ({"every_steps": 1, "keep_last": 1, "keep_every": 4}, [1, 2, 3, 4, 5, 6], [4, 6]),
        ({"save_at_end": True}, [6], [6]),
        ({"save_at_end": False}, [], []),
    ],
)
def test_a_checkpoint_is_saved_when_due_and_at_the_end_once_after_the_line_of_its_step(
    scripted: Make, keys: dict[str, Any], saved: list[int], kept: list[int]
) -> None:
    """A kill between the two must not leave a checkpoint of a step that has no line: it would never be written."""
    run = scripted(checkpoint=keys)
    num_lines: list[tuple[int, int]] = []
    save = run.world.save

    async def watching(path: Any, *, step: int, in_background: bool) -> None:
        num_lines.append((step, len(lines(run))))
        await save(path, step=step, in_background=in_background)

    run.world.save = watching  # type: ignore[method-assign]
    run.play()
    assert run.world.numbers("saved") == saved
    assert sorted(path.name for path in run.telemetry.run_dir.checkpoints.glob("step_*")) == [f"step_{n}" for n in kept]
    assert all(step == count for step, count in num_lines if step < 6)
    assert (run.telemetry.run_dir.export / "model").exists() is ("export_hf" in keys)


@pytest.mark.parametrize("save_at_end", [False, True])
def test_a_request_to_stop_takes_effect_between_two_steps_and_is_always_saved(
    scripted: Make, save_at_end: bool
) -> None:
    run = scripted(Script(train_s=5.0), trainer={"total_steps": 50}, checkpoint={"save_at_end": save_at_end})
    run.play(interrupt_when=lambda: len(run.world.numbers("train")) == 3)
    assert run.world.numbers("trained") == run.world.numbers("train") == [0, 1, 2]
    assert [line["step"] for line in lines(run)] == [1, 2, 3]
    assert (run.world.live, run.world.numbers("saved")) == (3, [3])
    run = scripted(Script(hangs=lambda item: item.start_version >= 2))
    run.play(interrupt_when=lambda: asyncio.get_running_loop().time() > 500.0)
    assert 2 <= run.state.step < 6, "it waited for groups"


def test_an_interrupt_after_the_accuracy_was_reached_leaves_out_the_export_and_is_reported(scripted: Make) -> None:
    keys = {"stop_at_accuracy": 0.2, "total_steps": 50}
    run = scripted(Script(evaluate_s=20.0), trainer=keys, checkpoint={"export_hf": True})
    run.play(interrupt_when=lambda: run.state.stop_reason is not None)
    assert not run.telemetry.run_dir.export.exists()
    assert run.state.stop_reason == "interrupted"


def test_a_stalled_run_ends_with_the_reason(scripted: Make) -> None:
    run = scripted(Script(hangs=lambda item: item.group_id == 4), trainer={"stall_timeout_s": 77.0, "total_steps": 50})
    run.world.lost_engines["engine_1"] = "lost (no answer)"
    with pytest.raises(StallTimeout, match=r"no batch for step \d+ within trainer.stall_timeout_s=77: .*4") as caught:
        run.play()
    assert "num_running=1" in str(caught.value)
    assert "engines lost: {'engine_1': 'lost (no answer)'}" in str(caught.value)


def test_a_disk_that_hangs_delays_no_step_and_what_it_cannot_take_is_counted(
    scripted: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A finished group goes to the buffer at once, and is recorded in the background."""
    monkeypatch.setattr(trajectories, "MAX_PENDING", 4)
    run, responds_again = scripted(), threading.Event()
    folder = run.telemetry.run_dir.trajectories
    with ThreadPoolExecutor(1) as disk:
        disk.submit(responds_again.wait)
        recorder = trajectories.TrajectoryRecorder(folder)
        run.telemetry = replace(run.telemetry, recorder=recorder, group_thread=disk)
        try:
            run.play()
            assert run.state.step == 6
            assert recorded(run) == []
        finally:
            responds_again.set()
    assert len(recorded(run)) == 4
    last = lines(run)[-1]
    assert last["telemetry/trajectories_skipped"] == last["buffer/finished"] - 4 > 0
    assert caplog.text.count("is too slow: 4 records wait") == 1


def test_a_slot_is_not_freed_before_weights_are_live(scripted: Make) -> None:
    run = scripted(Script(generate_s=(0.1, 0.1), train_s=0.1, pull_s=50.0), mode={"max_staleness": 1}).play()
    first_live = next(time for time, what, _ in run.world.events if what == "live")
    assert first_live > 50
    assert sum(what == "generate" and time < first_live for time, what, _ in run.world.events) == 2 * 3


def judge_is_down(group_id: int, sample: int) -> float:
    """Of every group the second response has no reward."""
    return 1.0 if sample == 0 else math.nan


@pytest.mark.parametrize(
    ("script", "keys", "words"),
    [
        (Script(reward_of=judge_is_down), {}, ["rewards_failed: 13", "RuntimeError: judge is down"]),
        # One failure is not blamed for groups that were filtered for another reason.
        (
            Script(reward_of=lambda group, sample: judge_is_down(group, sample) if group == 0 else 1.0),
            {"algorithm": {"dynamic_sampling": True}},
            ["too easy", "judge is down"],
        ),
    ],
    ids=["the judge is down", "filtered, and one failed"],
)
def test_a_run_without_progress_ends_with_the_reason_that_it_has(
    scripted: Make, caplog: pytest.LogCaptureFixture, script: Script, keys: dict[str, Any], words: list[str]
) -> None:
    run = scripted(script, **keys)
    with pytest.raises(BaseException) as caught:
        run.play()
    cause = first_cause(caught.value)
    assert isinstance(cause, NoProgress) and all(word in str(cause) for word in words)
    assert run.world.num_generating == 0
    if not keys:
        assert "too easy" not in str(cause)
        warnings = [one for one in caplog.records if "failed and got no reward" in one.message]
        assert 1 < len(warnings) < 6, "at each doubling"


def test_a_response_that_failed_is_reported_by_its_first_line_and_kept_whole() -> None:
    failed, error = FailedResponses(), 'reward "mine.py:reward": raised ValueError\n  File "mine.py", line 3, in reward'
    failed.count(make_group([replace(trajectory(PROMPT, 0, [(0, 3)], reward=math.nan), error=error)]))
    assert str(failed).endswith('First failure: reward "mine.py:reward": raised ValueError')
    assert failed.first_error == error


class Perfect(World):
    """From some version on all responses are right, and the filter keeps no group."""

    right_from: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.script.reward_of = lambda _group, sample: 1.0 if self.live >= self.right_from else float(sample % 2)
        self.script.accuracy_of = lambda version: float(version >= self.right_from)


def perfect(run: ScriptedRun) -> ScriptedRun:
    run.world = Perfect(run.world.script)
    return run


@pytest.mark.parametrize(
    ("script", "trainer", "max_refills"),
    [
        ({"evaluate_s": 0.0}, {}, 20),
        ({"evaluate_s": 30.0}, {}, 20),
        # Its groups are filtered so slowly that the filter never reports that it is too many.
        ({"generate_s": (40.0, 60.0)}, {"stall_timeout_s": 200.0}, 100_000),
    ],
)
def test_a_run_that_reached_its_accuracy_needs_no_more_groups(
    scripted: Make, script: dict[str, Any], trainer: dict[str, Any], max_refills: int
) -> None:
    """What is generated while the last evaluation runs, or for the step after the one that did it, is all filtered."""
    keys = {"total_steps": 50, "eval_every": 1, **trainer}
    sections: dict[str, Any] = {
        "algorithm": {"dynamic_sampling": True, "max_filtered_batches_per_step": max_refills},
        "checkpoint": {"export_hf": True, "save_at_end": True},
    }
    run = perfect(scripted(Script(train_s=3.0, **script), trainer={**keys, "stop_at_accuracy": 0.9}, **sections)).play()
    assert run.state.stop_reason == "accuracy_reached"
    assert run.state.last_evaluation is not None
    assert run.state.last_evaluation.version >= Perfect.right_from
    assert (run.telemetry.run_dir.export / "model").exists()
    assert run.world.num_generating == 0
    if not trainer:
        run = perfect(scripted(Script(train_s=3.0), trainer=keys, algorithm={"dynamic_sampling": True}))
        with pytest.raises(BaseException) as caught:
            run.play()
        assert isinstance(first_cause(caught.value), NoProgress), "nothing ends it"


@pytest.mark.parametrize("is_filtered", [False, True])
def test_greedy_baselines_are_reported_and_not_trained_and_decide_which_groups_have_equal_rewards(
    scripted: Make, is_filtered: bool
) -> None:
    """All samples of a group have the same reward, in two of three groups that of the greedy response."""
    remax = {"advantage_estimator": "remax", "loss": "ppo_clip", "max_filtered_batches_per_step": 16}
    script = Script(reward_of=lambda group_id, _sample: float(group_id % 3 > 0))
    run = scripted(script, algorithm=remax | {"dynamic_sampling": is_filtered}, mode={"max_staleness": 2})
    run_group = run.world.run_group

    async def with_baseline(item: RolloutRequest) -> Group:
        greedy = trajectory(item.prompt, 2, [(run.world.live, 7)], reward=1.0)
        return replace(await run_group(item), baseline=greedy)

    run.world.run_group = with_baseline  # type: ignore[method-assign]
    run.play()
    written = lines(run)
    assert len(written) == 6
    assert {line["reward/greedy_mean"] for line in written} == {1.0}
    assert {line["learner/num_samples"] for line in written} == {3 * 2}
    assert {line["response/tokens_max"] for line in written} <= {2.0, 3.0}
    assert all(line["baseline"]["num_generated_tokens"] == 7 for line in recorded(run))
    if is_filtered:
        reasons = {line["group_id"] % 3: line["reason"] for line in recorded(run)}
        assert reasons == {0: "", 1: "zero_variance", 2: "zero_variance"}
        assert {line["reward/zero_variance_frac"] for line in written} == {0.0}


@pytest.mark.parametrize("unchanged", [{0, 1, 2}, {3}, {0, 2, 5}, {5}])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_step_that_left_the_policy_as_it_was_publishes_nothing_and_makes_no_version(
    scripted: Make, unchanged: set[int], max_staleness: int
) -> None:
    """As `critic.warmup_steps`, and gradients that are not finite."""
    script = Script(changes_policy=lambda step: step not in unchanged, generate_s=(0.1, 5.0))
    run = scripted(script, mode={"max_staleness": max_staleness}, checkpoint={"every_steps": 1})
    seen = watch_batches(run)
    run.play()
    versions = [sum(step not in unchanged for step in range(end)) for end in range(1, 7)]
    assert run.world.packed == list(range(1, versions[-1] + 1))
    assert run.state.version == run.state.live_version == run.world.live == versions[-1]
    written = lines(run)
    assert [(line["step"], line["version"]) for line in written] == list(zip(range(1, 7), versions, strict=True))
    assert [line["step"] for line in written if "sync/pull_s" not in line] == [step + 1 for step in sorted(unchanged)]
    assert run.world.trained_versions == [0, *versions[:-1]]
    for line, trained, groups in zip(written, run.world.trained_versions, seen, strict=True):
        ages = [trained - group.start_version for group in groups]
        assert 0 <= min(ages) <= max(ages) == line["staleness/group_max"] <= max_staleness
        assert line["sync/version_lag"] <= 1
        assert line["staleness/max"] <= max_staleness
    resumed = find_resume_point(run.cfg, run.telemetry.run_dir.checkpoints)
    assert resumed is not None and (resumed.step, resumed.version) == (6, versions[-1])
    assert all_evaluations(run)[-1]["version"] == versions[-1]
