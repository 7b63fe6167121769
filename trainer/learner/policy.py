"""One rank's training step.

Shape legend: `T` packed tokens, `L` loss tokens.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from trainer.algorithms.corrections import correct
from trainer.algorithms.losses import kl_penalty, policy_loss
from trainer.config.algorithm import SELECTING_LOSSES
from trainer.data.batch import MicroBatch
from trainer.errors import GradientsDiverged, TrainingDiverged
from trainer.learner.checkpoint import load_sharded, save_sharded
from trainer.learner.critic import OwnCritic, Preparation, UpdateAt, build_critic, build_reference, over_tokens, score
from trainer.learner.flops import model_flops, peak_flops
from trainer.learner.fsdp import ShardedAdamW, learner_mesh, learning_rate
from trainer.learner.hf_export import export_hf
from trainer.learner.model import Site, build_policy
from trainer.learner.offload import Offload
from trainer.learner.packed_inputs import PackedInputs, loss_inputs, to_device, token_ages
from trainer.learner.step_stats import Metric, MicroBatchLoss, PhaseTimer, StepResult, StepTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from trainer.config.schema import RunConfig
    from trainer.data.batch import StepRewards
    from trainer.learner.critic import PreparedStep
    from trainer.learner.model import PolicyOutput
    from weight_sync.device.base import Backend


class PolicyLearner:
    """Model, optimizer and loss of one rank. Every public method except `close` is collective: all ranks must call it.

    The default process group must be open (`parallel.open_process_group`). On CPU the same seed, inputs and
    number of ranks give the same bits; other numbers of ranks differ by float32 rounding only. On accelerators
    gradients may differ by rounding: see `VarlenLayout`.
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
        self._cfg, self._rank, self._device, self._clock, self._backend = cfg, rank, device, clock, backend
        site = Site(mesh=learner_mesh(backend, world_size), device=device, backend=backend)
        built = build_policy(cfg, site)
        self._policy, self._layout, self._source_dir = built.policy, built.layout, built.source_dir
        self._critic = build_critic(cfg, built, site)
        reference = build_reference(cfg, built, site)
        self._preparation = Preparation(cfg, reference=reference, critic=self._critic, device=device)
        self._optimizer = ShardedAdamW(built.policy.trained(), config=cfg.learner)
        moments = (tensor for optimizer in self._optimizers().values() for tensor in optimizer.tensors())
        frozen = () if reference is None else reference.parameters()
        self.offload = Offload((*built.policy.parameters(), *frozen, *moments), backend=backend)
        """What takes device memory between two steps: weights, moments, a critic's, the reference."""
        self._model_flops = model_flops(self.model)
        self._peak_flops = peak_flops(
            backend.device_name(), compute_dtype=cfg.model.compute_dtype, given_tflops=cfg.device.peak_tflops
        )
        self._critic_alone_steps = cfg.critic.warmup_steps if cfg.algorithm.uses_critic else 0
        self._num_skipped_in_a_row = 0

    @property
    def model(self) -> PreTrainedModel:
        """The sharded Hugging Face model: parameters are float32 DTensors under their checkpoint names."""
        return self._policy.hf

    @property
    def device(self) -> torch.device:
        """Where the forward runs."""
        return self._device

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, step: int, rewards: StepRewards | None = None
    ) -> StepResult:
        """One optimizer step over this rank's micro-batches; all ranks must bring the same number of them.

        The loss is the sum of weight x token loss over all ranks and micro-batches. In the first
        `critic.warmup_steps` steps only the critic is trained; the policy's learning rate starts after them.

        A step whose gradient is not finite is skipped on every rank: nothing is updated, and `skipped_steps` is 1.

        Args:
            rewards: of the whole step, where advantages are finished here (`algorithm.finishes_on_ranks`).

        Raises:
            GradientsDiverged: more than `learner.max_skipped_steps` gradients of policy or critic in a row are not
                finite on any rank. No weight has been changed.
            TrainingDiverged: a value or a log-prob of the reference is not finite on any rank. No weight has been
                changed.
            ValueError: no micro-batch, or one is malformed or younger than the weights.
        """
        if not micro_batches:
            raise ValueError("train_step needs at least one micro-batch per rank; pad ranks with a batch without loss")
        self.offload.require_device("train_step")
        timer = PhaseTimer(self._device, clock=self._clock)
        trains_policy = step >= self._critic_alone_steps
        try:
            prepared = self._preparation.prepare(micro_batches, rewards, trains_policy=trains_policy, timer=timer)
        except TrainingDiverged:
            self._drop_gradients()
            raise
        metrics: dict[str, Metric] = {}
        norms: dict[str, float] = {}
        if trains_policy:
            metrics, norms["learner"] = self._policy_gradients(prepared, step=step, timer=timer)
        if isinstance(self._critic, OwnCritic):
            norms["critic"] = self._critic.grad_norm()
        is_skipped = self._is_skipped(norms, step=step)
        metrics["skipped_steps"] = Metric(sum=float(is_skipped))
        if trains_policy:
            metrics["grad_norm"] = Metric(sum=norms["learner"])
        if is_skipped:
            return self._result(micro_batches, metrics, step=step, trains_policy=trains_policy, timer=timer)
        if trains_policy:
            alone, config = self._critic_alone_steps, self._cfg.learner
            lr = learning_rate(step - alone, config=config, total_steps=self._cfg.trainer.total_steps - alone)
            self._optimizer.step(lr=lr, grad_norm=norms["learner"])
            metrics["lr"] = Metric(sum=lr)
        timer.mark("optimizer")
        if isinstance(self._critic, OwnCritic):
            metrics |= self._critic.update(prepared, UpdateAt(step=step, grad_norm=norms["critic"]))
        if self._critic is not None:
            metrics |= prepared.totals.reduce(self._device)
            timer.mark("critic")
        return self._result(micro_batches, metrics, step=step, trains_policy=trains_policy, timer=timer)

    def _result(
        self,
        micro_batches: Sequence[MicroBatch],
        metrics: dict[str, Metric],
        *,
        step: int,
        trains_policy: bool,
        timer: PhaseTimer,
    ) -> StepResult:
        operations = self._model_flops.of_batches(micro_batches) if self._model_flops and trains_policy else None
        return StepResult(
            step=step,
            metrics=metrics,
            seconds=timer.seconds(),
            model_flops=operations,
            peak_flops=self._peak_flops,
        )

    def rehearse(self, batch: MicroBatch) -> None:
        """Every pass of a step over `batch`, of reference and critic too, and nothing kept of them but what is done
        once: compiling, above all.

        Weights, moments and the numbers of later steps stay as they were, and torch's cache gives the memory back.
        """
        self.offload.require_device("rehearse")
        self._preparation.rehearse(batch)
        self._policy.set_is_last_backward(True)  # pyright: ignore[reportCallIssue]
        output = self._policy(PackedInputs.of(batch, device=self._device, layout=self._layout))
        loss = self._loss(batch, output, step=0, reference_T=None).loss
        if output.values_L is not None:
            loss = loss + 0.0 * output.values_L.sum()
        loss.backward()
        del output, loss
        self._drop_gradients()
        self._backend.release_cached()

    def logprobs(self, batch: MicroBatch) -> np.ndarray:
        """Log-probabilities of the loss tokens under the current weights, after temperature.

        Returns:
            float32[T], 0 outside `loss_mask`.
        """
        return over_tokens(score(self._policy, batch, layout=self._layout, device=self._device).logprobs_L, batch)

    def save(self, path: Path, *, step: int) -> None:
        """Write this rank's part of model and optimizer into the directory `path` (see `checkpoint.begin`). Works
        while they are on the host, too."""
        save_sharded(path, self._optimizers(), step=step, readable=self.offload.readable)

    def load(self, path: Path) -> int:
        """Restore model and optimizer, also from another number of ranks; returns the step they were saved at.

        Raises:
            CheckpointError: a file is missing or truncated, or the checkpoint is of another model.
        """
        self.offload.require_device("load")
        return load_sharded(path, self._optimizers())

    def export_hf(self, path: Path) -> None:
        """Write the policy as a Hugging Face model directory in `model.rollout_dtype`; rank 0 writes."""
        self.offload.require_device("export_hf")
        export_hf(path, model=self.model, source_dir=self._source_dir, config=self._cfg.model, rank=self._rank)

    def _optimizers(self) -> dict[str, ShardedAdamW]:
        own = {"critic.": self._critic.optimizer} if isinstance(self._critic, OwnCritic) else {}
        return {"": self._optimizer, **own}

    def _policy_gradients(
        self, prepared: PreparedStep, *, step: int, timer: PhaseTimer
    ) -> tuple[dict[str, Metric], float]:
        """Forward and backward of every micro-batch: (metrics, norm of the whole gradient)."""
        totals = StepTotals(self._device, correction=self._cfg.algorithm.correction)
        for index, batch in enumerate(prepared.batches):
            is_last = index == len(prepared.batches) - 1
            self._policy.set_is_last_backward(is_last)  # pyright: ignore[reportCallIssue]
            output = self._policy(PackedInputs.of(batch, device=self._device, layout=self._layout))
            part = self._loss(batch, output, step=step, reference_T=prepared.references[index])
            loss = part.loss
            if output.values_L is not None:
                value_loss = prepared.totals.loss(
                    output.values_L, batch, prepared.targets[index], clip=self._cfg.critic.value_clip
                )
                loss = loss + self._cfg.critic.value_coef * value_loss
            timer.mark("forward")
            loss.backward()
            timer.mark("backward")
            totals.add(part, num_tokens=len(batch.token_ids))
        return totals.reduce(self._optimizer.grad_sq_sum())

    def _is_skipped(self, norms: Mapping[str, float], *, step: int) -> bool:
        """Whether a norm, which is of all ranks, is not finite; all gradients are dropped then.

        Raises:
            GradientsDiverged: it is one too many in a row.
        """
        bad = next((section for section, norm in norms.items() if not np.isfinite(norm)), None)
        if bad is None:
            self._num_skipped_in_a_row = 0
            return False
        self._drop_gradients()
        self._num_skipped_in_a_row += 1
        what = f"{'' if bad == 'learner' else f'{bad} '}gradient norm of step {step} is {norms[bad]}"
        do = f"lower {bad}.lr or {bad}.max_grad_norm, or look for wrong rewards in the recorded trajectories"
        most = self._cfg.learner.max_skipped_steps
        if self._num_skipped_in_a_row > most:
            raise GradientsDiverged(f"{what}, after {most} skipped steps (learner.max_skipped_steps); {do}")
        return True

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers().values():
            optimizer.zero_grad()

    def _loss(
        self, batch: MicroBatch, output: PolicyOutput, *, step: int, reference_T: np.ndarray | None
    ) -> MicroBatchLoss:
        """Correction and policy loss of one micro-batch."""
        algorithm, mask = self._cfg.algorithm, batch.loss_mask
        correction = correct(
            loss_inputs(batch, output.logprobs_L),
            age_L=token_ages(batch, step=step, device=self._device),
            config=algorithm.correction,
        )
        loss_L, stats = policy_loss(correction.inputs, config=algorithm)
        loss_L = loss_L * correction.weight_L
        if algorithm.entropy_coef > 0:
            loss_L = loss_L - algorithm.entropy_coef * output.entropy_L * correction.keep_L
        kl_L = None
        if reference_T is not None:
            reference_L = to_device(reference_T[mask], self._device)
            if algorithm.kl.placement == "loss":
                penalty_L = kl_penalty(output.logprobs_L, reference_L, algorithm.kl.estimator)
                loss_L = loss_L + algorithm.kl.coef * penalty_L * correction.keep_L
            kl_L = kl_penalty(output.logprobs_L.detach(), reference_L, "k3")
        return MicroBatchLoss(
            loss=(loss_L * to_device(batch.loss_weights[mask], self._device)).sum(),
            stats=stats,
            correction=correction.stats,
            entropy_L=output.entropy_L.detach(),
            kl_L=kl_L,
        )


