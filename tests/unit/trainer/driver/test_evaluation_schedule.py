"""Evaluations of a run: the right version, the right line, and nothing lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.metric_names import check_known
from tests.fakes.scripted_run import InlineExecutor, Script, ScriptedRun, all_evaluations, lines, prompt_set
from tests.fakes.virtual_time import run_virtual
from trainer.driver import run as run_module
from trainer.driver.datasets import EvalSet
from trainer.driver.loops import StallTimeout
from trainer.driver.state import EvalMetrics, RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.driver.training_run import TrainingRun

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., TrainingRun]


def broken_at(version: int) -> Script:
    def accuracy_of(evaluated: int) -> float:
        if evaluated == version:
            raise OSError("the engine lost its mind")
        return evaluated / 10

    return Script(evaluate_s=0.1, train_s=3.0, accuracy_of=accuracy_of)


def interrupt_at(run: ScriptedRun, step: int) -> Callable[[TrainingRun], Any]:
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
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        training, lock = run.training(), run.world.frozen
        async with training.tasks:
            await lock.acquire()
            asyncio.get_running_loop().call_later(3.0, lock.release)
            await training.evaluations.begin()
            assert asyncio.get_running_loop().time() == pytest.approx(3.0)
            assert lock.locked()

    run_virtual(main())


def test_a_run_without_held_out_prompts_evaluates_nothing(scripted: Make, play: Play) -> None:
    run = scripted(num_held_out=0)
    play(run)
    assert (run.world.evaluated, run.state.step) == ([], 6)
    assert {line["time/wait_for_eval_s"] for line in lines(run)} == {0.0}


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


def test_periodic_evaluation_can_be_turned_off(scripted: Make, play: Play) -> None:
    run = scripted(trainer={"eval_every": 0, "eval_at_start": False, "eval_at_end": False})
    play(run)
    assert run.world.evaluated == []
    run.telemetry.run_dir.close()


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

    def without_replicas(parts: TrainingRun) -> None:
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
        with pytest.raises(StallTimeout):
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


def answers_of(run: ScriptedRun, evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of the file that a line of evaluations.jsonl names."""
    return [json.loads(line) for line in (run.telemetry.run_dir.path / evaluation["answers"]).read_text().splitlines()]


def test_the_recorded_answers_give_the_accuracy_that_was_told(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=0.1, train_s=3.0))
    play(run)
    told = all_evaluations(run)
    assert [line["answers"] for line in told] == [f"evaluations/version_{v}.jsonl" for v in (0, 2, 4, 6)]
    assert len(list(run.telemetry.run_dir.answers.iterdir())) == 4
    for line in told:
        answers = answers_of(run, line)
        assert [one["prompt"]["prompt_id"] for one in answers] == [f"train/{i}" for i in range(4)]
        rewards = [reward for one in answers for reward in one["rewards"]]
        assert sum(rewards) / len(rewards) == pytest.approx(line["accuracy"])
        versions = {v for one in answers for t in one["trajectories"] for v in t["versions"]}
        assert versions == {line["version"]} == {one["version"] for one in answers}
        assert {one["status"] for one in answers} == {"scored"}


