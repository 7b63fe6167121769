"""A private Ray cluster on a host that is suspended while it starts, and one that loses its control service."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray._private import services

from tests.fakes.scripted_run import config
from trainer.driver.cluster import POLL_INTERVAL_S, Cluster, ClusterLost
from trainer.driver.placement import plan_placement
from trainer.driver.process_cleaner import RUN_ID_VAR, processes_of
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timing

TOO_SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"
"""As Ray 2.60 reports it, with a plain `Exception`, after 30 s."""


@pytest.fixture
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[tuple[str, Path]]]:
    """`slow_starts(2)`: at the next two starts, Ray's daemons run, but the node is said not to be up in time. Returns
    the mark and the scratch directory of each, as they come."""
    found: list[tuple[str, Path]] = []
    get_node = services.get_node

    def begin(number: int) -> list[tuple[str, Path]]:
        def asked(*args: Any, **options: Any) -> Any:
            if len(found) == number:
                return get_node(*args, **options)
            mark = os.environ[RUN_ID_VAR]
            (scratch,) = {Path(name) for name in _scratch_of(mark)}
            found.append((mark, scratch))
            raise Exception(TOO_SLOW)

        monkeypatch.setattr(services, "get_node", asked)
        return found

    monkeypatch.setenv(RUN_ID_VAR, "")  # set by the cluster, and taken back with the rest
    return begin


def _scratch_of(mark: str) -> set[str]:
    """Named on the command lines of the daemons that carry the mark."""
    words = [
        word.partition("=")[2]
        for process in processes_of(mark, Path("/nowhere"), spare=(os.getpid(),))
        for word in process.cmdline()
        if word.startswith(("--temp_dir=", "--temp-dir="))
    ]
    return set(words)


def start() -> Cluster:
    cfg = config()
    return Cluster.start(cfg, plan_placement(cfg, resource=None), get_backend("cpu", cpu_threads=1))


@pytest.mark.timeout(300)
def test_a_cluster_that_was_too_slow_once_is_started_again_and_nothing_of_the_first_is_left(
    slow_starts: Callable[[int], list[tuple[str, Path]]], caplog: pytest.LogCaptureFixture
) -> None:
    slow = slow_starts(1)
    cluster = start()
    try:
        assert "starting it again" in caplog.text
        ((mark, scratch),) = slow
        assert os.environ[RUN_ID_VAR] != mark
        assert not processes_of(mark, scratch, spare=(os.getpid(),))
        assert not scratch.exists()
        assert ray.get(ray.remote(lambda: 7).options(num_cpus=1).remote(), timeout=120) == 7
    finally:
        cluster.stop(keep_logs_in=None)


@pytest.mark.timeout(300)
def test_the_end_of_rays_control_service_is_noticed_long_before_ray_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RUN_ID_VAR, "")
    cluster = start()
    try:

        async def lose_it() -> None:
            watch = asyncio.create_task(cluster.watch())
            await asyncio.sleep(2 * POLL_INTERVAL_S)
            assert not watch.done()
            found = processes_of(os.environ[RUN_ID_VAR], Path("/nowhere"), spare=(os.getpid(),))
            (service,) = (process for process in found if process.cmdline()[0].endswith("gcs_server"))
            service.kill()
            with pytest.raises(ClusterLost, match="control service"):
                await asyncio.wait_for(watch, 20)

        asyncio.run(lose_it())
    finally:
        cluster.stop(keep_logs_in=None)


@pytest.mark.timeout(300)
def test_a_cluster_that_is_too_slow_twice_is_given_up(slow_starts: Callable[[int], list[tuple[str, Path]]]) -> None:
    slow = slow_starts(2)
    with pytest.raises(Exception, match="timed out during startup"):
        start()
    assert len(slow) == 2
    assert all(not processes_of(mark, scratch, spare=(os.getpid(),)) and not scratch.exists() for mark, scratch in slow)
