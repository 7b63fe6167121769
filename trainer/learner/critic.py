"""What a step needs before its first gradient: reference log-probs, critic values, advantages; and the critics."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.algorithms.advantages import MIN_VARIANCE, gae_advantages, reward_to_go, step_advantages
from trainer.algorithms.losses import kl_penalty, value_loss
from trainer.config.algorithm import DEFAULT_LR_RATIO, traits_of
from trainer.errors import ModelError, TrainingDiverged
from trainer.learner.fsdp import ShardedAdamW, end_forward, learning_rate
from trainer.learner.lora import without_adapters
from trainer.learner.model import (
    PolicyModel,
    ValueHead,
    hidden_size,
    hollow_model,
    settle,
    source_states,
    torch_dtype,
    vocab_size,
)
from trainer.learner.packed_inputs import PackedInputs, to_device
from trainer.learner.step_stats import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import PreTrainedModel

    from trainer.config.algorithm import AlgorithmConfig, KlConfig
    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch, StepRewards
    from trainer.learner.model import BuiltPolicy, PolicyOutput, Site
    from trainer.learner.packed_inputs import LayoutFn
    from trainer.learner.step_stats import PhaseTimer


def penalized_rewards(batch: MicroBatch, reference_T: np.ndarray | None, *, config: KlConfig) -> np.ndarray:
    """r_t - coef x KL_t, the KL of the policy that sampled to the reference (Ziegler et al. 2019, section 2; Ouyang et
    al. 2022, section 3.5).

    Args:
        reference_T: float32[T]; None without a KL in the reward.

    Returns:
        float64[T], 0 outside `loss_mask`.

    Raises:
        ValueError: the batch carries no rewards.
    """
    if batch.unfinished is None:
        raise ValueError("a micro-batch has no token rewards, but its advantages are not final; build it with them")
    rewards_T = batch.unfinished.rewards.astype(np.float64)
    if reference_T is None or not config.in_reward:
        return rewards_T
    return np.where(batch.loss_mask, rewards_T - config.coef * _sampled_kl(batch, reference_T, config=config), 0.0)


def penalized_advantages(batch: MicroBatch, reference_T: np.ndarray, *, config: KlConfig) -> np.ndarray:
    """A_t - coef x KL_t: what the estimator gives a token less its own KL, of the policy that sampled to the reference.
    No later token counts.

    With A of 0 and a ratio in the loss it is on-policy distillation (Lu et al. 2025, thinkingmachines.ai/blog/
    on-policy-distillation): d = log policy - log teacher as cost has the gradient of KL(policy || teacher) in the mean.

    Args:
        reference_T: float32[T].

    Returns:
        float32[T], 0 outside `loss_mask`.

    Example:
        A 0, coef 1, log policy -2 and log teacher -0.5 give 1.5: the teacher likes the token better.
    """
    less_T = batch.advantages - config.coef * _sampled_kl(batch, reference_T, config=config)
    return np.where(batch.loss_mask, less_T, 0.0).astype(np.float32)


def _sampled_kl(batch: MicroBatch, reference_T: np.ndarray, *, config: KlConfig) -> np.ndarray:
    """float64[T], of no meaning outside `loss_mask`."""
    sampled_T, ours_T = (torch.from_numpy(x.astype(np.float64)) for x in (batch.behaviour_logprobs, reference_T))
    return kl_penalty(sampled_T, ours_T, config.estimator).numpy()


def reward_advantages(
    batches: Sequence[MicroBatch],
    rewards: Sequence[np.ndarray],
    *,
    step_rewards: StepRewards,
    config: AlgorithmConfig,
    device: torch.device,
) -> list[np.ndarray]:
    """Without a critic: what the estimator makes of penalized rewards. Collective.

    An estimator of the reward-to-go sees the reward of every token; every other one the sum over the answer, as it
    sees the reward of the outcome otherwise.

    Args:
        rewards: float64[T] of every micro-batch, from `penalized_rewards`.

    Returns:
        float64[T] of every micro-batch, 0 outside `loss_mask`.
    """
    traits = traits_of(config)
    if not traits.reward_to_go:
        return _answer_advantages(batches, rewards, step_rewards=step_rewards, config=config, device=device)
    returns: list[np.ndarray] = []
    for batch, rewards_T in zip(batches, rewards, strict=True):
        returns_T = np.zeros(len(rewards_T))
        for start, stop in pairwise(batch.cu_seqlens.tolist()):
            returns_T[start:stop] = reward_to_go(rewards_T[start:stop], batch.loss_mask[start:stop])
        returns.append(returns_T)
    return normalized_over_ranks(returns, batches, device=device) if traits.spans_step else returns


def normalized_over_ranks(
    values: Sequence[np.ndarray], batches: Sequence[MicroBatch], *, device: torch.device
) -> list[np.ndarray]:
    """(a - mean) / sqrt(max(variance, 1e-8)) over all loss tokens of the step, with the biased variance. Collective.

    `step_baselines.normalized_over_tokens` for values that lie on different ranks.

    Args:
        values: float64[T] of every micro-batch.

    Returns:
        float64[T] of every micro-batch, 0 outside `loss_mask`.
    """
    own = np.concatenate([v[batch.loss_mask] for v, batch in zip(values, batches, strict=True)])
    count, total, square = _summed(np.array([own.size, own.sum(), (own**2).sum()]), device)
    mean = total / max(1.0, count)
    # Two sums in one pass: advantages lie near 0 and hold 16 digits, so the difference loses none that matter.
    scale = np.sqrt(max(square / max(1.0, count) - mean**2, MIN_VARIANCE))
    return [np.where(batch.loss_mask, (v - mean) / scale, 0.0) for v, batch in zip(values, batches, strict=True)]


def _answer_advantages(
    batches: Sequence[MicroBatch],
    rewards: Sequence[np.ndarray],
    *,
    step_rewards: StepRewards,
    config: AlgorithmConfig,
    device: torch.device,
) -> list[np.ndarray]:
    """Every rank knows the rewards of all answers and the penalties of its own; then all compute the same."""
    sizes = [group.rewards_G.size for group in step_rewards.groups]
    penalties_N = np.zeros(sum(sizes))
    for batch, rewards_T in zip(batches, rewards, strict=True):
        assert batch.unfinished is not None
        penalties_T = batch.unfinished.rewards - rewards_T
        for answer, (start, stop) in zip(batch.unfinished.answers, pairwise(batch.cu_seqlens.tolist()), strict=True):
            if answer >= 0:
                penalties_N[answer] += penalties_T[start:stop].sum()
    # An answer of one sequence is on one rank alone, the others add 0: the sum has the same bits on every split.
    split = np.split(_summed(penalties_N, device), np.cumsum(sizes)[:-1])
    groups = [
        replace(group, rewards_G=group.rewards_G - of_group)
        for group, of_group in zip(step_rewards.groups, split, strict=bool(sizes))
    ]
    advantages_N = np.concatenate([*step_advantages(groups, config=config), [0.0]])  # [-1]: of a filler
    found: list[np.ndarray] = []
    for batch in batches:
        assert batch.unfinished is not None
        per_token_T = np.repeat(advantages_N[batch.unfinished.answers], np.diff(batch.cu_seqlens))
        found.append(np.where(batch.loss_mask, per_token_T, 0.0))
    return found


def _summed(values: np.ndarray, device: torch.device) -> np.ndarray:
    """Over ranks."""
    packed = torch.from_numpy(values).to(device)
    dist.all_reduce(packed, op=dist.ReduceOp.SUM)
    return packed.cpu().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTargets:
    """Of one micro-batch, from the values that the critic gave at the start of the step; 0 outside `loss_mask`."""

    values_T: np.ndarray
    """float32[T]"""
    advantages_T: np.ndarray
    """float64[T]"""
    returns_T: np.ndarray
    """float64[T]: what the critic learns."""


def value_targets(
    batch: MicroBatch, rewards_T: np.ndarray, values_T: np.ndarray, *, config: AlgorithmConfig
) -> ValueTargets:
    """GAE over every sequence by itself; a sequence is whole in one micro-batch.

    Args:
        rewards_T: float64[T], 0 outside `loss_mask`.
        values_T: float32[T], of the state in which each token is chosen.

    A value that is not finite counts as 0 here and stays in `values_T`, where `Preparation` finds it on all ranks
    together: an error on one of them would leave the others waiting.
    """
    known_T = np.where(np.isfinite(values_T), values_T, np.float32(0))
    advantages_T, returns_T = np.zeros(len(rewards_T)), np.zeros(len(rewards_T))
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        one = slice(start, stop)
        advantages_T[one], returns_T[one] = gae_advantages(
            rewards_T[one], known_T[one], batch.loss_mask[one], gamma=config.gae_gamma, lam=config.gae_lambda
        )
    return ValueTargets(values_T=values_T, advantages_T=advantages_T, returns_T=returns_T)


class ValueTotals:
    """Sums over the loss tokens of one step, for its metrics and for the weight of a token."""

    def __init__(self, *, num_loss_tokens: int) -> None:
        """`num_loss_tokens` counts those of the whole step."""
        self.token_weight = 1.0 / max(1, num_loss_tokens)
        """Of a token in the critic's loss, which is a token mean over the step under every aggregation."""
        self._sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)

    def loss(self, values_L: Tensor, batch: MicroBatch, targets: ValueTargets, *, clip: float | None) -> Tensor:
        """The share of a micro-batch in the critic's loss, with gradient."""
        mask, device = batch.loss_mask, values_L.device
        old_L = to_device(targets.values_T[mask], device)
        returns_L = to_device(targets.returns_T[mask].astype(np.float32), device)
        loss_L, is_clipped_L = value_loss(values_L, old_L, returns_L, clip=clip)
        if clip is not None:
            self._sums["clipped"] += float(is_clipped_L.sum())
            self._sums["clip_tokens"] += len(loss_L)
        return loss_L.sum() * self.token_weight

    def add(self, batch: MicroBatch, targets: ValueTargets) -> None:
        """Count a micro-batch, once per step, with the values from its start."""
        returns_L = targets.returns_T[batch.loss_mask]
        values_L = targets.values_T[batch.loss_mask].astype(np.float64)
        errors_L = returns_L - values_L
        for name, values in (
            ("tokens", np.ones_like(errors_L)), ("value", values_L), ("return", returns_L),
            ("return_sq", returns_L**2), ("error", errors_L), ("error_sq", errors_L**2),
        ):  # fmt: skip
            self._sums[name] += float(values.sum())

    def reduce(self, device: torch.device) -> dict[str, Metric]:
        """Sum over ranks. Collective."""
        packed = torch.tensor(list(self._sums.values()), dtype=torch.float64, device=device)
        dist.all_reduce(packed, op=dist.ReduceOp.SUM)
        return _metrics(dict(zip(_SUMS, packed.tolist(), strict=True)))


