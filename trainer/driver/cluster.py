"""The Ray cluster of a run, its own or a joined one."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
import uuid
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

from trainer.builtin.tiny_model import cache_dir
from trainer.config.schema import RayConfig
from trainer.driver.findings import problem
from trainer.driver.placement import (
    SIZES,
    Node,
    assign_free_nodes,
    check_device_is_named,
    check_fits,
    describe_bundles,
    describe_idle_devices,
    describe_nodes,
)
from trainer.driver.process_cleaner import RUN_ID_VAR, ProcessCleaner
from trainer.errors import ConfigurationError, Problem, one_line
from trainer.subprograms import ROOT
from trainer.telemetry.last_words import copy_logs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer.config.schema import RunConfig
    from trainer.driver.placement import Bundle, Placement
    from weight_sync.device.base import Backend


log = logging.getLogger(__name__)

SCRATCH_PREFIX = "tandem-ray-"
SCRATCH_LOCK = "lock"
"""The file in a scratch directory that its driver keeps locked."""
ENGINE_SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where vLLM puts its sockets."""
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""What torch compiles is kept with our other caches; by default it would stay in the temporary directory for good."""
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TOKEN = secrets.token_hex(32)
"""One for all clusters of this process, since Ray reads it once."""
POLL_INTERVAL_S = 1.0
"""Between two checks of Ray's control service."""
FALLBACK_TEMP_DIR = "/tmp"
MAX_TEMP_BYTES = 14
"""A socket's path has at most 107 bytes, of which our directory, Ray's session in it and the name take 93."""
_ADDED_BY_RAY = (
    "node:", "memory", "object_store_memory", "accelerator_type:", "bundle_group_", "CPU_group", "GPU_group",
)  # fmt: skip
"""How the names of resources begin that no actor asks for."""


class ClusterLost(RuntimeError):
    """Ray itself has ended, and the run with it."""


class Cluster:
    """A connection to Ray. `start` blocks for some seconds: call it in a thread."""

    def __init__(self, placement: Placement, *, end: contextlib.ExitStack, scratch: Path | None = None) -> None:
        """`end` stops and removes all that was started; `scratch` is Ray's session directory if the cluster is ours."""
        self.placement = placement
        """The one asked for; on a joined cluster, with a node for every actor."""
        self._end, self._scratch = end, scratch

    @classmethod
    def start(
        cls,
        cfg: RunConfig,
        placement: Placement,
        backend: Backend,
        *,
        last_words: Mapping[str, object] | None = None,
    ) -> Cluster:
        """Start the private cluster, or join `ray.address` and reserve there what every actor needs.

        Args:
            last_words: what is written if this process is killed; see `ProcessCleaner`.

        Raises:
            ConfigurationError: not enough devices, no cluster at that address, or no room on it.
        """
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if cfg.ray.address != "local":
            return cls._join(cfg, placement, backend)
        resource, num_devices = backend.ray_resource, backend.num_devices()
        check_fits(cfg, placement, backend=backend.name, num_devices=num_devices, where="this host")
        _sweep_scratch()
        devices = {resource: num_devices} if resource else {}
        try:
            cluster = cls._start_own(cfg, placement, devices, last_words)
        except Exception as error:
            # Ray has no setting for how long a daemon may take: 30 s for a node, after which it raises an `Exception`.
            if not isinstance(error, TimeoutError) and "timed out" not in str(error):
                raise
            log.warning("Ray did not start in time, as on a host that was suspended; once more: %s", one_line(error))
            cluster = cls._start_own(cfg, placement, devices, last_words)
        if resource:
            here = Node(node_id="here", address="this host", resources=devices)
            _warn_of_idle_devices(dict.fromkeys(placement.bundles, here.node_id), placement, [here], resource)
        return cluster

    @classmethod
    def _start_own(
        cls,
        cfg: RunConfig,
        placement: Placement,
        devices: dict[str, int],
        last_words: Mapping[str, object] | None,
    ) -> Cluster:
        """Start Ray on this host. If that fails, nothing of it is left."""
        run_id = uuid.uuid4().hex
        os.environ[RUN_ID_VAR] = run_id  # inherited by everything that is started from here on
        with contextlib.ExitStack() as stack:
            # In the temporary directory, since Ray's sockets need a short path.
            scratch, lock = _make_scratch()
            stack.callback(os.close, lock)
            stack.callback(ProcessCleaner(run_id, scratch, last_words).close)
            if _keep_token_in(scratch):
                stack.callback(os.environ.pop, TOKEN_PATH, None)
            stack.callback(ray.shutdown)
            # vLLM leaves files behind when it is killed; in the scratch directory they are removed with it.
            env = {ENGINE_SOCKETS: str(scratch), "TMPDIR": str(scratch), COMPILE_CACHE: str(cache_dir() / "inductor")}
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
                    runtime_env={"env_vars": env},
                    job_config=_OwnPackagesFirst(),
                    _temp_dir=str(scratch),
                    # Otherwise Ray starts a process per core that no actor can use: each of ours has another
                    # environment.
                    _system_config={"prestart_worker_first_driver": False},
                )
            return cls(placement, end=stack.pop_all(), scratch=scratch)

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
        """Ends a run whose Ray is lost, while it can still be saved: Ray ends this process a minute after its control
        service. A joined cluster has that elsewhere.

        Waits for: its interval. Unblocked by: cancellation.

        Raises:
            ClusterLost: the control service of the private cluster has ended.
        """
        node = ray_worker._global_node
        while self._scratch is not None and node is not None:
            if ray_constants.PROCESS_TYPE_GCS_SERVER in dict(node.dead_processes()):
                raise ClusterLost(
                    "Ray's control service (gcs_server) has ended, as when the kernel kills it for memory; look at the "
                    "memory of this host, and start again with the same run_dir"
                )
            await asyncio.sleep(POLL_INTERVAL_S)

    def stop(self, *, keep_logs_in: Path | None) -> None:
        """Leave the cluster; end it if it is ours, and remove its scratch directory. Idempotent.

        With `keep_logs_in`, what the actors printed is copied there first. Every part is done, even if another fails: a
        disk that refuses the copies must not keep processes alive.
        """
        with self._end:
            if keep_logs_in is not None and self._scratch is not None:
                try:
                    copy_logs(self._scratch, keep_logs_in)
                except OSError as error:
                    log.warning("the output of the actors is not kept in %s: %s", keep_logs_in, error)


