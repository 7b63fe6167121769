"""The models that a configuration names, and the keys that name them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.config.schema.run import RunConfig


def model_paths(config: RunConfig) -> dict[str, str]:
    """Key -> the model that it names, the policy first: a directory, a hub name or a built-in one. Keys that are null
    are left out."""
    named = {
        "model.path": config.model.path,
        "critic.path": config.critic.path,
        "algorithm.kl.path": config.algorithm.kl.path,
    }
    return {key: path for key, path in named.items() if path is not None}


def with_model_paths(config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    """`config` with `change` applied to every path of `model_paths`."""
    model, critic, kl = config.model, config.critic, config.algorithm.kl
    return replace(
        config,
        model=replace(model, path=change(model.path)),
        critic=critic if critic.path is None else replace(critic, path=change(critic.path)),
        algorithm=replace(config.algorithm, kl=kl if kl.path is None else replace(kl, path=change(kl.path))),
    )
