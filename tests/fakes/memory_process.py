"""A learner rank with a large model, which measures the memory that publishing takes. Real processes, real gloo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.fakes.party_process import PartyProcess
from weight_sync.device.cpu import CpuBackend
from weight_sync.messages import OpenPublisher, PackReport, decode, encode, manifest_to_bytes
from weight_sync.plan.planner import build_manifest
from weight_sync.plan.types import ParamMeta
from weight_sync.publish.publisher import WeightPublisher
from weight_sync.publish.shards import shard_descs
from weight_sync.receive.recorder import record_layout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fakes.protocol_traps import Traps

NUM_PARAMS, ROWS, COLUMNS = 10, 2500, 2000
"""50 million elements: 200 MB in float32, 100 MB on the wire."""
WIRE_BYTES = NUM_PARAMS * ROWS * COLUMNS * 2
PARAMS = tuple(ParamMeta(name=f"w{i}", shape=(ROWS, COLUMNS), dtype="bfloat16") for i in range(NUM_PARAMS))


class PlainModel(torch.nn.Module):
    """An engine that takes the checkpoint as it is."""

    def __init__(self) -> None:
        super().__init__()
        for param in PARAMS:
            value = torch.nn.Parameter(torch.zeros(param.shape, dtype=torch.bfloat16), requires_grad=False)
            self.register_parameter(param.name, value)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def plain_manifest(num_ranks: int) -> bytes:
    """The plan of the large model, for one engine worker."""
    layout = record_layout(PlainModel(), PARAMS, worker=0)
    shards = shard_descs(PARAMS, num_ranks=num_ranks)
    return manifest_to_bytes(build_manifest(epoch=1, params=PARAMS, shards=shards, workers=[layout]))


class MemoryParty:
    """Holds its rows in float32."""

    def __init__(self, rank: int, num_ranks: int, traps: Traps) -> None:
        self._shards = {param.name: torch.full((ROWS // num_ranks, COLUMNS), 1.0 + rank) for param in PARAMS}
        self._publisher = WeightPublisher(CpuBackend(), rank=rank)

    def open(self, manifest: bytes) -> None:
        opening = OpenPublisher(
            run_id="run", secret=b"s" * 32, epoch=1, manifest=manifest, transport="shm", num_slots=2, verify=True,
            host="127.0.0.1",
        )  # fmt: skip
        self._publisher.open(encode(opening))

    def publish(self, version: int) -> int:
        """Publish, and measure how many bytes that added while it ran."""
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
        report = decode(self._publisher.publish(version, self._shards, deadline_s=30.0), PackReport)
        self._publisher.digests(version)  # sealed, that is
        assert report.version == version
        return _status("VmHWM") - before

    def close(self) -> None:
        self._publisher.close()


class MemoryProcess(PartyProcess):
    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(f"learner {rank}", MemoryParty, rank, num_ranks)


def _status(name: str) -> int:
    """Bytes of a row of proc(5) status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")
