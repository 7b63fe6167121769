"""A learner rank in a process of its own: FSDP2 over gloo, a tiny Qwen2, a real publisher. Driven through a pipe."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch

from tests.fakes.forks import RANKS, forks
from tests.fakes.patience import PATIENT_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TINY = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def rank_main(rank: int, num_ranks: int, store: str, pipe: Any) -> None:
    """Build the shard, then answer `(method, args)` until the pipe closes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**TINY))
    mesh = init_device_mesh("cpu", (num_ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    learner = _Learner(model, rank)
    try:
        while True:
            method, args = pipe.recv()
            try:
                pipe.send((True, getattr(learner, method)(*args)))
            except Exception as error:  # noqa: BLE001 - a process's edge: the parent raises it again
                pipe.send((False, f"{type(error).__name__}: {error}"))
    except EOFError:
        learner.ws_close()
        dist.destroy_process_group()


class _Learner:
    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        from weight_sync.device.cpu import CpuBackend
        from weight_sync.publish.publisher import WeightPublisher
        from weight_sync.publish.shards import local_shards

        self.model = model
        self.params, self.shards, self.tensors = local_shards(model, rollout_dtype="bfloat16")
        self.publisher = WeightPublisher(CpuBackend(), rank=rank)

    def train(self, seed: int) -> None:
        """New weights in place, as an optimizer step would leave them; forward first, so FSDP has gathered once."""
        with torch.no_grad():
            self.model(torch.arange(8).view(1, 8))
            self.model.reshard()  # a forward leaves the root group gathered, as plain parameters
            for i, parameter in enumerate(self.model.parameters()):
                generator = torch.Generator().manual_seed(seed * 1000 + i)
                full = torch.randn(parameter.shape, generator=generator) * 0.05
                local = parameter.to_local()
                start = _first_row(parameter)
                local.copy_(full[start : start + local.shape[0]])

    def full_state(self) -> dict[str, torch.Tensor] | None:
        """Reference: torch's own all-gather of every parameter, cast to the rollout dtype. A collective."""
        return {name: p.full_tensor().detach().to(torch.bfloat16) for name, p in self.model.named_parameters()}

    def ws_describe(self) -> bytes:
        return self.publisher.describe(self.params, self.shards)

    def ws_open(self, request: bytes) -> bytes:
        return self.publisher.open(request)

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        return self.publisher.publish(version, self.tensors, deadline_s=deadline_s)

    def ws_digests(self, version: int) -> bytes:
        return self.publisher.digests(version)

    def ws_close(self) -> None:
        self.publisher.close()


def _first_row(parameter: Any) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0]


class RankProcess:
    """The parent's end of one rank; a `PublisherHandle`."""

    def __init__(self, rank: int, num_ranks: int, store: Path) -> None:
        self._start(rank, rank_main, num_ranks, str(store))

    def _start(self, rank: int, main: Callable[..., None], *args: object) -> None:
        """`main(rank, *args, pipe)` in a process."""
        context = forks(*RANKS)
        self.rank = rank
        self._pipe, theirs = context.Pipe()
        self._lock = threading.Lock()
        self.process = context.Process(target=main, args=(rank, *args, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: object, timeout_s: float = PATIENT_S) -> Any:
        with self._lock:
            self._pipe.send((method, args))
            if not self._pipe.poll(timeout_s):
                raise TimeoutError(f"rank {self.rank} did not answer {method} within {timeout_s:.0f} s")
            is_ok, value = self._pipe.recv()
        if not is_ok:
            raise RuntimeError(f"rank {self.rank}: {value}")
        return value

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        return await asyncio.to_thread(self.ask, method, *args, timeout_s=timeout_s)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def close(self) -> None:
        self._pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()
