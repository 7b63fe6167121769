"""`telemetry`: logs, metrics and what is drawn on the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    log_level: Literal["debug", "info", "warning", "error"] = key("info", "Level of log.txt and the screen.")
    progress: Literal["auto", "rich", "plain", "off"] = key(
        "auto", "Display: a live panel on a terminal, one line per step elsewhere."
    )
    tensorboard: bool = key(True, "Write TensorBoard events to `run_dir/tb`.")
    trace: bool = key(True, "Write `run_dir/trace.json` for Perfetto.")
    wandb: bool = key(False, "Send metrics to Weights & Biases too; needs the extra `wandb`.")
    wandb_project: str = key("tandem", "Project in Weights & Biases.")
    wandb_entity: str = key("", "User or team that the project belongs to; empty means the default of the account.")
    wandb_group: str = key("", "Group that the run is shown in; empty means none.")
    wandb_tags: str = key("", "Tags of the run, joined by `+`.")
    record_trajectories: bool = key(
        True,
        "Write every group to `run_dir/trajectories`, before any filter, and every evaluation's answers to "
        "`run_dir/evaluations`.",
    )
    trajectories_gib: float | None = key(
        20.0,
        "GiB that `run_dir/trajectories` may hold at most, and `run_dir/evaluations` as many: what comes later is "
        "counted and not written. A token takes about 20 bytes. null for no bound.",
        gt=0,
    )
