"""Two real FSDP2 ranks (gloo) bring their weights into a live vLLM engine: at TP 1 and TP 2 while it generates, and to
both stages of a pipeline."""

from __future__ import annotations

import asyncio
import gc
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import torch

from tests.fakes.patience import PATIENT_S, PATIENT_TEST_S
from tests.fakes.ranks import TINY, RankProcess, tiny_rank
from tests.fakes.readable_extension import READABLE
from weight_sync.control.coordinator import SyncCoordinator
from weight_sync.control.epoch import SyncOptions
from weight_sync.errors import SlotOverwritten
from weight_sync.messages import Ok, PrefetchRequest, SlotAt, WorkerStatus, open_reply
from weight_sync.vllm.replica import AsyncLLMReplica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(PATIENT_TEST_S)]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Rig:
    """Learner ranks, and an engine in this process's child."""

    def __init__(self, ranks: list[RankProcess], engine: Any, num_workers: int) -> None:
        self.ranks, self.engine, self.num_workers = ranks, engine, num_workers
        self.replica = AsyncLLMReplica(engine, name="r0")

    async def generate(self, prompt: list[int], *, max_tokens: int, name: str) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        salted = {"prompt_token_ids": prompt, "cache_salt": self.replica.cache_salt}
        last = None
        async for output in self.engine.generate(salted, sampling, request_id=name):
            last = output
        assert last is not None
        return list(last.outputs[0].token_ids)

    async def parameters(self) -> list[dict[str, torch.Tensor]]:
        """Every worker's live parameters, flat, as the engine itself would read them."""
        replies = await self.replica.call("te_read", engine_names(), timeout_s=PATIENT_S)
        return [flat(reply) for reply in replies]

    async def everyone(self, method: str, *args: object) -> list[Any]:
        """Collectives need all ranks at once."""
        return await asyncio.gather(*(rank.call(method, *args) for rank in self.ranks))

    async def assert_equal(self) -> None:
        full = (await self.everyone("full_state"))[0]
        for worker, held in enumerate(await self.parameters()):
            expected = expected_worker(full, worker, self.num_workers)
            assert held.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(held[name], tensor.reshape(-1)), f"worker {worker}: {name} differs"


def flat(reply: bytes) -> dict[str, torch.Tensor]:
    held = msgspec.msgpack.decode(reply, type=dict[str, bytes])
    return {n: torch.frombuffer(bytearray(b), dtype=torch.bfloat16) for n, b in held.items()}


def engine_names() -> list[str]:
    per_layer = ["self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias", "self_attn.o_proj.weight",
                 "mlp.gate_up_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight",
                 "post_attention_layernorm.weight"]  # fmt: skip
    layers = [f"model.layers.{i}.{name}" for i in range(TINY["num_hidden_layers"]) for name in per_layer]
    return ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", *layers]