class _OwnPackagesFirst(JobConfig):
    """Workers look for modules in our packages first, then in the working directory, where plug-ins may be, and a file
    that has the name of one of ours. Ray would put the working directory first; it inserts the last of a list last."""

    def __init__(self) -> None:
        super().__init__(_py_driver_sys_path=[str(Path.cwd()), str(ROOT)])

    def _runtime_env_has_working_dir(self) -> bool:
        """Whether Ray adds nothing to the list."""
        return True


def _keep_token_in(scratch: Path) -> bool:
    """Ray keeps the token of its clusters in `~/.ray`. Where that cannot be written, it is kept here, and True is
    returned."""
    if {"RAY_AUTH_TOKEN", TOKEN_PATH} & os.environ.keys():
        return False
    try:
        home = Path.home() / ".ray"
        home.mkdir(exist_ok=True)
        if not (home / "auth_token").is_file():
            tempfile.TemporaryFile(dir=home).close()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        token = scratch / "auth_token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        os.environ[TOKEN_PATH] = str(token)
        return True
    return False


@contextlib.contextmanager
def _separate_sessions() -> Iterator[None]:
    """Ray's daemons start in separate sessions while the block runs.

    Otherwise they are in the driver's process group, and a signal to it (a terminal that is closed, a scheduler) ends
    them, and with them every actor, while the driver still waits for the step to be finished and saved. Ray 2.60 has no
    setting for it.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


# --- nodes of a joined cluster ---


def _reserve(cfg: RunConfig, placement: Placement, *, resource: str | None) -> Placement:
    """Reserve the resources of every actor, each on the node that was chosen for it.

    A placement group per unit: of one actor, so that an engine can move when its node is lost, or of an engine and the
    learners whose devices it shares, which Ray then keeps on one node. The groups end with the driver.

    Raises:
        ConfigurationError: the cluster is too small, or others hold its resources for `ray.placement_timeout_s`.
    """
    nodes = _nodes()
    chosen = assign_free_nodes(placement, nodes, _free())
    # The target is soft, and Ray has only this spelling for it: a group whose node is full or lost goes elsewhere.
    # A label selector on the node's id would be hard, and a lost engine could not come back.
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
    """The nodes that live, with the resources that actors can ask for; the driver's first."""
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
    """Id of a node -> what no one has of it, as far as Ray's head knows; that may be a second old."""
    return {node: _usable(there_is) for node, there_is in available_resources_per_node().items()}


def _usable(resources: Bundle) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not name.startswith(_ADDED_BY_RAY)}


def _no_room(cfg: RunConfig, late: dict[str, Bundle], nodes: list[Node]) -> Problem:
    """Call it while the groups that were made still hold their shares."""
    free = _free()
    left = [replace(node, resources=free.get(node.node_id, {})) for node in nodes]
    return Problem(
        key=SIZES,
        value=f"no room for {', '.join(late)}: {describe_bundles(late)}",
        message=f"the Ray cluster is large enough ({describe_nodes(nodes)}), but after "
        f"ray.placement_timeout_s={cfg.ray.placement_timeout_s:g} no node had that left, besides what others hold and "
        f"what was reserved for the rest of this run: {describe_nodes(left)}",
        hint="`ray status` shows who holds what; wait for others, or ask for fewer ranks or replicas",
    )


# --- the scratch directory ---


def _scratch_home() -> str:
    """The temporary directory, unless the paths of Ray's sockets would be too long there."""
    home = tempfile.gettempdir()
    return home if len(os.fsencode(home)) <= MAX_TEMP_BYTES else FALLBACK_TEMP_DIR


def _make_scratch() -> tuple[Path, int]:
    """A new scratch directory, and the descriptor of its lock: it is not swept before that is closed, by us or by the
    kernel."""
    path = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=_scratch_home()))
    lock = os.open(path / f"{SCRATCH_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (path / f"{SCRATCH_LOCK}.new").rename(path / SCRATCH_LOCK)  # it appears locked
    return path, lock


def _sweep_scratch() -> None:
    """Remove session directories of runs that were killed together with what cleans up after them.

    Process ids do not show who lives: the directory may be shared with other containers, or with other hosts.
    """
    for path in Path(_scratch_home()).glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, locked, or swept by another run just now
            lock = os.open(path / SCRATCH_LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.info("removing %s, left behind by a run that was killed", path)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