def test_the_line_of_a_step_breaks_the_newest_evaluation_down(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=0.1, train_s=3.0))

    def with_parts(parts: TrainingRun) -> None:
        generate = parts.evaluator._generate

        async def of_several_rewards(prompts: Any, *how: Any) -> Any:
            answers = await generate(prompts, *how)
            return [replace(t, reward=float(i), reward_parts={"third": i / 3}) for i, t in enumerate(answers)]

        parts.evaluator._generate = of_several_rewards
        (main_set,) = parts.evaluator._eval_sets
        named = zip(main_set.prompts, ("math", "math", "", "code"), strict=True)
        prompts = [replace(prompt, reward=name) for prompt, name in named]
        parts.evaluator._eval_sets = [replace(main_set, prompts=prompts)]

    play(run, meddle=with_parts)
    for line in lines(run):
        check_known(line)
        found = {name: value for name, value in line.items() if name.startswith(("eval/accuracy", "eval/reward/"))}
        if "eval/version" in line:
            assert found == {
                "eval/accuracy": 1.5,
                "eval/accuracy_stderr": pytest.approx((5 / 3) ** 0.5 / 2),
                "eval/accuracy/math": 0.5,
                "eval/accuracy/arithmetic": 2.0,
                "eval/accuracy/code": 3.0,
                "eval/reward/part/third": 0.5,
            }
            assert line["eval/num_prompts/math"] == 2
        else:
            assert found == {}
    shares = {"arithmetic": (2.0, 1), "code": (3.0, 1), "math": (0.5, 2)}
    for told in all_evaluations(run):
        assert {name: (one["accuracy"], one["num_prompts"]) for name, one in told["by_reward"].items()} == shares
        assert (told["accuracy"], told["reward_parts"]) == (1.5, {"third": 0.5})


def test_a_version_that_is_evaluated_again_after_a_resume_has_a_second_file(scripted: Make, play: Play) -> None:
    keys: dict[str, Any] = {"trainer": {"total_steps": 4}, "checkpoint": {"save_at_end": True}}
    first = scripted(Script(evaluate_s=0.1, train_s=3.0), **keys)
    play(first)
    before = answers_of(first, all_evaluations(first)[-1])
    first.telemetry.run_dir.close()
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    state.load_state_dict({"step": 4, "first_accuracy": None, "last_evaluation": None})
    again = Script(evaluate_s=0.1, train_s=3.0, accuracy_of=lambda _version: 0.75)
    second = scripted(again, state=state, trainer={"total_steps": 6})
    play(second)
    told = [(line["version"], line["accuracy"], line["answers"]) for line in all_evaluations(second)]
    assert told[-3:] == [
        (4, 0.4, "evaluations/version_4.jsonl"),
        (4, 0.75, "evaluations/version_4.2.jsonl"),
        (6, 0.75, "evaluations/version_6.jsonl"),
    ]
    assert answers_of(second, {"answers": told[-3][2]}) == before
    assert {reward for one in answers_of(second, {"answers": told[-2][2]}) for reward in one["rewards"]} == {0.75}