_SUMS = ("tokens", "value", "return", "return_sq", "error", "error_sq", "clipped", "clip_tokens")


def _metrics(sums: dict[str, float]) -> dict[str, Metric]:
    tokens = max(1.0, sums["tokens"])
    left = sums["error_sq"] - sums["error"] ** 2 / tokens
    spread = sums["return_sq"] - sums["return"] ** 2 / tokens
    metrics = {
        "value_loss": Metric(sum=0.5 * sums["error_sq"], count=sums["tokens"]),
        "value_mean": Metric(sum=sums["value"], count=sums["tokens"]),
        "return_mean": Metric(sum=sums["return"], count=sums["tokens"]),
    }
    if sums["clip_tokens"]:
        metrics["value_clip_frac"] = Metric(sum=sums["clipped"], count=sums["clip_tokens"])
    if spread > MIN_SPREAD * tokens:
        metrics["value_explained_variance"] = Metric(sum=1.0 - left / spread)
    return metrics


MIN_SPREAD = 1e-8
"""Variance of returns below which there is nothing to explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """One entry per micro-batch, where not said otherwise."""

    batches: tuple[MicroBatch, ...]
    """With final advantages."""
    references: tuple[np.ndarray | None, ...]
    """float32[T], log-probs of the reference; None where nothing needs them."""
    targets: tuple[ValueTargets, ...]
    """Empty without a critic."""
    totals: ValueTotals


class Preparation:
    """Reference and critic of a learner at work. Collective."""

    def __init__(
        self, cfg: RunConfig, *, reference: Reference | None, critic: Critic | None, device: torch.device
    ) -> None:
        self._cfg, self._reference, self._critic, self._device = cfg, reference, critic, device

    def prepare(
        self,
        micro_batches: Sequence[MicroBatch],
        rewards: StepRewards | None,
        *,
        trains_policy: bool,
        timer: PhaseTimer,
    ) -> PreparedStep:
        """Finish the advantages of a step, if they are not final; with a critic of its own, leave its gradients.

        Raises:
            TrainingDiverged: a log-prob of the reference or a value is not finite, on any rank; raised on all of them.
                A critic of its own holds gradients then.
            ValueError: the advantages are not final, and `rewards` or those of the tokens are missing.
        """
        references: tuple[np.ndarray | None, ...] = (None,) * len(micro_batches)
        if self._reference is not None and (trains_policy or self._cfg.algorithm.kl.in_reward):
            logprobs = [self._reference.logprobs(batch) for batch in micro_batches]
            named = self._cfg.algorithm.kl.path
            self._refuse_non_finite(logprobs, _BAD_REFERENCE.format(key="model.path" if named is None else _KL_PATH))
            references = tuple(logprobs)
            timer.mark("reference")
        totals = ValueTotals(num_loss_tokens=0 if rewards is None else rewards.num_loss_tokens)
        targets: tuple[ValueTargets, ...] = ()
        batches = tuple(micro_batches)
        if self._cfg.algorithm.finishes_on_ranks:
            if rewards is None:
                raise ValueError("the advantages of this step are not final, and it came without rewards; pass them")
            targets, advantages = self._finish(batches, references, rewards, totals)
            batches = tuple(
                replace(batch, advantages=advantages_T.astype(np.float32))
                for batch, advantages_T in zip(batches, advantages, strict=True)
            )
            timer.mark("advantages" if self._critic is None else "critic")
        if self._cfg.algorithm.kl.in_advantage:
            batches = tuple(map(self._less_kl, batches, references))
        return PreparedStep(batches=batches, references=references, targets=targets, totals=totals)

    def _less_kl(self, batch: MicroBatch, reference_T: np.ndarray | None) -> MicroBatch:
        if reference_T is None:  # the critic alone is trained
            return batch
        return replace(batch, advantages=penalized_advantages(batch, reference_T, config=self._cfg.algorithm.kl))

    def rehearse(self, batch: MicroBatch) -> None:
        """The passes of `prepare`, for what is done once. A critic of its own holds gradients then."""
        if self._reference is not None:
            self._reference.logprobs(batch)
        if self._critic is not None:
            rewards_T = np.zeros(len(batch.token_ids))
            self._critic.targets([batch], [rewards_T], totals=ValueTotals(num_loss_tokens=0))

    def _finish(
        self,
        batches: Sequence[MicroBatch],
        references: Sequence[np.ndarray | None],
        rewards: StepRewards,
        totals: ValueTotals,
    ) -> tuple[tuple[ValueTargets, ...], list[np.ndarray]]:
        """(targets, empty without a critic; advantages, float64[T] per micro-batch)."""
        config = self._cfg.algorithm
        penalized = [penalized_rewards(b, r, config=config.kl) for b, r in zip(batches, references, strict=True)]
        if self._critic is None:
            return (), reward_advantages(batches, penalized, step_rewards=rewards, config=config, device=self._device)
        targets = tuple(self._critic.targets(batches, penalized, totals=totals))
        self._refuse_non_finite([one.values_T for one in targets], _BAD_VALUES)
        advantages = [one.advantages_T for one in targets]
        if config.whiten_advantages:
            advantages = normalized_over_ranks(advantages, batches, device=self._device)
        return targets, advantages

    def _refuse_non_finite(self, arrays: Iterable[np.ndarray], told: str) -> None:
        """Raises TrainingDiverged on every rank if any of them has such a number: one that raised alone would leave the
        others waiting in their next collective."""
        found = float(sum(np.count_nonzero(~np.isfinite(array_T)) for array_T in arrays))
        count = torch.tensor(found, dtype=torch.float64, device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.SUM)
        if count > 0:
            raise TrainingDiverged(f"{int(count)} {told}; no weight was changed by this step")


_BAD_REFERENCE = (
    "log-probs of the reference (algorithm.kl) are not finite; its weights do not change in a run, so look at those of "
    "{key}, and try model.compute_dtype=float32"
)
_KL_PATH = "algorithm.kl.path"
_BAD_VALUES = "values of the critic are not finite; lower critic.lr or critic.max_grad_norm"


@torch.no_grad()
def score(policy: PolicyModel, batch: MicroBatch, *, layout: LayoutFn, device: torch.device) -> PolicyOutput:
    """The policy's output for the loss tokens. Collective."""
    output = policy(PackedInputs.of(batch, device=device, layout=layout))
    end_forward(policy)
    return output


