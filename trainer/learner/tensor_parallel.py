"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): ranks that divide the matrices of each block.

Which matrix is divided by rows and which by columns is transformers' own plan for a model (`base_model_tp_plan`), in
torch's styles; FSDP2 then shards each part over the ranks that have the same one. Every rank of a group has all tokens:
heads and inner features are divided, what is between them (norms, residuals) is computed by all alike.

Outside the blocks nothing is divided but the loss tokens: FSDP2 shards embedding, final norm and output matrix over all
ranks, and sums their gradients over all of them. So the gradient of the embeddings, the same on every rank of a group,
is divided by their number; and that of the last hidden states, on every rank of its own loss tokens, is summed before
it enters the last block.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from trainer.config.schema import LearnerConfig

COLUMNS, ROWS, OF_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Styles of transformers' plans: by output features, by input features, and norms of single heads."""


def check_divisible(hf: PreTrainedModel, blocks: nn.ModuleList, learner: LearnerConfig) -> dict[str, str]:
    """The style of every module in a block that is divided or works on divided heads, by a name with `*` for the block.
    Raises ModelError, with all reasons, if the model cannot be divided by `learner.tensor_parallel_size`."""
    text, size, num_shards = hf.config.get_text_config(), learner.tensor_parallel_size, learner.num_shards
    plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    styles: dict[str, str] = {}
    whole: dict[str, None] = {}  # that every rank has and computes
    problems: dict[str, None] = {}  # in order, each once
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(text, key, None)) and count % size:
            problems[f"{key}={count} is no multiple of it"] = None
    for full_name, module in blocks.named_modules():
        name = re.sub(r"^\d+", "*", full_name)
        own = {key: param.shape for key, param in module.named_parameters(recurse=False)}
        match plan.get(f"layers.{name}"):
            case "colwise" | "rowwise" as style if isinstance(module, nn.Linear):
                # Rows are divided once more, by FSDP2, and weight sync needs equal parts of what is divided twice.
                num_parts, length = (num_shards, own["weight"][0]) if style == COLUMNS else (size, own["weight"][1])
                if length % num_parts:
                    key = "ranks of a replica" if style == COLUMNS else "of them"
                    problems[f"{name} has {length} features, no multiple of {num_parts} ({key})"] = None
                styles[name] = style
            case "replicated_with_grad_allreduce" as style if all(len(shape) == 1 for shape in own.values()):
                styles[name] = style
            case None if all(len(shape) < 2 for shape in own.values()):
                whole |= dict.fromkeys([name] if own else [])
            case style:
                what = "not in its plan" if style is None else f"{style} in its plan"
                problems[f"{name} is {what}, only matrices that are {COLUMNS} or {ROWS} can be divided"] = None
    divided = {f"{name.rpartition('.')[0]}." for name, style in styles.items() if style == COLUMNS}
    for name in whole:
        if name.startswith(tuple(divided)):  # its gradient would be of this rank's part alone
            problems[f"{name} has parameters among divided features and is not in its plan"] = None
    if not plan:
        problems = {"transformers has no plan (base_model_tp_plan) for it": None}
    if problems:
        raise ModelError(
            f"{type(hf).__name__} cannot be divided by learner.tensor_parallel_size={size}: {'; '.join(problems)}; use "
            "another size, 1 for FSDP2 alone, or a dense model such as Llama, Mistral, Qwen2 or Qwen3"
        )
    return styles


def divide_blocks(hf: PreTrainedModel, blocks: nn.ModuleList, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Make the parameters of `styles` DTensors over `mesh`, before FSDP2 shards them and before they have memory."""
    makers: dict[str, Callable[[], ParallelStyle]] = {
        COLUMNS: ColwiseParallel,
        ROWS: RowwiseParallel,
        OF_HEADS: lambda: SequenceParallel(sequence_dim=2, use_local_output=True),  # [1, T, heads, size]
    }
    is_trained = {name: param.requires_grad for name, param in blocks.named_parameters()}
    parallelize_module(blocks, mesh, {name: makers[style]() for name, style in styles.items()}, src_data_rank=None)
    for name, param in blocks.named_parameters():
        param.requires_grad_(is_trained[name])

    def with_states(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden, *others = args or (kwargs.pop("hidden_states"),)
        return (DTensor.from_local(hidden, mesh, [Replicate()], run_check=False), *others), kwargs

    # One sum of the gradients of what q, k and v (or gate and up) read, and not one for each of them.
    parents = {name.rpartition(".")[0].removeprefix("*.") for name, style in styles.items() if style == COLUMNS}
    for block in blocks:
        for parent in parents:
            block.get_submodule(parent).register_forward_pre_hook(with_states, with_kwargs=True)
    group, size = mesh.get_group(), mesh.size()

    def summed(grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    hf.get_input_embeddings().register_forward_hook(_with_gradient(lambda grad: grad / size))
    blocks[-1].register_forward_hook(_with_gradient(summed))


def _with_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    """A hook: the gradient of what a module returns becomes what `change` makes of it."""

    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(change)

    return hook
