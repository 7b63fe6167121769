"""Writes a policy as a Hugging Face directory."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.rendering import load_tokenizer
from trainer.errors import ModelError
from trainer.files import replace_directory
from trainer.learner.checkpoint import load_weights, verify
from trainer.learner.lora import ADAPTER_DIR, add_adapters, gather_adapters, merged_parameters, write_adapter
from trainer.learner.model import allocate, fill_weights, meta_model, torch_dtype
from trainer.learner.weights import has_weights
from weight_sync.publish.shards import persistent_buffers

if TYPE_CHECKING:
    from trainer.config.schema import ModelConfig, RunConfig


TOKENIZER_FILES = (
    "*.json", "*.txt", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.tiktoken", "*.vocab", "*.bpe",
    "*.spm", "*.py",
)  # fmt: skip
"""Copied byte for byte: loading and saving a tokenizer again may change it. By kind, since one with custom code has
files of any name; not everything, since it may be a directory of checkpoints."""
MODEL_FILES = ("config.json", "generation_config.json", "adapter_config.json", "*quant*.json", "*.index.json")
"""Of those, what describes the weights next to the tokenizer, and not the ones that are written."""
GENERATION_FILE = "generation_config.json"
"""Copied, too: it may name more end tokens than config.json, from which a model is built here."""

log = logging.getLogger(__name__)


def export_hf(path: Path, *, model: PreTrainedModel, source_dir: Path, config: ModelConfig) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` and engines load, with weights in
    `model.rollout_dtype`; whole or not at all, in place of what is there. Collective, if there is a process group: rank
    0 gathers one parameter after another. LoRA adapters are merged, and also written alone to `adapter/`. Raises
    OSError if rank 0 cannot write to `path`."""
    dtype, rank = getattr(torch, config.rollout_dtype), dist.get_rank() if dist.is_initialized() else 0
    state: dict[str, Tensor] = {}
    for name, whole in merged_parameters(model, dtype):  # in lockstep over ranks
        if rank == 0:
            state[name] = whole.cpu()
    state |= {name: buffer.detach().cpu() for name, buffer in persistent_buffers(model)}
    adapter = gather_adapters(model)
    if rank == 0:
        tmp = path.with_name(f"{path.name}.tmp")
        try:
            _write(tmp, state, model=model, source=source_dir, config=config)
            if adapter:
                write_adapter(tmp / ADAPTER_DIR, adapter, config.lora, base=config.path)
            replace_directory(tmp, path)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()


def export_checkpoint(checkpoint: Path, out: Path, cfg: RunConfig) -> None:
    """Write to `out`, which is replaced, the same bytes as `PolicyTrainer.export_hf` after `load(checkpoint)`.
    (LoRA adapters are merged on the CPU, so matrix products may differ in the last bit.)

    Peak memory: one copy of the model in `model.rollout_dtype` (with LoRA two: the frozen base in
    `model.compute_dtype`, and the merged weights), and the largest parameter in float32 twice.

    Args:
        cfg: of the run. `model.path`, a directory or a hub name, has the model's config, its tokenizer, and what is not
            trained: with LoRA the base, and buffers that a model saves.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or of another model than `cfg` names.
        ModelError: `model.path` cannot be read, with LoRA has no weights, or PEFT is missing.
        OSError: `out` cannot be written.
    """
    verify(checkpoint)
    meta, model = meta_model(cfg.model.path, cfg), cfg.model
    hf, cpu = meta.hf, torch.device("cpu")
    if model.lora.rank:
        if not has_weights(meta.source_dir):
            raise ModelError(
                f"{meta.source_dir} has no weights: below its adapters the run had a model that was made from the "
                "seed on its device, and the host would make another one; only the run itself can export it "
                "(checkpoint.export_hf)"
            )
        add_adapters(hf, meta.blocks, model.lora, base_dtype=torch_dtype(model.compute_dtype))
    else:
        for param in hf.parameters():
            param.data = param.data.to(getattr(torch, model.rollout_dtype))
    allocate(hf, hf, cpu, buffers=cpu)
    hf.tie_weights()  # every module has memory of its own now
    if model.lora.rank or any(True for _ in persistent_buffers(hf)):
        fill_weights(meta, cfg, device=cpu)
    load_weights(checkpoint, {name: param.detach() for name, param in hf.named_parameters() if param.requires_grad})
    export_hf(out, model=hf, source_dir=meta.source_dir, config=model)


def _write(tmp: Path, state: dict[str, Tensor], *, model: PreTrainedModel, source: Path, config: ModelConfig) -> None:
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    # A model of the original class on the meta device writes the files: it knows the class name, tied weights and
    # renamed experts.
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(
            model.config, dtype=getattr(torch, config.rollout_dtype), trust_remote_code=config.trust_remote_code
        )
    meta.generation_config = model.generation_config
    meta.save_pretrained(tmp, state_dict=state)
    for weights in tmp.glob("*.safetensors"):  # written with access for their owner alone, unlike the other files
        weights.chmod((tmp / "config.json").stat().st_mode)
    if (source / GENERATION_FILE).is_file():
        shutil.copyfile(source / GENERATION_FILE, tmp / GENERATION_FILE)
    _copy_tokenizer(_tokenizer_dir(config, source), tmp, config)


def _copy_tokenizer(source: Path, target: Path, config: ModelConfig) -> None:
    """A warning if it has no files or does not open from there; the weights are worth having without it."""
    found = [
        path.relative_to(source)
        for pattern in TOKENIZER_FILES
        for path in source.glob(pattern)
        if path.is_file() and not path.name.startswith(".") and not any(map(path.match, MODEL_FILES))
    ]
    for name in found:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    if not found:
        log.warning("no tokenizer files found for %s; the exported model has none", config.path)
        return
    try:
        load_tokenizer(str(target), trust_remote_code=config.trust_remote_code)
    except Exception as error:  # noqa: BLE001 - code that comes with a tokenizer may raise anything
        log.warning(
            "the tokenizer of the exported model does not open: %s: %s; copy what is missing from %s",
            type(error).__name__,
            (str(error).strip().splitlines() or ["no message"])[0],
            config.tokenizer_path if config.tokenizer_path else config.path,
        )


def _tokenizer_dir(config: ModelConfig, source_dir: Path) -> Path:
    """Where its files are; those of a hub name are downloaded into (or found in) the hub cache."""
    path = Path(config.tokenizer_path).expanduser() if config.tokenizer_path else source_dir
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(config.tokenizer_path, allow_patterns=list(TOKENIZER_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        log.warning("model.tokenizer_path %r cannot be downloaded: %s", config.tokenizer_path, error)
        return path
