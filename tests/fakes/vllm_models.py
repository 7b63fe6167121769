"""Real vLLM models without an engine, synced by plan and compared bit for bit with vLLM's own loaders, in one process.

`reports` starts it: `python -m tests.fakes.vllm_models KIND DIR CASE...` prints a line of JSON for each report. DIR has
`old/` and `new/` Hugging Face checkpoints of a model.

- `recorder`: a case is `NAME:TPxPP`, with checkpoints in DIR/NAME, and every worker of a replica is built in turn:
  loading uses no collective, so vLLM's parallel state can be set to any rank of any group. The learner's side is a real
  transformers model, sharded by FSDP2 over fake groups.
- `derived`: a case is `KIND:TP`, with checkpoints in DIR/KIND; weights are "fp8" (quantised while loading), "packed"
  (the CPU build packs linear weights) or "mla" (attention derives matrices of its own).
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
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

from tests.fakes.patience import PATIENT_TEST_S
from tests.fakes.row_shards import held_by, row_shards, rows_of
from tests.fakes.sync_world import record_layout
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import PlanMismatch
from weight_sync.plan.planner import build_plan, check_plan
from weight_sync.plan.types import ParamMeta, RankShards
from weight_sync.publish.shards import local_shards
from weight_sync.receive.quantized import Reloads
from weight_sync.receive.recorder import record
from weight_sync.receive.staging import Targets, build_targets, parameter_bytes
from weight_sync.vllm.cpu import keep_weights_addressable
from weight_sync.vllm.reload import layerwise_reloader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transformers import PretrainedConfig

    from weight_sync.messages import CommitMode
    from weight_sync.plan.types import Plan, WorkerLayout

ROOT = Path(__file__).parents[2]
NUM_LEARNER_RANKS = (1, 2, 3)
QUANTISED = {"fp8": "fp8_per_channel", "packed": None, "mla": None}
Tensors = dict[str, torch.Tensor]


def write_checkpoints(folder: Path, config: PretrainedConfig, *, std: float = 1.0) -> None:
    """`old` and `new`: two sets of random weights of one model."""
    for seed, which in enumerate(("old", "new")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.normal_(std=std)  # norms and biases start as constants, which would hide mistakes
        model.save_pretrained(folder / which)


def reports(kind: str, folder: Path, cases: Sequence[str]) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.vllm_models", kind, str(folder), *cases],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENT_TEST_S - 60.0, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-10000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]


def main(kind: str, root: Path, cases: list[str]) -> None:
    """An exception ends the process with a traceback."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    # As vLLM's CPU worker does, since the loader calls it on every platform. vLLM also looks at each model class in a
    # separate process (10 s), and its loader collects garbage (0.4 s).
    torch.accelerator.empty_cache = lambda: None
    registry: Any = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    gc.collect()
    gc.freeze()
    check = {"recorder": recorded, "derived": derived}[kind](root, cases)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{root}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
    for case in cases:
        for report in check(case):
            print(json.dumps({"case": case, **report}), flush=True)
    cleanup_dist_env_and_memory()


def build(folder: Path, **engine: Any) -> tuple[Any, Any]:
    """The model as vLLM makes it from `folder` (built, loaded, post-processed), and vLLM's config of it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    parallel = {name: engine.pop(name) for name in list(engine) if name.endswith("parallel_size")}
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64, **engine
    ).create_engine_config()
    for name, size in parallel.items():
        setattr(config.parallel_config, name, size)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def pack(plan: Plan, tensors: Mapping[int, Tensors]) -> dict[int, torch.Tensor]:
    """What learner ranks would pack. `tensors`: rank -> parameter -> its rows there."""
    arenas: dict[int, torch.Tensor] = {}
    dtypes = {meta.name: getattr(torch, meta.dtype) for meta in plan.params}
    for own in plan.pack:
        arenas[own.rank] = torch.zeros(own.arena_bytes, dtype=torch.uint8)
        for item in own.items:
            box = tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))
            packed = tensors[own.rank][item.param][box].to(dtypes[item.param]).contiguous().view(-1).view(torch.uint8)
            arenas[own.rank][item.arena_off : item.arena_off + item.nbytes].copy_(packed)
    return arenas


def named_tensors(model: Any) -> Tensors:
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def bits(model: Any) -> dict[str, bytes]:
    flat = {name: t.detach().contiguous().view(-1).view(torch.uint8) for name, t in named_tensors(model).items()}
    return {name: tensor.numpy().tobytes() for name, tensor in flat.items()}


def addresses(model: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if left[name] != right[name]]


# The recorder


class Learner:
    """What 1, 2 and 3 FSDP2 ranks of the `new` checkpoint describe and hold."""

    def __init__(self, folder: Path) -> None:
        self.file = load_file(folder / "new" / "model.safetensors")
        self.params: tuple[ParamMeta, ...] = ()
        self.shards: dict[int, list[RankShards]] = {}
        self.tensors: dict[int, dict[int, Tensors]] = {}
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
                self.shards[world].append(RankShards.of(rank, self.params, shards))

    def plan(self, world: int, layouts: Sequence[WorkerLayout]) -> Plan:
        return build_plan(epoch=0, params=self.params, shards=self.shards[world], workers=layouts)


_fresh = itertools.count()


@contextmanager
def _fake_rank(rank: int, world: int) -> Iterator[Any]:
    """A mesh that this process is `rank` of; collectives succeed and move nothing. Names are new: meshes are cached."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=(f"fsdp{next(_fresh)}",))
    finally:
        dist.destroy_process_group()


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


