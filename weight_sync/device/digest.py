"""A 64-bit digest of a tensor's bytes from torch integer operations alone, so it is the same on every device.

The bytes, padded with zeros to 64-bit words, are cut into blocks of `BLOCK_WORDS`. With fixed odd weights `W[i]`, a
block has two sums modulo 2**64: `low = sum(word[i] * W[i])` and `high = sum((word[i] >> 32) * W[i])`.

- A change within one word changes `low`, because an odd number is invertible modulo 2**64.
- Two exchanged words `a != b` change one of the sums. The difference is `(a - b) * (W[i] - W[j])`, which vanishes only
  if the powers of two in both factors reach 64. All weights differ modulo 2**33, so the second factor holds at most
  2**32; if `a - b` is a multiple of 2**32, `low` may miss it, and then `high` sees `(a - b) >> 32` instead.

Blocks are then folded with their index, and with the length, through a 64-bit mixer (the splitmix64 finalizer, Steele
et al. 2014). It is no cryptographic hash: it finds accidents, not adversaries. `torch.hash_tensor` is not used: it
reduces with xor, so it is blind to order.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from weight_sync.errors import DeviceError

BLOCK_WORDS = 8192
BLOCK_BYTES = BLOCK_WORDS * 8
_SMALL_BYTES = 1 << 20
"""Host tensors up to this size go through numpy: a handful of torch calls costs more than their bytes do."""
_CHUNK_BLOCKS_CPU = 64
"""4 MiB: stays in the cache between the passes."""
_CHUNK_BLOCKS_DEVICE = 256
"""16 MiB: enough to hide kernel launches, little enough to be no burden."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_FEW_BLOCKS = 8


def digest_bytes(data: torch.Tensor, *, chunk_blocks: int | None = None) -> int:
    """Digest of a contiguous tensor's bytes in [0, 2**64); shape and dtype do not matter.

    Scratch memory is bounded by `chunk_blocks` blocks of 64 KiB (twice that if the bytes are not 8-aligned); the result
    does not depend on it. One device synchronisation, at the end.

    Raises:
        DeviceError: `data` is not contiguous.
    """
    if not data.is_contiguous():
        raise DeviceError(
            f"digest needs a contiguous tensor, got shape {tuple(data.shape)} with strides {data.stride()}; "
            "digest the contiguous buffer it came from"
        )
    flat = data.detach().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu" and chunk_blocks is None and flat.numel() <= _SMALL_BYTES:
        return _fold(*_small_block_sums(flat.numpy()), flat.numel())
    default_blocks = _CHUNK_BLOCKS_CPU if flat.device.type == "cpu" else _CHUNK_BLOCKS_DEVICE
    low, high = _block_sums(flat, default_blocks if chunk_blocks is None else chunk_blocks)
    return _fold(low, high, flat.numel())


def _block_sums(flat: torch.Tensor, chunk_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) sums of every block, uint64; the last block is padded with zeros."""
    num_full = flat.numel() // BLOCK_BYTES
    weights = weights_on(str(flat.device))
    rows = max(1, min(chunk_blocks, num_full))
    scratch = torch.empty(rows, BLOCK_WORDS, dtype=torch.int64, device=flat.device)
    # Views as 64-bit words need 8-aligned bytes; shards cut at any byte do not have them and are staged.
    aligned = flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0
    stage = None if aligned else torch.empty(rows * BLOCK_BYTES, dtype=torch.uint8, device=flat.device)
    sums = []
    for first in range(0, num_full, rows):
        chunk = flat[first * BLOCK_BYTES : min(first + rows, num_full) * BLOCK_BYTES]
        if stage is not None:
            chunk = stage[: chunk.numel()].copy_(chunk)
        sums.append(_sums_of(chunk, weights, scratch))
    tail = flat[num_full * BLOCK_BYTES :]
    if tail.numel() > 0:
        padded = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=flat.device)
        padded[: tail.numel()].copy_(tail)
        sums.append(_sums_of(padded, weights, scratch))
    if not sums:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    both = torch.cat(sums, dim=1).cpu().numpy().view(np.uint64)
    return both[0], both[1]


def _small_block_sums(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `_block_sums`, of uint8 host memory. numpy's integer products and sums wrap too."""
    num_words = -(-data.size // 8)
    if data.size % 8 == 0 and data.ctypes.data % 8 == 0:
        words = data.view(np.uint64)
    else:
        words = np.zeros(num_words, np.uint64)
        words.view(np.uint8)[: data.size] = data
    upper = (words.view(np.int64) >> 32).view(np.uint64)
    weights = _host_weights()
    cut = num_words - num_words % BLOCK_WORDS
    sums = [np.matmul(half[:cut].reshape(-1, BLOCK_WORDS), weights) for half in (words, upper)]
    if cut == num_words:
        return sums[0], sums[1]
    last = [np.dot(half[cut:], weights[: num_words - cut]) for half in (words, upper)]
    return np.append(sums[0], last[0]), np.append(sums[1], last[1])


def _sums_of(chunk: torch.Tensor, weights: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """int64[2, blocks]: low and high sums of whole blocks. int64 products and sums wrap on every device."""
    words = chunk.view(torch.int64).view(-1, BLOCK_WORDS)
    product = scratch[: words.shape[0]]
    torch.mul(words, weights, out=product)
    low = product.sum(dim=1)
    torch.bitwise_right_shift(words, 32, out=product)
    product.mul_(weights)
    return torch.stack([low, product.sum(dim=1)])


def _fold(low: np.ndarray, high: np.ndarray, nbytes: int) -> int:
    if low.size <= _FEW_BLOCKS:
        return _fold_few(low.tolist(), high.tolist(), nbytes)
    with np.errstate(over="ignore"):
        index = np.arange(1, low.size + 1, dtype=np.uint64)
        mixed = mix(mix(low + index * GOLDEN) + high)
        total = np.add.reduce(mixed, dtype=np.uint64) + mix(np.array([nbytes], np.uint64))
        return int(mix(total)[0])


def _fold_few(low: list[int], high: list[int], nbytes: int) -> int:
    """As `_fold`, on Python's integers: for a few blocks that takes less time than numpy needs to set out."""
    total = _mix_one(nbytes)
    for index, (first, second) in enumerate(zip(low, high, strict=True), start=1):
        total += _mix_one((_mix_one((first + index * int(GOLDEN)) & _MASK) + second) & _MASK)
    return _mix_one(total & _MASK)


def _mix_one(x: int) -> int:
    """`mix` of one word."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64 finalizer: a bijection of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def block_weights() -> np.ndarray:
    """uint64[BLOCK_WORDS], odd, and pairwise different modulo 2**33."""
    with np.errstate(over="ignore"):
        return mix(np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * GOLDEN) | np.uint64(1)


@lru_cache(maxsize=1)
def _host_weights() -> np.ndarray:
    return block_weights()


@lru_cache(maxsize=16)
def weights_on(device: str) -> torch.Tensor:
    """`block_weights` as int64[BLOCK_WORDS] on `device`; one copy per process. Not to be written to."""
    return torch.from_numpy(block_weights().view(np.int64)).to(device)
