"""`learner.compile` with the real compiler."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.fakes.learner import (
    gradients,
    make_learner,
    pack,
    process_group,
    run_config,
    save_tiny,
    sequences,
)
from tests.fakes.rewarded import config, filler, rewarded
from trainer.learner.fit import largest_micro_batch

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_blocks_give_the_same_gradients_and_names(tmp_path: Path) -> None:
    with process_group(tmp_path / "store"):
        directory = save_tiny(tmp_path / "model")
        plain, compiled = (make_learner(run_config(directory, compile=flag)) for flag in (False, True))
        for batch in (pack(sequences(5)), pack(sequences(7, seed=1))):
            expected = gradients(plain, [batch])
            for name, tensor in gradients(compiled, [batch]).items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize(
    "changes",
    [
        {"advantage_estimator": "grpo"},
        {"advantage_estimator": "grpo", "kl": {"coef": 0.1}},
        {"advantage_estimator": "gae", "critic": {"path": "llama"}},
        {"advantage_estimator": "gae", "critic": {"shared_backbone": True}},
    ],
)
def test_after_compiling_ahead_no_step_waits_for_the_compiler(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process_group(tmp_path / "store"):
        directory = save_tiny(tmp_path / "model")
        save_tiny(tmp_path / "llama", "llama")
        monkeypatch.chdir(tmp_path)  # where the critic is, whose blocks are not the policy's
        cfg = config(directory, **changes)
        cfg = replace(
            cfg,
            learner=replace(cfg.learner, compile=True, max_tokens_per_micro_batch=100),
            task=replace(cfg.task, max_prompt_tokens=5),
            rollout=replace(cfg.rollout, max_response_tokens=30),
        )
        learner = make_learner(cfg)
        torch.compiler.reset()  # a test before this one may have compiled the same block
        before = counters["stats"]["unique_graphs"]
        learner.rehearse(largest_micro_batch(cfg, 100))
        compiled_ahead = counters["stats"]["unique_graphs"]
        assert compiled_ahead > before
        (parts, rewards), (one, of_one) = rewarded(4), rewarded(2, seed=1)
        for step, (batch, given) in enumerate(((pack(parts), rewards), (pack(one[:1]), of_one), (filler(), rewards))):
            learner.train_step([batch], step=step, **given)
        assert counters["stats"]["unique_graphs"] == compiled_ahead
