"""A loss by dotted path inside the learner: the same gradients as the built-in one, and errors that name it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.fakes.learner import gradients, make_learner, pack, run_config, sequences, without_loss
from trainer.config.algorithm import AlgorithmConfig

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_path_trains_as_the_name_does(tiny_dir: Path) -> None:
    numbers = {"clip_low": 0.1, "clip_high": 0.1}
    named = AlgorithmConfig(loss="gspo", clip_low=0.1, clip_high=0.1)
    by_path = AlgorithmConfig(loss="trainer.algorithms.losses.gspo_loss", loss_args=numbers)
    parts = sequences(6)
    batches = [pack(parts[:2]), pack(parts[2:]), without_loss()]
    got = [gradients(make_learner(replace(run_config(tiny_dir), algorithm=a)), batches) for a in (named, by_path)]
    assert got[0].keys() == got[1].keys()
    assert all(torch.equal(got[0][name], got[1][name]) for name in got[0])
    assert any(value.abs().max() > 0 for value in got[0].values())


def test_a_loss_that_averages_stops_the_step_by_name(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_learner_loss_for_test.py").write_text(
        "from trainer.algorithms.losses import loss_stats\n"
        "def loss(inputs):\n    return (-inputs.advantages_L * inputs.logprobs_L).mean(), loss_stats(inputs)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    algorithm = AlgorithmConfig(loss="own_learner_loss_for_test.loss")
    learner = make_learner(replace(run_config(tiny_dir), algorithm=algorithm))
    with pytest.raises(ValueError, match=r"algorithm\.loss=own_learner_loss_for_test\.loss must give one"):
        learner.train_step([pack(sequences(3))], step=0)
