"""Learner ranks in processes: FSDP2 over gloo with a real publisher, as a tiny Qwen2 or as a whole `LearnerActor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.fakes.forks import RANKS
from tests.fakes.patience import PATIENT_S
from tests.fakes.processes import Child

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.config.schema import RunConfig

TINY = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


class RankProcess(Child):
    """A `PublisherHandle`; `build(rank, *args)` makes what is in the process."""

    def __init__(self, build: Callable[..., Any], rank: int, *args: object) -> None:
        super().__init__(f"rank {rank}", build, rank, *args, preload=RANKS)
        self.rank = rank

    async def call(self, method: str, *args: object, timeout_s: float = PATIENT_S) -> Any:
        return await self.lines[0].ask_async(method, *args, timeout_s=timeout_s)


class ShardedByTorch:
    """What a rank publishes whose model torch has sharded; beside `LocalPublisher`."""

    publisher: Any
    ws_close: Any
    params: Any
    shards: Any
    tensors: dict[str, torch.Tensor]

    def ws_describe(self) -> bytes:
        return self.publisher.describe(self.params, self.shards, self.tensors)

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        return self.publisher.publish(version, self.tensors, deadline_s=deadline_s)

    def close(self) -> None:
        self.ws_close()
        torch.distributed.destroy_process_group()


def tiny_rank(rank: int, num_ranks: int, store: Path) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.fakes.sync_world import LocalPublisher
    from weight_sync.publish.shards import local_shards

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**TINY))
    mesh = init_device_mesh("cpu", (num_ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    class TinyRank(ShardedByTorch, LocalPublisher):
        def __init__(self) -> None:
            super().__init__(rank, num_ranks, {})
            self.params, self.shards, self.tensors = local_shards(model, rollout_dtype="bfloat16")

        def train(self, seed: int) -> None:
            """New weights in place, as an optimizer step leaves them; forward first, so FSDP has gathered once."""
            with torch.no_grad():
                model(torch.arange(8).view(1, 8))
                model.reshard()  # a forward leaves the root group gathered, as plain parameters
                for number, parameter in enumerate(model.parameters()):
                    _fill(parameter, seed * 1000 + number, 0.05)

        def full_state(self) -> dict[str, torch.Tensor]:
            """Reference: torch's own all-gather of every parameter, cast to the rollout dtype. A collective."""
            return {name: p.full_tensor().detach().to(torch.bfloat16) for name, p in model.named_parameters()}

    return TinyRank()


def toy_rank(rank: int, sharding: str, store: Path) -> Any:
    """The model of `sync_world` over 2 x 2 ranks: "replicas" x shards, or FSDP x tensor parallelism."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from tests.fakes.sync_world import SHAPES, LocalPublisher, full_weights
    from weight_sync.publish.shards import local_shards

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    model = torch.nn.Module()
    for name, shape in SHAPES.items():
        is_norm = len(shape) == 1
        layer = torch.nn.RMSNorm(shape) if is_norm else torch.nn.Linear(shape[1], shape[0], bias=False)
        model.add_module(name.removesuffix(".weight"), layer)
    if sharding == "replicas":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        columns = {name: ColwiseParallel() for name in "qkv"}
        parallelize_module(model, mesh["tp"], {**columns, "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])

    class ToyRank(ShardedByTorch, LocalPublisher):
        def __init__(self) -> None:
            super().__init__(rank, 4, {})
            self.params, self.shards, self.tensors = local_shards(model, rollout_dtype="bfloat16")

        def train(self, seed: int) -> dict[str, torch.Tensor]:
            """A collective. Fills the model in torch's own way, and gathers it in torch's own way."""
            full = full_weights(seed)
            for name, param in model.named_parameters():
                assert isinstance(param, DTensor)
                parts = distribute_tensor(full[name], param.device_mesh, param.placements, src_data_rank=None)
                param.to_local().detach().copy_(parts.to_local())
            return {name: param.full_tensor().detach() for name, param in model.named_parameters()}

        def disturb(self, name: str) -> None:
            self.tensors[name][-1] += 1

    return ToyRank()


def lora_rank(rank: int, cfg: RunConfig, num_ranks: int) -> Any:
    from trainer.learner.actor import LearnerActor
    from trainer.learner.lora import adapters_of, gather_adapters

    class LoraRank(LearnerActor):
        def set_adapters(self, seed: int) -> None:
            """New adapters in place, as an optimizer step leaves them, large enough to be seen in every logit."""
            for index, adapter in enumerate(adapters_of(self._parts.learner.model)):
                for at, param in enumerate((adapter.a, adapter.b)):
                    _fill(param.detach(), seed * 1000 + 2 * index + at, 0.15)

        def adapters(self) -> tuple[dict[str, torch.Tensor], float]:
            """Collective. The whole adapter under PEFT's names, B without scaling; and the scaling."""
            model = self._parts.learner.model
            return gather_adapters(model), adapters_of(model)[0].scaling

    return LoraRank(cfg, rank=rank, world_size=num_ranks)


def _fill(sharded: Any, seed: int, std: float) -> None:
    """With this rank's rows of a random tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = sharded.device_mesh, sharded.placements
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, mesh, placements)
    whole = torch.randn(sharded.shape, generator=torch.Generator().manual_seed(seed)) * std
    sharded.to_local().copy_(whole[offset[0] : offset[0] + shape[0]])
