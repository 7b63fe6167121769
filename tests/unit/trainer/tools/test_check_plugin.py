"""`python -m trainer.check_plugin`, and the examples of docs/add_a_loss.md."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from trainer.config.algorithm import AdvantageName, AggregationName, LossName
from trainer.tools import check_plugin

ROOT = Path(__file__).parents[4]
DOCUMENT = (ROOT / "docs" / "add_a_loss.md").read_text()
BUILT_IN = "trainer.algorithms.losses"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the document, where Python finds them."""
    blocks = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    for name, code in blocks:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    reward = re.search(r"^```python\n(def reward.*?)^```", (ROOT / "docs" / "add_a_reward.md").read_text(), re.S | re.M)
    assert reward is not None
    (tmp_path / "my_package" / "rewards.py").write_text(reward[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path


def test_the_document_lists_every_loss_aggregation_and_advantage() -> None:
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", DOCUMENT, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert {*get_args(LossName), *get_args(AggregationName), *get_args(AdvantageName)} <= listed


def test_the_commands_of_the_document_pass(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^python -m trainer\.check_plugin (.*)$", DOCUMENT, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert check_plugin.main(shlex.split(command)) == check_plugin.EXIT_KEPT, capsys.readouterr().out
    assert capsys.readouterr().out.count("checks passed") == 3


def test_the_test_of_the_document_passes(package: Path) -> None:
    tests = importlib.import_module("test_my_package")
    found = [getattr(tests, name) for name in dir(tests) if name.startswith("test_")]
    assert len(found) == 2
    for test in found:
        test()


def test_a_broken_promise_is_told_with_exit_code_1(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = package / "my_package" / "losses.py"
    losses.write_text(losses.read_text().replace("loss_L = -(", "loss_L = ("))
    assert check_plugin.main(["loss", "my_package.losses.tempered_loss"]) == check_plugin.EXIT_BROKEN
    out = capsys.readouterr().out
    assert "FAIL  a good token becomes likelier" in out
    assert out.splitlines()[-1] == "loss my_package.losses.tempered_loss: 1 of 9 checks failed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["loss", f"{BUILT_IN}.ppo_clip"], "did you mean 'ppo_clip_loss'"),
        (["loss", f"{BUILT_IN}.ppo_clip_loss"], "missing a required"),
        (["loss", f"{BUILT_IN}.dro_loss", "alpha=1"], "'dro_beta'"),
        (["advantage", "nowhere.estimator"], "nowhere"),
        (["reward", "nowhere:reward"], "nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_told_with_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_plugin.main(arguments) == check_plugin.EXIT_UNUSABLE
    assert words in capsys.readouterr().err


def test_numbers_are_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_plugin.main(["loss", f"{BUILT_IN}.dro_loss", "dro_beta=0.1"]) == check_plugin.EXIT_KEPT
    with pytest.raises(SystemExit):
        check_plugin.main(["loss", f"{BUILT_IN}.dro_loss", "dro_beta"])
    assert "NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hangs", "the call took longer than 0.5 s; its process was killed"),
        ("exits", "its process ended with exit code 0"),
    ],
)
def test_a_reward_that_hangs_or_ends_its_process_is_a_broken_one(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["reward", f"tests.fakes.wrong_rewards.{name}", "--timeout", "0.5"]
    assert check_plugin.main(arguments) == check_plugin.EXIT_BROKEN
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("timeout", ["nan", "inf", "0", "-1", "soon"])
def test_a_limit_that_is_none_is_refused(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_plugin.main(["reward", "zero", f"--timeout={timeout}"])
    assert ended.value.code == check_plugin.EXIT_UNUSABLE
    assert "--timeout" in capsys.readouterr().err


def test_it_is_a_program(package: Path) -> None:
    command = [sys.executable, "-m", "trainer.check_plugin", "advantage", "my_package.estimators.median_baseline"]
    done = subprocess.run(
        command, cwd=package, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all 7 checks passed" in done.stdout
