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
from typing import TYPE_CHECKING, Any

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
from trainer.driver.placement import (
    SIZES,
    Node,
    assign_free_nodes,
    bundles_by_actor,
    check_device_is_named,
    check_fits,
    describe_bundles,
    describe_idle_devices,
    describe_nodes,
    units_of,
)
from trainer.driver.process_cleaner import RUN_ID_VAR, ProcessCleaner
from trainer.errors import ConfigurationError, Problem, one_line
from trainer.subprograms import ROOT
from trainer.telemetry.last_words import copy_logs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ray.util.placement_group import PlacementGroup

    from trainer.config.schema import RunConfig
    from trainer.driver.placement import Bundle, Placement
    from weight_sync.device.base import Backend


log = logging.getLogger(__name__)

SCRATCH_PREFIX = "tandem-ray-"
CLAIM = "claim"
"""The file in a scratch directory that its driver keeps locked."""
ENGINE_SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where vLLM puts its sockets. It leaves them behind when it is killed; in our scratch directory they go with it."""
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""What torch compiles is kept with our other caches; by default it would stay in the temporary directory for good."""
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TOKEN = secrets.token_hex(32)
"""One for all clusters of this process, since Ray reads it once."""
LOOK_S = 1.0
"""Between two looks at Ray's control service."""
SHORT_TEMP = "/tmp"
MAX_TEMP_BYTES = 14
"""A socket's path has at most 107 bytes, of which our directory, Ray's session in it and the name take 93."""
_NOT_ASKED_FOR = (
    "node:",
    "memory",
    "object_store_memory",
    "accelerator_type:",
    "bundle_group_",
    "CPU_group",
    "GPU_group",
)
"""Beginnings of the names of resources that Ray adds by itself."""


class ClusterLost(RuntimeError):
    """Ray itself has ended, and the run with it."""


