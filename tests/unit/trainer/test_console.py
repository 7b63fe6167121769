"""The command `tandem`, and the programs that a run starts, in a directory that has files of the same names."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import subprograms
from trainer.__main__ import TOOLS, main
from trainer.config.cli import help_text


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """As in most repositories of machine learning."""
    (tmp_path / "trainer.py").write_text("print('my own trainer'); raise SystemExit(0)")
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize("arguments", [["--version"], ["export", "--help"]])
def test_no_file_of_the_working_directory_is_run_instead(foreign: Path, arguments: list[str]) -> None:
    script = Path(sys.executable).with_name("tandem")
    result = subprocess.run([script, *arguments], cwd=foreign, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, ""), "an imported library warned"
    assert "my own trainer" not in result.stdout
    assert ("tandem-rl" if arguments == ["--version"] else "usage") in result.stdout.lower()


def test_programs_that_a_run_starts_are_its_own(foreign: Path) -> None:
    command = subprograms.command("trainer.console")
    env = subprograms.environment()
    result = subprocess.run(command, cwd=foreign, env=env, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_a_mistake_has_the_exit_code_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seeed=1", "seed=x"]) == 2
    assert "did you mean seed" in capsys.readouterr().err


def test_tools_are_named_by_the_help_and_run_by_the_first_word(capsys: pytest.CaptureFixture[str]) -> None:
    named = help_text().partition("Tools:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in named] == [*TOOLS]
    assert main(["advise", "/nowhere"]) == 2 and "is not a directory" in capsys.readouterr().err
    assert main(["advice"]) == 2 and "advice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "word"),
    [("advise", "advise"), ("bench", "bench"), ("check_plugin", "check"), ("export", "export"), ("view", "view")],
)
def test_earlier_names_of_tools_still_start_them(
    module: str, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["-m", "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"trainer.{module}", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert f"usage: python -m trainer {word}" in capsys.readouterr().out
