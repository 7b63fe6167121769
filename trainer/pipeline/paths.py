"""Paths of the configuration as the actors read them: Ray starts those in the directory where `ray start` ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.plugins import is_file
from rollout.reward.registry import BUILTIN_REWARDS, lookup
from trainer.builtin import tiny_model
from trainer.config.model_paths import with_model_paths
from trainer.pipeline.inputs import with_model_directory

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig


def for_actors(cfg: RunConfig) -> RunConfig:
    """The configuration with built-in models by their directories, and relative paths made absolute.

    A name that is no directory here stays as it is: it may be one of the hub.

    Raises:
        DataError: there is no such reward, or no such file.
    """
    reward = cfg.task.reward
    task = replace(cfg.task, reward=replace(reward, name=_located_reward(reward.name)))
    return replace(with_located_models(cfg), task=task)


def with_located_models(cfg: RunConfig) -> RunConfig:
    """The part of it that an engine needs, whatever has become of the reward since the run began."""
    cfg = with_model_paths(with_model_directory(cfg), _located)
    return replace(cfg, model=replace(cfg.model, tokenizer_path=_located(cfg.model.tokenizer_path)))


def _located(path: str) -> str:
    is_here = Path(path).is_dir() or Path(path) == tiny_model.cached_path()  # which may not have been made yet
    return str(Path(path).absolute()) if path and is_here else path


def _located_reward(name: str) -> str:
    """A built-in one by its name, a function by the absolute path of its file or by its module."""
    if name in BUILTIN_REWARDS:
        return name
    target = lookup(name).target
    return target if is_file(target.rpartition(":")[0]) else name