def expected_worker(full: dict[str, torch.Tensor], worker: int, num_workers: int) -> dict[str, torch.Tensor]:
    """What Megatron-style tensor parallelism puts on a worker, written down independently of vLLM's loaders."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(num_workers, dim=0)[worker]

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(num_workers, dim=1)[worker].contiguous()

    out = {"model.norm.weight": full["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        out[name] = rows(full[name])
    for i in range(TINY["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for kind in ("weight", "bias"):
            out[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat(
                [rows(full[f"{p}self_attn.{x}_proj.{kind}"]) for x in "qkv"]
            )
        out[f"{p}mlp.gate_up_proj.weight"] = torch.cat([rows(full[f"{p}mlp.{x}_proj.weight"]) for x in ("gate", "up")])
        for x in ("self_attn.o_proj", "mlp.down_proj"):
            out[f"{p}{x}.weight"] = columns(full[f"{p}{x}.weight"])
        for x in ("input_layernorm", "post_attention_layernorm"):
            out[f"{p}{x}.weight"] = full[f"{p}{x}.weight"]
    return out


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[pytest.param(1, marks=pytest.mark.full), 2], ids=["tp1", "tp2"]
)
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        async with running(tmp_path_factory.mktemp("model"), request.param, tensor_parallel_size=request.param) as rig:
            yield rig


@asynccontextmanager
async def running(folder: Path, num_workers: int, **parallel: int) -> AsyncIterator[Rig]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = {**TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    ranks = [RankProcess(tiny_rank, rank, 2, folder / "store") for rank in range(2)]
    args = AsyncEngineArgs(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        max_model_len=512, max_num_seqs=16, worker_extension_cls=READABLE, disable_log_stats=True, **parallel,
    )  # fmt: skip
    engine = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
    try:
        yield Rig(ranks, engine, num_workers)
    finally:
        with suppress(psutil.NoSuchProcess):  # vLLM looks at a child that may end at this moment
            engine.shutdown()
        del engine
        gc.collect()  # its finalizer must not run after the interpreter has torn vLLM down
        for rank in ranks:
            rank.close()


def coordinator_of(rig: Rig, **options: Any) -> SyncCoordinator:
    return SyncCoordinator(rig.ranks, [rig.replica], options=SyncOptions(timeout_s=PATIENT_S, **options))


@pytest.mark.parametrize("commit", ["staged", "inplace"])
async def test_live_engine_follows_the_learner_bit_for_bit_while_it_generates(rig: Rig, commit: str) -> None:
    coordinator = coordinator_of(rig, commit=commit)
    await coordinator.open()
    try:
        await rig.everyone("train", 1)
        await coordinator.publish(1)
        first = await coordinator.sync(1)
        await rig.assert_equal()
        await coordinator.self_test()
        prompt = list(range(5, 21))
        before = await rig.generate(prompt, max_tokens=12, name=f"{commit}-before")
        is_over = asyncio.Event()

        async def keep_asking(number: int) -> list[int]:
            """The number of tokens of one response after the other."""
            found: list[int] = []
            while not is_over.is_set():
                name = f"{commit}-{number}-{len(found)}"
                found.append(len(await rig.generate([number + 1, *prompt], max_tokens=120, name=name)))
            return found

        running = [asyncio.create_task(keep_asking(number)) for number in range(4)]
        for version in (2, 3):
            await rig.everyone("train", version)
            await coordinator.publish(version)
            report = await coordinator.sync(version)
            await rig.assert_equal()
        is_over.set()
        assert {num for found in await asyncio.gather(*running) for num in found} == {120}, "a request was lost"
        names = ("allocations", "registrations", "sockets", "control_connections")
        assert {n: report.counters[n] for n in names} == {n: first.counters[n] for n in names}
        other = await rig.generate(prompt, max_tokens=12, name=f"{commit}-after")
        await rig.everyone("train", 1)
        await coordinator.publish(4)
        await coordinator.sync(4)
        again = await rig.generate(prompt, max_tokens=12, name=f"{commit}-again")
        assert other != before, "new weights are not used"
        assert again == before, "the same weights must give the same greedy tokens"
        assert rig.replica.version == 4
    finally:
        await coordinator.close()


async def test_worker_errors_reach_the_caller_with_their_type(rig: Rig) -> None:
    coordinator = coordinator_of(rig, commit="inplace")
    await coordinator.open()
    try:
        await coordinator.publish(1)
        await coordinator.sync(1)
        slots = tuple(SlotAt(rank=rank, slot=0, generation=998) for rank in range(len(rig.ranks)))
        request = PrefetchRequest(version=77, slots=slots, deadline_s=PATIENT_S)
        await coordinator._members["r0"].ask(0, request, Ok, deadline_s=PATIENT_S)
        reply = (await rig.replica.call("ws_commit", 77, PATIENT_S, timeout_s=PATIENT_S))[0]
        with pytest.raises(SlotOverwritten, match="version 77"):
            open_reply(reply, WorkerStatus, party="r0/0")
        await coordinator.publish(2)
        await coordinator.sync(2)
        status = open_reply((await rig.replica.call("ws_status", timeout_s=PATIENT_S))[0], WorkerStatus, party="r0/0")
        assert (status.live_version, status.dirty) == (2, False)
        await rig.assert_equal()
    finally:
        await coordinator.close()


@pytest.mark.full
async def test_every_stage_of_a_pipeline_has_the_learners_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is generated: the workers of vLLM's CPU build cannot pass tensors on from stage to stage."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    async with running(tmp_path, 2, pipeline_parallel_size=2) as rig:
        coordinator = coordinator_of(rig)
        await coordinator.open()
        try:
            for version in (1, 2, 3):
                await rig.everyone("train", version)
                await coordinator.publish(version)
                await coordinator.sync(version)
                await coordinator.self_test()
            full = expected_worker((await rig.everyone("full_state"))[0], 0, 1)
            num_found = 0
            for name, tensor in full.items():
                stage = 0 if name.startswith(("model.embed_tokens", "model.layers.0.")) else 1
                reply = (await rig.replica.call("te_read", [name], timeout_s=PATIENT_S))[stage]
                assert torch.equal(flat(reply)[name], tensor.reshape(-1)), f"stage {stage}: {name} differs"
                num_found += 1
            assert num_found == 3 + 7 * TINY["num_hidden_layers"]
        finally:
            await coordinator.close()
