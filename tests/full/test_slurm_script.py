"""`scripts/slurm.sbatch` with stand-ins for Slurm's programs and `scripts/multinode.sh`. It has not run under Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.fakes.trainer_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Submit = Callable[..., subprocess.Popen[str]]

pytestmark = pytest.mark.timing

# The head records that it runs, and is asked to end like the trainer. A worker lives until somebody ends it.
MULTINODE = """#!/usr/bin/env bash
echo "$1 host=${TANDEM_HOST-none} args: ${*:2}" >>"$CALLS"
case $1 in
head) trap 'echo "head asked to end" >>"$CALLS"; exit "$HEAD_CODE_WHEN_ASKED"' TERM
      for _ in $(seq "$HEAD_TICKS"); do sleep 0.05; done; exit "$HEAD_CODE" ;;
worker) trap 'echo "worker asked to end" >>"$CALLS"; exit 143' TERM; for _ in $(seq 400); do sleep 0.05; done ;;
esac
"""
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$CALLS"
while [ "$1" != scripts/multinode.sh ]; do shift; done
exec "$@"
"""
SCONTROL = '#!/usr/bin/env bash\necho "scontrol $*" >>"$CALLS"\n'


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    """`submit(*arguments, VARIABLE=value)`: the script as Slurm starts it on the first node of a job."""
    programs, repository = tmp_path / "bin", tmp_path / "repository"
    for folder in (programs, repository / "scripts"):
        folder.mkdir(parents=True)
    files = {programs / "srun": SRUN, programs / "scontrol": SCONTROL, repository / "scripts/multinode.sh": MULTINODE}
    for file, text in files.items():
        file.write_text(text)
        file.chmod(0o755)
    spooled = tmp_path / "slurm_script"  # Slurm runs a copy
    spooled.write_bytes((ROOT / "scripts" / "slurm.sbatch").read_bytes())
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        settings = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "SLURM_SUBMIT_DIR": str(repository),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NUM_NODES": "3",
            "TANDEM_HOST": "127.0.0.1",
            "CALLS": str(tmp_path / "calls"),
            "HEAD_TICKS": "400",
            "HEAD_CODE": "0",
            "HEAD_CODE_WHEN_ASKED": "130",
        }
        process = subprocess.Popen(
            ["bash", str(spooled), *arguments], cwd=tmp_path, env={**os.environ, **settings, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def calls(tmp_path: Path, *, until: str = "") -> list[str]:
    """What the stand-ins recorded, once `until` is among it."""
    file, give_up = tmp_path / "calls", time.monotonic() + 20
    while until not in (text := file.read_text() if file.exists() else ""):
        assert time.monotonic() < give_up, text
        time.sleep(0.02)
    return text.splitlines()


def test_the_first_node_is_the_head_and_all_others_are_its_workers(submit: Submit, tmp_path: Path) -> None:
    job = submit("--config-name", "dapo_7b", "run_dir=shared/one", HEAD_TICKS="20", SLURM_CPUS_PER_TASK="64")
    assert job.wait(20) == 0
    found = calls(tmp_path)
    assert "head host=127.0.0.1 args: 3 --config-name dapo_7b run_dir=shared/one" in found
    assert "worker host=none args: 127.0.0.1" in found, "TANDEM_HOST is an address of the first node alone"
    (srun,) = [line for line in found if line.startswith("srun ")]
    assert srun.startswith("srun --nodes 2 --ntasks 2 --relative 1 --ntasks-per-node 1 --cpus-per-task 64 ")
    assert "--cpu-bind=none" in srun, "all actors of a node are children of its one task"
    assert "\n#SBATCH --mem=0\n" in (ROOT / "scripts" / "slurm.sbatch").read_text(), "--exclusive alone gives no memory"
    assert "worker asked to end" in found
    assert not [line for line in found if line.startswith("scontrol")], "a run that is done does not come back"


@pytest.mark.parametrize("code", [0, 1])
def test_a_single_node_needs_no_workers_and_ends_the_job_with_its_code(
    submit: Submit, tmp_path: Path, code: int
) -> None:
    assert submit("run_dir=one", HEAD_TICKS="1", HEAD_CODE=str(code), SLURM_JOB_NUM_NODES="1").wait(20) == code
    assert calls(tmp_path) == ["head host=127.0.0.1 args: 1 run_dir=one"], "nor does it go back into the queue"


@pytest.mark.parametrize(
    ("asked", "code", "comes_back"),
    [
        (signal.SIGUSR1, 130, True),  # the time is nearly up, and it has saved
        (signal.SIGUSR1, 143, True),  # the same, before it could listen
        (signal.SIGUSR1, 0, False),  # its last step was the one it finished
        (signal.SIGUSR1, 1, False),  # it failed on its way out
        (signal.SIGTERM, 130, False),  # scancel
    ],
)
def test_only_a_run_that_was_stopped_by_the_time_limit_goes_back_into_the_queue(
    submit: Submit, tmp_path: Path, asked: signal.Signals, code: int, comes_back: bool
) -> None:
    job = submit("run_dir=one", HEAD_CODE_WHEN_ASKED=str(code))
    calls(tmp_path, until="head host")
    calls(tmp_path, until="worker host")
    time.sleep(0.3)  # the stand-ins have set their traps, and the script its own
    job.send_signal(asked)  # as --signal=B: this process alone
    assert job.wait(20) == code
    found = calls(tmp_path)
    assert "head asked to end" in found
    assert ("scontrol requeue 77" in found) is comes_back


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        (["seed=1"], {}, "give run_dir=DIR"),
        (["run_dir=one"], {"SLURM_SUBMIT_DIR": "/"}, "call sbatch from the root of the repository"),
        (["run_dir=one"], {"SLURM_SUBMIT_DIR": ""}, "start it with sbatch"),
    ],
)
def test_what_is_missing_is_reported_before_anything_starts(
    submit: Submit, tmp_path: Path, arguments: list[str], variables: dict[str, str], expected: str
) -> None:
    job = submit(*arguments, **variables)
    output, _ = job.communicate(timeout=20)
    assert job.returncode != 0
    assert expected in output
    assert not (tmp_path / "calls").exists()
