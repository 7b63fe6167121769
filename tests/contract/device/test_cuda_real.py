"""The cuda backend on a real device: two processes on one device, or on two if there are two (each sees its own only).

Everything runs in child processes: the allocator's settings must be in the environment before torch starts.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fakes.drivers.peer import Peer, pattern
from weight_sync.device import DeviceError
from weight_sync.device.digest import digest_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.version.cuda is None or not torch.cuda.is_available(),
        reason="no CUDA device, or torch built without CUDA",
    ),
]

NBYTES = 64 * 2**20 + 12345


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Peer, Peer]]:
    """(exporter, importer), each seeing one device, both with expandable segments."""
    every = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1"}
    pair = (
        Peer({**settings, "CUDA_VISIBLE_DEVICES": visible[0]}, spawned=True),
        Peer({**settings, "CUDA_VISIBLE_DEVICES": visible[-1]}, spawned=True),
    )
    yield pair
    for peer in pair:
        peer.close()


def test_a_block_is_seen_by_a_second_process_and_digests_as_on_cpu(pair: tuple[Peer, Peer]) -> None:
    exporter, importer = pair
    expected = pattern(NBYTES, 5)
    theirs = exporter.call("alloc", "cuda", None, NBYTES)
    exporter.call("write", theirs, 0, expected.numpy().tobytes())
    assert exporter.call("digest", theirs) == digest_bytes(expected)

    mapped = importer.open("cuda", None, exporter.export(theirs))
    assert importer.call("read", mapped, NBYTES - 40, 40) == expected[-40:].numpy().tobytes()
    own = importer.call("alloc", "cuda", None, NBYTES)
    importer.call("copy", own, mapped)
    for block in (mapped, own):
        assert importer.call("digest", block) == digest_bytes(expected)

    importer.call("write", mapped, 1000, b"dead")
    assert exporter.call("read", theirs, 1000, 4) == b"dead"
    for peer, block in ((importer, mapped), (importer, own), (exporter, theirs)):
        peer.call("give_up", block)


def test_memory_comes_back_when_a_block_is_closed(pair: tuple[Peer, Peer]) -> None:
    exporter, _ = pair
    source = """
backend = self.backend("cuda", None)
before = backend.memory_info()[0]
block = backend.alloc_persistent(1 << 30)
during = backend.memory_info()[0]
block.close()
result = [before, during, backend.memory_info()[0]]
"""
    before, during, after = exporter.call("run", source)
    assert before - during >= 1 << 30
    assert after >= before


def test_shared_host_memory_is_pinned_until_it_closes(pair: tuple[Peer, Peer]) -> None:
    exporter, importer = pair
    theirs = exporter.call("alloc", "cpu", None, NBYTES)
    exporter.call("write", theirs, 0, pattern(NBYTES, 6).numpy().tobytes())
    source = f"""
import torch
backend = self.backend("cuda", None)
block = self._blocks[{importer.open("cpu", None, exporter.export(theirs))}][1]
pinning = backend.pin(block, [(0, block.nbytes)])
is_pinned = pinning.wait(20)
target = backend.alloc_persistent(block.nbytes)
stream = backend.new_stream()
backend.copy_async(target.tensor, block.tensor, stream)
backend.synchronize(stream)
result = [is_pinned, backend.digest(target.tensor) == backend.digest(block.tensor)]
block.close()
target.close()
result.append(pinning.wait(0))
"""
    assert importer.call("run", source) == [True, True, False]
    exporter.call("give_up", theirs)


def test_a_block_is_no_torch_memory_and_a_torch_tensor_is_no_block(pair: tuple[Peer, Peer]) -> None:
    exporter, _ = pair
    source = """
import torch
backend = self.backend("cuda", None)
before = torch.cuda.memory_reserved()
block = backend.alloc_persistent(1 << 28)
result = torch.cuda.memory_reserved() - before
block.close()
"""
    assert exporter.call("run", source) == 0
    with pytest.raises(DeviceError, match="expandable_segments"):
        exporter.call("run", "import torch\nself.backend('cuda', None).ipc_export(torch.zeros(9, device='cuda'))")


def test_out_of_memory_is_a_clear_error_and_torch_goes_on_working(pair: tuple[Peer, Peer]) -> None:
    exporter, _ = pair
    with pytest.raises(DeviceError, match=r"block of 1099511627776000 bytes: \d+ of \d+ bytes are free"):
        exporter.call("alloc", "cuda", None, 1000 << 40)
    assert exporter.call("run", "import torch\nresult = float(torch.ones(8, device='cuda').sum())") == 8.0


def test_work_on_a_driver_stream_is_ordered_with_copies_on_it(pair: tuple[Peer, Peer]) -> None:
    exporter, _ = pair
    source = """
