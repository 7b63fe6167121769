"""The doctor's probes of a device, on every backend: what the contract promises, they find."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.contract.device.conftest import ACCELERATORS
from tests.fakes.drivers.build import make_backend
from tests.fakes.forks import PARTIES, forks
from trainer.tools import doctor_probes

if TYPE_CHECKING:
    from weight_sync.device.base import IpcHandle


NBYTES = 1 << 20


def read_block(library: str, name: str, index: int, handle: IpcHandle) -> tuple[int, float]:
    """In the second process of a probe."""
    doctor_probes.NBYTES, doctor_probes.get_backend = NBYTES, lambda name: make_backend(name, library)
    return doctor_probes._read_block(name, index, handle)


@pytest.fixture(params=ACCELERATORS)
def device(request: pytest.FixtureRequest, libraries: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    name, server = request.param, forks(*PARTIES)
    monkeypatch.setattr(doctor_probes.multiprocessing, "get_context", lambda _: server)  # spawning takes seconds
    monkeypatch.setattr(doctor_probes, "NBYTES", NBYTES)
    monkeypatch.setattr(doctor_probes, "_read_block", partial(read_block, libraries[name]))
    for function in ("get_backend", "build"):
        monkeypatch.setattr(doctor_probes, function, lambda name: make_backend(name, libraries[name]))
    return name


@pytest.mark.parametrize("probe", ["memory", "pinned", "ipc"])
def test_a_probe_finds_a_device_that_keeps_its_promises_well(device: str, probe: str) -> None:
    found = doctor_probes.PROBES[probe](device)
    assert found.state == "ok", found


def test_a_device_is_reported_with_what_it_claims_and_the_variables_that_it_needs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_probes.os, "environ", {})
    found = doctor_probes.device(device)
    assert found.state == "ok", found
    assert "Fake 0" in found.lines[0] and "ipc" in found.lines[1]
    assert found.facts["device"] == device and found.facts["environment"]
    # Mapped memory first; then the library of the device, where there are two devices.
    assert found.facts["transports"][0] == "ipc" and found.facts["transports"][-2:] == ["shm", "gloo"]
