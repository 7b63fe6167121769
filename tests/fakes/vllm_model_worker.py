"""Real vLLM models without an engine, every worker of a replica in turn in one process, with their own weight loaders.

Run as `python -m tests.fakes.vllm_model_worker DIR CASE...`; a case is `NAME:TPxPP`, where DIR/NAME holds `old/` and
`new/` Hugging Face checkpoints of one model. For each worker of each case, prints a line of JSON.

Loading uses no collective, so vLLM's parallel state can be set to any rank of any group: this process then
builds what that worker would build. The learner's side is a real transformers model, sharded by FSDP2 over fake groups.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from weight_sync.errors import PlanMismatch
from weight_sync.plan.planner import build_manifest, verify_manifest
from weight_sync.publish.shards import local_shards
from weight_sync.receive.recorder import record_layout
from weight_sync.vllm.compat import keep_weights_addressable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weight_sync.plan.types import Manifest, ParamMeta, ShardDesc, WorkerLayout

NUM_LEARNER_RANKS = (1, 2, 3)


def main(root: Path, cases: list[str]) -> None:
    """Check every case; an exception ends the process with a traceback."""
    keep_weights_addressable()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does: the loader calls it on every platform
    _make_vllm_quick()
    learners = {name: Learner(root / name) for name in sorted({case.split(":")[0] for case in cases})}
    with _one_rank_groups(root):
        for case in cases:
            name, split = case.split(":")
            tp, pp = map(int, split.split("x"))
            for report in check(learners[name], root / name, tp=tp, pp=pp):
                print(json.dumps({"case": case, **report}), flush=True)


class Learner:
    """What 1, 2 and 3 FSDP2 ranks of the `new` checkpoint describe and hold."""

    def __init__(self, folder: Path) -> None:
        self.file = load_file(folder / "new" / "model.safetensors")
        self.params: tuple[ParamMeta, ...] = ()
        self.shards: dict[int, list[ShardDesc]] = {}
        self.tensors: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
        for world in NUM_LEARNER_RANKS:
            self.shards[world], self.tensors[world] = [], {}
            for rank in range(world):
                # from_pretrained, so that names and shapes pass through transformers in both directions
                model = AutoModelForCausalLM.from_pretrained(folder / "new", dtype=torch.bfloat16)
                with _fake_rank(rank, world) as mesh:
                    for layer in model.model.layers:
                        fully_shard(layer, mesh=mesh)
                    fully_shard(model, mesh=mesh)
                    self.params, shards, self.tensors[world][rank] = local_shards(model, rollout_dtype="bfloat16")
                self.shards[world].extend(shards)


_fresh = itertools.count()


@contextmanager
def _fake_rank(rank: int, world: int) -> Iterator[Any]:
    """A mesh that this process is `rank` of; collectives succeed and move nothing. Names are new: meshes are cached."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=(f"fsdp{next(_fresh)}",))
    finally:
        dist.destroy_process_group()


def _make_vllm_quick() -> None:
    """vLLM looks at each model class in a process of its own (10 s), and its loader collects garbage (0.4 s)."""
    registry: Any = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    gc.collect()
    gc.freeze()


