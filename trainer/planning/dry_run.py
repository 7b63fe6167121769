"""Loads what a run would check first, prints objective and plan, and refuses what cannot fit. Starts nothing."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trainer.builtin import tiny_model
from trainer.config.errors import ConfigurationError, Problem
from trainer.config.model_paths import model_paths
from trainer.config.objective import describe_critic, describe_objective, describe_rollout
from trainer.config.schema.model import LoraConfig
from trainer.learner.errors import ModelError
from trainer.pipeline.agent_inputs import check_agent
from trainer.pipeline.inputs import check_torchvision, ensure_model, with_model_directory
from trainer.pipeline.preflight import check_files, check_own_functions, preflight
from trainer.planning.model import model_shape
from trainer.planning.plan import plan_run, problems
from trainer.planning.report import in_words
from trainer.planning.seats import Seating, seat
from trainer.planning.sizes import GIB, Device, Workload
from weight_sync.device.host_memory import host_memory
from weight_sync.device.select import build, get_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.config.schema import RunConfig
    from trainer.pipeline.inputs import Inputs
    from trainer.planning.sizes import ModelShape


def dry_run(
    cfg: RunConfig,
    *,
    device_memory_gib: float | None,
    response_tokens: float | None,
    nodes: Sequence[int] | None = None,
) -> None:
    """
    Args:
        device_memory_gib: plan for devices of this size that need not be here, nor need the engine's package; all else
            is checked. None asks the device layer and, where Ray is started on this host, its memory.
        response_tokens: mean length of the answers; None if that is not known.
        nodes: devices of every node of a cluster that need not be here, the driver's node first, for a configuration
            that joins one; None seats nobody.

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
        check_torchvision()
        check_own_functions(cfg)
        inputs, _ = check_files(cfg, agent=check_agent(cfg), is_device_here=False)
        device = Device(name="given", total_bytes=int(device_memory_gib * GIB), is_shared=False)
    seating = Seating() if nodes is None else _seating(cfg, nodes, is_elsewhere=device_memory_gib is not None)
    if tiny_model.BUILTIN_TINY in model_paths(cfg).values():
        asyncio.run(ensure_model(cfg))
    named = with_model_directory(cfg)
    plan = plan_run(
        cfg,
        _shape(named, named.model.path, key="model.path"),
        device,
        critic=_critic_shape(named),
        teacher=_teacher_shape(named),
        workload=_workload(cfg, inputs, response_tokens=response_tokens),
        host_bytes=host_bytes,
        homes=seating.homes,
    )
    sys.stdout.write(_objective(cfg) + "\n" + in_words(plan, cfg, seats=seating.lines))
    sys.stdout.flush()
    # Both look at how devices are paired: said once.
    if found := dict.fromkeys([*problems(plan, cfg), *seating.problems]):
        raise ConfigurationError(found)


def _objective(cfg: RunConfig) -> str:
    critic = f"{describe_critic(cfg.critic, policy_lr=cfg.learner.lr)}\n" if cfg.algorithm.uses_critic else ""
    return f"objective: {describe_objective(cfg.algorithm)}\n{critic}rollout: {describe_rollout(cfg)}\n"


def _seating(cfg: RunConfig, nodes: Sequence[int], *, is_elsewhere: bool) -> Seating:
    """Who sits where. Devices that are elsewhere are of the kind that `device` names; `auto` takes what is here, or,
    if that is no accelerator, what Ray calls a GPU.

    Raises:
        ConfigurationError: the devices are not such as nodes are counted by.
    """
    name = cfg.device.name
    backend = get_backend() if name == "auto" else build(name)
    if backend.ray_resource is not None:
        return seat(cfg, nodes, backend=backend.name, resource=backend.ray_resource)
    if is_elsewhere and name == "auto":
        return seat(cfg, nodes, backend="GPU", resource="GPU")
    allowed = f"counts accelerators, and the device is {backend.name}: its processes are seated by CPUs alone"
    do = "leave --nodes out, or plan for accelerators that are elsewhere: --device-memory-gib N, without device=cpu"
    raise ConfigurationError([Problem(key="--nodes", got=",".join(map(str, nodes)), allowed=allowed, do=do)])


def _critic_shape(cfg: RunConfig) -> ModelShape | None:
    if not cfg.algorithm.uses_critic or cfg.critic.shared_backbone:
        return None
    return _shape(cfg, cfg.model.path if cfg.critic.path is None else cfg.critic.path, key="critic.path")


def _teacher_shape(cfg: RunConfig) -> ModelShape | None:
    path = cfg.algorithm.kl.path
    whole = replace(cfg, model=replace(cfg.model, lora=LoraConfig()))  # adapters are the policy's
    return None if path is None else _shape(whole, path, key="algorithm.kl.path")


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
        num_evaluated=sum(len(one.prompts) * one.num_samples for one in inputs.evaluation) if evaluates else 0,
    )


def _here(cfg: RunConfig) -> tuple[Device, Inputs]:
    """The device that the run would use, after every check that the run would make."""
    checked = preflight(cfg)
    backend = checked.backend
    if (reason := backend.why_unavailable()) is not None:  # on a cluster that is joined it may be elsewhere
        do = "plan for devices that are elsewhere: --device-memory-gib N"
        raise ConfigurationError([Problem(key="device", got=backend.name, allowed=f"is not here: {reason}", do=do)])
    backend.set_device(0)
    total_bytes = backend.memory_info()[1]
    is_shared = backend.ray_resource is None
    return Device(name=backend.name, total_bytes=total_bytes, is_shared=is_shared), checked.inputs


def _shape(cfg: RunConfig, path: str, *, key: str) -> ModelShape:
    try:
        return model_shape(cfg.model, path)
    except ModelError as error:
        raise ConfigurationError([Problem(key=key, got=path, allowed=" ".join(str(error).split()))]) from error
