"""The learner's benchmark, on a CPU: what a step trains, and what the file says about it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
import torch

from tests.fakes.trainer_process import ROOT
from trainer.tools import bench_learner
from trainer.tools.bench_learner import Rows, main

if TYPE_CHECKING:
    from pathlib import Path

SMALL = shlex.split("--shape tiny --device cpu --micro-batch 96 --longest 64 --steps 1 --warmup 1")


def test_rows_are_full_repeatable_and_of_the_lengths_that_were_asked_for() -> None:
    rows = Rows(micro_batch_tokens=1000, num_micro_batches=40, shortest=20, longest=320)
    batches = rows.of_rank(0, vocab_size=50)
    lengths = np.concatenate([np.diff(batch.cu_seqlens)[:-1] for batch in batches])  # the last one is cut
    assert {len(batch.token_ids) for batch in batches} == {1000}
    assert lengths.min() == 20 and lengths.max() == 320
    # Pareto of shape 1: half of all are below twice the shortest.
    assert np.mean(lengths < 40) == pytest.approx(0.5, abs=0.05)
    assert sum(float(batch.loss_weights.sum()) for batch in batches) == pytest.approx(1.0)
    again, other = rows.of_rank(0, vocab_size=50), rows.of_rank(1, vocab_size=50)
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(batches, again, strict=True))
    assert not np.array_equal(batches[0].cu_seqlens, other[0].cu_seqlens)


@pytest.mark.full
def test_file_has_the_figures_of_two_ranks_and_a_profile_is_written(tmp_path: Path) -> None:
    file, profile = tmp_path / "found.json", tmp_path / "profile.txt"
    arguments = "--ranks 2 learner.lr=0.5 --micro-batches 2 --shortest 48 --longest 48 device.peak_tflops=1"
    assert main([*SMALL, *shlex.split(arguments), "--json", str(file), "--profile", str(profile)]) == 0
    found = json.loads(file.read_text())
    computes = "not compiled, float32 logits, attention by padded blocks"
    assert found["learner"] == f"sharded, gathered once per step, {computes}"
    assert found["tokens_per_step"] == 2 * 96 and found["sequences_per_step"] == 4
    assert found["mfu"] == pytest.approx(found["model_flops"] / 1e12 / found["step_s"])
    assert {"forward", "backward", "optimizer", "step"} <= found["seconds"].keys()
    assert found["memory"]["planned"]["masters (float32)"] * 2 == pytest.approx(4 * 5_985_024, rel=0.01)
    assert "aten::mm" in profile.read_text()


def test_without_room_the_plan_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_learner, "measure", mock.Mock(side_effect=torch.OutOfMemoryError("tried 2 GiB")))
    assert main(SMALL) == 1
    error = capsys.readouterr().err
    assert "out of memory on rank 0 (tried 2 GiB)" in error and "masters (float32)" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learner.chunk=1"], "learner.chunk"),
        (["learner.compile"], "KEY=VALUE"),
        (["--shortest", "65"], "--shortest must be 2 to 64"),
    ],
)
def test_wrong_command_line_ends_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.full
def test_host_needs_neither_ray_nor_hydra() -> None:
    code = "import sys, trainer.tools.bench_learner; print({'ray', 'hydra', 'omegaconf', 'rich'} & {*sys.modules})"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.strip() == "set()"
