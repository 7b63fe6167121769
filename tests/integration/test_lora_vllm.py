"""LoRA end to end: adapters of two real FSDP2 ranks (PEFT) in a live vLLM engine, at TP 1 and TP 2.

References: Hugging Face with the merged weights (and, for requests that cross commits, with a KV cache that is handed
from one version's model to the next), and slices of the adapter written down independently of vLLM's loaders.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config, Qwen2ForCausalLM

from rollout.engine.vllm_config import vllm_sampling
from rollout.engine.vllm_engine import VllmEngine
from rollout.types import SamplingParams
from tests.contract.engine.suite import Response, collect
from tests.fakes.learner import run_config
from tests.fakes.patience import PATIENT_S, PATIENT_TEST_S
from tests.fakes.ranks import RankProcess, lora_rank
from tests.fakes.readable_extension import READABLE
from tests.fakes.tiny_vllm import EngineHandle, make_spec, random_prompt
from trainer.config.schema import LoraConfig
from weight_sync.control.coordinator import SyncCoordinator
from weight_sync.control.epoch import SyncOptions
from weight_sync.errors import PlanMismatch
from weight_sync.vllm.lora import peft_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from rollout.engine.interface import EngineSpec

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(PATIENT_TEST_S)]
RANK, ALPHA, LAYERS, HEADS = 8, 12.0, 2, 2
TARGETS = "q_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"
"""Without k_proj: a fused layer of which a part has no adapter."""
SHAPES = {
    "self_attn.q_proj": (128, 128), "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (192, 128), "mlp.up_proj": (192, 128), "mlp.down_proj": (128, 192),
}  # fmt: skip
FUSED = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
         "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
         "self_attn.o_proj": ("self_attn.o_proj",), "mlp.down_proj": ("mlp.down_proj",)}  # fmt: skip
ADAPTER_BYTES = 4 * LAYERS * sum(RANK * (rows + columns) for rows, columns in SHAPES.values())


class Rig:
    def __init__(self, ranks: list[RankProcess], engine: VllmEngine, num_workers: int, folder: Path) -> None:
        self.ranks, self.engine, self.num_workers, self.folder = ranks, engine, num_workers, folder
        self.models: dict[int, Any] = {}
        """Version -> merged Hugging Face model, as the learner exported it."""

    async def everyone(self, method: str, *args: object) -> list[Any]:
        return await asyncio.gather(*(rank.call(method, *args) for rank in self.ranks))

    async def export(self, version: int) -> None:
        await self.everyone("set_adapters", version)
        await self.everyone("export_hf", str(self.folder / f"v{version}"))
        self.models[version] = AutoModelForCausalLM.from_pretrained(self.folder / f"v{version}", dtype=torch.float32)

    async def next_version(self, coordinator: SyncCoordinator, version: int) -> Any:
        """Exported now, unless it was before."""
        if version not in self.models:
            await self.export(version)
        await self.everyone("set_adapters", version)
        await coordinator.publish(version)
        return await coordinator.sync(version)

    async def assert_slot_holds_the_adapter(self, dtype: torch.dtype = torch.float32) -> None:
        state, scaling = (await self.everyone("adapters"))[0]
        expected = [expected_slot(state, scaling, worker, self.num_workers) for worker in range(self.num_workers)]
        replies = await self.engine.call_workers("te_read", list(expected[0]), timeout_s=PATIENT_S)
        for worker, reply in enumerate(replies):
            held = msgspec.msgpack.decode(reply, type=dict[str, bytes])
            for name, tensor in expected[worker].items():
                got = torch.frombuffer(bytearray(held[name]), dtype=dtype)
                assert torch.equal(got, tensor.to(dtype).contiguous().reshape(-1)), f"worker {worker}: {name}"


def expected_slot(state: dict[str, torch.Tensor], scaling: float, worker: int, size: int) -> dict[str, torch.Tensor]:
    """Column-parallel layers cut B by rows, row-parallel ones A by columns; parts without an adapter are zero."""
    found: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for fused, parts in FUSED.items():
            row_parallel = fused in {"self_attn.o_proj", "mlp.down_proj"}
            for index, part in enumerate(parts):
                module = f"model.layers.{layer}.{part}"
                a = state.get(peft_name(module, is_a=True), torch.zeros(RANK, 128))
                b = state.get(peft_name(module, is_a=False), torch.zeros(64, RANK)) * scaling
                name = f"model.layers.{layer}.{fused}"
                found[f"{name}.lora_a.{index}"] = a.chunk(size, dim=1)[worker] if row_parallel else a
                found[f"{name}.lora_b.{index}"] = b if row_parallel else b.chunk(size, dim=0)[worker]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128, hidden_size=128, intermediate_size=192, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.1,
        eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).float().save_pretrained(folder / "base")
    return folder


@contextlib.asynccontextmanager
async def learner_ranks(
    folder: Path, *, rollout_dtype: str
) -> AsyncIterator[tuple[list[RankProcess], asyncio.Future[Any]]]:
    """Two learner ranks on the host, and their setup on its way: engines start at the same time."""
    cfg = run_config(folder / "base", num_ranks=2)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, target_modules=TARGETS)
    cfg = replace(cfg, model=replace(cfg.model, rollout_dtype=rollout_dtype, lora=lora))
    cfg = replace(cfg, device=replace(cfg.device, name="cpu"))
    ranks = [RankProcess(lora_rank, rank, cfg, 2) for rank in range(2)]

    async def setup() -> None:
        address = await ranks[0].call("node_address")
        await asyncio.gather(*(rank.call("setup", address) for rank in ranks))

    ready = asyncio.ensure_future(setup())
    try:
        yield ranks, ready
    finally:
        await asyncio.gather(*(asyncio.to_thread(rank.close) for rank in ranks))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def learners(folder: Path) -> AsyncIterator[tuple[list[RankProcess], asyncio.Future[Any]]]:
    async with learner_ranks(folder, rollout_dtype="float32") as learners:
        yield learners


def lora_spec(folder: Path, **changes: Any) -> EngineSpec:
    lora = {"extension": READABLE, "lora_rank": RANK, "lora_targets": tuple(TARGETS.split("+"))}
    size = {"max_model_len": 1024, "max_num_seqs": 8, "stream_interval": 8}
    return make_spec(folder / "base", **{"tokenizer": "", "stop_token_ids": (), **lora, **size, **changes})


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)], ids=["tp1", "tp2"]
)
async def rig(
    request: pytest.FixtureRequest, learners: tuple[list[RankProcess], asyncio.Future[Any]], folder: Path
) -> AsyncIterator[Rig]:
    ranks, ready = learners
    engine = VllmEngine(lora_spec(folder, tensor_parallel_size=request.param))
    try:
        await asyncio.gather(engine.start(), ready)
        yield Rig(ranks, engine, request.param, folder)
    finally:
        await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def coordinator(rig: Rig) -> AsyncIterator[SyncCoordinator]:
    coordinator = SyncCoordinator(rig.ranks, [EngineHandle(rig.engine)], options=SyncOptions(timeout_s=PATIENT_S))
    await coordinator.open()
    yield coordinator
    await coordinator.close()


def reference(rig: Rig, prompt: np.ndarray, response: Response, labels: list[int]) -> np.ndarray:
    """Log-prob of every token by the model of its label, over a KV cache that earlier versions have written."""
    cache, picked = DynamicCache(), []
    inputs = torch.from_numpy(prompt.astype(np.int64))[None]
    for token, version in zip(response.tokens, labels, strict=True):
        with torch.no_grad():
            logits = rig.models[version](inputs, past_key_values=cache, use_cache=True).logits[0, -1]
        picked.append(float(torch.log_softmax(logits, -1)[token]))
        inputs = torch.tensor([[token]])
    return np.array(picked)


async def ask(rig: Rig, name: str, prompt: np.ndarray, max_tokens: int = 24) -> Response:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3, ignore_eos=True)
    return await collect(rig.engine, name, params, prompt)


async def test_engine_has_the_adapter_bit_for_bit_and_only_the_adapter_moves(
    rig: Rig, coordinator: SyncCoordinator
) -> None:
    for version in (1, 2, 3):
        report = await rig.next_version(coordinator, version)
        await rig.assert_slot_holds_the_adapter()
        await coordinator.self_test()
        if rig.num_workers == 1:
            assert report.nbytes == ADAPTER_BYTES, "adapters and nothing else"
        assert report.nbytes < 2 * ADAPTER_BYTES
        prompt = random_prompt(version)
        response = await ask(rig, f"v{version}", prompt)
        assert set(response.labels) == {version}
        np.testing.assert_allclose(response.logprobs, reference(rig, prompt, response, response.labels), atol=2e-3)
        other = reference(rig, prompt, response, [max(1, version - 1)] * len(response.tokens))
        assert version == 1 or np.abs(response.logprobs - other).max() > 0.3, "another adapter would be noticed"


async def test_requests_in_flight_change_version_at_the_commit_and_every_token_says_so(
    rig: Rig, coordinator: SyncCoordinator
) -> None:
    """An off-by-one label would take one log-prob from the wrong adapter."""
    for version in (12, 13):  # while requests run, nothing but the syncs takes time
        await rig.export(version)
    await rig.next_version(coordinator, 11)
    prompts = [random_prompt(20 + i) for i in range(3)]
    is_over = asyncio.Event()
    responses: list[tuple[np.ndarray, Response]] = []

    async def keep_asking(number: int) -> None:
        for turn in itertools.count():
            name = f"long-{number}-{turn}"
            responses.append((prompts[number], await ask(rig, name, prompts[number], max_tokens=700)))
            if is_over.is_set():
                return

    running = asyncio.gather(*(keep_asking(number) for number in range(3)))
    await asyncio.sleep(0)
    try:
        for version in (12, 13):
            await rig.next_version(coordinator, version)
    finally:
        is_over.set()
    await running
    assert all(len(response.tokens) == 700 for _, response in responses), "no request is lost"
    for before, after in ((11, 12), (12, 13)):
        spanning = [(p, a) for p, a in responses if {before, after} <= set(a.labels)]
        assert spanning, f"no request was under way at the commit of {after}"
        prompt, response = spanning[0]
        expected = reference(rig, prompt, response, response.labels)
        np.testing.assert_allclose(response.logprobs, expected, atol=5e-3)


async def test_two_versions_never_share_a_prefix_though_the_adapter_has_one_name(
    rig: Rig, coordinator: SyncCoordinator
) -> None:
    """The second half shows that the cache is on and that nothing but the salt keeps versions apart."""
    prompt = random_prompt(40, num_tokens=600)
    responses, unsalted = [], []
    for version in (21, 22):
        await rig.next_version(coordinator, version)
        responses.append([await ask(rig, f"{version}-{i}", prompt, max_tokens=4) for i in range(2)])
        unsalted.append(await first_token_with_salt(rig, prompt, "same", f"{version}-raw"))
    for version, pair in zip((21, 22), responses, strict=True):
        for response in pair:  # the second comes from the cache
            expected = reference(rig, prompt, response, [version] * 4)
            np.testing.assert_allclose(response.logprobs, expected, atol=2e-3)
    with torch.no_grad():
        fresh = torch.log_softmax(rig.models[22](torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1], -1)
    token, logprob = unsalted[1]
    assert abs(logprob - float(fresh[token])) > 0.05, (
        "with one salt for all versions the old version's KV would be used"
    )


async def first_token_with_salt(rig: Rig, prompt: np.ndarray, salt: str, name: str) -> tuple[int, float]:
    """And its log-prob, by a request that bypasses our salt."""
    from weight_sync.vllm.lora import policy_adapter

    sampling = vllm_sampling(SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), [])
    inputs: Any = {"prompt_token_ids": prompt.tolist(), "cache_salt": salt}
    last: Any = None
    async for output in rig.engine._engine.generate(inputs, sampling, request_id=name, lora_request=policy_adapter()):
        last = output
    return last.outputs[0].token_ids[0], last.outputs[0].logprobs[0]


async def test_an_adapter_for_a_layer_the_engine_has_not_wrapped_is_refused_before_a_byte_moves(rig: Rig) -> None:
    from weight_sync.messages import RecordedLayout, RecordRequest, encode, open_reply
    from weight_sync.plan.types import ParamMeta

    module = "model.layers.0.self_attn.k_norm"
    params = tuple(ParamMeta(name=peft_name(module, is_a=a), shape=(8, 8), dtype="float32") for a in (True, False))
    reply = (await rig.engine.call_workers("ws_record", encode(RecordRequest(params=params)), timeout_s=PATIENT_S))[0]
    with pytest.raises(PlanMismatch, match=r"no linear layer with LoRA for .*k_norm"):
        open_reply(reply, RecordedLayout, party="r0/0")
