"""What contracts of devices and of transports share."""

from __future__ import annotations

import pytest

from tests.fakes.drivers.build import compile_fakes, compiler


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Backend -> its fake driver library."""
    if compiler() is None:
        pytest.skip("no C compiler `cc` to build the fake driver libraries with")
    return compile_fakes(tmp_path_factory.mktemp("drivers"))