def test_answers_without_a_reward_are_recorded_as_those_of_a_failed_evaluation(
    scripted: Make, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted(trainer={"eval_every": 0, "eval_at_start": False})

    def without_a_verdict(parts: TrainingRun) -> None:
        generate = parts.evaluator._generate

        async def failing(*how: Any) -> Any:
            first, *others = await generate(*how)
            return [replace(first, status="failed", reward=float("nan"), error="no verdict"), *others]

        parts.evaluator._generate = failing

    play(run, meddle=without_a_verdict)
    (told,) = all_evaluations(run)
    assert told["answers"] == "evaluations/version_6.jsonl"
    answers = answers_of(run, told)
    assert {(one["status"], one["reason"]) for one in answers} == {("failed", told["failed"])}
    assert [one["rewards"] for one in answers] == [[None], [0.6], [0.6], [0.6]]
    assert answers[0]["trajectories"][0]["error"] == "no verdict"
    assert "(its answers are in evaluations/version_6.jsonl)" in caplog.text


def test_an_evaluation_that_failed_in_the_middle_leaves_no_answers_and_the_log_says_so(
    scripted: Make, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted(broken_at(2))
    play(run)
    (failed,) = (line for line in all_evaluations(run) if "failed" in line)
    assert failed["answers"] is None
    assert not (run.telemetry.run_dir.answers / "version_2.jsonl").exists()
    assert "the engine lost its mind (none of its answers is kept)" in caplog.text


def test_answers_that_cannot_be_written_end_nothing_and_are_counted(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=0.1, train_s=3.0))
    play(run, meddle=lambda _parts: shutil.rmtree(run.telemetry.run_dir.answers))
    assert [line["eval/version"] for line in lines(run) if "eval/version" in line] == [0, 2, 4, 6]
    assert {line["answers"] for line in all_evaluations(run)} == {None}
    assert lines(run)[-1]["telemetry/trajectory_errors"] >= 3


def waited_beside(run: ScriptedRun, *spans: tuple[float, float]) -> dict[int, float]:
    """Step -> for how long, between the end of the step before and its own beginning, one of the spans lay."""
    begun = [time for time, what, _ in run.world.events if what == "train"]
    free = [0.0, *(time + run.world.script.pack_s for time, what, _ in run.world.events if what == "trained")]
    return {
        step: sum(max(0.0, min(to, end) - max(since, start)) for start, end in spans)
        for step, (since, to) in enumerate(zip(free, begun, strict=False), start=1)
    }


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_line_says_for_how_long_the_learner_waited_beside_an_evaluation(
    scripted: Make, play: Play, max_staleness: int
) -> None:
    """One engine: syncs wait for the evaluation, so the learner goes on to its bound and then waits for groups."""
    run = scripted(Script(evaluate_s=20.0), trainer={"eval_every": 3}, mode={"max_staleness": max_staleness})
    spans: list[tuple[float, float]] = []

    def watch(parts: TrainingRun) -> None:
        evaluate = parts.evaluator.run

        async def watched(*how: Any, **more: Any) -> Any:
            began = asyncio.get_running_loop().time()
            result = await evaluate(*how, **more)
            spans.append((began, asyncio.get_running_loop().time()))
            return result

        parts.evaluator.run = watched  # type: ignore[method-assign]

    play(run, meddle=watch)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "else the reference counts twice"
    expected = waited_beside(run, *spans)
    found = {line["step"]: line["time/wait_for_eval_s"] for line in lines(run)}
    assert found == pytest.approx(expected)
    assert all(line["time/wait_for_eval_s"] <= line["time/wait_for_batch_s"] + 1e-9 for line in lines(run))
    if max_staleness == 0:
        assert found[2] > 15.0
        assert 0.0 in found.values()


def test_an_evaluation_that_training_stands_still_for_is_no_wait_for_data(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=20.0), trainer={"eval_blocking": True})
    play(run)
    assert {line["time/wait_for_eval_s"] for line in lines(run)} == {0.0}


QUICK = Script(evaluate_s=0.1, train_s=3.0)
"""No version supersedes another, and each is live on its own."""


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize(("eval_every", "evaluated"), [(2, [2, 4, 6]), (3, [3, 6]), (4, [4]), (0, [])])
def test_a_periodic_evaluation_of_the_last_step_is_made_without_one_at_the_end(
    scripted: Make, play: Play, is_blocking: bool, eval_every: int, evaluated: list[int]
) -> None:
    keys = {"eval_at_start": False, "eval_at_end": False, "eval_blocking": is_blocking}
    run = scripted(QUICK, trainer={"eval_every": eval_every, **keys})
    play(run)
    assert run.world.evaluated == evaluated
    assert lines(run)[-1].get("eval/version") == (6 if 6 in evaluated else None)


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("eval_every", [0, 2, 4])
def test_the_last_version_is_evaluated_once_with_one_at_the_end(
    scripted: Make, play: Play, is_blocking: bool, eval_every: int
) -> None:
    run = scripted(QUICK, trainer={"eval_every": eval_every, "eval_at_start": False, "eval_blocking": is_blocking})
    play(run)
    assert run.world.evaluated.count(6) == 1 == [line["version"] for line in all_evaluations(run)].count(6)


def test_a_periodic_evaluation_that_waited_for_another_one_is_made_at_the_end(scripted: Make, play: Play) -> None:
    """It is due at step 4, while that of step 2 runs until all five steps are trained."""
    keys = {"eval_every": 2, "total_steps": 5, "eval_at_start": False, "eval_at_end": False}
    run = scripted(Script(evaluate_s=200.0), trainer=keys, mode={"max_staleness": 4})
    play(run)
    assert len(run.world.evaluated) == 2
    assert run.world.evaluated[0] < 4
    assert lines(run)[-1]["eval/version"] == run.world.evaluated[-1] == 5