def largest_micro_batch(cfg: RunConfig) -> MicroBatch:
    """As large as one can be: sequences of the longest prompt and answer, the last one cut to what is left.

    Its loss is 0 whatever the model says, because no token has weight.
    """
    prompt = cfg.task.max_prompt_tokens
    longest = prompt + cfg.rollout.max_response_tokens
    num_tokens = max(longest, cfg.learner.max_tokens_per_micro_batch)
    starts = np.arange(0, num_tokens, longest)
    if num_tokens - starts[-1] < 2:  # a sequence has a token to predict, and one to predict it from
        starts, num_tokens = starts[:-1], int(starts[-1])
    bounds = np.append(starts, num_tokens)
    mask = np.arange(num_tokens) - np.repeat(starts, np.diff(bounds)) >= prompt
    mask[-1] = True  # the sequence that is cut has a loss token, too
    zeros = np.zeros(num_tokens, np.float32)
    return MicroBatch(
        cu_seqlens=bounds.astype(np.int32),
        token_ids=np.zeros(num_tokens, np.int32),
        loss_mask=mask,
        behaviour_logprobs=zeros,
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=zeros,
        loss_weights=zeros,
        cov_selected=np.zeros(num_tokens, np.bool_) if cfg.algorithm.loss in SELECTING_LOSSES else None,
    )
