"""The recipes' tasks, warm-up and comparisons, without a model."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollout.rendering import last_tool_call
from scripts.recipes import compare
from scripts.recipes.rewards import calculator, last_integer
from tests.fakes.chat_tokenizer import END, PLAIN, chat_tokenizer
from trainer.config.compose import load_config
from trainer.config.presets import config_names, packaged_configs

if TYPE_CHECKING:
    from collections.abc import Callable

tasks = pytest.importorskip("scripts.recipes.tasks", reason="needs the extra recipes")
warm_up = pytest.importorskip("scripts.recipes.warm_up")
ROOT = Path(__file__).parents[3]
STORED = ROOT / "tests" / "golden" / "data" / "stored_runs.tar.gz"
RECIPES = [name for name in config_names(packaged_configs()) if name.startswith("smollm2_")]


# Tasks


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[dict[str, Any]]]:
    """Rows of a file of a set."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, parts in tasks.SETS.items():
        tasks.write(folder / name, parts, seed=1, train_size=120, eval_size=40, num_shown=60)

    def read(name: str, file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / name / f"{file}.jsonl").read_text().splitlines()]

    return read


@pytest.mark.parametrize("name", tasks.SETS)
def test_no_question_is_in_two_files_and_every_answer_is_an_integer(name: str, written: Any) -> None:
    train, held_out = written(name, "train"), written(name, "eval")
    assert len(held_out) == 40 and len(train) > 60
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert all(str(int(row["answer"])) == row["answer"] for row in (*train, *held_out))
    assert all(row["messages"][-1] == {"role": "user", "content": row["question"]} for row in train)


@pytest.mark.parametrize("name", ["word_problems", "calculator"])
def test_demonstrations_are_about_other_questions_and_earn_the_reward(name: str, written: Any) -> None:
    answers = {row["question"]: row["answer"] for file in ("train", "eval") for row in written(name, file)}
    shown = [row["messages"] for row in written(name, "demonstrations")]
    assert len(shown) > 20
    for messages in shown:
        (question,) = (one["content"] for one in messages if one["role"] == "user")
        assert question not in answers
        end = messages[-1]["content"]
        answer = end.removesuffix(".").rpartition("The answer is ")[2]
        assert last_integer(prompt="", response=end, answer=answer, metadata={}) == 1.0


def test_a_demonstrated_call_is_one_that_the_agent_reads_and_the_calculator_answers(written: Any) -> None:
    for row in written("calculator", "demonstrations"):
        *_, said, result, _ = row["messages"]
        call = last_tool_call(said["content"])
        assert call is not None and call.name == "calculator"
        assert str(calculator(**call.arguments)) == result["content"]
    for wrong in ("12 + 3", "2 ** 9", "__import__('os')", "12345678901 * 1"):
        with pytest.raises(ValueError, match="is no product of two integers"):
            calculator(wrong)


# Warm-up


def test_only_what_the_assistant_says_is_learned_with_its_end() -> None:
    tokenizer: Any = chat_tokenizer(PLAIN)
    messages = [
        {"role": "user", "content": "2*3?"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "six"},
    ]
    tokens, labels = warm_up.labelled(messages, tokenizer)
    assert len(tokens) == len(labels)
    learned = "".join(tokenizer.decode([token]) for token in labels if token != warm_up.IGNORED)
    assert learned == f"call{END}six{END}"


# Comparisons


def test_a_recipe_that_does_not_exist_is_refused_with_those_that_do() -> None:
    command = ["bash", "scripts/recipes/run.sh", "smollm2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert sorted(done.stderr.split("one of: ")[1].split()) == sorted(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_tasks_and_a_question_that_varies_it(name: str) -> None:
    assert name.removeprefix("smollm2_") in tasks.SETS
    assert name in {question.recipe for question in compare.QUESTIONS.values()}


@pytest.mark.parametrize("name", compare.QUESTIONS)
def test_every_variant_is_a_run_that_can_be_started(name: str) -> None:
    question = compare.QUESTIONS[name]
    for overrides in question.variants.values():
        for device in ("cpu", "cuda"):
            load_config(["--config-name", question.recipe, f"device={device}", "seed=2", *overrides])


def place(out: Path, *runs: tuple[str, str]) -> None:
    """Stored runs at OUT/PLACE."""
    with tarfile.open(STORED) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
        archive.extractall(out / "stored")
    for name, where in runs:
        shutil.copytree(out / "stored" / name, out / where)


def test_runs_that_have_ended_are_not_started_again_and_the_rest_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    place(tmp_path, ("sync", "grpo/seed_0"), ("sync", "grpo/seed_1"))
    started: list[list[str]] = []

    def launch(command: list[str]) -> int:
        started.append(command)
        return int("seed=1" in command)

    arguments = ["objectives", "trainer.total_steps=2", "--seeds", "0,1", "--out", str(tmp_path)]
    assert compare.main(arguments, launch=launch) == 1, "one has failed"
    variants = {"dapo": ["algorithm=dapo"], "ppo__critic": ["algorithm=ppo", "critic.lr=2e-5"]}
    expected = [
        ["smollm2_arithmetic", *keys, f"seed={seed}", f"run_dir={tmp_path}/{where}/seed_{seed}", arguments[1]]
        for where, keys in variants.items()
        for seed in (0, 1)
    ]
    assert [command[2:] for command in started] == expected
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert rows[2].startswith("| GRPO | 2 | 12 | 0.500 | 0.000 -> 1.000 | 17 | 123 | 314 | 27.")
    assert "| DAPO |" not in "".join(rows), "none of its runs has ended a step"
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert compare.main(["lora", "--draw", "--out", str(tmp_path)], launch=launch) == 2


def test_a_band_is_where_all_seeds_have_a_point() -> None:
    assert compare.band([[(1, 0.0), (2, 1.0), (3, 1.0)], [(1, 0.5), (2, 0.5)]]) == [
        (1, 0.0, 0.25, 0.5),
        (2, 0.5, 0.75, 1.0),
    ]
    assert compare.band([]) == []


def test_the_goal_is_reached_by_the_mean_of_whole_windows() -> None:
    records = [{"time_s": float(i), "reward/mean": 1.0 if i == 1 or i > 5 else 0.0} for i in range(1, 12)]
    assert compare.seconds_to(0.3, records) == 7.0
    assert compare.seconds_to(1.1, records) == float("inf")
