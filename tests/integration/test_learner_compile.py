"""`learner.compile` with the real compiler."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from tests.fakes.learner import gradients, make_learner, pack, process_group, run_config, save_tiny, sequences

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_blocks_give_the_same_gradients_and_names(tmp_path: Path) -> None:
    with process_group(tmp_path / "store"):
        directory = save_tiny(tmp_path / "model")
        plain, compiled = (make_learner(run_config(directory, compile=flag)) for flag in (False, True))
        for batch in (pack(sequences(5)), pack(sequences(7, seed=1))):
            expected = gradients(plain, [batch])
            for name, tensor in gradients(compiled, [batch]).items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
