"""The digest against a slow reference in plain integers, and against every accident it must notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.device import DeviceError
from weight_sync.device.digest import BLOCK_WORDS, block_weights, digest_bytes

if TYPE_CHECKING:
    from tests.contract.device.conftest import Harness

MASK = (1 << 64) - 1
BLOCK_BYTES = BLOCK_WORDS * 8


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference(data: bytes) -> int:
    """The definition, with Python's unbounded integers."""
    weights = [int(w) for w in block_weights()]
    total = mix(len(data))
    for block, start in enumerate(range(0, len(data), BLOCK_BYTES), start=1):
        low = high = 0
        for i, at in enumerate(range(start, min(start + BLOCK_BYTES, len(data)), 8)):
            word = int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little", signed=True)
            low += word * weights[i]
            high += (word >> 32) * weights[i]
        total += mix((mix((low + block * 0x9E3779B97F4A7C15) & MASK) + high) & MASK)
    return mix(total & MASK)


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


@pytest.mark.parametrize(
    "nbytes", [0, 1, 7, 8, 9, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5, 9 * BLOCK_BYTES]
)
def test_digest_is_its_definition(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert digest_bytes(tensor(data)) == reference(data)
    assert digest_bytes(tensor(data), chunk_blocks=2) == reference(data), "by torch, as large tensors are"


def test_equal_bytes_give_equal_digests_on_every_backend(every: Harness) -> None:
    data = np.random.default_rng(1).bytes(100_003)
    block = every.backend.alloc_persistent(len(data))
    block.tensor.copy_(tensor(data))
    assert every.backend.digest(block.tensor) == digest_bytes(tensor(data))
    block.close()


def test_shape_dtype_and_alignment_do_not_matter() -> None:
    values = torch.randn(24, 5000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected = digest_bytes(values)
    assert digest_bytes(values.view(-1)) == expected
    assert digest_bytes(values.view(5000, 24)) == expected
    assert digest_bytes(values.view(torch.uint8)) == expected
    for shift in range(1, 9):
        padded = torch.zeros(values.numel() * 2 + 16, dtype=torch.uint8)
        padded[shift : shift + values.numel() * 2] = values.view(-1).view(torch.uint8)
        assert digest_bytes(padded[shift : shift + values.numel() * 2]) == expected
    assert digest_bytes(torch.nn.Parameter(values)) == expected


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3, 5, 100])
def test_chunking_does_not_matter(chunk_blocks: int) -> None:
    data = tensor(np.random.default_rng(2).bytes(7 * BLOCK_BYTES + 11))
    assert digest_bytes(data, chunk_blocks=chunk_blocks) == digest_bytes(data)
    assert digest_bytes(data[1:], chunk_blocks=chunk_blocks) == digest_bytes(data[1:].clone())


@given(data=st.binary(min_size=1, max_size=300), where=st.integers(0, 299), change=st.integers(1, 255))
@settings(deadline=None)
def test_any_flipped_byte_is_noticed(data: bytes, where: int, change: int) -> None:
    where %= len(data)
    flipped = bytearray(data)
    flipped[where] ^= change
    assert digest_bytes(tensor(bytes(flipped))) != digest_bytes(tensor(data))


words = st.one_of(st.integers(0, MASK), st.sampled_from([0, 1, 1 << 63, 1 << 31, 1 << 32, MASK, MASK >> 1, 3 << 62]))


@given(content=st.lists(words, min_size=2, max_size=40), i=st.integers(0, 39), j=st.integers(0, 39))
@settings(deadline=None)
def test_two_swapped_words_are_noticed(content: list[int], i: int, j: int) -> None:
    i, j = i % len(content), j % len(content)
    swapped = list(content)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    one, two = (b"".join(word.to_bytes(8, "little") for word in each) for each in (content, swapped))
    assert (digest_bytes(tensor(one)) == digest_bytes(tensor(two))) == (one == two)


@given(data=st.binary(max_size=100), num_zeros=st.integers(1, 40))
@settings(deadline=None)
def test_truncation_and_padding_are_noticed_even_of_zeros(data: bytes, num_zeros: int) -> None:
    assert digest_bytes(tensor(data + bytes(num_zeros))) != digest_bytes(tensor(data))


def test_two_swapped_blocks_are_noticed() -> None:
    data = tensor(np.random.default_rng(3).bytes(4 * BLOCK_BYTES)).view(4, BLOCK_BYTES)
    assert digest_bytes(data[[0, 2, 1, 3]]) != digest_bytes(data)


def test_words_that_differ_only_in_their_sign_do_not_hide_behind_wraparound() -> None:
    """A single wrapping sum with odd weights is blind to this for every pair of positions."""
    data = torch.zeros(64, dtype=torch.int64)
    digests = set()
    for position in range(64):
        data.zero_()
        data[position] = -(2**63)
        digests.add(digest_bytes(data))
    assert len(digests) == 64


def test_weights_have_the_properties_the_proof_uses() -> None:
    weights = block_weights()
    assert bool((weights & np.uint64(1)).all())
    assert np.unique(weights & np.uint64((1 << 33) - 1)).size == BLOCK_WORDS


def test_a_strided_tensor_is_refused() -> None:
    with pytest.raises(DeviceError, match="contiguous"):
        digest_bytes(torch.zeros(4, 4).t()[:2])
