"""`PolicyLearner`: one rank's share of training the policy. A plain object, no Ray.

Shape legend: `T` packed tokens, `L` loss tokens.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.algorithms.corrections import correct
from trainer.algorithms.losses import policy_loss
from trainer.learner.errors import TrainingDiverged
from trainer.learner.export import export_hf
from trainer.learner.inputs import PackedInputs, loss_inputs, to_device, token_ages
from trainer.learner.model import build_policy
from trainer.learner.optim import ShardedAdamW, learning_rate
from trainer.learner.parallel import learner_mesh
from trainer.learner.result import Metric, MicroBatchLoss, PhaseTimer, StepResult, StepTotals
from trainer.learner.sharded_state import load_sharded, save_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from weight_sync.device.base import Backend


class PolicyLearner:
    """Model, optimizer and loss of one rank. Every public method except `close` is collective: all ranks must call it.

    The default process group must be open (`parallel.open_process_group`). Numbers are deterministic: the same seed,
    inputs and number of ranks give the same bits; other numbers of ranks differ by float32 rounding only.
    """

    def __init__(
        self,
        cfg: RunConfig,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        backend: Backend,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises ModelError if `cfg.model` cannot be trained."""
        self._cfg, self._rank, self._device, self._clock = cfg, rank, device, clock
        built = build_policy(cfg, mesh=learner_mesh(backend, world_size), device=device, backend=backend)
        self._policy, self._layout, self._source_dir = built.policy, built.layout, built.source_dir
        self._optimizer = ShardedAdamW(built.policy.hf, config=cfg.learner)

    @property
    def model(self) -> PreTrainedModel:
        """The sharded Hugging Face model: parameters are float32 DTensors under their checkpoint names."""
        return self._policy.hf

    @property
    def device(self) -> torch.device:
        """Where the forward runs."""
        return self._device

    def train_step(self, micro_batches: Sequence[MicroBatch], *, step: int) -> StepResult:
        """One optimizer step over this rank's micro-batches; all ranks must bring the same number of them.

        The loss is the sum of weight x token loss over all ranks and micro-batches.

        Raises:
            TrainingDiverged: the gradient is not finite. No weight has been changed.
            ValueError: no micro-batch, or one is malformed or younger than the weights.
        """
        if not micro_batches:
            raise ValueError("train_step needs at least one micro-batch per rank; pad ranks with a batch without loss")
        correction = self._cfg.algorithm.correction
        timer = PhaseTimer(self._device, clock=self._clock)
        totals = StepTotals(self._device, correction=correction)
        proximal: Sequence[np.ndarray | None] = [None] * len(micro_batches)
        if correction.objective == "decoupled":
            proximal = [self.logprobs(batch) for batch in micro_batches]
            timer.mark("proximal")
        for index, (batch, proximal_T) in enumerate(zip(micro_batches, proximal, strict=True)):
            self._policy.set_is_last_backward(index == len(micro_batches) - 1)  # pyright: ignore[reportCallIssue]
            part = self._loss(batch, step=step, proximal_T=proximal_T)
            timer.mark("forward")
            part.loss.backward()
            timer.mark("backward")
            totals.add(part, num_tokens=len(batch.token_ids))
        metrics, grad_norm = totals.reduce(self._optimizer.grad_sq_sum())
        if not np.isfinite(grad_norm):
            self._optimizer.zero_grad()
            raise TrainingDiverged(
                f"gradient norm of step {step} is {grad_norm} (loss {metrics['loss'].mean}); lower learner.lr or "
                "learner.max_grad_norm, or look for wrong rewards and log-probs in the recorded trajectories"
            )
        lr = learning_rate(step, config=self._cfg.learner, total_steps=self._cfg.trainer.total_steps)
        self._optimizer.step(lr=lr, grad_norm=grad_norm)
        timer.mark("optimizer")
        metrics["lr"] = Metric(sum=lr)
        return StepResult(step=step, metrics=metrics, seconds=timer.seconds())

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> np.ndarray:
        """Log-probabilities of the loss tokens under the current weights, after temperature.

        Returns:
            float32[T], 0 outside `loss_mask`.
        """
        inputs = PackedInputs.of(batch, device=self._device, layout=self._layout)
        logprobs_L, _ = self._policy(inputs)
        self._policy.reshard()  # pyright: ignore[reportCallIssue]  # without a backward the root stays gathered
        out_T = np.zeros(len(batch.token_ids), np.float32)
        out_T[batch.loss_mask] = logprobs_L.cpu().numpy()
        return out_T

    def save(self, path: Path, *, step: int) -> None:
        """Write this rank's part of model and optimizer into the directory `path` (see `checkpoint.begin`)."""
        save_sharded(path, model=self.model, optimizer=self._optimizer, step=step)

    def load(self, path: Path) -> int:
        """Restore model and optimizer, also from another number of ranks; returns the step they were saved at.

        Raises:
            CheckpointError: a file is missing or truncated, or the checkpoint is of another model.
        """
        return load_sharded(path, model=self.model, optimizer=self._optimizer)

    def export_hf(self, path: Path) -> None:
        """Write the policy as a Hugging Face model directory in `model.rollout_dtype`; rank 0 writes."""
        export_hf(path, model=self.model, source_dir=self._source_dir, config=self._cfg.model, rank=self._rank)

    def _loss(self, batch: MicroBatch, *, step: int, proximal_T: np.ndarray | None) -> MicroBatchLoss:
        """Forward, correction and loss of one micro-batch."""
        algorithm, mask = self._cfg.algorithm, batch.loss_mask
        logprobs_L, entropy_L = self._policy(PackedInputs.of(batch, device=self._device, layout=self._layout))
        correction = correct(
            loss_inputs(batch, logprobs_L),
            age_L=token_ages(batch, step=step, device=self._device),
            proximal_L=None if proximal_T is None else to_device(proximal_T[mask], self._device),
            config=algorithm.correction,
        )
        loss_L, stats = policy_loss(correction.inputs, config=algorithm)
        loss_L = loss_L * correction.weight_L
        if algorithm.entropy_coef > 0:
            loss_L = loss_L - algorithm.entropy_coef * entropy_L * correction.keep_L
        loss = (loss_L * to_device(batch.loss_weights[mask], self._device)).sum()
        return MicroBatchLoss(loss=loss, stats=stats, correction=correction.stats, entropy_L=entropy_L.detach())
