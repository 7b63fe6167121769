"""The reference, frozen: the policy that the run began with, or a teacher. Shape legend: `T` packed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.learner.errors import ModelError
from trainer.learner.lora import without_adapters
from trainer.learner.model import PolicyModel, hollow_model, settle, torch_dtype, vocab_size
from trainer.learner.scoring import over_tokens, score

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import torch

    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.inputs import LayoutFn
    from trainer.learner.model import BuiltPolicy, Site


class Reference:
    """What the policy is held near. It is read from `algorithm.kl.path` or `model.path` (or the seed) again, never from
    a checkpoint, so a resumed run has the reference that it began with."""

    def __init__(self, model: PolicyModel, *, layout: LayoutFn, device: torch.device) -> None:
        """`model` may be the policy itself if it has adapters: they are switched off for every call."""
        self._model, self._layout, self._device = model, layout, device

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self._model.parameters()

    def logprobs(self, batch: MicroBatch) -> np.ndarray:
        """Log-probabilities of the loss tokens after temperature, among the policy's tokens: float32[T], 0 outside
        `loss_mask`. Collective."""
        with without_adapters(self._model.hf):
            output = score(self._model, batch, layout=self._layout, device=self._device)
        return over_tokens(output.logprobs_L, batch)


def build_reference(cfg: RunConfig, built: BuiltPolicy, site: Site) -> Reference | None:
    """The reference that `algorithm.kl` asks for; None while its coefficient is 0.

    With LoRA the first policy is the policy without its adapters and costs no memory. Otherwise the reference is a
    second model in the compute dtype, sharded like the policy, and with `learner.reference_cpu_offload` kept on the
    host.

    Raises:
        ModelError: its weights cannot be loaded, or it knows fewer tokens than the policy.
    """
    kl = cfg.algorithm.kl
    if kl.coef == 0:
        return None
    if cfg.model.lora.rank and kl.path is None:
        return Reference(built.policy, layout=built.layout, device=site.device)
    hollow = hollow_model(cfg.model.path if kl.path is None else kl.path, cfg)
    known, needed = vocab_size(hollow.hf), vocab_size(built.policy.hf)
    if known < needed:
        raise ModelError(
            f"algorithm.kl.path {kl.path!r} has {known} tokens, the policy {needed}; it has to judge whatever the "
            "policy may sample, use a model of the same family with at least as many"
        )
    for param in hollow.hf.parameters():
        param.requires_grad_(False)
        param.data = param.data.to(torch_dtype(cfg.model.compute_dtype))
    # A teacher may be padded to more rows. What it gives those the policy cannot give: both are over the same tokens.
    model = PolicyModel(hollow.hf, cfg, num_tokens=needed)
    layout = settle(model, hollow, cfg, site=site, cpu_offload=cfg.learner.reference_cpu_offload)
    return Reference(model, layout=layout, device=site.device)
