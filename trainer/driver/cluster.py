"""The Ray cluster of a run, its own or a joined one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray._private import ray_constants, services
from ray._private import worker as ray_worker
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.config.schema import RayConfig, problem
from trainer.driver.placement import (
    DEVICES_NEEDED,
    Node,
    assign_free_nodes,
    check_device_is_named,
    check_fits,
    describe_bundles,
    describe_idle_devices,
    describe_nodes,
)
from trainer.driver.process_cleaner import ProcessCleaner
from trainer.driver.scratch import Scratch, sweep
from trainer.errors import ConfigurationError, Problem, one_line
from trainer.subprograms import ROOT
from trainer.telemetry.last_words import copy_logs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer.config.schema import RunConfig
    from trainer.driver.placement import Bundle, Placement
    from weight_sync.device.base import Backend


log = logging.getLogger(__name__)

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TOKEN = secrets.token_hex(32)
"""For all clusters of this process, since Ray reads it once."""
POLL_INTERVAL_S = 1.0
"""Between two checks of Ray's control service."""
_ADDED_BY_RAY = (
    "node:", "memory", "object_store_memory", "accelerator_type:", "bundle_group_", "CPU_group", "GPU_group",
)  # fmt: skip
"""Prefixes of resources that no actor asks for."""


class ClusterLost(RuntimeError):
    """Ray itself has ended."""