import torch
backend = self.backend("cuda", None)
block = backend.alloc_persistent(1 << 26)
stream = backend.new_stream()
source = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
backend.synchronize()
bad = 0
for value in range(1, 21):
    with backend.use_stream(stream):
        source.fill_(value)
        backend.copy_async(block.tensor, source, stream)
    backend.synchronize(stream)
    bad += int((block.tensor != value).sum())
block.close()
result = bad
"""
    assert exporter.call("run", source) == 0


def test_pinned_memory_outlives_the_driver_streams_that_it_was_copied_on(pair: tuple[Peer, Peer]) -> None:
    exporter, _ = pair
    source = """
import gc, torch
backend = self.backend("cuda", None)
host = torch.ones(1 << 22, dtype=torch.uint8, pin_memory=True)
stream = backend.new_stream()
with backend.use_stream(stream):
    there = host.to("cuda", non_blocking=True)
backend.synchronize(stream)
result = int(there.sum())
del stream, there
gc.collect()
torch.cuda.empty_cache()
del host  # torch now asks the driver about every stream that it was copied on
again = torch.ones(1 << 22, dtype=torch.uint8, pin_memory=True)
torch.cuda.synchronize()
"""
    assert exporter.call("run", source) == 1 << 22


def test_handle_of_a_killed_exporter_is_refused(pair: tuple[Peer, Peer]) -> None:
    _, importer = pair
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    victim = Peer({"CUDA_VISIBLE_DEVICES": visible}, spawned=True)
    handle = victim.export(victim.call("alloc", "cuda", None, NBYTES))
    victim.kill()
    with pytest.raises(DeviceError, match="has ended"):
        importer.open("cuda", None, handle)


def on_device(pair: tuple[Peer, Peer], expression: str) -> Any:
    """The value of an expression in `scale` (tests.contract.device.fused_at_scale) and `backend`, in the exporter."""
    source = f"""
import tests.contract.device.fused_at_scale as scale
backend = self.backend("cuda", None)
backend.set_device(0)
result = {expression}
"""
    return pair[0].call("run", source)


def test_fused_digests_of_a_gibibyte_of_ragged_views_equal_digest_bytes(pair: tuple[Peer, Peer]) -> None:
    found = on_device(pair, "scale.wrong_digests(backend, (1 << 30) + 12345)")
    assert found["views"] > 100
    assert (found["wrong"], found["changed"]) == (0, 1)


def test_fused_casts_bring_every_bit_pattern_where_torch_brings_it(pair: tuple[Peer, Peer]) -> None:
    found = on_device(pair, "scale.wrong_casts(backend)")
    assert len(found) == 6
    assert not any(found.values()), found


def test_fused_moves_of_strided_and_misaligned_boxes_equal_torchs(pair: tuple[Peer, Peer]) -> None:
    found = on_device(pair, "scale.wrong_boxes(backend, 1 << 28)")
    assert len(found) == 9
    assert not any(found.values()), found


def test_digest_pack_and_commit_of_a_model_run_near_the_bandwidth_of_memory(pair: tuple[Peer, Peer]) -> None:
    copy = on_device(pair, "scale.copy_rate(backend)")
    rates = {name: on_device(pair, f"scale.{name}_rate(backend)") for name in ("digest", "pack", "commit")}
    print(f"torch's copy: {copy:.0f} GB/s read + written")
    for name, found in rates.items():
        print(f"{name}: " + ", ".join(f"{value:.2f} {unit}" for unit, value in found.items()))
        assert found["GB/s"] > 0.6 * copy, (name, found)
    for name in ("pack", "commit"):
        assert (rates[name]["right"], rates[name]["launches"]) == (1, 1), rates[name]
