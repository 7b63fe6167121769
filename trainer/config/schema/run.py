"""`RunConfig`: the whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema.algorithm import AlgorithmConfig
from trainer.config.schema.checkpoint import CheckpointConfig
from trainer.config.schema.critic import CriticConfig
from trainer.config.schema.device import DeviceConfig
from trainer.config.schema.field import key
from trainer.config.schema.learner import LearnerConfig
from trainer.config.schema.mode import ModeConfig
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.ray import RayConfig
from trainer.config.schema.rollout import RolloutConfig
from trainer.config.schema.task import TaskConfig
from trainer.config.schema.telemetry import TelemetryConfig
from trainer.config.schema.trainer import TrainerConfig
from trainer.config.schema.weight_sync import WeightSyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Typed, sealed and complete: built once by `trainer.config.load`, then only read."""

    name: str = key("tiny", "Name of the run; part of the default run directory.")
    run_dir: str = key("", "Directory of this run; empty means `runs/<name>/<time>`.", is_path=True)
    seed: int = key(0, "Seeds every random choice of the run.", ge=0, le=2**32 - 1)
    device: DeviceConfig = key(factory=DeviceConfig, doc="Accelerator.")
    model: ModelConfig = key(factory=ModelConfig, doc="The policy.")
    task: TaskConfig = key(factory=TaskConfig, doc="Prompts and rewards.")
    algorithm: AlgorithmConfig = key(factory=AlgorithmConfig, doc="The objective.")
    critic: CriticConfig = key(factory=CriticConfig, doc="The value function of PPO.")
    mode: ModeConfig = key(factory=ModeConfig, doc="How far generation runs ahead.")
    rollout: RolloutConfig = key(factory=RolloutConfig, doc="Engines and sampling.")
    learner: LearnerConfig = key(factory=LearnerConfig, doc="Training.")
    weight_sync: WeightSyncConfig = key(factory=WeightSyncConfig, doc="Moving weights.")
    trainer: TrainerConfig = key(factory=TrainerConfig, doc="Length of the run and evaluation.")
    checkpoint: CheckpointConfig = key(factory=CheckpointConfig, doc="Saving and resuming.")
    telemetry: TelemetryConfig = key(factory=TelemetryConfig, doc="Logs and metrics.")
    ray: RayConfig = key(factory=RayConfig, doc="The Ray cluster.")