def over_tokens(values_L: Tensor, batch: MicroBatch) -> np.ndarray:
    """Values of the loss tokens at their places on the host: float32[T], 0 outside `loss_mask`."""
    out_T = np.zeros(len(batch.token_ids), np.float32)
    out_T[batch.loss_mask] = values_L.detach().cpu().numpy()
    return out_T


class Critic(Protocol):
    """Gives the advantages and returns of a step. What it learns from them is up to the kind."""

    def targets(
        self, batches: Sequence[MicroBatch], rewards: Sequence[np.ndarray], *, totals: ValueTotals
    ) -> list[ValueTargets]:
        """GAE from the current values. Collective.

        Args:
            rewards: float64[T] of every micro-batch.
        """
        ...


class CriticModel(nn.Module):
    """Backbone and value head in one forward; one module for the reason that `PolicyModel` gives."""

    def __init__(self, hf: PreTrainedModel, head: ValueHead) -> None:
        super().__init__()
        self.hf = hf
        self.value_head = head

    def forward(self, inputs: PackedInputs) -> Tensor:
        """Values of the states in which the loss tokens are chosen, float32[L]."""
        return self.value_head(source_states(self.hf, inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateAt:
    """When the critic is updated, and the norm of the gradient that it has then."""

    step: int
    grad_norm: float


class OwnCritic:
    """A critic with its own backbone and optimizer. Every method is collective.

    The values that give the advantages are those of the first update's forward pass: one pass serves both.
    """

    def __init__(self, cfg: RunConfig, *, site: Site, policy: PreTrainedModel) -> None:
        """Raises ModelError if `critic.path` cannot be trained, or knows fewer tokens than `policy`."""
        path = cfg.model.path if cfg.critic.path is None else cfg.critic.path
        hollow = hollow_model(path, cfg)
        known, needed = vocab_size(hollow.hf), vocab_size(policy)
        if known < needed:
            raise ModelError(
                f"critic.path {path!r} has {known} tokens, the policy {needed}; the critic reads the policy's tokens, "
                "use a model of the same family"
            )
        # Nothing reads its logits, and the matrix would cost memory and moments.
        hollow.hf.set_output_embeddings(nn.Identity())  # pyright: ignore[reportArgumentType]
        self._model = CriticModel(hollow.hf, ValueHead(hidden_size(hollow.hf)))
        self._layout: LayoutFn = settle(self._model, hollow, cfg, site=site, cpu_offload=cfg.critic.cpu_offload)
        self._cfg, self._device = cfg, site.device
        critic = cfg.critic
        self._schedule = replace(
            cfg.learner,
            lr=DEFAULT_LR_RATIO * cfg.learner.lr if critic.lr is None else critic.lr,
            weight_decay=critic.weight_decay,
            max_grad_norm=critic.max_grad_norm,
        )
        self.optimizer = ShardedAdamW(dict(self._model.named_parameters()), config=self._schedule)

    def targets(
        self, batches: Sequence[MicroBatch], rewards: Sequence[np.ndarray], *, totals: ValueTotals
    ) -> list[ValueTargets]:
        """See `Critic.targets`. Leaves the gradients of the first update."""
        found: list[ValueTargets] = []
        for index, (batch, rewards_T) in enumerate(zip(batches, rewards, strict=True)):
            values_L = self._forward(batch, is_last=index == len(batches) - 1)
            targets = value_targets(batch, rewards_T, over_tokens(values_L, batch), config=self._cfg.algorithm)
            totals.add(batch, targets)
            totals.loss(values_L, batch, targets, clip=self._cfg.critic.value_clip).backward()
            found.append(targets)
        return found

    def grad_norm(self) -> float:
        """Of the whole gradient."""
        grad_sq = self.optimizer.grad_sq_sum().to(self._device).double().reshape(1)
        dist.all_reduce(grad_sq, op=dist.ReduceOp.SUM)
        return float(grad_sq) ** 0.5

    def update(self, prepared: PreparedStep, at: UpdateAt) -> dict[str, Metric]:
        """Take the gradients that `targets` left, then make the other updates of the step towards the same returns.

        The policy has been updated by now, so a later gradient that is not finite fails nothing: that update and those
        after it are left out, on every rank, and `critic_skipped_updates` counts them.
        """
        lr = learning_rate(at.step, config=self._schedule, total_steps=self._cfg.trainer.total_steps)
        norms = [at.grad_norm]
        self.optimizer.step(lr=lr, grad_norm=at.grad_norm)
        num_updates, num_skipped = self._cfg.critic.updates_per_step, 0
        for done in range(1, num_updates):
            for index, (batch, of_batch) in enumerate(zip(prepared.batches, prepared.targets, strict=True)):
                values_L = self._forward(batch, is_last=index == len(prepared.batches) - 1)
                prepared.totals.loss(values_L, batch, of_batch, clip=self._cfg.critic.value_clip).backward()
            norm = self.grad_norm()
            if not math.isfinite(norm):
                self.optimizer.zero_grad()
                num_skipped = num_updates - done
                break
            norms.append(norm)
            self.optimizer.step(lr=lr, grad_norm=norm)
        return {
            "critic_grad_norm": Metric(sum=sum(norms), count=len(norms)),
            "critic_lr": Metric(sum=lr),
            **({"critic_skipped_updates": Metric(sum=float(num_skipped))} if num_updates > 1 else {}),
        }

    def _forward(self, batch: MicroBatch, *, is_last: bool) -> Tensor:
        self._model.set_is_last_backward(is_last)  # pyright: ignore[reportCallIssue]
        return self._model(PackedInputs.of(batch, device=self._device, layout=self._layout))


class SharedCritic:
    """The critic on the policy's backbone. The policy's own pass trains it."""

    def __init__(self, cfg: RunConfig, built: BuiltPolicy, *, device: torch.device) -> None:
        self._cfg, self._built, self._device = cfg, built, device

    def targets(
        self, batches: Sequence[MicroBatch], rewards: Sequence[np.ndarray], *, totals: ValueTotals
    ) -> list[ValueTargets]:
        """See `Critic.targets`. Costs a forward pass: the policy's loss needs all advantages of the step."""
        found: list[ValueTargets] = []
        for batch, rewards_T in zip(batches, rewards, strict=True):
            values_L = score(self._built.policy, batch, layout=self._built.layout, device=self._device).values_L
            assert values_L is not None
            targets = value_targets(batch, rewards_T, over_tokens(values_L, batch), config=self._cfg.algorithm)
            totals.add(batch, targets)
            found.append(targets)
        return found


def build_critic(cfg: RunConfig, built: BuiltPolicy, site: Site) -> OwnCritic | SharedCritic | None:
    """The critic that `algorithm.advantage=gae` needs; None with every other estimator.

    Raises:
        ModelError: `critic.path` cannot be trained.
    """
    if not cfg.algorithm.uses_critic:
        return None
    if cfg.critic.shared_backbone:
        return SharedCritic(cfg, built, device=site.device)
    return OwnCritic(cfg, site=site, policy=built.policy.hf)


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
