"""The transports under test, each with a publisher process that the tests of a module share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.contract.transports.world import QUICK, Kind, Local, Remote

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = {
    "ipc": Kind("ipc"),
    "shm": Kind("shm"),
    "gloo": Kind("gloo"),
    "gloo-staged": Kind("gloo", backend="cuda"),
    "nccl-on-host": Kind("nccl", backend="cuda"),
    "hccl-on-host": Kind("hccl", backend="npu"),
    "nccl": Kind("nccl", backend="cuda", environ={"NCCL_NVLS_ENABLE": "0"}),
}
"""Those on devices run on fake drivers, all but the last."""
REAL_NCCL = pytest.param(
    "nccl",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a pair needs two devices; this machine has fewer"),
    ],
)


def make_kind(request: pytest.FixtureRequest) -> Kind:
    kind = KINDS[request.param]
    if kind.backend == "cpu" or request.param == "nccl":
        return kind
    return replace(kind, library=request.getfixturevalue("libraries")[kind.backend])


@pytest.fixture(scope="module", params=[*list(KINDS)[:-1], REAL_NCCL])
def remote(request: pytest.FixtureRequest) -> Iterator[Remote]:
    remote = Remote(make_kind(request)).wait()
    yield remote
    remote.close()


@pytest.fixture(
    scope="module",
    params=["gloo", "nccl-on-host", pytest.param("hccl-on-host", marks=pytest.mark.full), REAL_NCCL],
)
def slow_kind(request: pytest.FixtureRequest) -> Kind:
    """A pair whose publisher takes three seconds for a slot, with short deadlines."""
    return replace(make_kind(request), is_slow=True, timing=QUICK)


@pytest.fixture
def local(remote: Remote) -> Iterator[Local]:
    local = Local(remote.kind)
    yield local
    local.close()
