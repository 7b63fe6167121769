"""Which devices an engine of the benchmark is shown, from what this process sees."""

from __future__ import annotations

import pytest

from weight_sync.bench.engines import devices_environment
from weight_sync.device import merge_env
from weight_sync.device.select import build

HIP, CUDA = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("device", "environ", "expected"),
    [
        ("cuda", {}, {CUDA: "1,2"}),
        ("cuda", {CUDA: "4,5,7"}, {CUDA: "5,7"}),
        ("rocm", {}, {HIP: "1,2,0"}),
        ("rocm", {HIP: "4,5,7"}, {HIP: "5,7,4"}),
        ("rocm", {HIP: "4,5,7", CUDA: "4,5,7"}, {HIP: "5,7,4", CUDA: "5,7,4"}),
        ("cpu", {}, {}),
    ],
)
def test_an_engine_is_shown_its_places_in_what_this_process_sees(
    device: str, environ: dict[str, str], expected: dict[str, str]
) -> None:
    backend = build(device)
    told = devices_environment(backend, [1, 2], num_devices=3, environ=environ)
    assert told == expected
    own = merge_env(backend.process_env("engine"), {**environ, **told}, {})
    assert backend.check_env("engine", own) == []
