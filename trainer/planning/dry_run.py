"""Loads what a run would check first, prints objective and plan, and refuses what cannot fit. Starts nothing."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import numpy as np

from trainer.builtin import tiny_model
from trainer.config.errors import ConfigurationError, Problem
from trainer.config.objective import describe_critic, describe_objective, describe_rollout
from trainer.learner.errors import ModelError
from trainer.pipeline.inputs import ensure_model, load_inputs, with_model_directory
from trainer.pipeline.preflight import check_agent, check_own_functions, preflight
from trainer.planning.model import model_shape
from trainer.planning.plan import plan_run, problems
from trainer.planning.report import in_words
from trainer.planning.sizes import GIB, Device, Workload
from weight_sync.device.host_memory import host_memory

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig
    from trainer.pipeline.inputs import Inputs
    from trainer.planning.sizes import ModelShape


def dry_run(cfg: RunConfig, *, device_memory_gib: float | None, response_tokens: float | None) -> None:
    """
    Args:
        device_memory_gib: plan for devices of this size that need not be here; None asks the device layer and, where
            Ray is started on this host, its memory.
        response_tokens: mean length of the answers; None if that is not known.

    Raises:
        ConfigurationError, DataError: the run would be refused, or does not fit; the plan is printed all the same.
    """
    _check_mean(cfg, response_tokens)
    host_bytes = None
    if device_memory_gib is None:
        device, inputs = _here(cfg)
        if cfg.ray.address == "local":
            _, host_bytes = host_memory()
    else:
        check_own_functions(cfg)
        check_agent(cfg)
        inputs = load_inputs(cfg)
        device = Device(name="given", total_bytes=int(device_memory_gib * GIB), is_shared=False)
    if tiny_model.BUILTIN_TINY in {cfg.model.path, cfg.critic.path}:
        asyncio.run(ensure_model(cfg))
    named = with_model_directory(cfg)
    plan = plan_run(
        cfg,
        _shape(named, named.model.path, key="model.path"),
        device,
        critic=_critic_shape(named),
        workload=_workload(cfg, inputs, response_tokens=response_tokens),
        host_bytes=host_bytes,
    )
    sys.stdout.write(f"objective: {describe_objective(cfg.algorithm)}\n")
    if cfg.algorithm.uses_critic:
        sys.stdout.write(f"{describe_critic(cfg.critic, policy_lr=cfg.learner.lr)}\n")
    sys.stdout.write(f"rollout: {describe_rollout(cfg)}\n")
    sys.stdout.write("\n" + in_words(plan, cfg))
    sys.stdout.flush()
    if found := problems(plan, cfg):
        raise ConfigurationError(found)


def _critic_shape(cfg: RunConfig) -> ModelShape | None:
    if not cfg.algorithm.uses_critic or cfg.critic.shared_backbone:
        return None
    return _shape(cfg, cfg.model.path if cfg.critic.path is None else cfg.critic.path, key="critic.path")


def _check_mean(cfg: RunConfig, response_tokens: float | None) -> None:
    longest = cfg.rollout.max_response_tokens
    if response_tokens is None or response_tokens <= longest:
        return
    allowed = f"a mean is at most the longest answer, rollout.max_response_tokens={longest}"
    raise ConfigurationError([Problem(key="--response-tokens", got=f"{response_tokens:g}", allowed=allowed)])


def _workload(cfg: RunConfig, inputs: Inputs, *, response_tokens: float | None) -> Workload:
    evaluates = bool(cfg.trainer.eval_every) or cfg.trainer.eval_at_start or cfg.trainer.eval_at_end
    return Workload(
        prompt_tokens=float(np.mean([len(prompt.token_ids) for prompt in inputs.train.prompts])),
        response_tokens=response_tokens,
        num_held_out=len(inputs.evaluation) if evaluates else 0,
    )


def _here(cfg: RunConfig) -> tuple[Device, Inputs]:
    """The device that the run would use, after every check that the run would make."""
    checked = preflight(cfg)
    backend = checked.backend
    backend.set_device(0)
    total_bytes = backend.memory_info()[1]
    is_shared = backend.ray_resource is None
    return Device(name=backend.name, total_bytes=total_bytes, is_shared=is_shared), checked.inputs


def _shape(cfg: RunConfig, path: str, *, key: str) -> ModelShape:
    try:
        return model_shape(cfg.model, path)
    except ModelError as error:
        raise ConfigurationError([Problem(key=key, got=path, allowed=" ".join(str(error).split()))]) from error
