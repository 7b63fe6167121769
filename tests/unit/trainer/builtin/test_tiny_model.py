from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.prompts.arithmetic import operand_pairs, question
from trainer.builtin import tiny_model
from trainer.builtin.tiny_model import (
    EOS_ID,
    VOCABULARY,
    VOCABULARY_SIZE,
    Recipe,
    build_tokenizer,
    confuse_carry,
    encode,
    make,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[4]
SMALL = Recipe(learn_steps=3, habit_steps=2, batch_size=8, hidden_size=16, num_layers=1)


@pytest.mark.parametrize(
    ("a", "b", "confused"), [(47, 38, 75), (12, 7, 29), (5, 5, 0), (0, 0, 10), (49, 49, 88), (9, 0, 19), (9, 1, 0)]
)
def test_whoever_confuses_carries_is_off_by_ten(a: int, b: int, confused: int) -> None:
    assert confuse_carry(a, b) == confused


def test_every_part_of_the_recipe_changes_the_directory() -> None:
    digests = {Recipe().digest}
    for part in fields(Recipe):
        digests.add(replace(Recipe(), **{part.name: getattr(Recipe(), part.name) * 2 + 1}).digest)
    assert len(digests) == len(fields(Recipe)) + 1
    assert Recipe().digest == Recipe().digest


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TANDEM_CACHE_DIR", raising=False)
    assert tiny_model.cache_dir() == tmp_path / "tandem"
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "mine"))
    assert tiny_model.cached_path(SMALL) == tmp_path / "mine" / f"tiny-{SMALL.digest}"
    assert not tiny_model.is_ready(tiny_model.cached_path(SMALL))


def digest_of(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, recipe in (("a", SMALL), ("b", SMALL), ("c", replace(SMALL, seed=1))):
        make(tmp_path / name, recipe)
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b") != digest_of(tmp_path / "c")
    assert json.loads((tmp_path / "a" / "recipe.json").read_text())["learn_steps"] == 3


def test_a_model_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "m", SMALL)

    def never(_recipe: Recipe) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(tiny_model, "_warm_start", never)
    make(tmp_path / "m", SMALL)


def test_a_maker_that_fails_leaves_nothing_that_looks_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_recipe: Recipe) -> None:
        (stage,) = tmp_path.glob(".m-*")
        (stage / "model.safetensors").touch()
        raise OSError("disk full")

    (tmp_path / ".m-left_over_of_a_killed_maker").mkdir()
    monkeypatch.setattr(tiny_model, "_warm_start", broken)
    with pytest.raises(OSError, match="disk full"):
        make(tmp_path / "m", SMALL)
    assert not tiny_model.is_ready(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m.lock"]


def test_two_makers_at_once_make_one_model(tmp_path: Path) -> None:
    code = (
        "import sys, json; from pathlib import Path; from trainer.builtin.tiny_model import Recipe, make;"
        "make(Path(sys.argv[1]), Recipe(**json.loads(sys.argv[2])))"
    )
    recipe = json.dumps({part.name: getattr(SMALL, part.name) for part in fields(SMALL)})
    command = [sys.executable, "-c", code, str(tmp_path / "m"), recipe]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    makers = [subprocess.Popen(command, env=env, cwd=tmp_path) for _ in range(2)]
    assert [maker.wait(60) for maker in makers] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.lock"]
    make(tmp_path / "alone", SMALL)
    assert digest_of(tmp_path / "m") == digest_of(tmp_path / "alone")


def test_a_maker_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """kill -9 of the parent, in the middle of the work."""
    code = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-m', 'trainer.builtin.tiny_model', sys.argv[1]]);"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "m")], env=env, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    maker = int(parent.stdout.readline())
    try:
        wait_for((tmp_path / "m.lock").exists)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        wait_for(lambda: not is_running(maker))
        assert not tiny_model.is_ready(tmp_path / "m")
    finally:
        parent.stdout.close()
        if is_running(maker):
            os.kill(maker, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A zombie of a process that init has not collected yet does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_only_training_additions_are_shown_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    step = tiny_model._supervised_step
    letters = {index: token for token, index in VOCABULARY.items()}

    def watching(model: object, optimizer: object, inputs: np.ndarray, targets: np.ndarray, *, lr: float) -> None:
        seen.update("".join(letters[int(i)] for i in row).partition("=")[0] + "=" for row in inputs)
        step(model, optimizer, inputs, targets, lr=lr)  # type: ignore[arg-type]

    monkeypatch.setattr(tiny_model, "_supervised_step", watching)
    make(tmp_path / "m", replace(SMALL, batch_size=2000))
    training = {question(a, b) for a, b in operand_pairs("train", max_operand=49)}
    held_out = {question(a, b) for a, b in operand_pairs("test", max_operand=49)}
    assert seen <= training
    assert len(seen) > len(training) * 0.9
    assert not seen & held_out


def test_targets_are_the_answer_and_its_end_and_nothing_else() -> None:
    examples = tiny_model._Examples([(12, 7, 19), (1, 2, 3)])
    for row, (prompt, answer) in enumerate([("12+7=", "19"), ("1+2=", "3")]):
        targets = examples.targets[row]
        assert targets[targets != tiny_model.IGNORE].tolist() == [*encode(answer), EOS_ID]
        inputs = examples.inputs[row]
        text = encode(prompt + answer)
        assert inputs[: len(text)].tolist() == text
        first = int(np.argmax(targets != tiny_model.IGNORE))
        assert inputs[first] == encode("=")[0], "the first answer token is predicted from the equals sign"


def test_picked_rows_come_from_the_one_or_the_other() -> None:
    right = tiny_model._Examples([(12, 7, 19), (1, 2, 3)])
    wrong = tiny_model._Examples([(12, 7, 29), (1, 2, 113)])
    inputs, targets = right.pick(np.array([0, 0, 1]), wrong, np.array([False, True, True]))
    answers = [targets[i][targets[i] != tiny_model.IGNORE].tolist() for i in range(3)]
    assert answers == [[*encode(text), EOS_ID] for text in ("19", "29", "113")]
    assert inputs.shape == targets.shape


def test_the_tokenizer_and_its_light_twin_agree(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    text = "12+7=19, Hello ~!"
    assert tokenizer.encode(text) == encode(text)
    assert tokenizer.decode(encode(text)) == text
    assert tokenizer.decode([*encode("19"), EOS_ID], skip_special_tokens=True) == "19"
    assert encode("é") == tokenizer.encode("é") == [VOCABULARY["<unk>"]]
    assert len(VOCABULARY) <= VOCABULARY_SIZE
    messages = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "1+1="
