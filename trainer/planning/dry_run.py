"""Loads what a run would check first, prints objective and plan, and refuses what cannot fit. Starts nothing."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import numpy as np

from trainer.builtin import tiny_model
from trainer.config.errors import ConfigurationError, Problem
from trainer.config.objective import describe_critic, describe_objective
from trainer.learner.errors import ModelError
from trainer.pipeline.inputs import ensure_model, load_inputs, with_model_directory
from trainer.pipeline.preflight import check_agent, check_own_functions, preflight
from trainer.planning.model import model_shape
from trainer.planning.plan import plan_run, problems
from trainer.planning.report import in_words
from trainer.planning.sizes import GIB, Device
from weight_sync.device.host_memory import host_memory

if TYPE_CHECKING:
    from rollout.prompts.source import PromptSet
    from trainer.config.schema import RunConfig
    from trainer.planning.sizes import ModelShape


def dry_run(cfg: RunConfig, *, device_memory_gib: float | None) -> None:
    """
    Args:
        device_memory_gib: plan for devices of this size that need not be here; None asks the device layer and, where
            Ray is started on this host, its memory.

    Raises:
        ConfigurationError, DataError: the run would be refused, or does not fit; the plan is printed all the same.
    """
    host_bytes = None
    if device_memory_gib is None:
        device, prompts = _here(cfg)
        if cfg.ray.address == "local":
            _, host_bytes = host_memory()
    else:
        check_own_functions(cfg)
        check_agent(cfg)
        prompts = load_inputs(cfg).train
        device = Device(name="given", total_bytes=int(device_memory_gib * GIB), is_shared=False)
    if tiny_model.BUILTIN_TINY in {cfg.model.path, cfg.critic.path}:
        asyncio.run(ensure_model(cfg))
    named = with_model_directory(cfg)
    critic = None
    if cfg.algorithm.uses_critic and not cfg.critic.shared_backbone:
        path = named.model.path if named.critic.path is None else named.critic.path
        critic = _shape(named, path, key="critic.path")
    plan = plan_run(
        cfg,
        _shape(named, named.model.path, key="model.path"),
        device,
        critic=critic,
        prompt_tokens=float(np.mean([len(prompt.token_ids) for prompt in prompts.prompts])),
        host_bytes=host_bytes,
    )
    sys.stdout.write(f"objective: {describe_objective(cfg.algorithm)}\n")
    if cfg.algorithm.uses_critic:
        sys.stdout.write(f"{describe_critic(cfg.critic, policy_lr=cfg.learner.lr)}\n")
    sys.stdout.write("\n" + in_words(plan, cfg))
    sys.stdout.flush()
    if found := problems(plan, cfg):
        raise ConfigurationError(found)


def _here(cfg: RunConfig) -> tuple[Device, PromptSet]:
    """The device that the run would use, after every check that the run would make."""
    checked = preflight(cfg)
    backend = checked.backend
    backend.set_device(0)
    total_bytes = backend.memory_info()[1]
    is_shared = backend.ray_resource is None
    return Device(name=backend.name, total_bytes=total_bytes, is_shared=is_shared), checked.inputs.train


def _shape(cfg: RunConfig, path: str, *, key: str) -> ModelShape:
    try:
        return model_shape(cfg.model, path)
    except ModelError as error:
        raise ConfigurationError([Problem(key=key, got=path, allowed=" ".join(str(error).split()))]) from error