def recorded(root: Path, cases: list[str]) -> Callable[[str], Iterator[dict[str, object]]]:
    keep_weights_addressable()
    learners = {name: Learner(root / name) for name in sorted({case.split(":")[0] for case in cases})}

    def check(case: str) -> Iterator[dict[str, object]]:
        name, split = case.split(":")
        tp, pp = map(int, split.split("x"))
        return check_workers(learners[name], root / name, tp=tp, pp=pp)

    return check


def check_workers(learner: Learner, folder: Path, *, tp: int, pp: int) -> Iterator[dict[str, object]]:
    """Sync `new` by plan into every worker of a replica that loaded `old`; compare with vLLM's loader bit for bit."""
    built = []
    for rank in range(tp * pp):
        with _acting_as(rank, tp=tp, pp=pp):
            built.append(build(folder / "old", tensor_parallel_size=tp, pipeline_parallel_size=pp))
    models = [model for model, _ in built]
    before, places = list(map(bits, models)), list(map(addresses, models))
    layouts = [record_layout(model, learner.params, worker=rank) for rank, model in enumerate(models)]
    untouched = [bits(model) == held for model, held in zip(models, before, strict=True)]
    try:
        learner.plan(1, layouts[:-1])
        refusal = ""
    except PlanMismatch as error:
        refusal = str(error)
    plans = {world: learner.plan(world, layouts) for world in NUM_LEARNER_RANKS}
    by_plan: dict[int, list[dict[str, bytes]]] = {}
    for world, plan in plans.items():
        check_plan(plan)
        arenas = pack(plan, learner.tensors[world])
        for rank, model in enumerate(models):
            _fill(model, layouts[rank], 7.0)
            _pull(model, plan, arenas, rank)
        by_plan[world] = list(map(bits, models))
    wire = plans[1].params
    for rank, model in enumerate(models):
        _fill(model, layouts[rank], 9.0)
        model.load_weights(iter(learner.file.items()))
        by_vllm, names = bits(model), [param.name for param in layouts[rank].params]
        yield {
            "model": type(model).__name__,
            "worker": rank,
            "untouched": untouched[rank] and addresses(model) == places[rank],
            "differing": {world: differing(states[rank], by_vllm) for world, states in by_plan.items()},
            "changed": len(differing(before[rank], by_vllm)),
            "num_params": len(names),
            "vocabulary": [name for name in names if name.endswith(("embed_tokens.weight", "lm_head.weight"))],
            "pulled_bytes": {world: plan.pull[rank].nbytes for world, plan in plans.items()},
            "param_bytes": sum(t.numel() * t.element_size() for t in model.parameters()),
            "packed_bytes": {
                world: sum(item.nbytes for own in plan.pack for item in own.items) for world, plan in plans.items()
            },
            "wire_bytes": sum(learner.file[m.name].numel() * (4 if m.dtype == "float32" else 2) for m in wire),
            "float32": [m.name for m in wire if m.dtype == "float32"],
            "without_last_worker": refusal,
            "expert_error": _expert_error(*built[rank], folder / "new") if tp * pp == 1 else None,
        }


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


def _pull(model: Any, plan: Plan, arenas: dict[int, torch.Tensor], rank: int) -> None:
    """As this worker would."""
    named = named_tensors(model)
    for run in plan.pull[rank].runs:
        engine = named[run.dst_param].data.view(-1).view(torch.uint8)
        engine[run.dst_off : run.dst_off + run.nbytes] = arenas[run.src_rank][run.src_off : run.src_off + run.nbytes]


def _fill(model: Any, layout: Any, value: float) -> None:
    """Only what comes from the checkpoint: padding is a constant of the engine that neither way writes again."""
    named = named_tensors(model)
    for copy in layout.copies:
        named[copy.dst_param].data.view(-1).as_strided(copy.src_size, copy.dst_stride, copy.dst_offset).fill_(value)


# Derived weights


