"""Packed attention, and log-probs and entropy in chunks, against plain computations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.fakes.learner import KINDS, one_sequence, pack, save_tiny, sequences
from trainer.errors import ModelError
from trainer.learner import attention
from trainer.learner.attention import (
    ATTENTION_NAME,
    BLOCK_GROWTH,
    FLEX,
    FLEX_BLOCK,
    KERNELS,
    SHORTEST_BLOCK,
    VarlenLayout,
    attention_name,
    best_layout,
    packed_attention,
    packed_rows,
    padded_layout,
    register_packed_attention,
)
from trainer.learner.logprobs import Head, selected_logprobs
from trainer.learner.model import predicting_states
from trainer.learner.packed_inputs import PackedInputs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has FlexAttention's backward in plain operations, which it refuses to use on a CPU, and none compiled."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_every_token_has_one_place_and_comes_back_to_it_and_padding_is_bounded(lengths: list[int]) -> None:
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    layout = padded_layout(cu_seqlens, CPU)
    flat = torch.cat([block.token_index for block in layout.blocks])
    assert flat[layout.restore_index].tolist() == list(range(cu_seqlens[-1]))
    for block in layout.blocks:
        assert block.token_index.shape == (block.num_seqs * block.length,)
        assert block.token_index[block.place_index].equal(block.packed_index)
        real_per_row = np.bincount(block.place_index.numpy() // block.length)
        assert block.length <= max(SHORTEST_BLOCK, BLOCK_GROWTH * real_per_row.min())
    assert sum(block.num_seqs for block in layout.blocks) == len(lengths)


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, padded_layout) for kind in sorted(KINDS)), *((kind, FLEX) for kind in ("mistral", "gemma2", "gpt_oss"))],
)
def test_packed_forward_equals_one_forward_per_sequence(kind: str, layout: Any, tmp_path: Path) -> None:
    register_packed_attention()
    directory = save_tiny(tmp_path, kind)
    packed_model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=ATTENTION_NAME)
    plain_model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    parts = sequences(9, longest=40)
    inputs = PackedInputs.of(pack(parts), device=CPU, layout=layout)
    assert layout is not padded_layout or len(inputs.layout.blocks) > 1
    packed = packed_model(
        input_ids=inputs.token_ids_1T, position_ids=inputs.position_ids_1T, use_cache=False, packed=inputs.layout
    ).logits[0]
    plain = torch.cat([plain_model(torch.from_numpy(p.token_ids.astype(np.int64))[None]).logits[0] for p in parts])
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-5)
    direction = torch.randn(plain.shape, generator=torch.Generator().manual_seed(0))
    (packed * direction).sum().backward()
    (plain * direction).sum().backward()
    for (name, a), b in zip(packed_model.named_parameters(), plain_model.parameters(), strict=True):
        atol = 2e-4 * max(1.0, b.grad.abs().max().item() / 10)  # those of Gemma are large
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What torch's kernel computes: the last query of a sequence sees its last key."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1] if enable_gqa else 1, dim=1) for x in (k, v))
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    parts = []
    for (q_start, q_stop), (k_start, k_stop) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[q_start:q_stop], k[k_start:k_stop]) * scale
        num_q, num_k = q_stop - q_start, k_stop - k_start
        behind = torch.arange(num_q)[:, None] + num_k - num_q - torch.arange(num_k)
        left, right = window_size
        hidden = (behind < -right) | (behind > left if left >= 0 else torch.zeros_like(behind, dtype=torch.bool))
        parts.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[k_start:k_stop])
        )
    return torch.cat(parts)


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in ("qwen2", "mistral") for layout in (padded_layout, *KERNELS[-3:])]
    + [(kind, layout) for kind in ("gemma2", "gpt_oss") for layout in (padded_layout, FLEX)],
)
def test_a_prompt_that_is_computed_once_gives_the_gradients_of_one_forward_per_sequence(
    kind: str, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
    register_packed_attention()
    directory, rng = save_tiny(tmp_path, kind), np.random.default_rng(4)
    parts, prefix_lens = [], []
    for num_answers, prompt_len in ((3, 9), (1, 4), (4, 1), (2, 21)):
        prompt = rng.integers(0, 61, prompt_len)
        for answer in range(num_answers):
            mask = np.arange(prompt_len + rng.integers(1, 24)) >= prompt_len
            part = one_sequence(rng, mask)
            part.token_ids[:prompt_len] = prompt
            parts.append(part)
            prefix_lens.append(prompt_len if answer else 0)
    batch = replace(pack(parts), prefix_lens=np.array(prefix_lens, np.int32))
    found: list[tuple[Tensor, ...]] = []
    for implementation in (ATTENTION_NAME, "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"):
        hf = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation=implementation, experts_implementation="eager", dtype=torch.float64
        )
        if implementation != ATTENTION_NAME:
            states, targets = [], []
            for part in parts:
                ids, positions = torch.from_numpy(part.token_ids.astype(np.int64)), np.flatnonzero(part.loss_mask)
                states.append(hf.base_model(input_ids=ids[None]).last_hidden_state[0, positions - 1])
                targets.append(ids[positions])
            hidden, target = torch.cat(states), torch.cat(targets)
        else:
            inputs = PackedInputs.of(batch, device=CPU, layout=layout)
            assert inputs.token_ids_1T.shape[1] == len(batch.token_ids) - sum(prefix_lens)
            hidden, target = predicting_states(hf, inputs), inputs.target_L
        logp, _ = selected_logprobs(hidden, hf.get_output_embeddings().weight, target, Head())
        direction = torch.randn(len(logp), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        (logp * direction).sum().backward()
        found.append((logp, *(param.grad for param in hf.parameters())))
    for got, expected in zip(*found, strict=True):
        # Norms are in float32, and gradients of Gemma large.
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-4 if kind == "gemma2" else 1e-5)


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=5), min_size=1, max_size=8),
    st.integers(0, 150),
    st.sampled_from([None, 1, 40, 300]),
)
def test_a_block_of_the_row_is_left_out_only_if_no_token_sees_another(
    groups: list[list[int]], prefix: int, window: int | None
) -> None:
    lengths = [prefix + length for group in groups for length in group]
    prefix_lens = [prefix * (index > 0) for group in groups for index, _ in enumerate(group)]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    rows = packed_rows(cu_seqlens, np.array(prefix_lens))
    layout = FLEX(cu_seqlens, CPU, rows)
    size, sees = int(rows.max()) + 1, np.zeros([-(-(int(rows.max()) + 1) // FLEX_BLOCK) * FLEX_BLOCK] * 2, np.bool_)
    for start, stop in pairwise(cu_seqlens):
        own = rows[start:stop]
        behind = np.arange(len(own))[:, None] - np.arange(len(own))
        found = (behind >= 0) & (behind < (size if window is None else window))
        sees[np.ix_(own, own)] |= found
    number = torch.arange(size)
    mask = layout.mask(window)
    seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), number[:, None], number).numpy()
    np.testing.assert_array_equal(seen, sees[:size, :size])
    blocks = sees.reshape(len(sees) // FLEX_BLOCK, FLEX_BLOCK, -1, FLEX_BLOCK).any(axis=(1, 3))
    listed = mask.to_dense()[0, 0].numpy().astype(np.bool_)
    assert listed.shape == blocks.shape and (listed | ~blocks).all()
    if len(groups) == sum(map(len, groups)) and window is None:
        np.testing.assert_array_equal(listed, blocks, err_msg="without shared prompts no block is computed in vain")


def test_prefixes_that_do_not_fit_their_sequences_are_refused() -> None:
    batch = pack(sequences(2))
    for prefix_lens in ([1, 0], [0, 40], [2, 2]):
        with pytest.raises(ValueError, match="do not fit lengths"):
            PackedInputs.of(replace(batch, prefix_lens=np.array(prefix_lens)), device=CPU, layout=padded_layout)


def test_what_is_not_computed_is_refused() -> None:
    module, heads = torch.nn.Linear(1, 1), torch.zeros(1, 1, 2, 4)
    layout = padded_layout(np.array([0, 2]), CPU)
    with pytest.raises(ModelError, match="attention with position_bias"):
        packed_attention(module, heads, heads, heads, None, packed=layout, position_bias=heads)
    with pytest.raises(ModelError, match=r"with attention_mask, .* use Qwen2"):
        packed_attention(module, heads, heads, heads, torch.zeros(2, 2), packed=layout)
    with pytest.raises(ModelError, match="values of size 3 and keys of size 4"):
        packed_attention(module, heads, heads, heads[..., :3], None, packed=layout)
    with pytest.raises(ModelError, match="was not given packed="):
        packed_attention(module, heads, heads, heads, None)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The kernel of an accelerator, which may be replaced, on a CPU; what was found before is forgotten."""
    found: dict[str, Any] = {"varlen": plain_varlen, "device": torch.device("meta")}

    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        keys: dict[str, Any] = {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa}
        return found["varlen"](q, k, v, cu_q, cu_k, max_q, max_k, **keys)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    why_not = attention.why_not
    monkeypatch.setattr(attention, "why_not", lambda kernel, _, *args, **keys: why_not(kernel, CPU, *args, **keys))
    best_layout.cache_clear()
    yield found
    best_layout.cache_clear()