class Cluster:
    """A connection to Ray. `start` blocks for some seconds: call it in a thread."""

    def __init__(self, placement: Placement, *, end: contextlib.ExitStack, scratch: Path | None = None) -> None:
        """`end` stops and removes what was started; `scratch` is Ray's session directory on a private cluster."""
        self.placement = placement
        """On a joined cluster with a node for every actor."""
        self._end, self._scratch = end, scratch

    @classmethod
    def start(
        cls,
        cfg: RunConfig,
        placement: Placement,
        backend: Backend,
        *,
        scratch: Scratch | None = None,
        last_words: Mapping[str, object] | None = None,
    ) -> Cluster:
        """Start the private cluster, or join `ray.address` and reserve there what every actor needs. Raises
        ConfigurationError if there are too few devices, no cluster at that address, or no room on it.

        Args:
            scratch: may be begun already; a private cluster closes it when it stops.
            last_words: what is written if this process is killed; see `ProcessCleaner`.
        """
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if cfg.ray.address != "local":
            return cls._join(cfg, placement, backend)
        sweep()
        scratch = Scratch() if scratch is None else scratch
        resource = backend.ray_resource
        devices = {resource: backend.num_devices()} if resource else {}
        try:
            cluster = cls._start_own(cfg, placement, backend, devices, scratch, last_words)
        except Exception as error:
            # Ray gives a node 30 s, without a setting for it, and then raises a plain `Exception`.
            if not isinstance(error, TimeoutError) and "timed out" not in str(error):
                raise
            log.warning("Ray did not start in time (was the host suspended?); starting it again: %s", one_line(error))
            cluster = cls._start_own(cfg, placement, backend, devices, scratch, last_words)
        if resource:
            here = Node(node_id="here", address="this host", resources=devices)
            _warn_of_idle_devices(dict.fromkeys(placement.bundles, here.node_id), placement, [here], resource)
        return cluster

    @classmethod
    def _start_own(
        cls,
        cfg: RunConfig,
        placement: Placement,
        backend: Backend,
        devices: dict[str, int],
        scratch: Scratch,
        last_words: Mapping[str, object] | None,
    ) -> Cluster:
        """Start Ray on this host; a failed start leaves nothing."""
        with contextlib.ExitStack() as stack:
            stack.callback(scratch.close)
            if not scratch.is_begun:
                scratch.begin(cfg)
                scratch.set_device(cfg, backend)
            stack.callback(ProcessCleaner(scratch.run_id, scratch.path, last_words).close)
            if _keep_token_in(scratch.path):
                stack.callback(os.environ.pop, TOKEN_PATH, None)
            stack.callback(ray.shutdown)
            stack.callback(scratch.end_servers)
            with _separate_sessions():
                ray.init(
                    address="local",
                    num_cpus=cfg.ray.num_cpus if cfg.ray.num_cpus else int(placement.num_cpus + 1),
                    num_gpus=devices.get("GPU", 0),
                    resources={name: num for name, num in devices.items() if name != "GPU"} or None,
                    object_store_memory=int(cfg.ray.object_store_gib * 2**30),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env=scratch.runtime_env,
                    job_config=_OwnPackagesFirst(),
                    _temp_dir=str(scratch.path),
                    # Or Ray starts a process per core that no actor can use, since each has another environment.
                    _system_config={"prestart_worker_first_driver": False},
                )
            return cls(placement, end=stack.pop_all(), scratch=scratch.path)

    @classmethod
    def _join(cls, cfg: RunConfig, placement: Placement, backend: Backend) -> Cluster:
        address = cfg.ray.address
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, job_config=_OwnPackagesFirst())
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            message = f"no Ray cluster can be reached there: {error}"
            hint = (
                "start one with `ray start --head`, or use ray.address=local; if it runs, and was started where Ray "
                "has a token (~/.ray/auth_token), set RAY_AUTH_MODE=token here too"
            )
            raise ConfigurationError([problem(cfg, "ray.address", message, hint)]) from error
        with contextlib.ExitStack() as stack:
            stack.callback(ray.shutdown)
            sizes = {"num_cpus": cfg.ray.num_cpus, "object_store_gib": cfg.ray.object_store_gib}
            if unread := [f"ray.{key}={size}" for key, size in sizes.items() if size != getattr(RayConfig(), key)]:
                log.info("the cluster at %s has its sizes from `ray start`: %s not read", address, ", ".join(unread))
            resource, there = backend.ray_resource, ray.cluster_resources()
            check_device_is_named(cfg, backend=backend.name, resource=resource, there=there)
            if resource is not None:
                num_devices = int(there.get(resource, 0))
                check_fits(cfg, placement, backend=backend.name, num_devices=num_devices, where="the Ray cluster")
            return cls(_reserve(cfg, placement, resource=resource), end=stack.pop_all())

    async def watch(self) -> None:
        """Raises ClusterLost when the control service of the private cluster has ended, while the run can still be
        saved: Ray ends this process a minute later.

        Waits for: its interval. Unblocked by: cancellation.
        """
        node = ray_worker._global_node
        while self._scratch is not None and node is not None:
            if ray_constants.PROCESS_TYPE_GCS_SERVER in dict(node.dead_processes()):
                raise ClusterLost(
                    "Ray's control service (gcs_server) has ended, perhaps killed for lack of memory; check the "
                    "memory of this host, and start again with the same run_dir"
                )
            await asyncio.sleep(POLL_INTERVAL_S)

    def stop(self, *, keep_logs_in: Path | None) -> None:
        """Leave the cluster; end a private one and remove its scratch directory. Idempotent. The output of actors is
        copied to `keep_logs_in` first; a disk that refuses it keeps no process alive."""
        with self._end:
            if keep_logs_in is not None and self._scratch is not None:
                try:
                    copy_logs(self._scratch, keep_logs_in)
                except OSError as error:
                    log.warning("the output of the actors is not kept in %s: %s", keep_logs_in, error)


class _OwnPackagesFirst(JobConfig):
    """Workers import from our packages first, then from the working directory, where plug-ins may be. Ray would search
    the working directory first, where a file may have the name of a module of ours; it inserts the last path last."""

    def __init__(self) -> None:
        super().__init__(_py_driver_sys_path=[str(Path.cwd()), str(ROOT)])

    def _runtime_env_has_working_dir(self) -> bool:
        """If so, Ray adds nothing to the list."""
        return True


def _keep_token_in(scratch: Path) -> bool:
    """Keeps the token of Ray's clusters in `scratch` where Ray cannot keep it in `~/.ray`; returns whether it does."""
    if {"RAY_AUTH_TOKEN", TOKEN_PATH} & os.environ.keys():
        return False
    try:
        home = Path.home() / ".ray"
        home.mkdir(exist_ok=True)
        if not (home / "auth_token").is_file():
            tempfile.TemporaryFile(dir=home).close()
        return False
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        token = scratch / "auth_token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        os.environ[TOKEN_PATH] = str(token)
        return True


