"""What the engine is started with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.engine.launch import _known

if TYPE_CHECKING:
    import pytest


def test_end_tokens_that_the_model_cannot_sample_are_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    assert _known({7, 0, 127, 128, -1}, 128) == [0, 7, 127]
    assert "[-1, 128] are not in the model's vocabulary of 128" in caplog.text
    caplog.clear()
    assert _known({7, 0}, 128) == [0, 7]
    assert caplog.text == ""