class Cluster:
    """A connection to Ray. `start` blocks for some seconds: call it in a thread."""

    def __init__(
        self,
        placement: Placement,
        *,
        scratch: Path | None = None,
        claim: int | None = None,
        cleaner: ProcessCleaner | None = None,
    ) -> None:
        self.placement = placement
        """The one asked for; on a cluster that was joined, with a seat for every actor."""
        self._scratch = scratch
        """Ray's session directory if the cluster is ours; its sockets need a short path, so it is not in the run
        directory."""
        self._claim = claim
        self._cleaner = cleaner

    @classmethod
    def start(
        cls,
        cfg: RunConfig,
        placement: Placement,
        backend: Backend,
        *,
        last_words: Mapping[str, object] | None = None,
    ) -> Cluster:
        """Start the private cluster, or join `ray.address` and set aside there what every actor needs.

        Args:
            last_words: what is written if this process ends without a word; see `ProcessCleaner`.

        Raises:
            ConfigurationError: not enough devices, no cluster at that address, or no room on it.
        """
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if cfg.ray.address != "local":
            return cls._join(cfg, placement, backend)
        num_devices = backend.num_devices() if backend.ray_resource else 0
        check_fits(cfg, placement, backend=backend.name, num_devices=num_devices, where="this host")
        _sweep_scratch()
        try:
            cluster = cls._start_own(cfg, placement, backend.ray_resource, num_devices, last_words)
        except Exception as error:
            if not _was_too_slow(error):
                raise
            log.warning(
                "Ray did not start in its own time, as on a host that stood still; once more: %s", one_line(error)
            )
            cluster = cls._start_own(cfg, placement, backend.ray_resource, num_devices, last_words)
        if backend.ray_resource:
            here = Node(node_id="here", address="this host", resources={backend.ray_resource: num_devices})
            bundles = bundles_by_actor(cfg, placement)
            _warn_of_idle_devices(dict.fromkeys(bundles, here.node_id), bundles, [here], resource=backend.ray_resource)
        return cluster

    @classmethod
    def _start_own(
        cls,
        cfg: RunConfig,
        placement: Placement,
        resource: str | None,
        num_devices: int,
        last_words: Mapping[str, object] | None,
    ) -> Cluster:
        """Start Ray on this host. If that fails, nothing of it is left."""
        scratch, claim = _claim_scratch()
        run_id = uuid.uuid4().hex
        os.environ[RUN_ID_VAR] = run_id  # inherited by everything that is started from here on
        _keep_token_in(scratch)
        cluster = cls(placement, scratch=scratch, claim=claim, cleaner=ProcessCleaner(run_id, scratch, last_words))
        custom = resource not in (None, "GPU")
        # vLLM leaves files behind when it is killed; in the scratch directory they are removed with it.
        env = {ENGINE_SOCKETS: str(scratch), "TMPDIR": str(scratch), COMPILE_CACHE: str(cache_dir() / "inductor")}
        try:
            with _sessions_of_their_own():
                ray.init(
                    address="local",
                    num_cpus=cfg.ray.num_cpus if cfg.ray.num_cpus else int(placement.num_cpus + 1),
                    num_gpus=num_devices if resource == "GPU" else 0,
                    resources={resource: num_devices} if custom and resource else None,
                    object_store_memory=int(cfg.ray.object_store_gib * 2**30),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env={"env_vars": env},
                    job_config=_OwnPackagesFirst(),
                    _temp_dir=str(scratch),
                    # Else Ray starts a process per core that no actor can use: each of ours has another environment.
                    _system_config={"prestart_worker_first_driver": False},
                )
        except BaseException:
            cluster.stop(keep_logs_in=None)
            raise
        return cluster

    @classmethod
    def _join(cls, cfg: RunConfig, placement: Placement, backend: Backend) -> Cluster:
        try:
            ray.init(
                address=cfg.ray.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                job_config=_OwnPackagesFirst(),
            )
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            problem = Problem(
                key="ray.address",
                value=cfg.ray.address,
                message=f"no Ray cluster can be reached there: {error}",
                hint="start one with `ray start --head`, or use ray.address=local; if it runs, and was started with a "
                "Ray token (~/.ray/auth_token), set RAY_AUTH_MODE=token here too",
            )
            raise ConfigurationError([problem]) from error
        if unread := [f"ray.{name}={value}" for name, value in _node_sizes(cfg).items()]:
            log.info(
                "the cluster at %s has its sizes from `ray start`: %s not read", cfg.ray.address, ", ".join(unread)
            )
        try:
            resource = backend.ray_resource
            check_device_is_named(cfg, backend=backend.name, resource=resource, there=ray.cluster_resources())
            if resource is not None:
                num_devices = int(ray.cluster_resources().get(resource, 0))
                check_fits(cfg, placement, backend=backend.name, num_devices=num_devices, where="the Ray cluster")
            return cls(_seated(cfg, placement, resource=resource))
        except BaseException:
            ray.shutdown()
            raise

    async def watch(self) -> None:
        """Ends a run whose Ray cannot go on, while it can still be saved: Ray ends this process a minute after its
        control service. A cluster that was joined has that elsewhere.

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
            await asyncio.sleep(LOOK_S)

    def stop(self, *, keep_logs_in: Path | None) -> None:
        """Leave the cluster; end it if it is ours, and remove its scratch directory. Idempotent.

        With `keep_logs_in`, what the actors printed is copied there first. Every part is done, whatever becomes of the
        others: a disk that refuses the copies must not keep processes alive.
        """
        with contextlib.ExitStack() as stack:
            if self._claim is not None:
                stack.callback(os.close, self._claim)
                self._claim = None
            if self._scratch is not None and os.environ.get(TOKEN_PATH, "").startswith(f"{self._scratch}{os.sep}"):
                stack.callback(os.environ.pop, TOKEN_PATH, None)  # the file goes with the directory
            if self._cleaner is not None:
                stack.callback(self._cleaner.close)
            stack.callback(ray.shutdown)
            if keep_logs_in is not None and self._scratch is not None:
                try:
                    copy_logs(self._scratch, keep_logs_in)
                except OSError as error:
                    log.warning("what the actors printed is not kept in %s: %s", keep_logs_in, error)


class _OwnPackagesFirst(JobConfig):
    """Workers look for modules in our packages first, then in the working directory, where plug-ins may be, and a file
    that has the name of one of ours. Ray would put the working directory first; it inserts the last of a list last."""

    def __init__(self) -> None:
        super().__init__(_py_driver_sys_path=[str(Path.cwd()), str(ROOT)])

    def _runtime_env_has_working_dir(self) -> bool:
        """Whether Ray adds nothing to the list."""
        return True


def _keep_token_in(scratch: Path) -> None:
    """Ray keeps the token of its clusters in `~/.ray`. Where that cannot be written, it is here."""
    if {"RAY_AUTH_TOKEN", TOKEN_PATH} & os.environ.keys():
        return
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


@contextlib.contextmanager
def _sessions_of_their_own() -> Iterator[None]:
    """Ray's daemons start in sessions of their own while the block runs.

    Else they are in the driver's process group, and a signal to it (a terminal that is closed, a scheduler) ends them,
    and with them every actor, while the driver still waits for the step to be finished and saved. Ray 2.60 has no
    setting for it.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _node_sizes(cfg: RunConfig) -> dict[str, float]:
    """What is asked of the nodes of a cluster of our own, beside the defaults."""
    asked = {"num_cpus": cfg.ray.num_cpus, "object_store_gib": cfg.ray.object_store_gib}
    return {name: value for name, value in asked.items() if value != getattr(RayConfig(), name)}


def _was_too_slow(error: Exception) -> bool:
    """Whether one of Ray's daemons was not up within a limit that Ray has no setting for: 30 s for a node, after which
    it raises a plain `Exception`."""
    return isinstance(error, TimeoutError) or "timed out" in str(error)


