"""What tests of several kinds share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a busy machine. `HYPOTHESIS_PROFILE=explore` looks for new examples.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model lies, or will lie: it is made once, by the run that comes first.

    `scripts/test.sh` names one place for all of its test processes.
    """
    shared = os.environ.get("TANDEM_TEST_CACHE")
    return Path(shared) if shared else tmp_path_factory.mktemp("cache")
