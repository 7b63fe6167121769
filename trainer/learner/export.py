"""The policy as a Hugging Face model directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.learner.lora import ADAPTER_DIR, gather_adapters, merged_parameters, write_adapter
from weight_sync.checkpoint_names import persistent_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema.model import ModelConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Copied as they are: loading and saving a tokenizer again may change it."""


def export_hf(path: Path, *, model: PreTrainedModel, source_dir: Path, config: ModelConfig, rank: int) -> None:
    """Collective: gather one parameter after another to the host of rank 0, which writes them as safetensors.

    `AutoModelForCausalLM.from_pretrained(path)` and engines load the result. Weights are in `model.rollout_dtype`: what
    the engines generated with. The directory appears whole or not at all. LoRA adapters are merged into the
    weights, and written once more by themselves in `adapter/`.

    Raises:
        OSError: rank 0 cannot write to `path`.
    """
    dtype = getattr(torch, config.rollout_dtype)
    state: dict[str, Tensor] = {}
    for name, whole in _whole_parameters(model, dtype, with_adapters=config.lora.rank > 0):  # in lockstep over ranks
        if rank == 0:
            state[name] = whole.to(dtype).cpu()
    state |= {name: buffer.detach().cpu() for name, buffer in persistent_buffers(model)}
    adapter = gather_adapters(model)
    if rank == 0:
        _write(path, state, adapter, model=model, source_dir=source_dir, config=config)
    dist.barrier()


def _whole_parameters(
    model: PreTrainedModel, dtype: torch.dtype, *, with_adapters: bool
) -> Iterator[tuple[str, Tensor]]:
    if with_adapters:
        yield from merged_parameters(model)
        return
    for name, param in model.named_parameters():
        local = param.detach().to(dtype)  # first, because it halves what is gathered
        yield name, local.full_tensor() if isinstance(local, DTensor) else local


def _write(
    path: Path,
    state: dict[str, Tensor],
    adapter: dict[str, Tensor],
    *,
    model: PreTrainedModel,
    source_dir: Path,
    config: ModelConfig,
) -> None:
    tmp = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    # A hollow model of the original class writes the files: it knows the class name, tied weights and renamed experts.
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(
            model.config, dtype=getattr(torch, config.rollout_dtype), trust_remote_code=config.trust_remote_code
        )
    hollow.generation_config = model.generation_config
    hollow.save_pretrained(tmp, state_dict=state)
    tokenizer_dir = Path(config.tokenizer_path) if config.tokenizer_path else source_dir
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, tmp / name)
    if adapter:
        write_adapter(tmp / ADAPTER_DIR, adapter, config.lora, base=config.path)
    if path.exists():
        shutil.rmtree(path)
    tmp.rename(path)
