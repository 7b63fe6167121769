"""Weight sync in one program: `python -m weight_sync.example`, on CPU, in a second.

A learner changes its weights, an engine goes on with them. The engine is a plain module with an engine's habits: it
stores two matrices of the checkpoint fused, in bfloat16, and its `load_weights` knows how. With vLLM, `AsyncLLMReplica`
stands where `Engine` stands here. Both sides could be in any process: handles carry bytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from weight_sync import (
    CommitResult,
    SyncCoordinator,
    SyncOptions,
    WeightPublisher,
    WeightReceiver,
    WorkerService,
    get_backend,
    local_shards,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH = 64


class Policy(torch.nn.Module):
    """What the learner trains, named as in its checkpoint. FSDP2 may have sharded it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, WIDTH, bias=False)


class EngineModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.zeros(2 * WIDTH, WIDTH, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            start = {"gate.weight": 0, "up.weight": WIDTH}[name]
            self.gate_up.data[start : start + WIDTH].copy_(tensor)


class Learner:
    """A `PublisherHandle`: one learner rank."""

    rank = 0

    def __init__(self, model: torch.nn.Module) -> None:
        publisher = WeightPublisher(get_backend("cpu"), rank=self.rank)
        params, shards, tensors = local_shards(model, rollout_dtype="bfloat16")
        self._calls = {
            "ws_describe": lambda: publisher.describe(params, shards, tensors),
            "ws_open": publisher.open,
            "ws_publish": lambda version, deadline_s: publisher.publish(version, tensors, deadline_s=deadline_s),
            "ws_digests": lambda version, deadline_s: publisher.digests(version, deadline_s=deadline_s),
            "ws_close": publisher.close,
        }

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        return await asyncio.wait_for(asyncio.to_thread(self._calls[method], *args), timeout_s)


class Engine:
    """A `ReplicaHandle`: one engine with one worker."""

    name = "engine"

    def __init__(self, model: EngineModel) -> None:
        self._service = WorkerService(lambda: WeightReceiver(model, get_backend("cpu"), worker=0))

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        answer = getattr(self._service, method)
        return [await asyncio.wait_for(asyncio.to_thread(answer, *args), timeout_s)]

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        # A real engine pauses before, resumes after unless `reply_state(results)` is "dirty", and labels its tokens.
        return CommitResult(results=await self.call(method, *args, timeout_s=timeout_s), pause_s=0.0)


async def main() -> None:
    policy, served = Policy(), EngineModel()
    coordinator = SyncCoordinator([Learner(policy)], [Engine(served)], options=SyncOptions(timeout_s=30.0))
    await coordinator.open()
    try:
        for version in (1, 2, 3):
            with torch.no_grad():
                policy.up.weight.add_(1.0)  # an optimizer step
            await coordinator.publish(version)
            report = await coordinator.sync(version)
            expected = torch.cat([policy.gate.weight, policy.up.weight]).to(torch.bfloat16)
            same = "the same" if torch.equal(served.gate_up, expected) else "other"
            way = f"{report.nbytes} bytes by {coordinator.transport}"
            print(f"version {version}: {same} weights in the engine, {way}")  # noqa: T201 - what a program is for
        await coordinator.self_test()
    finally:
        await coordinator.close()


if __name__ == "__main__":
    asyncio.run(main())
