"""Weights & Biases; the package is optional and needed only here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class WandbSink:
    """Numbers go to the run called `run_name`. Files stay in `folder`."""

    name = "wandb"

    def __init__(self, folder: Path, *, project: str, run_name: str, config: Mapping[str, object]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project=project, name=run_name, dir=str(folder), config=dict(config), resume="allow")

    def write(self, record: Mapping[str, object]) -> None:
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        self._run.finish()