@contextlib.contextmanager
def _separate_sessions() -> Iterator[None]:
    """Ray's daemons start in separate sessions while the block runs. Otherwise a signal to the driver's process group
    (a closed terminal, a scheduler) ends them and every actor while the driver finishes and saves its step. Ray 2.60
    has no setting for it."""
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


# --- nodes of a joined cluster ---


def _reserve(cfg: RunConfig, placement: Placement, *, resource: str | None) -> Placement:
    """Reserve the resources of every actor on the node chosen for it. Raises ConfigurationError if the cluster is too
    small, or others hold its resources for `ray.placement_timeout_s`.

    Each unit has a placement group, which ends with the driver: a single engine can move when its node is lost, and an
    engine that shares devices stays on one node with its learners.
    """
    nodes = _nodes()
    chosen = assign_free_nodes(placement, nodes, _free())
    # The target is soft: a group whose node is full or lost goes elsewhere. A label selector on the node's id is hard:
    # a lost engine could not come back.
    groups = [
        placement_group(
            [dict(placement.bundles[name]) for name in unit],
            "STRICT_PACK",
            name=unit[-1],
            _soft_target_node_id=chosen[unit[-1]],
        )
        for unit in placement.units
    ]
    give_up = time.monotonic() + cfg.ray.placement_timeout_s
    is_ready = [group.wait(max(0.0, give_up - time.monotonic())) for group in groups]
    if not all(is_ready):
        late = [name for unit, ready in zip(placement.units, is_ready, strict=True) if not ready for name in unit]
        no_room = _no_room(cfg, {name: placement.bundles[name] for name in late}, nodes)
        for group in groups:
            remove_placement_group(group)
        raise ConfigurationError([no_room])
    names = [[name for name, node_id in chosen.items() if node_id == node.node_id] for node in nodes]
    places = (
        f"{node.address}{' (driver)' if node.is_driver else ''}: {', '.join(here) or 'none'}"
        for node, here in zip(nodes, names, strict=True)
    )
    log.info("nodes: %s", "; ".join(places))
    if resource is not None:
        _warn_of_idle_devices(chosen, placement, nodes, resource)
    strategies = {
        name: PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        for unit, group in zip(placement.units, groups, strict=True)
        for index, name in enumerate(unit)
    }
    return replace(placement, strategies=strategies)


def _warn_of_idle_devices(chosen: dict[str, str], placement: Placement, nodes: list[Node], resource: str) -> None:
    if idle := describe_idle_devices(chosen, placement.bundles, nodes, resource=resource):
        log.warning("this run uses %s; learner.num_ranks and rollout.num_replicas set how many it takes", idle)


def _nodes() -> list[Node]:
    """Nodes that are alive, the driver's first."""
    own = ray.get_runtime_context().get_node_id()
    found = [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources=_usable(node["Resources"]),
            is_driver=node["NodeID"] == own,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: not node.is_driver)


def _free() -> dict[str, Bundle]:
    """Id of a node -> what nobody holds of it, as Ray's head knew at most a second ago."""
    return {node: _usable(there_is) for node, there_is in available_resources_per_node().items()}


def _usable(resources: Bundle) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not name.startswith(_ADDED_BY_RAY)}


def _no_room(cfg: RunConfig, late: dict[str, Bundle], nodes: list[Node]) -> Problem:
    """Call it while the placement groups hold their shares."""
    free = _free()
    left = [replace(node, resources=free.get(node.node_id, {})) for node in nodes]
    return Problem(
        key=DEVICES_NEEDED,
        value=f"no room for {', '.join(late)}: {describe_bundles(late)}",
        message=f"the Ray cluster is large enough ({describe_nodes(nodes)}), but after "
        f"ray.placement_timeout_s={cfg.ray.placement_timeout_s:g} no node had that left, besides what others hold and "
        f"what was reserved for the rest of this run: {describe_nodes(left)}",
        hint="`ray status` shows who holds what; wait for others, or ask for fewer ranks or replicas",
    )
