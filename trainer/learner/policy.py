"""One rank's training step.

Shape legend: `T` packed tokens, `L` loss tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.algorithms.corrections import correct
from trainer.algorithms.losses import kl_penalty, policy_loss
from trainer.errors import GradientsDiverged, TrainingDiverged
from trainer.learner.attention import attention_name, to_device
from trainer.learner.checkpoint import BackgroundSave, learner_state, load_sharded, save_sharded
from trainer.learner.critic import PreparedBatch, SeparateCritic, SharedCritic, ValueSums, build_critic
from trainer.learner.flops import model_flops, peak_flops
from trainer.learner.hf_export import export_hf
from trainer.learner.model import build_policy, compiles
from trainer.learner.offload import CpuOffload
from trainer.learner.optimizer import ShardedOptimizer, learning_rate, muon_matrices
from trainer.learner.packed_inputs import loss_inputs, token_ages
from trainer.learner.parallel import parallel_context
from trainer.learner.prepare import build_reference, prepare_step
from trainer.learner.step_stats import Metric, PhaseTimer, StepResult, UpdateSums, policy_metrics, sum_over_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from trainer.algorithms.advantages import GroupRewards
    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.attention import LayoutFn
    from trainer.learner.model import PolicyOutput
    from weight_sync.device.base import Backend


@dataclass(slots=True, kw_only=True)
class _Step:
    """What the updates of one step share, and what they leave."""

    version: int | None
    """Of the policy before the step; None while only the critic is trained."""
    lr: float
    critic_lr: float
    keeps_proximal: bool
    num_updates: int
    num_micro_batches: int
    values: ValueSums
    timer: PhaseTimer
    sums: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """Of each update of the policy with a finite gradient."""
    skipped: list[tuple[dict[str, float], dict[str, float] | None]] = field(default_factory=list[Any])
    """Norms, and sums of the policy, of each update with one that is not finite."""
    critic_norms: list[list[float]] = field(default_factory=list[list[float]])
    num_policy_updates: int = 0

    @property
    def is_skipped(self) -> bool:
        return len(self.skipped) == self.num_updates


class PolicyTrainer:
    """Model, optimizer and loss of one rank, in the default process group. Every public method is collective.

    On CPU the same seed, inputs and number of ranks give the same bits; other numbers of ranks, and accelerators
    (`VarlenLayout`), differ by rounding.
    """

    def __init__(self, cfg: RunConfig, *, device: torch.device, backend: Backend) -> None:
        """Raises ModelError if `cfg.model` cannot be trained."""
        self._cfg, self._backend = cfg, backend
        context = parallel_context(cfg.learner, device=device, backend=backend)
        self._built = build_policy(cfg, context)
        self._critic = build_critic(cfg, self._built, context)
        self._reference = build_reference(cfg, self._built, context)
        trained = self._built.policy.trained()
        matrices = muon_matrices(self.model, trained)
        self._optimizers = {"": ShardedOptimizer(trained, config=cfg.learner, seed=cfg.seed, matrices=matrices)}
        """By the prefix of their names in a checkpoint."""
        if isinstance(self._critic, SeparateCritic):
            self._optimizers["critic."] = self._critic.optimizer
        optimizers = self._optimizers.values()
        state = (tensor for one in optimizers for tensor in (*one.weights().values(), *one.state().values()))
        frozen = [] if self._reference is None else self._reference.parameters()
        self.offload = CpuOffload((*self._built.policy.parameters(), *frozen, *state), backend=backend)
        """What takes device memory between two steps: weights, moments, a critic's, the reference."""
        self.flops = model_flops(self.model)
        """None where the model's shapes are not enough to know."""
        self._peak_flops = peak_flops(
            backend.device_name(), compute_dtype=cfg.model.compute_dtype, given_tflops=cfg.device.peak_tflops
        )
        self._num_skipped_in_a_row = 0
        self._background = BackgroundSave(backend, timeout_s=cfg.learner.timeout_s)

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model: parameters are masters of `learner.master_dtype`, by their checkpoint names; DTensors
        if sharded."""
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
        updates: Sequence[tuple[int, int]] = (),
        version: int | None = None,
        group_rewards: Sequence[GroupRewards] | None = None,
    ) -> StepResult:
        """The optimizer updates of one step over this rank's micro-batches; every rank must have the same number.

        The loss of an update is the sum of weight x token loss over all ranks and its micro-batches. Advantages,
        values, reference and every old log-prob are from before the first update. The first `critic.warmup_steps`
        steps train only the critic. An update whose gradient is not finite is skipped on every rank, and so is one in
        which no token carries loss: momentum and decay would move the weights.

        Args:
            updates: as `TrainBatch.updates`.
            version: of the policy before the step; None where every step before it made one.
            group_rewards: of the whole step, where advantages are finished here (`algorithm.finishes_on_ranks`).

        Raises:
            GradientsDiverged: more than `learner.max_skipped_steps` steps in a row have no finite gradient.
            TrainingDiverged: a value or a log-prob of the reference is not finite. Both on all ranks; no weight has
                been changed.
            ValueError: no micro-batch, or one is malformed or younger than the weights.
        """
        if not micro_batches:
            raise ValueError("train_step needs at least one micro-batch per rank; pad ranks with a batch without loss")
        self.offload.require_onloaded("train_step")
        group = self._built.group
        micro_batches = [replace(batch, is_copy=group is not None and group.rank > 0) for batch in micro_batches]
        cfg, whole = self._cfg, (0, len(micro_batches))
        updates = list(updates) or [whole]
        num_critic_alone = cfg.critic.warmup_steps if cfg.algorithm.uses_critic else 0
        trains_policy = step >= num_critic_alone
        value_tokens = [0.0] * len(updates) if self._critic is None else _loss_tokens(micro_batches, updates)
        total_steps = cfg.trainer.total_steps - num_critic_alone
        current = _Step(
            version=(step if version is None else version) if trains_policy else None,
            lr=learning_rate(max(0, step - num_critic_alone), config=cfg.learner, total_steps=total_steps),
            critic_lr=self._critic.lr(step) if isinstance(self._critic, SeparateCritic) else 0.0,
            keeps_proximal=trains_policy and len(updates) > 1 and cfg.algorithm.correction.objective != "bypass",
            num_updates=len(updates),
            num_micro_batches=len(micro_batches),
            values=ValueSums(clip=cfg.critic.value_clip),
            timer=PhaseTimer(self.device),
        )
        # Over the whole batch, the pass that gives the values also leaves the critic's gradients of the first update.
        has_critic_gradients = updates[0] == whole
        try:
            prepared = prepare_step(
                micro_batches,
                group_rewards,
                config=cfg.algorithm,
                reference=self._reference,
                critic=self._critic,
                values=current.values,
                token_weight=1.0 / max(1.0, value_tokens[0]) if has_critic_gradients else None,
                trains_policy=trains_policy,
                timer=current.timer,
            )
        except TrainingDiverged:
            self._drop_gradients()
            raise
        if current.keeps_proximal:
            self._add_proximal([*prepared[: updates[0][0]], *prepared[updates[0][1] :]], current.timer)
        for (start, stop), num_tokens in zip(updates, value_tokens, strict=True):
            self._update(prepared[start:stop], current, num_tokens, has_critic_gradients=has_critic_gradients)
            has_critic_gradients = False
        self._count_skipped(current, step=step)
        visited = [batch for start, stop in updates for batch in micro_batches[start:stop] if not batch.is_copy]
        return StepResult(
            step=step,
            metrics=self._metrics(current),
            is_policy_changed=current.num_policy_updates > 0,
            seconds=current.timer.seconds(),
            model_flops=self.flops.of_batches(visited) if self.flops and trains_policy else None,
            peak_flops=self._peak_flops,
        )

    def _add_proximal(self, prepared: Sequence[PreparedBatch], timer: PhaseTimer) -> None:
        """To those that the first update does not visit, which adds it to its own."""
        for one in prepared:
            one.proximal_L = self._built.no_grad_forward(one.batch).logprobs_L
        if prepared:
            timer.mark("proximal")

    def _update(
        self,
        mini_batch: Sequence[PreparedBatch],
        current: _Step,
        num_value_tokens: float,
        *,
        has_critic_gradients: bool,
    ) -> None:
        """One update of the policy, and those of the critic. `num_value_tokens` are the loss tokens of all ranks, where
        there is a critic."""
        critic, token_weight = self._critic, 1.0 / max(1.0, num_value_tokens)
        norms: dict[str, float] = {}
        sums: dict[str, float] | None = None
        if current.version is not None:
            sums = self._policy_gradients(mini_batch, current, token_weight=token_weight)
            norms["learner"] = sums["grad_sq"] ** 0.5
        if isinstance(critic, SeparateCritic):
            if not has_critic_gradients:
                critic.learn(mini_batch, current.values, token_weight=token_weight)
            norms["critic"] = critic.grad_norm()
        if not all(map(math.isfinite, norms.values())):
            self._drop_gradients()
            current.skipped.append((norms, sums))
            return
        if sums is not None:
            current.sums.append(sums)
            # A correction may leave none of the tokens; the values of a shared critic learn from them nevertheless.
            if sums["weight"] > 0 or (isinstance(critic, SharedCritic) and num_value_tokens > 0):
                self._optimizers[""].step(lr=current.lr, grad_norm=norms["learner"])
                current.num_policy_updates += 1
            else:
                self._optimizers[""].zero_grad()
        current.timer.mark("optimizer")
        if isinstance(critic, SeparateCritic):
            if num_value_tokens > 0:
                current.critic_norms.append(
                    critic.update(
                        mini_batch,
                        current.values,
                        token_weight=token_weight,
                        lr=current.critic_lr,
                        grad_norm=norms["critic"],
                    )
                )
            else:
                critic.optimizer.zero_grad()
            current.timer.mark("critic")

    def _policy_gradients(
        self, mini_batch: Sequence[PreparedBatch], current: _Step, *, token_weight: float
    ) -> dict[str, float]:
        """Forward and backward of every micro-batch; the sums of `policy_metrics` over all ranks, and `grad_sq`."""
        sums, timer = UpdateSums(self.device), current.timer
        for index, one in enumerate(mini_batch):
            self._built.policy.expect_backward(is_last=index == len(mini_batch) - 1)
            output = self._built.forward(one.batch)
            loss, parts = self._loss(one, output, version=current.version or 0)
            sums.add(parts, is_copy=one.batch.is_copy)
            if current.keeps_proximal and one.proximal_L is None:
                one.proximal_L = output.logprobs_L.detach()
            if output.values_L is not None and one.targets is not None:
                value_loss = current.values.loss(output.values_L, one.batch, one.targets, token_weight=token_weight)
                loss = loss + self._cfg.critic.value_coef * value_loss
            timer.mark("forward")
            loss.backward()
            timer.mark("backward")
        counted = [one.batch for one in mini_batch if not one.batch.is_copy]
        counts = {
            "num_tokens": sum(len(batch.token_ids) for batch in counted),
            "num_loss_tokens": sum(int(np.count_nonzero(batch.loss_mask)) for batch in counted),
        }
        passes = len(mini_batch) / current.num_micro_batches
        return sums.reduce(self._optimizers[""].grad_sq_sum(), counts) | {"passes": passes}

    def _loss(
        self, one: PreparedBatch, output: PolicyOutput, *, version: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weighted sum of the token losses of a micro-batch, and its part of the sums of the update."""
        batch, reference_T = one.batch, one.reference_T
        algorithm, mask = self._cfg.algorithm, batch.loss_mask
        inputs, weight_L, keep_L, correction = correct(
            loss_inputs(batch, output.logprobs_L),
            age_L=token_ages(batch, version=version, device=self.device),
            config=algorithm.correction,
            proximal_L=one.proximal_L,
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

    def _count_skipped(self, current: _Step, *, step: int) -> None:
        """Raises GradientsDiverged if no update of the step had finite gradients, and that once too often in a row."""
        if not current.is_skipped:
            self._num_skipped_in_a_row = 0
            return
        self._num_skipped_in_a_row += 1
        limit, (norms, _) = self._cfg.learner.max_skipped_steps, current.skipped[0]
        if self._num_skipped_in_a_row > limit:
            bad = next(section for section, norm in norms.items() if not math.isfinite(norm))
            raise GradientsDiverged(
                f"{'' if bad == 'learner' else f'{bad} '}gradient norm of step {step} is {norms[bad]}, after {limit} "
                f"skipped steps (learner.max_skipped_steps); lower {bad}.lr or {bad}.max_grad_norm, or look for wrong "
                "rewards in the recorded trajectories"
            )

    def _metrics(self, current: _Step) -> dict[str, Metric]:
        """Collective where there is a critic."""
        critic = self._critic
        metrics = {"skipped_steps": Metric(sum=float(current.is_skipped))}
        if current.num_updates > 1:
            metrics["num_updates"] = Metric(sum=float(current.num_policy_updates))
            metrics["skipped_updates"] = Metric(sum=float(len(current.skipped)))
        # Those that were skipped would turn the means into NaN; alone they show what is wrong.
        sums = current.sums or [sums for _, sums in current.skipped if sums is not None]
        if sums:
            metrics |= policy_metrics(sums, correction=self._cfg.algorithm.correction)
        if current.num_policy_updates > 0:
            metrics["lr"] = Metric(sum=current.lr)
        if isinstance(critic, SeparateCritic) and current.critic_norms:
            norms = [norm for of_update in current.critic_norms for norm in of_update]
            metrics["critic_grad_norm"] = Metric(sum=sum(norms), count=len(norms))
            metrics["critic_lr"] = Metric(sum=current.critic_lr)
            if (wanted := self._cfg.critic.updates_per_step) > 1:
                missing = wanted * len(current.critic_norms) - len(norms)
                metrics["critic_skipped_updates"] = Metric(sum=float(missing))
        if critic is not None and not current.is_skipped:
            metrics |= current.values.reduce()
            current.timer.mark("critic")
        return metrics

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
                self._critic.targets([batch], [rewards_T], ValueSums(clip=None), token_weight=1.0)
            for is_last in (False, True):
                self._built.policy.expect_backward(is_last=is_last)
                output = self._built.forward(batch)
                loss, _ = self._loss(PreparedBatch(batch, None, None), output, version=0)
                if output.values_L is not None:
                    loss = loss + 0.0 * output.values_L.sum()
                loss.backward()
                del output, loss
        finally:
            self._built.policy.release()
            self._drop_gradients()
            self._backend.release_cached()

    def save(self, path: Path, *, step: int, in_background: bool = False) -> None:
        """Write this rank's part into the directory `path` (see `checkpoint.begin`), also while it is offloaded; with
        `in_background`, from a copy, until `wait_saved`."""
        state = learner_state(self._optimizers, step=step, host_view=self.offload.host_view)
        if in_background:
            self._background.begin(path, state)
        else:
            save_sharded(path, state)

    def wait_saved(self) -> None:
        """Until what is written in the background is written by all ranks; from any thread. Raises CheckpointError."""
        self._background.wait()

    def load(self, path: Path) -> int:
        """Restore model and optimizer, also from another number of ranks; returns their step. Raises CheckpointError
        if a file is missing or truncated, or the checkpoint is of another model."""
        self.offload.require_onloaded("load")
        return load_sharded(path, self._optimizers)

    def export_hf(self, path: Path) -> None:
        """Write the policy as a Hugging Face model directory in `model.rollout_dtype`; rank 0 writes."""
        self.offload.require_onloaded("export_hf")
        export_hf(path, model=self.model, source_dir=self._built.source_dir, config=self._cfg.model)


def _loss_tokens(micro_batches: Sequence[MicroBatch], updates: Sequence[tuple[int, int]]) -> list[float]:
    """Of each update, over all ranks. Collective."""
    of_batches = [0 if batch.is_copy else int(np.count_nonzero(batch.loss_mask)) for batch in micro_batches]
    return sum_over_ranks([float(sum(of_batches[start:stop])) for start, stop in updates])
