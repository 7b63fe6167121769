from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.fakes.learner import KINDS, pack, save_tiny, sequences
from trainer.errors import ModelError
from trainer.learner import packed_inputs as attention
from trainer.learner.packed_inputs import (
    ATTENTION_NAME,
    BLOCK_GROWTH,
    SHORTEST_BLOCK,
    PackedInputs,
    best_layout,
    packed_attention,
    padded_layout,
    register_packed_attention,
    varlen_layout,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_every_token_has_exactly_one_place_and_comes_back_to_it(lengths: list[int]) -> None:
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    layout = padded_layout(cu_seqlens, CPU)
    flat = torch.cat([block.token_index for block in layout.blocks])
    assert flat[layout.restore_index].tolist() == list(range(cu_seqlens[-1]))
    for block in layout.blocks:
        assert block.token_index.shape == (block.num_seqs * block.length,)
        assert block.token_index[block.place_index].equal(block.packed_index)
    assert sum(block.num_seqs for block in layout.blocks) == len(lengths)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_padding_never_outgrows_its_bound(lengths: list[int]) -> None:
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    for block in padded_layout(cu_seqlens, CPU).blocks:
        real_per_row = np.bincount(block.place_index.numpy() // block.length)
        assert block.length <= max(SHORTEST_BLOCK, BLOCK_GROWTH * real_per_row.min())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_packed_forward_equals_one_forward_per_sequence(kind: str, tmp_path: Path) -> None:
    register_packed_attention()
    directory = save_tiny(tmp_path, kind)
    packed_model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=ATTENTION_NAME)
    plain_model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    parts = sequences(9, longest=40)
    inputs = PackedInputs.of(pack(parts), device=CPU, layout=padded_layout)
    assert len(inputs.layout.blocks) > 1
    packed = packed_model(
        input_ids=inputs.token_ids_1T, position_ids=inputs.position_ids_1T, use_cache=False, packed=inputs.layout
    ).logits[0]
    plain = torch.cat([plain_model(torch.from_numpy(p.token_ids.astype(np.int64))[None]).logits[0] for p in parts])
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-5)
    direction = torch.randn(plain.shape, generator=torch.Generator().manual_seed(0))
    (packed * direction).sum().backward()
    (plain * direction).sum().backward()
    for (name, a), b in zip(packed_model.named_parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=2e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_what_is_not_computed_is_refused() -> None:
    module, heads = torch.nn.Linear(1, 1), torch.zeros(1, 1, 2, 4)
    layout = padded_layout(np.array([0, 2]), CPU)
    with pytest.raises(ModelError, match="attention with softcap"):
        packed_attention(module, heads, heads, heads, None, packed=layout, softcap=30.0)
    with pytest.raises(ModelError, match=r"with attention_mask, .* use Qwen2"):
        packed_attention(module, heads, heads, heads, torch.zeros(2, 2), packed=layout)
    with pytest.raises(ModelError, match="values of size 3 and keys of size 4"):
        packed_attention(module, heads, heads, heads[..., :3], None, packed=layout)
    with pytest.raises(ModelError, match="was not given packed="):
        packed_attention(module, heads, heads, heads, None)


@pytest.fixture
def accelerator() -> Iterator[torch.device]:
    """A device on which nothing is computed; what was found before is forgotten."""
    best_layout.cache_clear()
    yield torch.device("meta")
    best_layout.cache_clear()


def test_padded_blocks_are_the_normal_way_on_cpu_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert best_layout(CPU, torch.bfloat16, head_dim=32) is padded_layout
    assert not caplog.records


def test_a_kernel_that_fails_on_an_accelerator_is_told_once_with_its_reason(
    accelerator: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(attention, "_varlen", refuse)
    for _ in range(2):  # policy and reference
        assert best_layout(accelerator, torch.bfloat16, head_dim=32) is padded_layout
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "RuntimeError: no kernel image is available" in record.getMessage()
    assert best_layout(accelerator, torch.float32, head_dim=32) is padded_layout
    assert "it computes in half precision only" in caplog.records[1].getMessage()


def test_a_kernel_that_works_is_taken(accelerator: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_varlen", lambda q, *_, **__: q * 2)
    monkeypatch.setattr(torch, "isfinite", lambda _: torch.ones(()))
    assert best_layout(accelerator, torch.bfloat16, head_dim=32) is varlen_layout


def test_a_device_without_memory_for_the_trial_says_so_and_nothing_about_the_kernel(
    accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(attention, "_varlen", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        best_layout(accelerator, torch.bfloat16, head_dim=32)
