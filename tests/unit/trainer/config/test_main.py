"""`python -m trainer` as a process: speed, exit codes, and that it works from a wheel and from any directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import trainer.__main__ as main_module
from trainer.config.errors import ConfigurationError

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[4]


def run_trainer(*args: str, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-m", "trainer", *args],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_groups_keys_and_exit_codes(tmp_path: Path) -> None:
    result = run_trainer("--help", cwd=tmp_path)
    assert result.returncode == 0
    for words in ("Usage:", "algorithm  dapo", "mode.max_staleness=1", "Examples:", "130  interrupted"):
        assert words in result.stdout


def test_version_is_printed(tmp_path: Path) -> None:
    result = run_trainer("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout.split()[0]) == (0, "tandem-rl")


def test_help_imports_neither_torch_nor_hydra_and_loading_imports_no_torch() -> None:
    code = (
        "import sys; from trainer.__main__ import main; main(['--help']);"
        "assert not {'torch', 'hydra', 'ray'} & set(sys.modules);"
        "main(['--cfg', 'job']); assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_problems_end_with_code_2_and_leave_nothing(tmp_path: Path) -> None:
    result = run_trainer("learner.lrr=1", "mode.max_staleness=-1", "run_dir=here", cwd=tmp_path)
    assert result.returncode == 2
    assert "2 problems" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_show_config_prints_even_if_a_file_is_missing_and_still_ends_with_code_2(tmp_path: Path) -> None:
    result = run_trainer("--cfg", "job", "task.train_path=missing.jsonl", cwd=tmp_path)
    assert result.returncode == 2
    assert "train_path: missing.jsonl" in result.stdout
    assert "does not exist" in result.stderr


def test_a_built_wheel_carries_the_configurations(tmp_path: Path) -> None:
    """Built from a copy, so that the checkout gets no build directory."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("trainer", "rollout", "weight_sync", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "README.md").write_text("Tandem")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
        str(source),
    ]
    built = subprocess.run(build, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.unpack_archive(wheel, installed, "zip")
    result = run_trainer("--cfg", "job", "--config-name", "dapo_7b", "device=cuda", cwd=elsewhere, path=installed)
    assert result.returncode == 0, result.stderr
    assert "path: Qwen/Qwen2.5-7B" in result.stdout
    assert list(elsewhere.iterdir()) == []


def test_a_package_that_hides_the_configurations_is_named(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()
    result = run_trainer("--cfg", "job", cwd=tmp_path)
    assert result.returncode == 2
    assert "hides the package" in result.stderr


def test_a_plain_folder_named_configs_in_the_working_directory_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.yaml").write_text("broken: [")
    assert run_trainer("--cfg", "job", cwd=tmp_path).returncode == 0


def test_process_start_lies_before_now_and_after_the_test_session_began() -> None:
    before = time.time()
    code = "from trainer.__main__ import process_started_at as s; print(s())"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    assert before - 0.1 <= float(out.stdout) <= time.time()


def test_the_first_cause_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        try:
            raise OSError("disk full")
        except OSError as disk:
            raise ExceptionGroup("tasks", [RuntimeError("loop ended")]) from disk
    except ExceptionGroup as group:
        # The group was raised because of its member, whatever it was raised from.
        main_module.report_failure(type(group), group, group.__traceback__)
    assert capsys.readouterr().err.splitlines()[-1] == "failed: RuntimeError: loop ended"
    try:
        try:
            raise OSError("disk full")
        except OSError as disk:
            raise RuntimeError("step 3 failed") from disk
    except RuntimeError as error:
        main_module.report_failure(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.splitlines()[-1] == "failed: OSError: disk full"


def test_every_ending_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    def refused(*_: object) -> int:
        raise ConfigurationError([])

    monkeypatch.setattr(main_module, "_run", lambda *_: 1)
    assert main_module.main([]) == 1
    monkeypatch.setattr(main_module, "_run", interrupted)
    assert main_module.main([]) == 130
    monkeypatch.setattr(main_module, "_run", refused)
    assert main_module.main([]) == 2
