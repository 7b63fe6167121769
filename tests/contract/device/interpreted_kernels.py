"""The fused kernels on host memory, in Triton's interpreter. Run by test_fused.py in a separate process, because the
interpreter is chosen when the kernels are imported.

The interpreter cuts float32 to bfloat16 where devices round, so boxes carry values that need no rounding here, and all
bit patterns are cast on a device (fused_at_scale.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch

from weight_sync.device.cpu import CpuBackend
from weight_sync.device.digest import BLOCK_BYTES, digest_bytes
from weight_sync.device.fused import BatchCopy, BatchDigest, FusedKernels
from weight_sync.device.tables import TILE_VECTORS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 0xA5


@pytest.fixture(scope="module")
def kernels() -> FusedKernels:
    found = FusedKernels.open(CpuBackend(), torch.device("cpu"))
    assert isinstance(found, FusedKernels), found
    # Trusted with casts that the trial would refuse.
    found.moves_right = lambda kind: True
    return found


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def adversarial(dtype: torch.dtype) -> torch.Tensor:
    """Every seventh upper half with the lower halves around a tie; all patterns of a 16-bit dtype."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    if dtype != torch.float32:
        return upper.to(torch.int32).to(torch.int16).view(dtype)
    upper = upper[::7]
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = (upper[:, None] << 16 | lower).reshape(-1)
    return torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).to(torch.int32).view(torch.float32)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit; a NaN has to stay one, its payload is the hardware's affair."""
    is_nan = expected.isnan()
    assert torch.equal(got.isnan(), is_nan)
    as_int = torch.int32 if got.dtype == torch.float32 else torch.int16
    assert torch.equal(got.view(as_int)[~is_nan], expected.view(as_int)[~is_nan])


def test_digests_equal_digest_bytes_for_ragged_views_at_every_alignment(kernels: FusedKernels) -> None:
    data = random_bytes(12 * BLOCK_BYTES)
    blocks = (n * BLOCK_BYTES + more for n, more in ((1, -1), (1, 0), (1, 1), (4, 0), (9, 5)))
    sizes = [0, 1, 7, 8, 9, 15, 1000, *blocks]
    views = [data[shift : shift + size] for size in sizes for shift in ((0, 3, 8) if size > 9999 else range(17))]
    assert BatchDigest(kernels.backend, views, kernels)() == tuple(digest_bytes(view) for view in views)


def test_a_batch_digest_sees_the_bytes_as_they_are_now(kernels: FusedKernels) -> None:
    data = random_bytes(5 * BLOCK_BYTES + 77)
    views = [data[:0], data, data[1:60], data[100:100]]
    digest = BatchDigest(kernels.backend, views, kernels)
    before = digest()
    data[40] ^= 1
    after = digest()
    assert after == tuple(digest_bytes(view) for view in views)
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, False, True]


def test_no_views_have_no_digests(kernels: FusedKernels) -> None:
    assert BatchDigest(kernels.backend, [], kernels)() == ()
    assert BatchDigest(kernels.backend, [torch.zeros(0, dtype=torch.uint8)], kernels)() == (
        digest_bytes(torch.zeros(0)),
    )


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.float16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32)],
    ids=str,
)
def test_casts_round_as_torch_does(kernels: FusedKernels, source: torch.dtype, target: torch.dtype) -> None:
    values = adversarial(source)
    result = torch.zeros(values.shape, dtype=target)
    BatchCopy(kernels.backend, [(result, values)], kernels)()
    assert_same_bits(result, values.to(target))


@pytest.mark.parametrize(("source", "target"), itertools.product(FLOATS, repeat=2), ids=str)
def test_boxes_arrive_whatever_their_strides_and_alignment(
    kernels: FusedKernels, source: torch.dtype, target: torch.dtype
) -> None:
    values = torch.randint(-128, 128, (40, 264), generator=torch.Generator().manual_seed(1)).div(16).to(source)
    boxes = [
        values, values[3:9], values[:, 8:72], values[5:, 7:100], values[:, 3], values[2, ::3], values[7:8, 1:2],
        values.view(-1)[1 : 1 + 2 * TILE_VECTORS], values.view(40, 8, 33)[:, 2:4, 1:30], values.t(), values[:, :0],
    ]  # fmt: skip
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    guarded: list[torch.Tensor] = []
    for number, box in enumerate(boxes):
        size = box.numel() * target.itemsize
        start = 16 + number % 5 * target.itemsize
        memory = torch.full((start + size + 32,), GUARD, dtype=torch.uint8)
        guarded.append(torch.cat([memory[:start], memory[start + size :]]))
        pairs.append((memory[start : start + size].view(target).view(box.shape), box))
    copy = BatchCopy(kernels.backend, pairs, kernels)
    copy()
    for result, box in pairs:
        assert torch.equal(result, box.to(target))
    assert all(bool((edge == GUARD).all()) for edge in guarded)
    assert len(copy._through_torch[0]) == 2


def test_bytes_arrive_in_whatever_unit_they_travel(kernels: FusedKernels) -> None:
    data = random_bytes(200_000, seed=2)
    cuts = [(0, 0, 65536), (65537, 65537, 30), (70001, 70003, 999), (80000, 80008, 4000), (90002, 90004, 77)]
    memory = torch.full((200_000,), GUARD, dtype=torch.uint8)
    expected = memory.clone()
    pairs = [(memory[to : to + size], data[at : at + size]) for at, to, size in cuts]
    pairs.append((memory[140_000:160_000].view(50, 400), data[100_000:140_000].view(50, 800)[:, 300:700]))
    for target, source in pairs:
        start = target.data_ptr() - memory.data_ptr()
        expected[start : start + target.numel()] = source.reshape(-1)
    copy = BatchCopy(kernels.backend, pairs, kernels)
    copy()
    assert torch.equal(memory, expected)
    assert len(copy._through_torch[0]) == 0


def test_a_batch_copy_copies_what_the_source_holds_now(kernels: FusedKernels) -> None:
    source, target = torch.zeros(5000), torch.ones(5000, dtype=torch.bfloat16)
    copy = BatchCopy(kernels.backend, [(target, torch.nn.Parameter(source))], kernels)
    for value in (1.0, -2.5):
        source.fill_(value)
        copy()
        assert bool((target == value).all())


def test_dtypes_without_a_kernel_go_through_torch(kernels: FusedKernels) -> None:
    source = torch.randn(70, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    target, wholes = torch.zeros(70), torch.zeros(70, dtype=torch.float64)
    copy = BatchCopy(kernels.backend, [(target, source), (wholes, source)], kernels)
    copy()
    assert torch.equal(target, source.float())
    assert torch.equal(wholes, source)
    assert len(copy._through_torch[0]) == 1


def test_kernels_that_compute_something_else_are_not_used(
    kernels: FusedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weight_sync.device import kernels as module

    class Nothing:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda *args, **kwargs: None

    monkeypatch.setattr(module, "digest_whole_blocks", Nothing())
    reason = FusedKernels.open(CpuBackend(), torch.device("cpu"))
    assert isinstance(reason, str)
    assert "differ from torch" in reason
    monkeypatch.setattr(module, "move_tiles", Nothing())
    fresh = FusedKernels(CpuBackend(), torch.device("cpu"), module)
    target = torch.zeros(64, dtype=torch.bfloat16)
    copy = BatchCopy(fresh.backend, [(target, torch.ones(64))], fresh)
    copy()
    assert (len(copy._launches), len(copy._through_torch[0])) == (0, 1)
    assert bool((target == 1).all())
