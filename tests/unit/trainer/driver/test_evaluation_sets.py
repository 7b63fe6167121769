"""Several held-out sets: loaded as they say, evaluated together, and told apart everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.errors import DataError
from tests.fakes.chat_tokenizer import PLAIN, chat_tokenizer
from tests.fakes.metric_names import check_known
from tests.fakes.scripted_run import Script, ScriptedRun, prompt_set
from tests.unit.trainer.driver.test_loops_evaluation import all_evaluations, lines
from trainer.config.compose import load_config
from trainer.driver import run as run_module
from trainer.driver.checkpointing import RunState
from trainer.driver.datasets import DataSets, EvalSet, load_data
from trainer.driver.evaluation import deal
from trainer.driver.preflight import log_inputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.driver import loops

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., loops.Parts]

HARD = EvalSet(
    name="hard", prompts=[replace(p, prompt_id=f"hard/{i}") for i, p in enumerate(prompt_set(2).prompts)], num_samples=4
)
EASY = EvalSet(name="easy", prompts=prompt_set(3).prompts, num_samples=1)


def of_three_sets(make: Make, script: Script | None = None, **sections: Any) -> ScriptedRun:
    run = make(Script(evaluate_s=0.1, train_s=3.0) if script is None else script, **sections)
    run.further_sets = (HARD, EASY)
    return run


def judged(parts: loops.Parts) -> None:
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

    def perfect(parts: loops.Parts) -> None:
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
    again.add_evaluation(run.state.last_evaluation, {}, {"hard": 0.9})  # type: ignore[arg-type]
    assert again.set_accuracies["hard"] == (0.0, 0.9)


def test_an_answer_of_a_set_that_has_no_reward_fails_the_whole_evaluation(scripted: Make, play: Play) -> None:
    run = of_three_sets(scripted, trainer={"eval_every": 0, "eval_at_start": False})

    def without_a_verdict(parts: loops.Parts) -> None:
        generate = parts.evaluator._generate

        async def failing(*how: Any) -> Any:
            *others, last = await generate(*how)
            return [*others, replace(last, status="failed", reward=float("nan"), error="no verdict")]

        parts.evaluator._generate = failing

    play(run, meddle=without_a_verdict)
    (told,) = all_evaluations(run)
    assert "1 of 15 answers have no reward" in told["failed"]


def test_prompts_of_sets_with_other_numbers_of_answers_are_dealt_whole_and_in_turn() -> None:
    assert deal([1, 1, 3, 3, 2], 2) == [[0, 2, 3, 4, 8, 9], [1, 5, 6, 7]]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "test.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    rows = [{"question": f"{n}+5=", "solution": {"final": str(n + 5)}} for n in range(6)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    return tmp_path


def load(sets: str, *overrides: str) -> DataSets:
    paths = ["task.train_path=train.jsonl", "task.eval_path=test.jsonl"]
    cfg = load_config(["device=cpu", "trainer.eval_temperature=1", *paths, f"task.eval_sets={sets}", *overrides])
    data = load_data(cfg, chat_tokenizer(PLAIN))
    log_inputs(cfg, data)
    return data


COLUMNS = "prompt_column: question, answer_column: solution.final"


def test_a_set_is_read_as_it_says_and_otherwise_as_the_task_does(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    other_set, few_set = (f"path: other.jsonl, {COLUMNS}, {more}" for more in ("samples: 8", "size: 2"))
    sums_set = "path: 'builtin:arithmetic', split: train, size: 5"
    sets = f"{{other: {{{other_set}}}, few: {{{few_set}}}, sums: {{{sums_set}}}}}"
    main, other, few, sums = load(sets, "trainer.eval_samples=3").evaluation
    assert [(one.name, len(one.prompts), one.num_samples) for one in (main, other, few, sums)] == [
        ("", 1, 3),
        ("other", 6, 8),
        ("few", 2, 3),
        ("sums", 5, 3),
    ]
    assert [(p.text, p.answer) for p in other.prompts[:2]] == [("0+5=", "5"), ("1+5=", "6")]
    assert "1 training prompts, 1 held out, other 6, few 2, sums 5" in caplog.text
    assert "rows of task.eval_sets.other.path that were left out: 1 that repeat" in caplog.text


def test_what_is_wrong_with_a_set_is_told_with_its_name(files: Path) -> None:
    with pytest.raises(DataError, match=r"task\.eval_sets\.other: other\.jsonl, line 1: no column 'prompt'"):
        load("{other: {path: other.jsonl}}")


def test_a_set_that_holds_training_files_is_refused(files: Path) -> None:
    (files / "data").mkdir()
    for name in ("a", "b"):
        (files / "data" / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    sets = "{whole: {path: data, split: dev}}"
    message = (
        r"task\.train_path=data and task\.eval_sets\.whole\.path=data both read .* task\.eval_sets\.whole\.split=dev"
    )
    with pytest.raises(DataError, match=message):
        load(sets, "task.train_path=data")
