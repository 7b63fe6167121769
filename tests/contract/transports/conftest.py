"""The transports under test, each with a publisher process that the tests of a module share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.contract.transports.host_hccl import HostHcclKind
from tests.contract.transports.world import QUICK, Kind, Local, Remote
from tests.fakes.drivers.build import compile_fakes, compiler

if TYPE_CHECKING:
    from collections.abc import Iterator

REAL_NCCL = pytest.param(
    "nccl",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a pair needs two devices; this machine has fewer"),
    ],
)
KINDS = ("ipc", "shm", "gloo", "gloo-staged", "nccl-on-host", "hccl-on-host", REAL_NCCL)
PAIRS = ("gloo", "nccl-on-host", "hccl-on-host", REAL_NCCL)


@pytest.fixture(scope="session")
def fake_drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Backend -> its fake driver library."""
    if compiler() is None:
        pytest.skip("no C compiler `cc` to build the fake driver library with")
    return compile_fakes(tmp_path_factory.mktemp("drivers"))


def make_kind(name: str, request: pytest.FixtureRequest) -> Kind:
    match name:
        case "gloo-staged":
            return Kind("gloo", backend="cuda", library=request.getfixturevalue("fake_drivers")["cuda"])
        case "nccl-on-host":
            return Kind("nccl", backend="cuda", library=request.getfixturevalue("fake_drivers")["cuda"])
        case "hccl-on-host":
            return HostHcclKind("hccl", backend="npu", library=request.getfixturevalue("fake_drivers")["npu"])
        case "nccl":
            return Kind("nccl", backend="cuda", environ={"NCCL_NVLS_ENABLE": "0"})
        case _:
            return Kind(name)


@pytest.fixture(scope="module", params=KINDS)
def remote(request: pytest.FixtureRequest) -> Iterator[Remote]:
    remote = Remote(make_kind(request.param, request)).wait()
    yield remote
    remote.close()


@pytest.fixture(scope="module", params=PAIRS)
def slow_kind(request: pytest.FixtureRequest) -> Kind:
    """A pair whose publisher takes three seconds for a slot, with short deadlines."""
    return replace(make_kind(request.param, request), is_slow=True, timing=QUICK)


@pytest.fixture
def local(remote: Remote) -> Iterator[Local]:
    local = Local(remote.kind)
    yield local
    local.close()
