"""A version travels along a chain of real processes. On accelerators this also shows what a hop costs."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.relay_process import NUM_PIECES, SOURCES, RelayProcess

pytestmark = pytest.mark.timing

CHAIN = 3


@pytest.mark.parametrize(
    ("device", "piece_bytes"),
    [("cpu", 256 << 10), pytest.param("cuda", 64 << 20, marks=pytest.mark.gpu)],
)
def test_a_version_passes_along_a_chain_of_processes(device: str, piece_bytes: int) -> None:
    num_devices = torch.cuda.device_count() if device == "cuda" else 1
    chain = [
        RelayProcess(f"{name}/0", device=device, index=place % num_devices, piece_bytes=piece_bytes)
        for place, name in enumerate("ABCD"[:CHAIN])
    ]

    def pull_along(members: list[RelayProcess], version: int) -> None:
        """The last in line asks first: it waits for those before it, and they for the first."""
        for member in reversed(members):
            member.ask("begin", version)
        for member in reversed(chain[1:]):
            member.tell("pull")

    try:
        handles = [member.handle() for member in chain]
        for member, handle in zip(chain[1:], handles[:-1], strict=True):
            member.ask("follow", handle)
        for version in (1, 2):
            pull_along(chain, version)
            chain[0].ask("offer", timeout_s=60.0)
            for member in chain[1:]:
                member.told(60.0)
            assert all(member.ask("holds", version, timeout_s=60.0) for member in chain)
            # Once more with the first one ready, so that nothing but the links is measured.
            pull_along(chain[1:], version)
            spans = [member.told(60.0) for member in chain[1:]]
            seconds = max(ended for _, ended in spans) - max(began for began, _ in spans)
            nbytes = len(SOURCES) * NUM_PIECES * piece_bytes
            print(f"{device}: {nbytes / seconds / 1e9:.0f} GB/s to the last of {CHAIN - 1}, "
                  f"{(spans[-1][1] - spans[0][1]) * 1e3:.2f} ms after the one before it")  # fmt: skip
    finally:
        for member in chain:
            member.close()
