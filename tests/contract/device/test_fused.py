"""Batch digests and batch copies: the same results on every backend, and from the fused kernels as from torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weight_sync.device import DeviceError, fused
from weight_sync.device.cpu import CpuBackend
from weight_sync.device.digest import BLOCK_BYTES, digest_bytes
from weight_sync.device.fused import BatchCopy, BatchDigest, FusedKernels, kernels_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.device.conftest import Harness
    from weight_sync.device.base import Backend
    from weight_sync.device.tables import MoveKind


def data_of(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))


def test_a_batch_digest_answers_for_all_views_in_order_as_they_are_now(every: Harness) -> None:
    block = every.backend.alloc_persistent(3 * BLOCK_BYTES)
    block.tensor.copy_(data_of(3 * BLOCK_BYTES))
    views = [block.tensor[start : start + size] for start, size in ((7, 99), (0, 0), (1, 2 * BLOCK_BYTES), (8, 64))]
    digest = BatchDigest(every.backend, views)
    assert digest() == tuple(digest_bytes(view) for view in views)
    block.tensor[8] ^= 1
    every.backend.synchronize()
    assert digest() == tuple(digest_bytes(view.clone()) for view in views)
    block.close()


def test_a_batch_copy_copies_and_casts_every_pair(every: Harness) -> None:
    block = every.backend.alloc_persistent(4000)
    masters = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    same, cast = block.tensor[:1200].view(torch.float32).view(20, 15), block.tensor[2000:2600].view(torch.bfloat16)
    pairs = [
        (same, masters[:, 5:20]),
        (cast, torch.nn.Parameter(masters.view(-1)[100:400])),
        (same[:, :0], masters[:, :0]),
    ]
    pairs = [pair for pair in pairs if pair[0].is_contiguous()]
    copy = BatchCopy(every.backend, pairs)
    for factor in (1.0, -3.0):
        masters.mul_(factor)
        stream = every.backend.new_stream()
        copy(stream)
        every.backend.synchronize(stream)
        assert torch.equal(same, masters[:, 5:20])
        assert torch.equal(cast, masters.view(-1)[100:400].to(torch.bfloat16))
    block.close()


def test_no_views_and_no_pairs_are_no_trouble(every: Harness) -> None:
    assert BatchDigest(every.backend, [])() == ()
    BatchCopy(every.backend, [])()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: BatchDigest(b, [torch.zeros(4, dtype=torch.uint8), torch.zeros(4)]), "number 1 with torch.float32"),
        (lambda b: BatchDigest(b, [torch.zeros(4, 4, dtype=torch.uint8)[:, :2]]), "contiguous uint8 views"),
        (lambda b: BatchCopy(b, [(torch.zeros(4), torch.zeros(5))]), r"number 0 with destination \(4,\)"),
        (lambda b: BatchCopy(b, [(torch.zeros(4, 4)[:, :2], torch.zeros(4, 2))]), "contiguous destinations"),
    ],
    ids=["views that are no bytes", "scattered views", "pairs of other shapes", "scattered destinations"],
)
def test_is_refused(every: Harness, make: Callable[[Backend], object], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        make(every.backend)


def test_kernels_that_cannot_be_had_are_reported_once_and_torch_does_the_work(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = accelerator.backend
    tensors: list[Any] = [SimpleNamespace(device=torch.device("cuda", 0))]
    monkeypatch.setattr(fused, "_opened", {})
    monkeypatch.setattr(FusedKernels, "open", lambda backend, device: "there is no Triton here")
    with caplog.at_level(logging.INFO, logger="weight_sync.device.fused"):
        assert kernels_for(backend, tensors) is None
        assert kernels_for(backend, tensors) is None
    reasons = [record.getMessage() for record in caplog.records]
    assert len(reasons) == 1
    assert "torch is used: " in reasons[0]
    assert ("no Triton here" in reasons[0]) == (accelerator.name != "npu")


class FewKernels(FusedKernels):
    """On host memory, where the copy is made by numpy's like and each cast is as `cast` has it."""

    cast: Callable[[], None]

    def _moves_as_torch(self, kind: MoveKind) -> bool:
        if kind.source == kind.target:
            return True
        self.cast()
        return False


def out_of_order() -> None:
    raise RuntimeError("PTXASError: Feature '.bf16' requires .target sm_80")


@pytest.mark.parametrize(
    ("cast", "reason"), [(out_of_order, r"does not compile or run \(RuntimeError: PTX"), (bool, "other results")]
)
def test_a_cast_that_no_kernel_can_do_is_done_by_torch_and_the_log_says_why_once(
    cast: Callable[[], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = FewKernels(CpuBackend(), torch.device("cpu"), ModuleType("kernels"))
    kernels.cast = cast
    source, target = torch.randn(64, 64), torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="weight_sync.device.fused"):
        copies = [BatchCopy(kernels.backend, [(each, source)], kernels) for each in target]
    for copy in copies:
        assert (len(copy._launches), len(copy._through_torch[0])) == (0, 1)
        copy()
    assert torch.equal(target[1], source.to(torch.bfloat16))
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(rf"cpu: torch is used for .*'float32', target='bfloat16'.* on cpu: the kernel .*{reason}", line)


def test_a_missing_triton_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "weight_sync.device.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = FusedKernels.open(CpuBackend(), torch.device("cpu"))
    assert isinstance(reason, str)
    assert reason.startswith("Triton cannot be imported")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (the cpu build of torch does not need it)",
)
def test_fused_kernels_do_as_torch_does_in_tritons_interpreter() -> None:
    suite = Path(__file__).with_name("interpreted_kernels.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[3], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
