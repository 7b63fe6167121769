"""A version travels along a chain of real processes. On accelerators this also shows what a hop costs."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.relay_process import NUM_PIECES, SOURCES, RelayProcess
from weight_sync.channel import make_run_keys
from weight_sync.messages import LinkRequest, encode
from weight_sync.plan.routes import Stage

pytestmark = pytest.mark.timing

CHAIN = "abc"


@pytest.mark.parametrize(
    ("device", "piece_bytes"),
    [("cpu", 256 << 10), pytest.param("cuda", 64 << 20, marks=pytest.mark.gpu)],
)
def test_a_version_passes_along_a_chain_of_processes(device: str, piece_bytes: int) -> None:
    num_devices, keys = torch.cuda.device_count() if device == "cuda" else 1, make_run_keys("chain")
    chain = [
        RelayProcess(name, keys, device=device, index=place % num_devices, piece_bytes=piece_bytes)
        for place, name in enumerate(CHAIN)
    ]

    def link(place: int) -> None:
        before = () if place == 0 else (chain[place - 1].handle(),)
        told = tuple(f"{name}/0" for name in CHAIN[place + 1 : place + 2])
        stages = (Stage(SOURCES, (0,) if before else ()),)
        chain[place].ask("link", encode(LinkRequest(stages=stages, predecessors=before, readers=told)))

    try:
        for place in range(len(chain)):
            link(place)
        for version in (1, 2):
            for member in chain:
                member.ask("begin", version, 0.0, None)
            for member in reversed(chain):  # the last in line asks first
                member.tell("bring", version)
            assert [member.told(60.0)[0] for member in chain] == [0] * len(chain)
            assert all(member.ask("whole", version, timeout_s=60.0) for member in chain)
            # Once more with the first one ready, so that nothing but the links is measured.
            for member in chain[1:]:
                member.ask("begin", version, 0.0, None)
            for member in reversed(chain[1:]):
                member.tell("bring", version)
            spans = [member.told(60.0)[2:] for member in chain[1:]]
            seconds = max(ended for _, ended in spans) - max(began for began, _ in spans)
            nbytes = len(SOURCES) * NUM_PIECES * piece_bytes
            print(f"{device}: {nbytes / seconds / 1e9:.1f} GB/s to the last of {len(chain) - 1}, "
                  f"{(spans[-1][1] - spans[0][1]) * 1e3:.2f} ms after the one before it")  # fmt: skip
    finally:
        for member in chain:
            member.close()
