"""Weights & Biases; the package is optional and needed only here."""

from __future__ import annotations

import importlib
import secrets
from typing import TYPE_CHECKING, Any

from trainer.config.convert import to_plain
from trainer.telemetry.run_dir import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainer.config.schema.run import RunConfig
    from trainer.telemetry.run_dir import RunDir


class WandbSink:
    """Numbers go to one run of the service per run directory, whose processes all go on with it.

    Files stay in the run directory. `step` is the axis of every chart, and not the service's own count of lines: that
    only grows, and what a resumed run makes again would be left out there.
    """

    name = "wandb"

    def __init__(self, config: RunConfig, run_dir: RunDir) -> None:
        """Raises ImportError if the package is missing, and what it raises."""
        wandb: Any = importlib.import_module("wandb")
        telemetry = config.telemetry
        tags = tuple(tag for tag in telemetry.wandb_tags.split("+") if tag)
        self._run = wandb.init(
            project=telemetry.wandb_project,
            entity=telemetry.wandb_entity or None,
            group=telemetry.wandb_group or None,
            tags=tags or None,
            name=config.name,
            id=run_id(run_dir.wandb_run_id),
            resume="allow",
            dir=str(run_dir.path),
            config=to_plain(config),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, object]) -> None:
        self._run.log({name: value for name, value in record.items() if isinstance(value, int | float)})

    def close(self) -> None:
        self._run.finish()


def run_id(file: Path) -> str:
    """What the service knows the run of this directory by: from `file`, which is written by the first process."""
    if file.exists() and (known := file.read_text(encoding="utf-8").strip()):
        return known
    new = secrets.token_hex(8)
    write_atomically(file, f"{new}\n")
    return new
