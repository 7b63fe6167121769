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

from weight_sync.device.base import DeviceError

BLOCK_WORDS = 8192
_BLOCK_BYTES = BLOCK_WORDS * 8
_CHUNK_BLOCKS_CPU = 64
"""4 MiB: stays in the cache between the passes."""
_CHUNK_BLOCKS_DEVICE = 256
"""16 MiB: enough to hide kernel launches, little enough to be no burden."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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
    default_blocks = _CHUNK_BLOCKS_CPU if flat.device.type == "cpu" else _CHUNK_BLOCKS_DEVICE
    low, high = _block_sums(flat, default_blocks if chunk_blocks is None else chunk_blocks)
    return _fold(low, high, flat.numel())


def _block_sums(flat: torch.Tensor, chunk_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) sums of every block, uint64; the last block is padded with zeros."""
    num_full = flat.numel() // _BLOCK_BYTES
    weights = _weights_on(str(flat.device))
    rows = max(1, min(chunk_blocks, num_full))
    scratch = torch.empty(rows, BLOCK_WORDS, dtype=torch.int64, device=flat.device)
    # Views as 64-bit words need 8-aligned bytes; shards cut at any byte do not have them and are staged.
    aligned = flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0
    stage = None if aligned else torch.empty(rows * _BLOCK_BYTES, dtype=torch.uint8, device=flat.device)
    sums = []
    for first in range(0, num_full, rows):
        chunk = flat[first * _BLOCK_BYTES : min(first + rows, num_full) * _BLOCK_BYTES]
        if stage is not None:
            chunk = stage[: chunk.numel()].copy_(chunk)
        sums.append(_sums_of(chunk, weights, scratch))
    tail = flat[num_full * _BLOCK_BYTES :]
    if tail.numel() > 0:
        padded = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=flat.device)
        padded[: tail.numel()].copy_(tail)
        sums.append(_sums_of(padded, weights, scratch))
    if not sums:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    both = torch.cat(sums, dim=1).cpu().numpy().view(np.uint64)
    return both[0], both[1]


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
    with np.errstate(over="ignore"):
        index = np.arange(1, low.size + 1, dtype=np.uint64)
        mixed = _mix(_mix(low + index * _GOLDEN) + high)
        total = np.add.reduce(mixed, dtype=np.uint64) + _mix(np.array([nbytes], np.uint64))
        return int(_mix(total)[0])


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64 finalizer: a bijection of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def block_weights() -> np.ndarray:
    """uint64[BLOCK_WORDS], odd, and pairwise different modulo 2**33."""
    with np.errstate(over="ignore"):
        return _mix(np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


@lru_cache(maxsize=16)
def _weights_on(device: str) -> torch.Tensor:
    return torch.from_numpy(block_weights().view(np.int64)).to(device)
