"""A checkpoint as a Hugging Face model directory, on the host alone: no accelerator, no process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer.learner.checkpoint import verify
from trainer.learner.errors import ModelError
from trainer.learner.export import write_hf
from trainer.learner.lora import add_adapters
from trainer.learner.model import fill, hollow_model, materialise, torch_dtype
from trainer.learner.model_files import has_weights
from trainer.learner.sharded_state import load_weights
from weight_sync.checkpoint_names import persistent_buffers

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig


def export_checkpoint(checkpoint: Path, out: Path, cfg: RunConfig) -> None:
    """Write what `PolicyLearner.export_hf` would write after `load(checkpoint)`, into `out`, which is replaced.

    Equal bit for bit, with one exception: LoRA adapters are merged on the CPU, and a learner merges them on its device,
    whose matrix products may differ in the last bit.

    Peak memory: one copy of the model in `model.rollout_dtype` (with LoRA two: the frozen base in
    `model.compute_dtype`, and the merged weights), and the largest parameter in float32 twice. Moments are not read.

    Args:
        cfg: of the run that made the checkpoint; `model.path` is a directory or a hub name. It is read for the model's
            config and tokenizer, and for what is not trained: with LoRA the base, and buffers that a model saves.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or is of another model than `cfg` says.
        ModelError: `model.path` cannot be read, with LoRA has no weights, or PEFT is missing.
        OSError: `out` cannot be written.
    """
    verify(checkpoint)
    hollow, model = hollow_model(cfg.model.path, cfg), cfg.model
    hf, cpu = hollow.hf, torch.device("cpu")
    if model.lora.rank:
        if not has_weights(hollow.source_dir):
            raise ModelError(
                f"{hollow.source_dir} has no weights: below its adapters the run had a model that was made from the "
                "seed on its device, and the host would make another one; only the run itself can export it "
                "(checkpoint.export_hf)"
            )
        add_adapters(hf, hollow.blocks, model.lora, base_dtype=torch_dtype(model.compute_dtype))
    else:
        for param in hf.parameters():
            param.data = param.data.to(getattr(torch, model.rollout_dtype))
    materialise(hf, hf, cpu, buffers=cpu)
    hf.tie_weights()  # every module has memory of its own now
    if model.lora.rank or any(True for _ in persistent_buffers(hf)):
        fill(hollow, cfg, device=cpu)
    load_weights(checkpoint, {name: param.detach() for name, param in hf.named_parameters() if param.requires_grad})
    write_hf(out, model=hf, source_dir=hollow.source_dir, config=model, rank=0)
