"""One worker process of a real vLLM model without an engine: loads checkpoints, records, and compares two ways to sync.

Run as `python -m tests.fakes.vllm_model_worker RANK WORLD PORT DIR...`, each DIR with `old/` and `new/` Hugging Face
checkpoints of one model. For each, prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from weight_sync.layout import shard_descs
from weight_sync.plan import build_manifest, verify_manifest
from weight_sync.recorder import record_layout
from weight_sync.types import Manifest, ParamMeta, ShardDesc

NUM_LEARNER_RANKS = 3


def main(rank: int, world: int, port: int, folders: list[Path]) -> None:
    """Check every folder in this one process; an exception ends it with a traceback."""
    import vllm._custom_ops as ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    ops._supports_onednn = False  # else vLLM packs linear weights away on CPU and nothing can be loaded again
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does: the loader calls it on every platform
    for i, folder in enumerate(folders):
        config = EngineArgs(
            model=str(folder / "old"),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=64,
            tensor_parallel_size=world,
            distributed_executor_backend="mp" if world > 1 else None,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if i == 0:
                init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
                initialize_model_parallel(world)
            model = get_model(vllm_config=config)
            report = check(model, folder, rank, world)
        print(json.dumps({"folder": folder.name, "rank": rank, **report}), flush=True)
    cleanup_dist_env_and_memory()


def check(model: Any, folder: Path, rank: int, world: int) -> dict[str, object]:
    """Sync `new` once by plan and once through vLLM's loader, and compare every parameter bit for bit."""
    new = load_file(folder / "new" / "model.safetensors")
    params = tuple(ParamMeta(name=name, shape=tuple(t.shape), dtype="bfloat16") for name, t in new.items())
    before = _snapshot(model)
    started = time.perf_counter()
    layout = record_layout(model, params, worker=rank)
    seconds = time.perf_counter() - started
    untouched = _differing(before, _snapshot(model)) == []
    layouts: list[Any] = [None] * world
    torch.distributed.all_gather_object(layouts, layout)
    shards = shard_descs(params, num_ranks=NUM_LEARNER_RANKS)
    manifest = build_manifest(epoch=0, params=params, shards=shards, workers=layouts)
    verify_manifest(manifest)
    _sync(model, manifest, new, shards, rank)
    by_plan = _snapshot(model)
    for param in model.parameters():
        param.data.fill_(7.0)
    model.load_weights(iter(new.items()))
    by_vllm = _snapshot(model)
    return {
        "model": type(model).__name__,
        "untouched": untouched,
        "differing": _differing(by_plan, by_vllm),
        "changed": len(_differing(before, by_plan)),
        "num_params": len(layout.params),
        "num_copies": len(layout.copies),
        "num_runs": len(manifest.pull[rank].runs),
        "pulled_bytes": manifest.pull[rank].nbytes,
        "engine_bytes": sum(t.numel() * t.element_size() for t in model.parameters()),
        "packed_bytes": sum(item.nbytes for plan in manifest.pack for item in plan.items),
        "checkpoint_bytes": sum(t.numel() * t.element_size() for t in new.values()),
        "digest": manifest.digest,
        "record_s": seconds,
    }


def _sync(
    model: Any, manifest: Manifest, full: dict[str, torch.Tensor], shards: tuple[ShardDesc, ...], rank: int
) -> None:
    """Pack as the learner ranks would, pull as this worker would."""
    rows = {(s.param, s.rank): full[s.param][s.row_start : s.row_stop] for s in shards}
    arenas: dict[int, torch.Tensor] = {}
    for plan in manifest.pack:
        arenas[plan.rank] = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
        for item in plan.items:
            box = rows[item.param, plan.rank][
                tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))
            ]
            packed = box.contiguous().view(-1).view(torch.uint8)
            arenas[plan.rank][item.arena_off : item.arena_off + item.nbytes].copy_(packed)
    engine = {name: tensor.data.view(-1).view(torch.uint8) for name, tensor in model.named_parameters()}
    for run in manifest.pull[rank].runs:
        source = arenas[run.src_rank][run.src_off : run.src_off + run.nbytes]
        engine[run.dst_param][run.dst_off : run.dst_off + run.nbytes].copy_(source)


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
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [Path(arg) for arg in sys.argv[4:]])
