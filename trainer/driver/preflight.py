"""Everything that can be known to be wrong before anything starts."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.algorithms.group_filter import own_group_filter
from trainer.config.algorithm import traits_of
from trainer.config.own_function import is_own, load_own
from trainer.config.rules import estimator_problems
from trainer.config.schema import model_paths
from trainer.driver.actors import make_source, why_engines_read_weights
from trainer.driver.checkpointing import Resumed, find_resume
from trainer.driver.inputs import (
    Inputs,
    check_agent,
    check_engine_package,
    check_torchvision,
    load_inputs,
)
from trainer.driver.placement import Placement, check_cpus, check_fits, plan_placement
from trainer.errors import ConfigurationError, ModelError, Problem
from trainer.learner.weights import check_weights, is_random_init
from weight_sync.device.errors import DeviceError
from weight_sync.device.select import build, get_backend

if TYPE_CHECKING:
    from rollout.agent.loop import AgentLoop
    from trainer.config.schema import RunConfig
    from weight_sync.device.base import Backend


log = logging.getLogger(__name__)

_REACH_S = 5.0
"""For a connection to the head of a Ray cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a run is built from, all of it known to work."""

    backend: Backend
    placement: Placement
    inputs: Inputs
    resumed: Resumed | None


def preflight(cfg: RunConfig) -> Checked:
    """Check devices, packages, checkpoint, data and reward. Blocking; call it in the main thread, outside a loop.

    Raises:
        ConfigurationError, DataError: with what to do. Nothing is left behind.
    """
    check_engine_package()
    check_torchvision()
    check_own_functions(cfg)
    agent = check_agent(cfg)
    backend = _backend(cfg)
    _check_sleep(cfg, backend)
    placement = plan_placement(cfg, resource=backend.ray_resource)
    _check_ray_address(cfg.ray.address)
    if cfg.ray.address == "local":
        num_devices = backend.num_devices() if backend.ray_resource else 0
        check_fits(cfg, placement, backend=backend.name, num_devices=num_devices, where="this host")
        check_cpus(cfg, placement)
    inputs, resumed = check_files(cfg, agent=agent)
    return Checked(backend=backend, placement=placement, inputs=inputs, resumed=resumed)


def _check_ray_address(address: str) -> None:
    """Raises ConfigurationError if nobody answers at `address`, where it is HOST:PORT. Ray itself would try for half a
    minute, with a screen of retries, and after the run directory was made."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        return  # `local`, `auto`, or an address that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        allowed = f"no Ray cluster can be reached there: {getattr(error, 'strerror', None) or error}"
        do = "start one with `ray start --head`, or use ray.address=local"
        raise ConfigurationError([Problem(key="ray.address", got=address, allowed=allowed, do=do)]) from error


def _check_sleep(cfg: RunConfig, backend: Backend) -> None:
    """Raises ConfigurationError where engines would keep the memory that learners on the same devices need."""
    if not cfg.mode.shares_devices or backend.ray_resource is None or backend.capabilities().sleep_mode:
        return
    allowed = f"engines on {backend.name} cannot give their memory back with the version that is installed here"
    do = "use mode=async or mode=sync, with devices of their own, or a newer version (docs/backends.md)"
    raise ConfigurationError([Problem(key="mode.name", got=cfg.mode.name, allowed=allowed, do=do)])


def check_files(
    cfg: RunConfig, *, agent: AgentLoop | None = None, is_device_here: bool = True
) -> tuple[Inputs, Resumed | None]:
    """Check the files of models, checkpoint, data and reward.

    Args:
        agent: as for `load_inputs`.
        is_device_here: as for `find_resume`.

    Raises:
        ConfigurationError, DataError: with what to do.
    """
    _check_weights(cfg)  # first: whether they are drawn is part of what a checkpoint compares
    directory = Path(cfg.run_dir) / "checkpoints" if cfg.run_dir else None
    resumed = find_resume(cfg, directory, is_device_here=is_device_here)
    inputs = load_inputs(cfg, agent=agent)
    make_source(cfg, inputs, resumed)  # raises if the data does not go with its selection, or with the checkpoint
    return inputs, resumed


def look_again(cfg: RunConfig, checked: Checked, checkpoints: Path) -> Checked:
    """`checked` with the checkpoint that is the newest one now that the run directory is ours: while `preflight` read
    the data, a process that was about to end may have saved one more there, and deleted the one that it found.

    Args:
        checkpoints: of the run directory.

    Raises:
        ConfigurationError, DataError: as `preflight`.
    """
    resumed = find_resume(cfg, checkpoints)
    make_source(cfg, checked.inputs, resumed)  # raises if the data is not that of the checkpoint
    return replace(checked, resumed=resumed)


def check_own_functions(cfg: RunConfig) -> None:
    """Import what is given by dotted path (estimator, loss, group filter), and check what the estimator needs.

    Raises:
        ConfigurationError: one does not import, is no function, does not take its numbers, or does not go together
            with the rest of the configuration.
    """
    algorithm = cfg.algorithm
    if is_own(algorithm.loss):
        load_own(algorithm.loss, key="algorithm.loss", args=algorithm.loss_args)
    own_group_filter(algorithm)
    if is_own(algorithm.advantage):
        problems = list(estimator_problems(cfg, traits_of(algorithm)))
        if problems:
            raise ConfigurationError(problems)


def tell_weights(cfg: RunConfig) -> None:
    """Logs where the weights of the policy come from."""
    model = cfg.model
    text = f"drawn from seed {cfg.seed}" if model.random_weights else f"those of {model.path}"
    log.info("weights: %s", text)


def _check_weights(cfg: RunConfig) -> None:
    """Models in directories are checked here; those of the hub when the learner has them, since they may be large.

    Raises:
        ConfigurationError: a directory has no weights and they are not to be drawn, or has some that would not be
            read; or engines would load weights that are drawn: theirs would be others.
    """
    model, also = cfg.model, "model.random_weights"
    for key, path in model_paths(cfg).items():
        directory = Path(path).expanduser()
        if not directory.is_dir():
            continue
        try:
            check_weights(directory, is_random_init=is_random_init(model, path))
        except ModelError as error:
            raise ConfigurationError([Problem(key=key, got=path, allowed=str(error), also=(also,))]) from error
    if not model.random_weights:
        return
    if not Path(model.path).expanduser().is_dir():
        allowed = f"must be the directory of a config without weights with {also}=true, which draws them"
        raise ConfigurationError([Problem(key="model.path", got=model.path, allowed=allowed, also=(also,))])
    if key := why_engines_read_weights(cfg):
        allowed = f"must be a directory with weights: with {key} engines load them, and this one has a config alone"
        do = "save the weights there (save_pretrained), or name another model"
        raise ConfigurationError([Problem(key="model.path", got=model.path, allowed=allowed, do=do, also=(key, also))])


def _backend(cfg: RunConfig) -> Backend:
    """On a cluster that is joined, a device that is named need not be here: learners and engines have to see it."""
    name, is_elsewhere = cfg.device.name, cfg.ray.address != "local" and cfg.device.name != "auto"
    try:
        backend = (build if is_elsewhere else get_backend)(name, cpu_threads=cfg.device.cpu_threads)
        problems = backend.check_env("driver", dict(os.environ))
    except DeviceError as error:
        raise ConfigurationError([Problem(key="device", got=cfg.device.name, allowed=str(error))]) from error
    if problems:
        raise ConfigurationError([Problem(key="device", got=backend.name, allowed=text) for text in problems])
    return backend
