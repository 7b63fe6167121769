"""More whole runs: one that learns from a teacher alone (larger than the policy, of another
depth, and without its bad habit), one that is four versions ahead, one whose disk fills up, and one that is killed
while it starts."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.fakes.metric_names import check_complete, check_known
from tests.fakes.trainer_process import TrainerProcess
from trainer.builtin import tiny_model
from trainer.learner.checkpoint import find_latest, step_of, verify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(900)

STEPS = 40
TEACHER = tiny_model.Recipe(habit_steps=0, hidden_size=96, num_layers=3, num_heads=3, num_kv_heads=3)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "model"
    tiny_model.make(path, TEACHER)
    return path


@pytest.fixture(scope="module")
def job(teacher: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcess]:
    process = TrainerProcess(
        tmp_path_factory.mktemp("distillation") / "run",
        "algorithm=opd",
        f"algorithm.kl.reference_model={teacher}",
        f"trainer.total_steps={STEPS}",
        f"trainer.eval_every={STEPS}",
        cache=tiny_cache,
    )
    with closing(process):
        assert process.wait() == 0, process.text[-4000:]
        yield process


def test_every_step_measures_rewards_and_the_distance_to_the_teacher(job: TrainerProcess, teacher: Path) -> None:
    assert f"zero - 1 x KL to {teacher} (k1) of the token -> importance_sampling()" in job.text
    assert "is not checked" not in job.text, "its tokenizer was compared"
    assert [line["step"] for line in job.lines] == list(range(1, STEPS + 1))
    for line in job.lines:
        check_known(line)
        check_complete(line)
        assert {"reward/mean", "learner/kl_reference", "learner/reference_s"} <= line.keys()


def test_the_policy_comes_nearer_and_answers_better(job: TrainerProcess) -> None:
    distances = [line["learner/kl_reference"] for line in job.lines]
    assert sum(distances[-5:]) < 0.9 * sum(distances[:5])
    assert job.summary["last_accuracy"] > job.summary["first_accuracy"] + 0.08, "though no reward moved it"


def test_accuracy_rises_with_samples_of_five_versions_too(tiny_cache: Path, tmp_path: Path) -> None:
    """What runs is computed again at every commit, and slots are open for a lead of four versions."""
    process = TrainerProcess(
        tmp_path / "run",
        f"trainer.total_steps={STEPS}",
        "trainer.groups_per_step=32",
        "rollout.group_size=8",
        "mode.max_staleness=4",
        "mode.in_flight=recompute",
        "trainer.stop_at_accuracy=null",
        "learner.lr=1e-3",
        cache=tiny_cache,
    )
    with closing(process):
        assert process.wait() == 0, process.text[-4000:]
    ages = [line["staleness/max"] for line in process.lines]
    assert max(ages) <= 4
    assert max(ages[STEPS // 2 :]) > 1, "it was not as far ahead as it may be"
    assert process.summary["last_accuracy"] >= process.summary["first_accuracy"] + 0.1
    assert process.summary["discarded_tokens"] == 0


def test_a_disk_that_fills_up_while_the_learner_trains_on_ends_the_run_and_costs_no_earlier_checkpoint(
    tiny_cache: Path, tmp_path: Path
) -> None:
    checkpoints, keys = tmp_path / "run" / "checkpoints", ("trainer.eval_every=0", "checkpoint.every_steps=1")
    with closing(TrainerProcess(tmp_path / "run", *keys, "trainer.total_steps=100000", cache=tiny_cache)) as run:
        run.until(lambda: find_latest(checkpoints) is not None)
        run.process("ray::LearnerActor").rlimit(psutil.RLIMIT_FSIZE, (100_000, 100_000))
        assert run.wait() == 1, run.text[-4000:]
    latest = find_latest(checkpoints)
    assert latest is not None
    verify(latest)
    (unfinished,) = checkpoints.glob("step_*.tmp")
    assert f"{unfinished} cannot be written: File too large" in run.summary["error"]
    resumed = TrainerProcess(tmp_path / "run", *keys, f"trainer.total_steps={step_of(latest) + 2}", cache=tiny_cache)
    with closing(resumed):
        assert resumed.wait() == 0, resumed.text[-4000:]
    assert resumed.summary["resumed_from_step"] == step_of(latest) and not unfinished.exists()


def test_kill_9_during_the_start_takes_the_maker_of_the_model_along(tmp_path: Path) -> None:
    with closing(TrainerProcess(tmp_path / "run", "trainer.total_steps=100000", cache=tmp_path / "cache")) as run:
        run.until(lambda: any("trainer.builtin.tiny_model" in name for name in run.names))
        run.until(lambda: any("raylet" in name for name in run.names))
        run.kill()
        assert run.left_over(within_s=30.0) == []