def test_an_interrupt_leaves_out_the_periodic_evaluation_of_the_last_step(scripted: Make, play: Play) -> None:
    run = scripted(QUICK, trainer={"eval_every": 3, "eval_at_start": False, "eval_at_end": False, "total_steps": 50})

    async def interrupt() -> None:
        while not run.world.numbers("train")[2:]:
            await asyncio.sleep(0.1)
        run.state.stop("interrupted")

    play(run, meddle=lambda _parts: interrupt())
    assert (run.state.step, run.world.evaluated) == (3, [])


HARD = EvalSet(
    name="hard", prompts=[replace(p, prompt_id=f"hard/{i}") for i, p in enumerate(prompt_set(2).prompts)], num_samples=4
)


EASY = EvalSet(name="easy", prompts=prompt_set(3).prompts, num_samples=1)


def of_three_sets(make: Make, script: Script | None = None, **sections: Any) -> ScriptedRun:
    run = make(Script(evaluate_s=0.1, train_s=3.0) if script is None else script, **sections)
    run.further_sets = (HARD, EASY)
    return run


def judged(parts: TrainingRun) -> None:
    """Of the answers to each hard prompt, the first as many pass as its number says; everything else is as scripted.
    The answers to easy prompts are of three tokens."""
    generate = parts.evaluator._generate

    async def by_place(prompts: Any, *how: Any) -> Any:
        answers = await generate(prompts, *how)
        assert [p.prompt_id for p in prompts[:4]] == [f"train/{i}" for i in range(4)], "the main set comes first"
        assert [p.prompt_id for p in prompts[4:12]] == ["hard/0"] * 4 + ["hard/1"] * 4
        hard = [replace(t, reward=float(place == 4)) for place, t in enumerate(answers[4:12])]
        return [*answers[:4], *hard, *answers[12:]]

    parts.evaluator._generate = by_place


