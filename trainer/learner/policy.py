"""One rank's training step.

Shape legend: `T` packed tokens, `L` loss tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trainer.algorithms.corrections import correct
from trainer.algorithms.losses import kl_penalty, policy_loss
from trainer.errors import GradientsDiverged, TrainingDiverged
from trainer.learner.attention import attention_name, to_device
from trainer.learner.checkpoint import load_sharded, save_sharded
from trainer.learner.critic import SeparateCritic, ValueSums, build_critic
from trainer.learner.flops import model_flops, peak_flops
from trainer.learner.fsdp import ShardedAdamW, learning_rate
from trainer.learner.hf_export import export_hf
from trainer.learner.model import ParallelContext, build_policy, compiles
from trainer.learner.offload import CpuOffload
from trainer.learner.packed_inputs import loss_inputs, token_ages
from trainer.learner.prepare import build_reference, prepare_step
from trainer.learner.step_stats import Metric, PhaseTimer, StepResult, StepSums, policy_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from trainer.algorithms.advantages import GroupRewards
    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.attention import LayoutFn
    from trainer.learner.critic import ValueTargets
    from trainer.learner.model import PolicyOutput
    from weight_sync.device.base import Backend


class PolicyTrainer:
    """Model, optimizer and loss of one rank, in the default process group. Every public method is collective.

    On CPU the same seed, inputs and number of ranks give the same bits; other numbers of ranks, and accelerators
    (`VarlenLayout`), differ by rounding.
    """

    def __init__(self, cfg: RunConfig, *, device: torch.device, backend: Backend) -> None:
        """Raises ModelError if `cfg.model` cannot be trained."""
        self._cfg, self._backend = cfg, backend
        mesh = init_device_mesh(backend.torch_device, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        context = ParallelContext(mesh, device, backend)
        self._built = build_policy(cfg, context)
        self._critic = build_critic(cfg, self._built, context)
        self._reference = build_reference(cfg, self._built, context)
        self._optimizers = {"": ShardedAdamW(self._built.policy.trained(), config=cfg.learner)}
        """By the prefix of their names in a checkpoint."""
        if isinstance(self._critic, SeparateCritic):
            self._optimizers["critic."] = self._critic.optimizer
        optimizers = self._optimizers.values()
        trained = (tensor for one in optimizers for tensor in (*one.weights().values(), *one.state().values()))
        frozen = [] if self._reference is None else self._reference.parameters()
        self.offload = CpuOffload((*self._built.policy.parameters(), *frozen, *trained), backend=backend)
        """What takes device memory between two steps: weights, moments, a critic's, the reference."""
        self.flops = model_flops(self.model)
        """None where the model's shapes are not enough to know."""
        self._peak_flops = peak_flops(
            backend.device_name(), compute_dtype=cfg.model.compute_dtype, given_tflops=cfg.device.peak_tflops
        )
        self._num_skipped_in_a_row = 0

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model: parameters are float32 masters under their checkpoint names, DTensors if sharded."""
        return self._built.policy.hf

    @property
    def layout(self) -> LayoutFn:
        """Of the policy's attention."""
        return self._built.layout

    @property
    def description(self) -> str:
        """How it computes, in words."""
        compiled = "compiled" if compiles(self._cfg, self.device) else "not compiled"
        logits = self._cfg.model.compute_dtype if self._cfg.learner.fp32_head is False else "float32"
        parts = (
            self._built.policy.placement,
            compiled,
            f"{logits} logits",
            f"attention by {attention_name(self.layout)}",
        )
        return ", ".join(parts)

    @property
    def device(self) -> torch.device:
        """Where the forward runs."""
        return self._built.device

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        version: int | None = None,
        group_rewards: Sequence[GroupRewards] | None = None,
        num_loss_tokens: int = 0,
    ) -> StepResult:
        """One optimizer step over this rank's micro-batches; every rank must have the same number of them.

        The loss is the sum of weight x token loss over all ranks and micro-batches. The first `critic.warmup_steps`
        train only the critic. A step whose gradient is not finite is skipped on every rank: nothing is updated.

        Args:
            version: of the policy before the step; None where every step before it made one.
            group_rewards: of the whole step, where advantages are finished here (`algorithm.finishes_on_ranks`).
            num_loss_tokens: of the whole step; only a critic needs it.

        Raises:
            GradientsDiverged: more than `learner.max_skipped_steps` gradients in a row are not finite.
            TrainingDiverged: a value or a log-prob of the reference is not finite. Both on all ranks; no weight has
                been changed.
            ValueError: no micro-batch, or one is malformed or younger than the weights.
        """
        if not micro_batches:
            raise ValueError("train_step needs at least one micro-batch per rank; pad ranks with a batch without loss")
        self.offload.require_onloaded("train_step")
        cfg, critic = self._cfg, self._critic
        timer = PhaseTimer(self.device)
        values = ValueSums(num_loss_tokens=num_loss_tokens, clip=cfg.critic.value_clip)
        num_critic_alone = cfg.critic.warmup_steps if cfg.algorithm.uses_critic else 0
        trains_policy = step >= num_critic_alone
        try:
            batches, references, targets = prepare_step(
                micro_batches,
                group_rewards,
                config=cfg.algorithm,
                reference=self._reference,
                critic=critic,
                values=values,
                trains_policy=trains_policy,
                timer=timer,
            )
        except TrainingDiverged:
            self._drop_gradients()
            raise
        metrics: dict[str, Metric] = {}
        norms: dict[str, float] = {}
        if trains_policy:
            trained = step if version is None else version
            sums = self._policy_gradients(batches, references, targets, values, version=trained, timer=timer)
            norms["learner"] = sums["grad_sq"] ** 0.5
            metrics = policy_metrics(sums, correction=cfg.algorithm.correction)
            metrics["grad_norm"] = Metric(sum=norms["learner"])
        if isinstance(critic, SeparateCritic):
            norms["critic"] = critic.grad_norm()
        is_skipped = self._is_skipped(norms, step=step)
        metrics["skipped_steps"] = Metric(sum=float(is_skipped))
        if not is_skipped:
            if trains_policy:
                total_steps = cfg.trainer.total_steps - num_critic_alone
                lr = learning_rate(step - num_critic_alone, config=cfg.learner, total_steps=total_steps)
                self._optimizers[""].step(lr=lr, grad_norm=norms["learner"])
                metrics["lr"] = Metric(sum=lr)
            timer.mark("optimizer")
            if isinstance(critic, SeparateCritic):
                metrics |= critic.update(batches, targets, values, step=step, grad_norm=norms["critic"])
            if critic is not None:
                metrics |= values.reduce()
                timer.mark("critic")
        return StepResult(
            step=step,
            metrics=metrics,
            is_policy_changed=trains_policy and not is_skipped,
            seconds=timer.seconds(),
            model_flops=self.flops.of_batches(micro_batches) if self.flops and trains_policy else None,
            peak_flops=self._peak_flops,
        )

    def _policy_gradients(
        self,
        batches: Sequence[MicroBatch],
        references: Sequence[np.ndarray | None],
        targets: Sequence[ValueTargets],
        values: ValueSums,
        *,
        version: int,
        timer: PhaseTimer,
    ) -> dict[str, float]:
        """Forward and backward of every micro-batch; the sums of `policy_metrics` over all ranks, and `grad_sq`."""
        sums = StepSums(self.device)
        for index, batch in enumerate(batches):
            self._built.policy.expect_backward(is_last=index == len(batches) - 1)
            output = self._built.forward(batch)
            loss, parts = self._loss(batch, output, version=version, reference_T=references[index])
            sums.add(parts)
            if output.values_L is not None:
                loss = loss + self._cfg.critic.value_coef * values.loss(output.values_L, batch, targets[index])
            timer.mark("forward")
            loss.backward()
            timer.mark("backward")
        counts = {
            "num_tokens": sum(len(batch.token_ids) for batch in batches),
            "num_loss_tokens": sum(int(np.count_nonzero(batch.loss_mask)) for batch in batches),
        }
        return sums.reduce(self._optimizers[""].grad_sq_sum(), counts)

    def _loss(
        self, batch: MicroBatch, output: PolicyOutput, *, version: int, reference_T: np.ndarray | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weighted sum of the token losses of a micro-batch, and its part of the sums of the step."""
        algorithm, mask = self._cfg.algorithm, batch.loss_mask
        inputs, weight_L, keep_L, correction = correct(
            loss_inputs(batch, output.logprobs_L),
            age_L=token_ages(batch, version=version, device=self.device),
            config=algorithm.correction,
        )
        loss_L, stats = policy_loss(inputs, config=algorithm)
        loss_L = loss_L * weight_L
        sums = {
            "entropy": output.entropy_L.detach().sum(),
            "ratio": stats.ratio_sum,
            "ratio_max": stats.ratio_max,
            "clip_ratio_low": stats.clipped_low,
            "clip_ratio_high": stats.clipped_high,
            "dual_clip": stats.clipped_dual,
            **correction,
        }
        if algorithm.entropy_coef > 0:
            loss_L = loss_L - algorithm.entropy_coef * output.entropy_L * keep_L
        if reference_T is not None:
            reference_L = to_device(reference_T[mask], self.device)
            if algorithm.kl.apply_to == "loss":
                penalty_L = kl_penalty(output.logprobs_L, reference_L, algorithm.kl.estimator)
                loss_L = loss_L + algorithm.kl.coef * penalty_L * keep_L
            sums["kl_reference"] = kl_penalty(output.logprobs_L.detach(), reference_L, "k3").sum()
        loss = (loss_L * to_device(batch.loss_weights[mask], self.device)).sum()
        return loss, sums | {"loss": loss.detach()}

    def _is_skipped(self, norms: Mapping[str, float], *, step: int) -> bool:
        """Whether a norm, which is of all ranks, is not finite; all gradients are dropped then. Raises
        GradientsDiverged if it is one too many in a row."""
        bad = next((section for section, norm in norms.items() if not np.isfinite(norm)), None)
        if bad is None:
            self._num_skipped_in_a_row = 0
            return False
        self._drop_gradients()
        self._num_skipped_in_a_row += 1
        limit = self._cfg.learner.max_skipped_steps
        if self._num_skipped_in_a_row > limit:
            raise GradientsDiverged(
                f"{'' if bad == 'learner' else f'{bad} '}gradient norm of step {step} is {norms[bad]}, after {limit} "
                f"skipped steps (learner.max_skipped_steps); lower {bad}.lr or {bad}.max_grad_norm, or look for wrong "
                "rewards in the recorded trajectories"
            )
        return True

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def rehearse(self, batch: MicroBatch) -> None:
        """Run every pass of a step of two micro-batches, of reference and critic too: compiles them, and takes the
        memory that a step takes. Changes no number, and gives the memory back, also after an error."""
        self.offload.require_onloaded("rehearse")
        try:
            if self._reference is not None:
                self._reference.logprobs([batch])
            if self._critic is not None:
                rewards_T = np.zeros(len(batch.token_ids))
                self._critic.targets([batch], [rewards_T], ValueSums(num_loss_tokens=0, clip=None))
            for is_last in (False, True):
                self._built.policy.expect_backward(is_last=is_last)
                output = self._built.forward(batch)
                loss, _ = self._loss(batch, output, version=0, reference_T=None)
                if output.values_L is not None:
                    loss = loss + 0.0 * output.values_L.sum()
                loss.backward()
                del output, loss
        finally:
            self._built.policy.release()
            self._drop_gradients()
            self._backend.release_cached()

    def save(self, path: Path, *, step: int) -> None:
        """Write this rank's part into the directory `path` (see `checkpoint.begin`), also while it is offloaded."""
        save_sharded(path, self._optimizers, step=step, host_view=self.offload.host_view)

    def load(self, path: Path) -> int:
        """Restore model and optimizer, also from another number of ranks; returns their step. Raises CheckpointError
        if a file is missing or truncated, or the checkpoint is of another model."""
        self.offload.require_onloaded("load")
        return load_sharded(path, self._optimizers)

    def export_hf(self, path: Path) -> None:
        """Write the policy as a Hugging Face model directory in `model.rollout_dtype`; rank 0 writes."""
        self.offload.require_onloaded("export_hf")
        export_hf(path, model=self.model, source_dir=self._built.source_dir, config=self._cfg.model)
