"""A real vLLM model with derived weights in one process, no engine: sync it through the fallback, compare with a load.

Run as `python -m tests.fakes.vllm_fallback_worker DIR CASE...`, DIR with `old/` and `new/` checkpoints of one
model and each CASE "fp8" (quantised while loading) or "packed" (the CPU build packs linear weights). Prints a line of
JSON for each case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import PlanMismatch, WeightSyncError
from weight_sync.plan.planner import build_manifest, verify_manifest
from weight_sync.plan.types import Manifest, ParamMeta
from weight_sync.publish.shards import shard_descs
from weight_sync.receive.recorder import Recorded, record, record_layout
from weight_sync.receive.staging import Landing, Reloads, build_landing, parameter_bytes
from weight_sync.vllm.reload import layerwise_reloader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weight_sync.messages import CommitMode

NUM_LEARNER_RANKS = 3
QUANTISED = {"fp8": "fp8_per_channel", "packed": None}


def main(folder: Path, cases: list[str]) -> None:
    import vllm._custom_ops as ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does: the loader calls it on every platform
    for i, case in enumerate(cases):
        ops._supports_onednn = case == "packed"
        configs = [
            EngineArgs(
                model=str(folder / which), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
                max_model_len=64, quantization=QUANTISED[case],
            ).create_engine_config()
            for which in ("old", "new")
        ]  # fmt: skip
        with set_current_vllm_config(configs[0]):
            if i == 0:
                init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
                initialize_model_parallel(1)
            model = get_model(vllm_config=configs[0])
        with set_current_vllm_config(configs[1]):
            fresh = get_model(vllm_config=configs[1])
        for commit in ("staged", "inplace"):
            report = Check(model, fresh, configs[0], folder).run(commit)
            print(json.dumps({"case": case, "commit": commit, **report}), flush=True)
    cleanup_dist_env_and_memory()


class Check:
    """One model, synced from `old` to `new`, and back at the end."""

    def __init__(self, model: Any, fresh: Any, config: Any, folder: Path) -> None:
        self.model, self.fresh = model, fresh
        self.old, self.new = (load_file(folder / which / "model.safetensors") for which in ("old", "new"))
        self.params = tuple(ParamMeta(name=n, shape=tuple(t.shape), dtype="bfloat16") for n, t in self.new.items())
        reloader = layerwise_reloader(model, config)
        assert reloader is not None
        self.reloader = reloader

    def run(self, commit: CommitMode) -> dict[str, object]:
        before, outputs_before = _bits(self.model), _outputs(self.model)
        recorded = record(self.model, self.params, worker=0, reloader=self.reloader)
        untouched = _bits(self.model) == before and _differing(outputs_before, _outputs(self.model)) == []
        shards = shard_descs(self.params, num_ranks=NUM_LEARNER_RANKS)
        manifest = build_manifest(epoch=0, params=self.params, shards=shards, workers=[recorded.layout])
        verify_manifest(manifest)
        landing = self.landing(manifest, recorded, commit)
        assert landing.fallback is not None
        addresses = _addresses(self.model)
        report: dict[str, object] = {
            "untouched": untouched,
            "refused_without": _refused(self.model, self.params),
            "decisions": list(recorded.layout.decisions),
            "fallback_bytes": landing.fallback.nbytes,
        }
        self.corrupt(landing)
        report["corrupted"] = _differing(_outputs(self.model), _outputs(self.fresh))
        for _ in range(2):
            self.sync(manifest, landing, self.new)
        report["differing"] = [n for n, bits in _bits(self.fresh).items() if _bits(self.model)[n] != bits]
        report["outputs_differing"] = _differing(_outputs(self.model), _outputs(self.fresh))
        report["verified"] = landing.fallback.verify()
        report["failure"] = self.fail(landing)
        report["moved"] = [name for name, at in _addresses(self.model).items() if addresses[name] != at]
        self.sync(manifest, landing, self.old)
        report["back"] = _bits(self.model) == before and _differing(outputs_before, _outputs(self.model)) == []
        landing.close()
        return report

    def landing(self, manifest: Manifest, recorded: Recorded, commit: CommitMode) -> Landing:
        reloads = Reloads(self.model, self.reloader, recorded.reloaded)
        return build_landing(
            manifest.pull[0],
            parameter_bytes(self.model),
            CpuBackend(),
            commit=commit,
            reloads=reloads,
            params=self.params,
        )

    def sync(self, manifest: Manifest, landing: Landing, full: dict[str, torch.Tensor]) -> None:
        """What learner ranks pack, what a transport moves, what a receiver commits."""
        rows = {
            (s.param, s.rank): full[s.param][s.row_start : s.row_stop]
            for s in shard_descs(self.params, num_ranks=NUM_LEARNER_RANKS)
        }
        for plan in manifest.pack:
            arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
            for item in plan.items:
                box = tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))
                packed = rows[item.param, plan.rank][box].contiguous().view(-1).view(torch.uint8)
                arena[item.arena_off : item.arena_off + item.nbytes].copy_(packed)
            for piece in landing.pieces[plan.rank]:
                piece.dst.copy_(arena[piece.src_off : piece.src_off + piece.dst.numel()])
        for target, arrived in landing.moves:
            target.copy_(arrived)
        assert landing.fallback is not None
        landing.fallback.reload()

    def corrupt(self, landing: Landing) -> None:
        """Deliberately bad: one small buffer for all tensors, used again before vLLM is done with what it was given."""
        assert landing.fallback is not None
        chosen = set(landing.fallback.modules)
        modules = [module for name, module in self.model.named_modules() if name in chosen]
        buffer = torch.zeros(max(t.numel() for t in self.new.values()), dtype=torch.bfloat16)

        def streamed() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.new.items():
                if not name.endswith("layernorm.weight"):
                    view = buffer[: tensor.numel()].view(tensor.shape)
                    view.copy_(tensor)
                    yield name, view

        self.reloader.reload(modules, streamed())

    def fail(self, landing: Landing) -> str:
        """Weights that end in the middle of a layer, with an error."""
        assert landing.fallback is not None
        chosen = set(landing.fallback.modules)
        modules = [module for name, module in self.model.named_modules() if name in chosen]

        def streamed() -> Iterator[tuple[str, torch.Tensor]]:
            yield next((n, t) for n, t in self.new.items() if n.endswith("q_proj.weight"))
            raise ValueError("the line went dead")

        try:
            self.reloader.reload(modules, streamed())
        except WeightSyncError as error:
            return str(error)
        return ""


def _refused(model: Any, params: tuple[ParamMeta, ...]) -> str:
    try:
        record_layout(model, params, worker=0)
    except PlanMismatch as error:
        return str(error)
    return ""


def _bits(model: Any) -> dict[str, str]:
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = str(hash(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()))
    return found


def _addresses(model: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


def _outputs(model: Any) -> dict[str, torch.Tensor]:
    """What each linear layer makes of the same random input: also sees state that is no parameter."""
    outputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "apply") and "attn.attn" not in name:
            size: Any = getattr(module, "input_size_per_partition", getattr(module, "embedding_dim", None))
            x = torch.randn(20, size, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16()
            outputs[name] = method.apply(module, x, None)
    return outputs


def _differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
