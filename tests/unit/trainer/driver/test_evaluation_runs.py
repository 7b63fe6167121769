"""What evaluations of a run leave behind: their answers, what stands behind their numbers, and who waited for them."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.metric_names import check_known
from tests.fakes.scripted_run import Script, ScriptedRun
from tests.unit.trainer.driver.test_loops_evaluation import all_evaluations, lines
from trainer.driver.checkpointing import RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.driver import loops

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., loops.Parts]


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

    def with_parts(parts: loops.Parts) -> None:
        generate = parts.evaluator._generate

        async def of_several_rewards(prompts: Any, *how: Any) -> Any:
            answers = await generate(prompts, *how)
            return [replace(t, reward=float(i), reward_parts={"third": i / 3}) for i, t in enumerate(answers)]

        parts.evaluator._generate = of_several_rewards
        (held_out,) = parts.evaluator._held_out
        named = zip(held_out.prompts, ("math", "math", "", "code"), strict=True)
        prompts = [replace(prompt, reward=name) for prompt, name in named]
        parts.evaluator._held_out = [replace(held_out, prompts=prompts)]

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

    def without_a_verdict(parts: loops.Parts) -> None:
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


def broken_at_2(version: int) -> float:
    if version == 2:
        raise OSError("the engine lost its mind")
    return version / 10


def test_an_evaluation_that_failed_in_the_middle_leaves_no_answers_and_the_log_says_so(
    scripted: Make, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted(Script(evaluate_s=0.1, train_s=3.0, accuracy_of=broken_at_2))
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

    def watch(parts: loops.Parts) -> None:
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
    found = {line["step"]: line["wait/learner_for_evaluation_s"] for line in lines(run)}
    assert found == pytest.approx(expected)
    assert all(line["wait/learner_for_evaluation_s"] <= line["wait/learner_for_data_s"] + 1e-9 for line in lines(run))
    if max_staleness == 0:
        assert found[2] > 15.0
        assert 0.0 in found.values()


def test_an_evaluation_that_training_stands_still_for_is_no_wait_for_data(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=20.0), trainer={"eval_blocking": True})
    play(run)
    assert {line["wait/learner_for_evaluation_s"] for line in lines(run)} == {0.0}


def test_without_evaluations_nobody_waits_for_one(scripted: Make, play: Play) -> None:
    run = scripted(num_held_out=0)
    play(run)
    assert {line["wait/learner_for_evaluation_s"] for line in lines(run)} == {0.0}


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