def test_every_set_has_numbers_of_its_own_beside_those_of_the_main_set(
    scripted: Make, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = of_three_sets(scripted)
    play(run, meddle=judged)
    assert run.world.evaluated == [0, 2, 4, 6], "all sets are answered at once, by one version"
    last = lines(run)[-1]
    check_known(last)
    found = {name: value for name, value in last.items() if name.startswith("eval/")}
    assert found == {
        "eval/failed_runs": 0,
        "eval/version": 6,
        "eval/time_s": pytest.approx(0.1, abs=0.2),
        "eval/accuracy": pytest.approx(0.6),
        "eval/accuracy_stderr": pytest.approx(0.0),
        "eval/pass_at/1": 0.0,
        "eval/num_samples": 1,
        "eval/num_prompts": 4,
        "eval/tokens_mean": 1.0,
        "eval/truncated_frac": 0.0,
        "eval/hard/accuracy": 0.125,
        "eval/hard/accuracy_stderr": pytest.approx(0.125),
        "eval/hard/pass_at/1": 0.125,
        "eval/hard/pass_at/4": 0.5,
        "eval/hard/num_samples": 4,
        "eval/hard/num_prompts": 2,
        "eval/hard/tokens_mean": 1.0,
        "eval/hard/truncated_frac": 0.0,
        "eval/easy/accuracy": pytest.approx(0.6),
        "eval/easy/accuracy_stderr": pytest.approx(0.0),
        "eval/easy/pass_at/1": 0.0,
        "eval/easy/num_samples": 1,
        "eval/easy/num_prompts": 3,
        "eval/easy/tokens_mean": 1.0,
        "eval/easy/truncated_frac": 0.0,
    }
    assert "version 6: held-out accuracy 0.600" in caplog.text
    assert "version 6: accuracy on hard 0.125" in caplog.text
    assert "version 6: accuracy on easy 0.600" in caplog.text


def test_the_records_of_an_evaluation_know_the_sets(scripted: Make, play: Play) -> None:
    run = of_three_sets(scripted)
    play(run, meddle=judged)
    told = all_evaluations(run)[-1]
    assert (told["accuracy"], told["num_prompts"], told["num_samples"]) == (pytest.approx(0.6), 4, 1)
    assert list(told["sets"]) == ["hard", "easy"]
    assert told["sets"]["hard"] == {
        "accuracy": 0.125,
        "pass_at": {"1": 0.125, "4": 0.5},
        "num_prompts": 2,
        "num_samples": 4,
        "tokens_mean": 1.0,
        "truncated_frac": 0.0,
        "accuracy_stderr": pytest.approx(0.125),
        "reward_parts": {},
        "by_reward": {},
    }
    answers = [json.loads(line) for line in (run.telemetry.run_dir.path / told["answers"]).read_text().splitlines()]
    assert [one["set"] for one in answers] == [""] * 4 + ["hard"] * 2 + ["easy"] * 3
    for name, accuracy in [("", 0.6), ("hard", 0.125), ("easy", 0.6)]:
        rewards = [reward for one in answers if one["set"] == name for reward in one["rewards"]]
        assert sum(rewards) / len(rewards) == pytest.approx(accuracy)


def test_a_run_without_further_sets_says_nothing_of_them(scripted: Make, play: Play) -> None:
    run = scripted()
    play(run)
    assert "sets" not in all_evaluations(run)[-1]


@pytest.mark.parametrize(("target", "steps"), [(0.35, 4), (0.1, 2)])
def test_the_accuracy_that_ends_a_run_is_that_of_the_main_set(
    scripted: Make, play: Play, target: float, steps: int
) -> None:
    """The sets of the run have 1 from the beginning."""
    run = of_three_sets(scripted, trainer={"stop_at_accuracy": target})

    def perfect(parts: TrainingRun) -> None:
        generate = parts.evaluator._generate

        async def of_sets(*how: Any) -> Any:
            answers = await generate(*how)
            return [*answers[:4], *[replace(t, reward=1.0) for t in answers[4:]]]

        parts.evaluator._generate = of_sets

    play(run, meddle=perfect)
    assert run.state.stop_reason == "accuracy_reached"
    assert steps <= run.state.step <= steps + 1


def test_first_and_last_accuracies_of_sets_are_in_the_summary_and_survive_a_checkpoint(
    scripted: Make, play: Play
) -> None:
    run = of_three_sets(scripted)
    with run_module._summary(run.cfg, run.state, run.telemetry.run_dir):
        play(run)
        run.state.stop("completed")
    told = json.loads(run.telemetry.run_dir.summary.read_text())["eval_sets"]
    assert told == {name: {"first_accuracy": 0.0, "last_accuracy": pytest.approx(0.6)} for name in ("hard", "easy")}
    again = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    again.load_state_dict(json.loads(json.dumps(run.state.state_dict())))
    assert again.set_accuracies == run.state.set_accuracies != {}
    hard = EvalMetrics(version=7, accuracy=0.9, num_prompts=1, truncated_frac=0.0, time_s=1.0)
    again.add_evaluation({"": hard, "hard": hard})
    assert again.set_accuracies["hard"] == (0.0, 0.9)


def test_an_answer_of_a_set_that_has_no_reward_fails_the_whole_evaluation(scripted: Make, play: Play) -> None:
    run = of_three_sets(scripted, trainer={"eval_every": 0, "eval_at_start": False})

    def without_a_verdict(parts: TrainingRun) -> None:
        generate = parts.evaluator._generate

        async def failing(*how: Any) -> Any:
            *others, last = await generate(*how)
            return [*others, replace(last, status="failed", reward=float("nan"), error="no verdict")]

        parts.evaluator._generate = failing

    play(run, meddle=without_a_verdict)
    (told,) = all_evaluations(run)
    assert "1 of 15 answers have no reward" in told["failed"]
