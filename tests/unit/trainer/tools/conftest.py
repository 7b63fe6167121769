"""The shape of a 7B model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.model_7b import QWEN_7B
from trainer.config.schema import ModelConfig
from trainer.tools.memory_plan import model_shape

if TYPE_CHECKING:
    from trainer.tools.memory_plan import ModelShape


@pytest.fixture(scope="session")
def shape_7b() -> ModelShape:
    return model_shape(ModelConfig(), QWEN_7B)
