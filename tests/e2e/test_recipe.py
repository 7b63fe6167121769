"""Recipes of docs/recipes.md in their short form, from the package that holds the model to a rewarded step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the recipe needs, in a folder that it may write to."""
    folder = tmp_path_factory.mktemp("recipe")
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    run("smollm2_arithmetic", folder, "run_dir=run", "rollout.group_size=2")
    return folder


def run(recipe: str, folder: Path, *keys: str) -> None:
    """One step."""
    command = ["bash", "scripts/recipes/run.sh", recipe, "trainer.total_steps=1", "trainer.eval_every=0", *keys]
    command += ["checkpoint.save_at_end=false", "checkpoint.export_hf=false"]
    env = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_recipe_with_a_tool_warms_up_and_takes_a_rewarded_step(checkout: Path) -> None:
    run("smollm2_calculator", checkout, "run_dir=called", "rollout.max_response_tokens=96")
    made_of = json.loads((checkout / ".cache/recipes/calculator/warm/warm_up.json").read_text())
    assert made_of["num_rows"] == 8 and made_of["losses"][0] > 0
    (line,) = map(json.loads, (checkout / "called" / "metrics.jsonl").read_text().splitlines())
    assert line["agent/turns_mean"] >= 1 and line["agent/tool_errors"] >= 0  # eight demonstrations teach no call
    assert 0 <= line["reward/mean"] <= 1


def test_a_step_of_the_real_model_is_rewarded_and_trained(checkout: Path) -> None:
    (line,) = map(json.loads, (checkout / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["learner/num_samples"] == 8
    assert 0 <= line["reward/mean"] <= 1
    # What the learner computes from the converted weights is what vLLM sampled from.
    assert line["mismatch/fresh"] < 0.1
    log = (checkout / "run" / "log.txt").read_text()
    assert "engines: 16 sequences at once per engine (auto: all 16 that may be in flight)" in log
    assert 0.5 < line["learner/entropy"] < 4  # of a language model; noise has the logarithm of 49,152, which is 10.8


def test_the_converted_model_knows_what_it_was_taught(checkout: Path) -> None:
    directory = checkout / ".cache" / "recipes" / "smollm2-135m"
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        told = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(told[0])


def test_no_held_out_question_is_trained(checkout: Path) -> None:
    rows = {
        name: (checkout / ".cache/recipes/arithmetic" / f"{name}.jsonl").read_text().splitlines()
        for name in ("train", "eval")
    }
    questions = {name: {json.loads(row)["question"] for row in part} for name, part in rows.items()}
    assert len(questions["eval"]) == 200
    assert not questions["train"] & questions["eval"]