def test_the_first_kernel_that_computes_attention_is_taken_and_named_with_those_before_it(kernel: Any) -> None:
    layout = best_layout(kernel["device"], torch.bfloat16, head_dim=32)
    assert layout.name == "torch's variable-length kernel" and layout.shares_prefix
    assert "; not FlashAttention 3 (ModuleNotFoundError: No module named 'flash_attn_interface')" in attention_name(
        layout
    )
    made = layout(np.array([0, 3, 5]), CPU)
    assert isinstance(made, VarlenLayout) and not made.repeats_kv


def test_a_kernel_that_wants_all_heads_of_keys_gets_them(kernel: Any) -> None:
    def of_equal_heads(q: Tensor, k: Tensor, *args: Any, **keys: Any) -> Tensor:
        if q.shape[1] != k.shape[1]:
            raise RuntimeError("Number of heads must be equal")
        return plain_varlen(q, k, *args, **keys)

    kernel["varlen"] = of_equal_heads
    layout = best_layout(kernel["device"], torch.bfloat16, head_dim=32)
    assert "keys and values repeated" in layout.name and "heads must be equal" in attention_name(layout)


def test_a_kernel_that_aligns_fewer_queries_with_the_first_keys_is_not_taken(
    kernel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def first_keys(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *args: Any, **keys: Any) -> Tensor:
        return plain_varlen(q, k, v, cu_q, cu_k, *args, **{**keys, "window_size": (-1, int((cu_q - cu_k).abs().max()))})

    kernel["varlen"] = first_keys
    for _ in range(2):  # policy and reference
        layout = best_layout(kernel["device"], torch.bfloat16, head_dim=32)
        assert layout.name == "padded blocks" and not layout.shares_prefix
    (message,) = caplog.messages
    assert "attention of padded blocks; not FlashAttention 3" in message and "off by" in message


def test_a_kernel_that_fails_is_named_with_its_reason_and_a_lack_of_memory_says_nothing(
    kernel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [RuntimeError("no kernel image is available")]

    def refuse(*_: object, **__: object) -> Tensor:
        raise errors[0]

    kernel["varlen"] = refuse
    best_layout(kernel["device"], torch.bfloat16, head_dim=32)
    best_layout(kernel["device"], torch.float32, head_dim=32)
    first, second = caplog.messages
    assert "RuntimeError: no kernel image is available" in first and "half precision only" in second
    best_layout.cache_clear()
    errors[0] = torch.OutOfMemoryError("tried to allocate 2 GiB")
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        best_layout(kernel["device"], torch.bfloat16, head_dim=32)


def test_scores_that_are_not_plain_are_given_to_no_kernel_that_does_not_know_them(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = best_layout(kernel["device"], torch.bfloat16, head_dim=32, is_plain=False)
    assert layout.name == "padded blocks", "torch has no backward of FlexAttention for this device"
    (message,) = caplog.messages
    assert "not FlexAttention (NotImplementedError: FlexAttention does not support backward on CPU" in message
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    best_layout.cache_clear()
    for dtype in (torch.bfloat16, torch.float32):
        layout = best_layout(kernel["device"], dtype, head_dim=32, is_plain=False)
        assert attention_name(layout) == "FlexAttention" and layout.shares_prefix
    assert best_layout(kernel["device"], torch.bfloat16, head_dim=32).name == "torch's variable-length kernel"
    real = attention._attend_flex
    for wrong in ({"softcap": None}, {"sinks_H": None}, {"window": None}):
        monkeypatch.setattr(
            attention, "_attend_flex", lambda *args, wrong=wrong: real(*args[:4], args[4]._replace(**wrong))
        )
        best_layout.cache_clear()
        assert best_layout(kernel["device"], torch.bfloat16, head_dim=32, is_plain=False).name == "padded blocks"
    assert "its result is off by" in caplog.messages[-1] or "inf" in caplog.messages[-1]


def _reference(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("of_entropy", [0.0, 1.0])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_chunks_equal_the_full_softmax_with_gradients(
    temperature: float, chunk_tokens: int, of_entropy: float, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (11, 300))
    target, direction = torch.randint(0, 300, (11,), generator=generator), torch.randn(2, 11, generator=generator)
    direction[1] *= of_entropy
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            head = Head(temperature, chunk_tokens, entropy_has_grad=bool(of_entropy), softcap=softcap)
            both = selected_logprobs(h, w, target, head)
        else:
            both = _reference(h, w, target, temperature, softcap)
        (torch.stack(both) * direction).sum().backward()
        results.append((*both, h.grad, w.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("float32", [True, False])
def test_logits_of_bfloat16_products_are_rounded_only_where_engines_round_them(float32: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (5, 3000))
    target = torch.arange(5)
    logp, entropy = selected_logprobs(hidden, weight, target, Head(chunk_tokens=2, float32=float32))
    logits = hidden.double() @ weight.double().T if float32 else (hidden @ weight.T).double()
    expected = torch.log_softmax(logits, -1)
    torch.testing.assert_close(logp.double(), expected[torch.arange(5), target], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-5)


def test_a_likely_token_keeps_its_small_gradient_in_bfloat16() -> None:
    hidden, weight = torch.eye(2).bfloat16().requires_grad_(), (8 * torch.eye(2)).bfloat16().requires_grad_()
    logp, _ = selected_logprobs(hidden, weight, torch.arange(2), Head())
    logp.sum().backward()
    assert hidden.grad is not None
    # 8 (1 - p) of a probability that bfloat16 takes for 1
    torch.testing.assert_close(hidden.grad[0, 0].item(), 8 / (1 + np.exp(8)), rtol=0.01, atol=0.0)


def test_no_loss_token_still_joins_the_graph() -> None:
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(5, 8, requires_grad=True)
    logp, _ = selected_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), Head())
    logp.sum().backward()
    assert weight.grad is not None and weight.grad.eq(0).all()


class Shapes(TorchDispatchMode):
    """Of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("is_trained", [True, False])
def test_no_more_logits_exist_than_those_of_a_chunk_and_a_frozen_output_matrix_costs_no_gradient(
    is_trained: bool,
) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (64, 2048))
    grads = []
    for trained in (True, is_trained):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        with Shapes() as shapes:
            logp, _ = selected_logprobs(h, w, torch.arange(64), Head(temperature=0.6, chunk_tokens=4))
            logp.sum().backward()
        assert ((2048, 8) in shapes.seen) is trained
        assert (w.grad is not None) is trained
        assert max(np.prod(shape) for shape in shapes.seen) <= 2048 * 8 < 64 * 2048
        grads.append(h.grad)
    assert grads[0].equal(grads[1])
