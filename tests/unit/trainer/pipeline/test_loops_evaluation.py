"""Evaluations and checkpoints beside training: the right version, the right line, nothing lost."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import Script, ScriptedRun
from tests.fakes.virtual_time import run_virtual
from trainer.pipeline import loops
from trainer.pipeline.resume import find_resume
from trainer.pipeline.state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., loops.Parts]


def lines(run: ScriptedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.telemetry.run_dir.metrics.read_text().splitlines()]


def evaluations(run: ScriptedRun) -> dict[int, int]:
    """Evaluated version -> step of the line that has it."""
    return {line["eval/version"]: line["step"] for line in lines(run) if "eval/version" in line}


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_evaluations_at_start_periodic_and_at_the_end_are_each_on_one_line(
    scripted: Make, play: Play, max_staleness: int
) -> None:
    # Quick generation, so that no version supersedes another and each is live on its own.
    run = scripted(Script(evaluate_s=0.1, train_s=3.0), mode={"max_staleness": max_staleness})
    play(run)
    found = evaluations(run)
    assert list(found) == run.world.evaluated == [0, 2, 4, 6]
    assert all(version <= step for version, step in found.items())
    assert found[6] == 6
    for line in lines(run):
        if "eval/version" in line:
            assert line["eval/accuracy"] == pytest.approx(line["eval/version"] / 10)
            assert line["eval/num_prompts"] == 4


def test_the_last_line_carries_the_final_evaluation_however_slow_it_is(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=40.0))
    play(run)
    last = lines(run)[-1]
    assert (last["step"], last["eval/version"]) == (6, 6)
    assert run.state.last_evaluation is not None
    assert run.state.last_evaluation.version == 6
    assert run.state.first_accuracy == 0.0


def test_weights_wait_for_a_running_evaluation_and_training_goes_on(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=20.0), mode={"max_staleness": 1})
    play(run)
    first_live = next(time for time, what, _ in run.world.events if what == "live")
    trained = [time for time, what, _ in run.world.events if what == "trained"]
    assert first_live >= 20.0 > trained[0]


def test_a_blocking_evaluation_is_of_exactly_its_step_and_the_learner_waits_for_it(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=20.0, pull_s=5.0), trainer={"eval_blocking": True}, mode={"max_staleness": 4})
    play(run)
    assert evaluations(run) == {2: 2, 4: 4, 6: 6} | {0: 1}
    begun = {number: time for time, what, number in run.world.events if what == "train"}
    live = {number: time for time, what, number in run.world.events if what == "live"}
    assert begun[0] >= 20.0
    for version in (2, 4):
        assert begun[version] >= live[version] + 20.0


def test_the_learner_does_not_wait_for_an_evaluation_otherwise(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=20.0, generate_s=(0.1, 0.2)), mode={"max_staleness": 4})
    play(run)
    begun = [time for time, what, _ in run.world.events if what == "train"]
    assert begun[4] < 20.0


def test_beginning_an_evaluation_waits_until_no_commit_can_slip_in(scripted: Make) -> None:
    """Somebody else keeps the replica for three seconds."""
    run = scripted()

    async def main() -> None:
        async with run.supervisor as supervisor:
            parts, lock = run.parts(), run.world.frozen
            await lock.acquire()
            asyncio.get_running_loop().call_later(3.0, lock.release)
            await loops.begin_evaluation(parts, supervisor)
            assert asyncio.get_running_loop().time() == pytest.approx(3.0)
            assert lock.locked()

    run_virtual(main())


def test_periodic_evaluation_can_be_turned_off(scripted: Make, play: Play) -> None:
    run = scripted(trainer={"eval_every": 0, "eval_at_start": False, "eval_at_end": False})
    play(run)
    assert run.world.evaluated == []
    run.telemetry.run_dir.close()


def test_a_run_without_held_out_prompts_evaluates_nothing(scripted: Make, play: Play) -> None:
    run = scripted(num_held_out=0)
    play(run)
    assert (run.world.evaluated, run.state.step) == ([], 6)


def test_an_evaluation_that_fails_ends_the_run_with_its_error(scripted: Make, play: Play) -> None:
    def broken(version: int) -> float:
        if version == 2:
            raise OSError("the engine lost its mind")
        return 0.0

    with pytest.raises(OSError, match="lost its mind"):
        play(scripted(Script(accuracy_of=broken)))


def test_a_first_evaluation_that_cannot_begin_ends_the_run(scripted: Make, play: Play) -> None:
    def without_replicas(parts: loops.Parts) -> None:
        parts.evaluator._replicas = list

    with pytest.raises(IndexError):
        play(scripted(), meddle=without_replicas)


def test_a_run_stops_when_the_accuracy_is_reached_and_a_line_says_so(scripted: Make, play: Play) -> None:
    run = scripted(trainer={"stop_at_accuracy": 0.4, "total_steps": 50})
    play(run)
    assert run.state.stop_reason == "accuracy_reached"
    assert 4 <= run.state.step < 8
    written = lines(run)
    assert [line["step"] for line in written] == list(range(1, run.state.step + 1))
    assert written[-1]["eval/version"] == run.state.step
    assert written[-1]["eval/accuracy"] >= 0.4
    assert run.state.last_evaluation is not None
    assert run.state.last_evaluation.version == run.state.step == run.world.live


def test_an_interrupted_run_is_not_evaluated_again(scripted: Make, play: Play) -> None:
    run = scripted(trainer={"total_steps": 50, "eval_every": 0})

    async def interrupt() -> None:
        while run.state.step < 3:
            await asyncio.sleep(0.3)
        run.state.stop("interrupted")

    play(run, meddle=lambda _parts: interrupt())
    assert run.world.evaluated == [0]


def test_a_checkpoint_is_saved_when_due_and_at_the_end_once(scripted: Make, play: Play) -> None:
    run = scripted(checkpoint={"every_steps": 2, "keep_last": 2, "save_at_end": True, "export_hf": True})
    play(run)
    assert run.world.numbers("saved") == [2, 4, 6]
    assert sorted(path.name for path in run.telemetry.run_dir.checkpoints.iterdir()) == ["step_4", "step_6"]
    assert (run.telemetry.run_dir.export / "model").exists()


def test_the_line_of_a_step_is_written_before_its_checkpoint(scripted: Make, play: Play) -> None:
    """A kill between the two must not leave a checkpoint of a step that has no line: it would never be written."""
    run = scripted(checkpoint={"every_steps": 1})
    num_lines: list[tuple[int, int]] = []
    save = run.world.save

    async def watching(path: Any, *, step: int) -> None:
        num_lines.append((step, len(lines(run))))
        await save(path, step=step)

    run.world.save = watching  # type: ignore[method-assign]
    play(run)
    assert [(step, count) for step, count in num_lines if step < 6] == [(step, step) for step in range(1, 6)]


def test_a_run_goes_on_from_its_checkpoint_without_losing_a_prompt(scripted: Make, play: Play) -> None:
    script = Script(learner_error=lambda step: OSError("power cut") if step == 5 else None, generate_s=(0.1, 9.0))
    keys: dict[str, Any] = {"mode": {"max_staleness": 2}, "checkpoint": {"every_steps": 3, "save_at_end": True}}
    first = scripted(script, trainer={"total_steps": 8}, **keys)
    with pytest.raises(OSError, match="power cut"):
        play(first)
    first.telemetry.run_dir.close()
    resumed = find_resume(first.cfg, first.telemetry.run_dir.checkpoints)
    assert resumed is not None
    assert resumed.step == 3
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    state.load_state_dict(resumed.state["run"])
    second = scripted(Script(seed=9), state=state, trainer={"total_steps": 8}, **keys)
    second.buffer.load_state_dict(resumed.state["buffer"])
    second.source.load_state_dict(resumed.state["source"])
    trained: list[list[int]] = []

    def watch(parts: loops.Parts) -> None:
        take = parts.buffer.take

        async def watching(step: int) -> Any:
            groups = await take(step)
            trained.append([group.group_id for group in groups])
            return groups

        parts.buffer.take = watching  # type: ignore[method-assign]

    play(second, meddle=watch)
    assert [line["step"] for line in lines(second)] == list(range(1, 9))
    assert second.world.numbers("trained") == [3, 4, 5, 6, 7]
    # What was in flight at the checkpoint comes first, under its old ids.
    owed = {entry["group_id"] for entry in resumed.state["buffer"]["prompts"]}
    assert owed
    assert owed <= {group_id for groups in trained for group_id in groups}
    assert second.state.resumed_from_step == 3
    assert second.state.first_accuracy == 0.0