def _seated(cfg: RunConfig, placement: Placement, *, resource: str | None) -> Placement:
    """Set aside the resources of every actor, each on the node that was chosen for it.

    A placement group per unit: of one actor, so that an engine can move when its node is lost, or of an engine and the
    learners whose devices it shares, which Ray then keeps on one node. The groups end with the driver.

    Raises:
        ConfigurationError: the cluster is too small, or others hold its resources for `ray.placement_timeout_s`.
    """
    nodes, bundles = _nodes(), bundles_by_actor(cfg, placement)
    chosen = assign_free_nodes(cfg, placement, nodes, _free())
    groups = [
        (unit, _set_aside(unit[-1], [bundles[name] for name in unit], node_id=chosen[unit[-1]]))
        for unit in units_of(cfg, placement)
    ]
    give_up = time.monotonic() + cfg.ray.placement_timeout_s
    late = [unit for unit, group in groups if not group.wait(max(0.0, give_up - time.monotonic()))]
    if late:
        problem = _no_room(cfg, {name: bundles[name] for unit in late for name in unit}, nodes)
        for _, group in groups:
            remove_placement_group(group)
        raise ConfigurationError([problem])
    log.info("nodes: %s", _who_sits_where(chosen, nodes))
    if resource is not None:
        _warn_of_idle_devices(chosen, bundles, nodes, resource=resource)
    return replace(
        placement,
        seats={
            name: PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for unit, group in groups
            for index, name in enumerate(unit)
        },
    )


def _set_aside(name: str, bundles: list[Bundle], *, node_id: str) -> PlacementGroup:
    # The target is soft, and Ray has only this spelling for it: a group whose node is full or lost goes elsewhere.
    # A label selector on the node's id would be hard, and a lost engine could not come back.
    return placement_group([dict(bundle) for bundle in bundles], "STRICT_PACK", name=name, _soft_target_node_id=node_id)


def _warn_of_idle_devices(
    chosen: dict[str, str], bundles: dict[str, Bundle], nodes: list[Node], *, resource: str
) -> None:
    if idle := describe_idle_devices(chosen, bundles, nodes, resource=resource):
        log.warning("this run uses %s; learner.num_ranks and rollout.num_replicas say how many it takes", idle)


def _nodes() -> list[Node]:
    """The nodes that live, with the resources that actors can ask for; the driver's first."""
    own = ray.get_runtime_context().get_node_id()
    found = [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources=_asked_for(node["Resources"]),
            is_driver=node["NodeID"] == own,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: not node.is_driver)


def _free() -> dict[str, Bundle]:
    """Id of a node -> what nobody has of it, as far as Ray's head has been told; that may be a second old."""
    return {node: _asked_for(there_is) for node, there_is in available_resources_per_node().items()}


def _asked_for(resources: Bundle) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not name.startswith(_NOT_ASKED_FOR)}


def _no_room(cfg: RunConfig, late: dict[str, Bundle], nodes: list[Node]) -> Problem:
    """Call it while the groups that were made still hold their shares."""
    free = _free()
    left = [replace(node, resources=free.get(node.node_id, {})) for node in nodes]
    return Problem(
        key=SIZES,
        value=f"no room for {', '.join(late)}: {describe_bundles(late)}",
        message=f"the Ray cluster is large enough ({describe_nodes(nodes)}), but after "
        f"ray.placement_timeout_s={cfg.ray.placement_timeout_s:g} no node had that left, beside what others hold and "
        f"what was set aside for the rest of this run: {describe_nodes(left)}",
        hint="`ray status` says who holds what; wait for others, or ask for fewer ranks or replicas",
    )


def _who_sits_where(chosen: dict[str, str], nodes: list[Node]) -> str:
    """Example: `10.0.0.1 (driver): learner_0, rollout_worker_0; 10.0.0.2: replica_0`"""
    return "; ".join(
        f"{node.address}{' (driver)' if node.is_driver else ''}: "
        f"{', '.join(name for name, node_id in chosen.items() if node_id == node.node_id) or 'nobody'}"
        for node in nodes
    )


def actor_options(resources: dict[str, Any], *, env: dict[str, str], name: str) -> dict[str, Any]:
    """Keyword arguments for `actor.options`: resources, environment, and a name that people see in `ps` and logs."""
    return {**resources, "runtime_env": {"env_vars": env}, "name": name, "max_restarts": 0}


def _scratch_home() -> str:
    """Where scratch directories lie: the temporary directory, unless Ray's sockets would get too long a path there."""
    home = tempfile.gettempdir()
    return home if len(os.fsencode(home)) <= MAX_TEMP_BYTES else SHORT_TEMP


def _claim_scratch() -> tuple[Path, int]:
    """A new scratch directory, and the descriptor that keeps it: nobody sweeps it before that is closed, by us or by
    the kernel."""
    path = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=_scratch_home()))
    claim = os.open(path / f"{CLAIM}.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(claim, fcntl.LOCK_EX)
    (path / f"{CLAIM}.new").rename(path / CLAIM)  # it appears locked
    return path, claim


def _sweep_scratch() -> None:
    """Remove session directories of runs that were killed together with what cleans up after them.

    Process ids do not say who lives: the directory may be shared with other containers, or with other hosts.
    """
    for path in Path(_scratch_home()).glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):  # another one's, claimed, or swept by somebody else just now
            claim = os.open(path / CLAIM, os.O_RDWR)
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.info("removing %s, left behind by a run that was killed", path)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(claim)
