"""What tests of several kinds share."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.fakes.trainer_process import ROOT, TrainerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How long an example takes says nothing on a busy machine. `HYPOTHESIS_PROFILE=explore` looks for new examples.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    """What earlier modules have imported is not looked at by collections of garbage, which would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is, once the first run has made it. `scripts/test.sh` names one place for all processes."""
    shared = os.environ.get("TANDEM_TEST_CACHE")
    return Path(shared) if shared else tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model for real engines."""
    from tests.fakes.tiny_vllm import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(tiny_cache: Path) -> Iterator[Callable[..., TrainerProcess]]:
    """`start(run_dir, *overrides)` starts a run, in the repository or in `directory`; the end of the test kills it."""
    with contextlib.ExitStack() as stack:

        def begin(run_dir: Path, *overrides: str, cache: Path = tiny_cache, directory: Path = ROOT) -> TrainerProcess:
            process = TrainerProcess(run_dir, *overrides, cache=cache, directory=directory)
            stack.callback(process.close)
            return process

        yield begin


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else extensions report what is frozen as leaked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of tests/full is marked `full`, as are single tests elsewhere."""
    for item in items:
        if "tests/full/" in item.path.as_posix():
            item.add_marker("full")