@contextmanager
def _one_rank_groups(root: Path) -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{root}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@contextmanager
def _acting_as(rank: int, *, tp: int, pp: int) -> Iterator[None]:
    """Tell vLLM that this process is worker `rank` of a replica of `tp` x `pp`: ranks of a stage are neighbours."""
    from vllm.distributed import parallel_state

    groups = {parallel_state.get_tp_group(): (tp, rank % tp), parallel_state.get_pp_group(): (pp, rank // tp)}
    before = {group: (group.world_size, group.rank_in_group, group.rank, group.ranks) for group in groups}
    for group, (size, index) in groups.items():
        # is_first_rank and is_last_rank compare `rank` with `ranks`
        group.world_size, group.rank_in_group, group.rank, group.ranks = size, index, index, list(range(size))
    try:
        yield
    finally:
        for group, state in before.items():
            group.world_size, group.rank_in_group, group.rank, group.ranks = state


def build(folder: Path, rank: int, *, tp: int, pp: int) -> tuple[Any, Any]:
    """Worker `rank`'s model as vLLM makes it from `folder`: built, loaded, post-processed. And vLLM's config of it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = tp
    config.parallel_config.pipeline_parallel_size = pp
    with set_current_vllm_config(config), _acting_as(rank, tp=tp, pp=pp):
        return get_model(vllm_config=config), config


def check(learner: Learner, folder: Path, *, tp: int, pp: int) -> Iterator[dict[str, object]]:
    """Sync `new` by plan into every worker of a replica that loaded `old`; compare with vLLM's loader bit for bit."""
    built = [build(folder / "old", rank, tp=tp, pp=pp) for rank in range(tp * pp)]
    models = [model for model, _ in built]
    before = [_snapshot(model) for model in models]
    layouts, seconds = [], []
    for rank, model in enumerate(models):
        started = time.perf_counter()
        layouts.append(record_layout(model, learner.params, worker=rank))
        seconds.append(time.perf_counter() - started)
    untouched = [_differing(old, _snapshot(model)) == [] for old, model in zip(before, models, strict=True)]
    manifests: dict[int, Manifest] = {}
    by_plan: dict[int, list[Any]] = {}
    refusal = _refusal(learner, layouts)
    for world in NUM_LEARNER_RANKS:
        manifest = build_manifest(epoch=0, params=learner.params, shards=learner.shards[world], workers=layouts)
        verify_manifest(manifest)
        arenas = _pack(manifest, learner.tensors[world])
        for rank, model in enumerate(models):
            _fill(model, layouts[rank], 7.0)
            _pull(model, manifest, arenas, rank)
        manifests[world], by_plan[world] = manifest, [_snapshot(model) for model in models]
    wire = manifests[1].params
    for rank, model in enumerate(models):
        _fill(model, layouts[rank], 9.0)
        model.load_weights(iter(learner.file.items()))
        by_vllm = _snapshot(model)
        yield {
            "model": type(model).__name__,
            "worker": rank,
            "untouched": untouched[rank],
            "differing": {world: _differing(states[rank], by_vllm) for world, states in by_plan.items()},
            "changed": len(_differing(before[rank], by_vllm)),
            "num_params": len(layouts[rank].params),
            "vocabulary": [
                p.name for p in layouts[rank].params if p.name.endswith(("embed_tokens.weight", "lm_head.weight"))
            ],
            "num_copies": len(layouts[rank].copies),
            "num_runs": {world: len(manifest.pull[rank].runs) for world, manifest in manifests.items()},
            "pulled_bytes": {world: manifest.pull[rank].nbytes for world, manifest in manifests.items()},
            "param_bytes": sum(t.numel() * t.element_size() for t in model.parameters()),
            "packed_bytes": {
                world: sum(item.nbytes for plan in manifest.pack for item in plan.items)
                for world, manifest in manifests.items()
            },
            "wire_bytes": sum(learner.file[m.name].numel() * (4 if m.dtype == "float32" else 2) for m in wire),
            "float32": [m.name for m in wire if m.dtype == "float32"],
            "record_s": seconds[rank],
            "without_last_worker": refusal,
            "expert_error": _expert_error(*built[rank], folder / "new") if tp * pp == 1 else None,
        }


def _refusal(learner: Learner, layouts: list[WorkerLayout]) -> str:
    """The error of the planner for a replica without its last worker; "" if there is none."""
    try:
        build_manifest(epoch=0, params=learner.params, shards=learner.shards[1], workers=layouts[:-1])
    except PlanMismatch as error:
        return str(error)
    return ""


def _expert_error(model: Any, config: Any, folder: Path) -> float | None:
    """Largest relative error of the experts' output against transformers, over some tokens; None without experts."""
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if name.endswith(".mlp") and hasattr(module, "experts")
    }
    if not layers:
        return None
    from vllm.forward_context import set_forward_context

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    x = torch.randn(23, reference.config.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    errors: list[float] = []
    for name, module in layers.items():
        with torch.no_grad(), set_forward_context(None, config, num_tokens=len(x)):
            got = module(x).float()
            wanted = reference.get_submodule(name)(x.float()[None])
        wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).view_as(got)
        errors.append(float((got - wanted).norm() / wanted.norm()))
    return max(errors)


def _pack(manifest: Manifest, tensors: dict[int, dict[str, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """As the learner ranks would."""
    arenas: dict[int, torch.Tensor] = {}
    dtypes = {meta.name: getattr(torch, meta.dtype) for meta in manifest.params}
    for plan in manifest.pack:
        arenas[plan.rank] = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
        for item in plan.items:
            box = tensors[plan.rank][item.param][
                tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))
            ]
            packed = box.to(dtypes[item.param]).contiguous().view(-1).view(torch.uint8)
            arenas[plan.rank][item.arena_off : item.arena_off + item.nbytes].copy_(packed)
    return arenas


def _pull(model: Any, manifest: Manifest, arenas: dict[int, torch.Tensor], rank: int) -> None:
    """As this worker would."""
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for run in manifest.pull[rank].runs:
        source = arenas[run.src_rank][run.src_off : run.src_off + run.nbytes]
        engine = named[run.dst_param].data.view(-1).view(torch.uint8)
        engine[run.dst_off : run.dst_off + run.nbytes].copy_(source)


def _fill(model: Any, layout: Any, value: float) -> None:
    """Only what comes from the checkpoint: padding is a constant of the engine that neither way writes again."""
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for copy in layout.copies:
        named[copy.dst_param].data.view(-1).as_strided(copy.src_size, copy.dst_stride, copy.dst_offset).fill_(value)


def _snapshot(model: Any) -> dict[str, tuple[int, torch.Tensor]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.data_ptr(), tensor.detach().clone().contiguous()) for name, tensor in named}


def _differing(left: dict[str, tuple[int, torch.Tensor]], right: dict[str, tuple[int, torch.Tensor]]) -> list[str]:
    assert left.keys() == right.keys()
    return [
        name
        for name in left
        if left[name][0] != right[name][0]
        or not torch.equal(left[name][1].view(-1).view(torch.uint8), right[name][1].view(-1).view(torch.uint8))
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
