"""A learner rank with a large model, which measures the memory that publishing takes. Real processes, real gloo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from tests.fakes.party_process import PartyProcess
from weight_sync.device.cpu import CpuBackend
from weight_sync.layout import shard_descs
from weight_sync.plan import build_manifest, manifest_to_bytes
from weight_sync.publisher import WeightPublisher
from weight_sync.recorder import record_layout
from weight_sync.types import ParamMeta
from weight_sync.wire import OpenPublisher, PackReport, decode, encode

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


class Meter(NamedTuple):
    """Bytes that a publish added while it ran (peak) and that it kept."""

    peak_bytes: int
    kept_bytes: int


def plain_manifest(num_ranks: int) -> bytes:
    """The plan of the large model, for one engine worker."""
    layout = record_layout(PlainModel(), PARAMS, worker=0)
    shards = shard_descs(PARAMS, num_ranks=num_ranks)
    return manifest_to_bytes(build_manifest(epoch=1, params=PARAMS, shards=shards, workers=[layout]))


class MemoryParty:
    """Holds its rows in float32. `is_gathering` is the bad way: the whole model on every rank, then its own rows."""

    def __init__(self, rank: int, num_ranks: int, store: str, is_gathering: bool, traps: Traps) -> None:
        self._rank, self._num_ranks, self._is_gathering = rank, num_ranks, is_gathering
        rows = ROWS // num_ranks
        self._shards = {param.name: torch.full((rows, COLUMNS), 1.0 + rank) for param in PARAMS}
        self._publisher = WeightPublisher(CpuBackend(), rank=rank)
        if is_gathering:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)

    def open(self, manifest: bytes) -> None:
        opening = OpenPublisher(
            run_id="run", secret=b"s" * 32, epoch=1, manifest=manifest, transport="shm", num_slots=2, verify=True,
            host="127.0.0.1",
        )  # fmt: skip
        self._publisher.open(encode(opening))

    def publish(self, version: int) -> Meter:
        """Publish and measure."""
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
        report = decode(self._publisher.publish(version, self._rows(), deadline_s=30.0), PackReport)
        self._publisher.digests(version)  # sealed, that is
        assert report.version == version
        return Meter(_status("VmHWM") - before, _status("VmRSS") - before)

    def close(self) -> None:
        self._publisher.close()
        if self._is_gathering:
            dist.destroy_process_group()

    def _rows(self) -> dict[str, torch.Tensor]:
        if not self._is_gathering:
            return self._shards
        whole = dict(self._gathered())
        rows = ROWS // self._num_ranks
        return {name: tensor[self._rank * rows : (self._rank + 1) * rows] for name, tensor in whole.items()}

    def _gathered(self) -> Iterable[tuple[str, torch.Tensor]]:
        for name, shard in self._shards.items():
            whole = torch.empty(ROWS, COLUMNS)
            dist.all_gather(list(whole.chunk(self._num_ranks)), shard)
            yield name, whole


class MemoryProcess(PartyProcess):
    def __init__(self, rank: int, num_ranks: int, store: Path, *, is_gathering: bool) -> None:
        super().__init__(f"learner {rank}", MemoryParty, rank, num_ranks, str(store), is_gathering)


def _status(name: str) -> int:
    """Bytes of a row of proc(5) status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")