def derived(root: Path, _cases: list[str]) -> Callable[[str], Iterator[dict[str, object]]]:
    def check(case: str) -> Iterator[dict[str, object]]:
        import vllm._custom_ops as ops

        kind, size = case.split(":")
        if kind == "mla":  # experts in the order of the checkpoint, as our extension keeps them on a CPU
            keep_weights_addressable()
        workers: list[DerivedWorker] = []
        for rank in range(int(size)):
            with _acting_as(rank, tp=int(size), pp=1):
                ops._supports_onednn = kind == "packed"
                how = {"tensor_parallel_size": int(size), "quantization": QUANTISED[kind]}
                (model, config), (fresh, _) = (build(root / kind / which, **how) for which in ("old", "new"))
                ops._supports_onednn = False
                plain, _ = build(root / kind / "new", tensor_parallel_size=int(size))
                named = [tensor for name, tensor in plain.named_parameters() if ".W_U" not in name]
                shard_bytes = sum(tensor.numel() * tensor.element_size() for tensor in named)
                workers.append(DerivedWorker(model, fresh, config, rank=rank, shard_bytes=shard_bytes))
        ops._supports_onednn = kind == "packed"
        for commit in ("staged", "inplace"):
            yield from sync_derived(workers, root / kind, commit)

    return check


class DerivedWorker:
    """One worker's model, synced from `old` to `new`, and back at the end."""

    def __init__(self, model: Any, fresh: Any, config: Any, *, rank: int, shard_bytes: int) -> None:
        self.model, self.fresh, self.rank, self.shard_bytes = model, fresh, rank, shard_bytes
        self.reloader: Any = layerwise_reloader(model, config)
        assert self.reloader is not None
        self.before, self.outputs_before, self.places = bits(model), _outputs(model), addresses(model)

    def is_as_before(self) -> bool:
        same_outputs = _differing_outputs(self.outputs_before, _outputs(self.model)) == []
        return bits(self.model) == self.before and same_outputs

    def record(self, params: Sequence[ParamMeta]) -> dict[str, object]:
        self.recorded = record(self.model, params, worker=self.rank, reloader=self.reloader)
        report: dict[str, object] = {"untouched": self.is_as_before(), "decisions": self.recorded.layout.decisions}
        try:
            record_layout(self.model, params, worker=self.rank)
        except PlanMismatch as error:
            report["refused_without"] = str(error)
        return {**report, "worker": self.rank, "shard_bytes": self.shard_bytes}

    def open(self, plan: Plan, commit: CommitMode) -> Targets:
        reloads = Reloads(self.model, self.reloader, self.recorded.reloaded)
        views = parameter_bytes(self.model)
        return build_targets(plan.pull[self.rank], views, CpuBackend(), commit=commit, reloads=reloads)

    def compared(self) -> dict[str, object]:
        """With one that loaded `new`."""
        held = bits(self.model)
        return {
            "differing": [name for name, value in bits(self.fresh).items() if held[name] != value],
            "outputs_differing": _differing_outputs(_outputs(self.model), _outputs(self.fresh)),
            "moved": differing(self.places, addresses(self.model)),
        }


def sync_derived(workers: Sequence[DerivedWorker], folder: Path, commit: CommitMode) -> Iterator[dict[str, object]]:
    old, new = (load_file(folder / which / "model.safetensors") for which in ("old", "new"))
    params = tuple(ParamMeta(name=n, shape=tuple(t.shape), dtype="bfloat16") for n, t in new.items())
    shards = row_shards(params, 3)
    reports = [worker.record(params) for worker in workers]
    layouts = [worker.recorded.layout for worker in workers]
    plan = build_plan(epoch=0, params=params, shards=shards, workers=layouts)
    check_plan(plan)
    landings = [worker.open(plan, commit) for worker in workers]

    def sync(full: Tensors) -> None:
        """What learner ranks pack, what a transport moves, what a receiver commits."""
        arenas = pack(plan, {rank: held_by(full, rows_of(params, rank, 3)) for rank in range(3)})
        for targets in landings:
            for rank, pieces in targets.pieces.items():
                for piece in pieces:
                    piece.dst.copy_(arenas[rank][piece.src_off : piece.src_off + piece.dst.numel()])
            for target, arrived in targets.moves:
                target.copy_(arrived)
            assert targets.derived is not None
            targets.derived.reload()

    sync(new)
    sync(new)
    for worker, targets, report in zip(workers, landings, reports, strict=True):
        assert targets.derived is not None
        report.update(worker.compared(), verified=targets.derived.verify(), commit=commit)
        report["pulled_bytes"] = plan.pull[worker.rank].nbytes
    sync(old)
    for worker, targets, report in zip(workers, landings, reports, strict=True):
        yield {**report, "back": worker.is_as_before()}
        targets.close()


def _outputs(model: Any) -> Tensors:
    """What each linear layer makes of the same random input: also sees state that is no parameter."""
    outputs: Tensors = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "apply") and "attn.attn" not in name:
            size: Any = getattr(module, "input_size_per_partition", getattr(module, "embedding_dim", None))
            if size is None:  # experts
                continue
            x = torch.randn(20, size, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16()
            outputs[name] = method.apply(module, x, None)
    return outputs


def _differing_outputs(left: Tensors, right: Tensors) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
