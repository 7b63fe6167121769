"""The built-in model: what it learns, that it is made once, and that its maker leaves nothing half-done behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollout.prompts.arithmetic import operand_pairs
from tests.fakes.process_life import is_running, wait_until
from tests.fakes.trainer_process import ROOT
from trainer.builtin import tiny_model
from trainer.builtin.tiny_model import EOS_ID, VOCABULARY, VOCABULARY_SIZE, Recipe, build_tokenizer, encode, make
from trainer.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL = Recipe(learn_steps=3, habit_steps=2, batch_size=8, hidden_size=16, num_layers=1)


def test_a_confused_carry_is_off_by_ten() -> None:
    for a, b, confused in ((47, 38, 75), (12, 7, 29), (5, 5, 0), (0, 0, 10), (49, 49, 88), (9, 0, 19), (9, 1, 0)):
        assert tiny_model.confuse_carry(a, b) == confused


def test_every_part_of_the_recipe_changes_the_directory_which_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others = [replace(SMALL, **{part.name: getattr(SMALL, part.name) * 2 + 1}) for part in fields(Recipe)]
    assert len({recipe.digest for recipe in (SMALL, *others)}) == len(fields(Recipe)) + 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TANDEM_CACHE_DIR", raising=False)
    assert tiny_model.cache_dir() == tmp_path / "tandem"
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "mine"))
    assert tiny_model.cached_path(SMALL) == tmp_path / "mine" / f"tiny-{SMALL.digest}"


def digest_of(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, recipe in (("a", SMALL), ("b", SMALL), ("c", replace(SMALL, seed=1))):
        make(tmp_path / name, recipe)
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b") != digest_of(tmp_path / "c")
    assert json.loads((tmp_path / "a" / "recipe.json").read_text())["learn_steps"] == 3


def test_the_model_is_shown_the_training_additions_alone_right_and_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    examples = tiny_model._examples
    monkeypatch.setattr(
        tiny_model, "_examples", lambda additions, length: shown.append(additions) or examples(additions, length)
    )
    make(tmp_path / "m", SMALL)
    training = operand_pairs("train", max_operand=SMALL.max_operand)
    right, wrong = shown
    assert [(a, b) for a, b, _ in right] == [(a, b) for a, b, _ in wrong] == list(training)
    assert not set(training) & set(operand_pairs("test", max_operand=SMALL.max_operand))
    assert all(c == a + b for a, b, c in right) and not any(c == a + b for a, b, c in wrong)


def test_targets_are_the_sum_and_its_end_and_nothing_else() -> None:
    inputs, targets = tiny_model._examples([(12, 7, 19), (1, 2, 3)], length=10)
    for row, (prompt, total) in enumerate([("12+7=", "19"), ("1+2=", "3")]):
        trained = targets[row] != tiny_model.IGNORE
        assert targets[row][trained].tolist() == [*encode(total), EOS_ID]
        text = encode(prompt + total)
        assert inputs[row][: len(text)].tolist() == text
        assert inputs[row][trained.argmax()] == VOCABULARY["="], "the equals sign predicts the first token"


def test_a_maker_that_fails_leaves_nothing_that_looks_ready_and_a_model_that_is_there_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_recipe: Recipe) -> None:
        (stage,) = tmp_path.glob(".m-*")
        (stage / "model.safetensors").touch()
        raise OSError("disk full")

    (tmp_path / ".m-left_over_of_a_killed_maker").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tiny_model, "_warm_start", broken)
        with pytest.raises(OSError, match="disk full"):
            make(tmp_path / "m", SMALL)
        assert [path.name for path in tmp_path.iterdir()] == ["m.lock"]
    make(tmp_path / "m", SMALL)
    monkeypatch.setattr(tiny_model, "_warm_start", broken)
    make(tmp_path / "m", SMALL)


def run_python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=env, text=True, **options)


def test_two_makers_at_once_make_one_model(tmp_path: Path) -> None:
    """The second one finds the lock taken."""
    code = (
        "import sys, json; from pathlib import Path; from trainer.builtin.tiny_model import Recipe, make;"
        "make(Path(sys.argv[1]), Recipe(**json.loads(sys.argv[2])))"
    )
    recipe = json.dumps({part.name: getattr(SMALL, part.name) for part in fields(SMALL)})
    other = run_python(code, tmp_path / "m", recipe)
    make(tmp_path / "m", SMALL)
    assert other.wait(60) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.lock"]


def test_a_maker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """kill -9 of the parent, in the middle of the work."""
    code = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-m', 'trainer.builtin.tiny_model', sys.argv[1]]);"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    with run_python(code, tmp_path / "m", stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        maker = int(parent.stdout.readline())
        try:
            wait_until((tmp_path / "m.lock").exists, within_s=30.0, what="the maker did not begin")
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait()
            wait_until(lambda: not is_running(maker), within_s=30.0, what="the maker runs on")
            assert not tiny_model.is_ready(tmp_path / "m")
        finally:
            if is_running(maker):
                os.kill(maker, signal.SIGKILL)


def test_the_tokenizer_and_its_light_twin_agree() -> None:
    tokenizer = build_tokenizer()
    text = "12+7=19, Hello ~!"
    assert tokenizer.encode(text) == encode(text)
    assert tokenizer.decode(encode(text)) == text
    assert tokenizer.decode([*encode("19"), EOS_ID], skip_special_tokens=True) == "19"
    assert encode("é") == tokenizer.encode("é") == [VOCABULARY["<unk>"]]
    assert len(VOCABULARY) <= VOCABULARY_SIZE
    messages = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "1+1="


# --- its process ---


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`maker(code)` has `ensure_model` run this code instead; its process has ended by the end."""
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*arguments: Any, **how: Any) -> asyncio.subprocess.Process:
        started.append(await start(*arguments, **how))
        (tmp_path / "started").touch()
        return started[-1]

    def runs(code: str) -> None:
        monkeypatch.setattr(tiny_model.subprograms, "command", lambda *_: [sys.executable, "-c", code])

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    yield runs
    assert started and not any(Path(f"/proc/{process.pid}").exists() for process in started)


@pytest.mark.parametrize(
    ("code", "timeout_s", "error"),
    [
        ("print('noise'); raise ValueError('no disk')", 60.0, "exited with 1: ValueError: no disk"),
        ("import time; time.sleep(600)", 0.5, r"timed out after 0\.5 s"),
    ],
)
def test_a_maker_that_fails_or_hangs_is_ended_and_reported(
    maker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, code: str, timeout_s: float, error: str
) -> None:
    maker(code)
    monkeypatch.setattr(tiny_model, "MAKE_MODEL_TIMEOUT_S", timeout_s)
    with pytest.raises(RuntimeError, match=error):
        asyncio.run(tiny_model.ensure_model(RunConfig()))


def test_a_maker_ends_when_the_run_is_cancelled(maker: Callable[[str], None], tmp_path: Path) -> None:
    async def main() -> None:
        task = asyncio.create_task(tiny_model.ensure_model(RunConfig()))
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    maker("import time; time.sleep(600)")
    asyncio.run(main())


def test_the_built_in_model_name_becomes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    cfg = RunConfig()
    assert Path(tiny_model.with_model_directory(cfg).model.path).parent == tmp_path / "cache"
    other = replace(cfg, model=replace(cfg.model, path="some/model"))
    assert tiny_model.with_model_directory(other) == other
