"""Evaluations and checkpoints beside training: the right version, the right line, nothing lost."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import Script, ScriptedRun
from tests.fakes.virtual_time import run_virtual
from trainer.driver import loops
from trainer.driver.checkpointing import RunState, find_resume
from trainer.driver.loops import begin_evaluation

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., loops.Parts]


def lines(run: ScriptedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.telemetry.run_dir.metrics.read_text().splitlines()]


def all_evaluations(run: ScriptedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.telemetry.run_dir.evaluations.read_text().splitlines()]


def broken_at(version: int) -> Script:
    def accuracy_of(evaluated: int) -> float:
        if evaluated == version:
            raise OSError("the engine lost its mind")
        return evaluated / 10

    return Script(evaluate_s=0.1, train_s=3.0, accuracy_of=accuracy_of)


def interrupt_at(run: ScriptedRun, step: int) -> Callable[[loops.Parts], Any]:
    async def interrupt() -> None:
        while run.state.step < step:
            await asyncio.sleep(0.3)
        run.state.stop("interrupted")

    return lambda _parts: interrupt()


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
            await begin_evaluation(parts, supervisor)
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


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("version", [0, 2, 6])
def test_an_evaluation_that_fails_is_told_and_training_goes_on(
    scripted: Make, play: Play, caplog: pytest.LogCaptureFixture, version: int, is_blocking: bool
) -> None:
    run = scripted(broken_at(version), trainer={"eval_blocking": is_blocking}, checkpoint={"export_hf": True})
    play(run)
    assert [line["step"] for line in lines(run)] == list(range(1, 7))
    assert (run.telemetry.run_dir.export / "model").exists()
    assert list(evaluations(run)) == [v for v in (0, 2, 4, 6) if v != version], "no line has a number of it"
    assert [line["eval/failed_runs"] for line in lines(run)][-1] == 1
    (failed,) = (line for line in all_evaluations(run) if "failed" in line)
    assert (failed["version"], failed["failed"]) == (version, "OSError: the engine lost its mind")
    assert "accuracy" not in failed
    assert f"the evaluation of version {version} failed and gives no accuracy: OSError" in caplog.text
    assert run.state.first_accuracy == (0.2 if version == 0 else 0.0)


def test_an_evaluation_that_finds_no_live_replica_ends_nothing(scripted: Make, play: Play) -> None:
    run = scripted()

    def without_replicas(parts: loops.Parts) -> None:
        parts.evaluator._members = lambda: {"replica_0": "dead"}

    play(run, meddle=without_replicas)
    assert (run.state.step, run.world.evaluated) == (6, [])
    assert "no live replica is left to evaluate on: {'replica_0': 'dead'}" in all_evaluations(run)[0]["failed"]


@pytest.mark.parametrize("is_blocking", [False, True])
def test_an_evaluation_that_takes_too_long_is_given_up(scripted: Make, play: Play, is_blocking: bool) -> None:
    keys = {"eval_timeout_s": 50.0, "eval_blocking": is_blocking}
    run = scripted(Script(evaluate_s=1e5), trainer=keys, rollout={"request_timeout_s": 20.0})
    play(run)
    assert run.state.step == 6
    assert [line["step"] for line in lines(run)] == list(range(1, 7))
    assert run.world.evaluated == []
    failed = all_evaluations(run)
    assert failed[-1]["version"] == 6
    assert run.state.num_failed_evaluations == len(failed) == lines(run)[-1]["eval/failed_runs"]
    assert all("trainer.eval_timeout_s=50" in line["failed"] and line["version"] >= 0 for line in failed)


def test_a_long_evaluation_that_holds_training_up_is_no_stall(scripted: Make, play: Play) -> None:
    keys = {"stall_timeout_s": 60.0, "eval_every": 0}
    run = scripted(Script(evaluate_s=500.0), trainer=keys, mode={"max_staleness": 0})
    play(run)
    assert run.world.evaluated == [0, 6]


def test_a_stall_after_an_evaluation_is_one(scripted: Make) -> None:
    script = Script(evaluate_s=500.0, hangs=lambda item: item.group_id == 1)
    run = scripted(script, trainer={"stall_timeout_s": 60.0})

    async def main() -> float:
        with pytest.raises(loops.Stalled):
            await run.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(560.0, abs=1.0)


def test_every_evaluation_is_told_although_several_end_during_a_step(scripted: Make, play: Play) -> None:
    script = Script(evaluate_s=8.0, train_s=3.0)
    run = scripted(script, mode={"max_staleness": 4}, trainer={"eval_every": 1})
    play(run)
    told = all_evaluations(run)
    assert [line["version"] for line in told] == run.world.evaluated
    assert len(told) > len(evaluations(run)), "otherwise this shows nothing"
    for line in told:
        assert line["accuracy"] == pytest.approx(line["version"] / 10)
        assert line["version"] <= line["step"] <= 6
        assert line["pass_at"] == {"1": 0.0}
        assert (line["num_prompts"], line["num_samples"], line["tokens_mean"], line["truncated_frac"]) == (4, 1, 1, 0)
        assert line["seconds"] >= 0 and "time_s" in line


def test_a_run_ends_only_when_the_evaluation_beside_it_has(scripted: Make, play: Play) -> None:
    """It stops before its last step; the sync of its last version begins a periodic evaluation."""
    script = Script(evaluate_s=30.0, accuracy_of=lambda version: 1.0 if version == 0 else 0.5)
    keys = {"stop_at_accuracy": 0.9, "eval_every": 1, "total_steps": 50}
    run = scripted(script, trainer=keys, mode={"max_staleness": 1})
    play(run)
    assert run.state.stop_reason == "accuracy_reached"
    assert run.state.step < 50
    assert [line["version"] for line in all_evaluations(run)] == run.world.evaluated
    assert run.world.evaluated[-1] == run.state.step
    assert lines(run)[-1]["eval/version"] == run.state.step


def test_the_last_step_is_saved_before_it_is_evaluated(scripted: Make, play: Play) -> None:
    saved: list[list[int]] = []
    run = scripted(checkpoint={"save_at_end": True})
    run.world.script = Script(accuracy_of=lambda _version: saved.append(run.world.numbers("saved")) or 0.0)
    play(run)
    assert [] in saved and saved[-1] == [6]
    assert run.world.numbers("saved") == [6]


def test_a_last_sync_that_fails_costs_neither_checkpoint_nor_line(scripted: Make, play: Play) -> None:
    script = Script(sync_error=lambda version: OSError("no replica") if version == 6 else None, train_s=3.0)
    run = scripted(script, checkpoint={"save_at_end": True})
    with pytest.raises(OSError, match="no replica"):
        play(run)
    assert lines(run)[-1]["step"] == 6


@pytest.mark.parametrize("save_at_end", [False, True])
def test_an_interrupted_run_is_always_saved(scripted: Make, play: Play, save_at_end: bool) -> None:
    run = scripted(trainer={"total_steps": 50, "eval_every": 0}, checkpoint={"save_at_end": save_at_end})
    play(run, meddle=interrupt_at(run, 3))
    assert run.world.numbers("saved") == [run.state.step]


def test_an_interrupt_during_the_last_evaluation_saves_and_does_not_wait_for_it(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=5000.0), trainer={"eval_at_start": False, "eval_every": 0})
    ended: list[float] = []

    async def interrupt() -> None:
        while run.state.step < 6:
            await asyncio.sleep(0.3)
        await asyncio.sleep(100.0)
        ended.append(asyncio.get_running_loop().time())
        run.state.stop("interrupted")

    async def both() -> float:
        await run.run(meddle=lambda _parts: interrupt())
        return asyncio.get_running_loop().time()

    assert run_virtual(both()) - ended[0] == pytest.approx(30.0, abs=1.0), "trainer.shutdown_timeout_s"
    assert run.world.numbers("saved") == [6]
    assert "the run was interrupted" in all_evaluations(run)[0]["failed"]
    assert lines(run)[-1]["step"] == 6


def test_an_interrupt_gives_a_running_evaluation_a_moment_and_tells_of_it(scripted: Make, play: Play) -> None:
    for evaluate_s, is_told in ((20.0, "accuracy"), (900.0, "failed")):
        run = scripted(Script(evaluate_s=evaluate_s), trainer={"total_steps": 50}, mode={"max_staleness": 4})
        play(run, meddle=interrupt_at(run, 1))
        (line,) = all_evaluations(run)
        assert line["version"] == 0 and is_told in line
        assert run.world.numbers("saved") == [run.state.step]
        run.telemetry.run_dir.evaluations.unlink()
        run.telemetry.run_dir.close()


def test_a_run_that_goes_on_is_evaluated_on_its_old_grid(scripted: Make, play: Play) -> None:
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    state.load_state_dict({"step": 5, "first_accuracy": None, "last_evaluation": None})
    keys = {"total_steps": 9, "eval_every": 4, "eval_at_start": False}
    run = scripted(Script(evaluate_s=0.1, train_s=3.0), state=state, trainer=keys)
    play(run)
    assert run.world.evaluated == [8, 9]


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


def test_every_so_many_steps_a_checkpoint_is_kept_for_ever(scripted: Make, play: Play) -> None:
    run = scripted(checkpoint={"every_steps": 1, "keep_last": 1, "keep_every": 4})
    play(run)
    assert sorted(path.name for path in run.telemetry.run_dir.checkpoints.iterdir()) == ["step_4", "step_6"]


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
    second.buffer.load_state_dict(resumed.state["buffer"], second.source.find)
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
