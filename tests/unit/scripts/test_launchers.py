"""`scripts/quickstart.sh`, `scripts/dapo_7b.sh` and `scripts/install.sh` with a stand-in for Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = """#!/usr/bin/env bash
case $1 in -c) echo cpu ;; *) echo "called: $*"; exit "$CODE" ;; esac
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("quickstart.sh", "dapo_7b.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "scripts/install.sh").write_text("exit 0\n")
    python = tmp_path / ".venv/bin/python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def call(repository: Path, script: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"scripts/{script}", *arguments], cwd=repository, env={"PATH": "/usr/bin:/bin", "CODE": str(code)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "Done."), (1, "log.txt of the run directory"), (2, "what to change is above"), (130, "resumes from the last")],
)
def test_the_end_of_a_run_is_reported_by_its_code(repository: Path, code: int, words: str) -> None:
    result = call(repository, "quickstart.sh", "seed=1", code=code)
    assert result.returncode == code
    assert "called: -m trainer seed=1" in result.stdout and words in result.stdout + result.stderr


@pytest.mark.parametrize("option", [["--help"], ["--cfg", "job"], ["--dry-run"]])
def test_an_option_that_only_shows_something_starts_no_run(repository: Path, option: list[str]) -> None:
    result = call(repository, "quickstart.sh", *option)
    assert result.returncode == 0 and "Done." not in result.stdout


def test_a_run_of_7b_needs_an_accelerator_and_its_plan_none(repository: Path) -> None:
    refused = call(repository, "dapo_7b.sh", "run_dir=x", "--config-dir", "mine")
    assert refused.returncode == 2 and "found no accelerator" in refused.stderr and "called" not in refused.stdout
    planned = call(repository, "dapo_7b.sh", "--dry-run", "--device-memory-gib", "80")
    assert "called: -m trainer --config-name dapo_7b --dry-run --device-memory-gib 80" in planned.stdout


def installed(tmp_path: Path, extras: str, *, python: str = "3.12") -> subprocess.CompletedProcess[str]:
    """`scripts/install.sh`; its output has every call of pip."""
    for name in ("scripts/install.sh", "pyproject.toml", "constraints"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    stand_in = tmp_path / ".venv/bin/python"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(
        "#!/usr/bin/env bash\n"
        f'case "$*" in *version_info*) [[ " $* " == *" {python} "* ]]; exit ;; *" show "*) exit 1 ;; esac\n'
        'echo "called: ${VLLM_TARGET_DEVICE:+for $VLLM_TARGET_DEVICE: }$*"\n'
    )
    stand_in.chmod(0o755)
    return call(tmp_path, "install.sh", extras)


def test_vllm_for_amd_comes_from_its_own_index_with_the_torch_it_brings(tmp_path: Path) -> None:
    result = installed(tmp_path, "rocm")
    assert result.returncode == 0, result.stderr
    vllm, tandem = (line for line in result.stdout.splitlines() if "pip install" in line)
    assert vllm.endswith("-c constraints/rocm.txt --extra-index-url https://wheels.vllm.ai/rocm/0.25.1/rocm723 vllm")
    assert tandem.endswith("-c constraints/rocm.txt -e .[rocm]")
    assert "vllm==0.25.1+rocm723" in (ROOT / "constraints/rocm.txt").read_text().split()


def test_vllm_for_ascend_is_built_without_kernels_before_the_plugin_that_has_them(tmp_path: Path) -> None:
    result = installed(tmp_path, "npu,test")
    assert result.returncode == 0, result.stderr
    vllm, tandem = (line for line in result.stdout.splitlines() if "pip install" in line)
    assert "for empty: " in vllm and "-c constraints/npu.txt" in vllm and vllm.endswith("--no-binary vllm vllm")
    assert "for empty: " not in tandem and "-c constraints/npu.txt" in tandem and tandem.endswith("-e .[npu,test]")


def test_an_environment_of_a_python_without_wheels_is_refused_with_those_that_have_them(tmp_path: Path) -> None:
    result = installed(tmp_path, "rocm", python="3.11")
    assert result.returncode == 1 and "needs Python 3.12" in result.stderr and "pip install" not in result.stdout
